"""The model: configuration, weights, layer programs, and the runner that calls them."""
