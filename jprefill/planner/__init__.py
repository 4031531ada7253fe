"""How much memory a model needs on a GPU, from programs compiled for it. No GPU is needed, and JAX is not imported."""
