"""Attention for packed segments: one contract, several implementations."""

from jprefill.pallas.attention.api import KeyRanges, attend, default_implementation, implementations

__all__ = ["KeyRanges", "attend", "default_implementation", "implementations"]
