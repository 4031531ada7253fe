"""One run of a few minutes on a GPU that answers everything: numbers, speed, memory, next to PyTorch.

    main       the parent: steps, time budget, JSON and tables; imports neither JAX nor PyTorch
      |- pipe -> jax_worker      jprefill from this source tree
      |- pipe -> torch_worker    the peer, where PyTorch is installed

A child computes only between a question and its answer, so the two sides never run at the same time. A child that
dies or hangs costs its own answer: the parent notes it, starts another one and goes on.
"""
