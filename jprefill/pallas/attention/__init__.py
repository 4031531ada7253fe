"""Attention for packed segments: one contract, several implementations."""

from jprefill.pallas.attention.api import attend, default_implementation, implementations
from jprefill.pallas.attention.contract import KeyRanges

__all__ = ["KeyRanges", "attend", "default_implementation", "implementations"]
