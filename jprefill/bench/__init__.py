"""Comparisons with other implementations, and benchmarks."""
