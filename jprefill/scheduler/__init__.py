"""Who runs next, and with whom: queue, policy, packer. Pure Python and NumPy; no JAX."""
