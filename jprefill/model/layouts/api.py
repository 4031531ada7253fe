"""The registry of layouts."""

from jprefill.config import Layout
from jprefill.model.layouts.contract import Layer
from jprefill.model.layouts.full import layer_full
from jprefill.model.layouts.hybrid import layer_hybrid
from jprefill.model.layouts.stream import layer_stream


def layer_of(layout: Layout) -> Layer:
    """The layer program of a layout by name (`jprefill.config.Layout`)."""
    return {"stream": layer_stream, "hybrid": layer_hybrid, "full": layer_full}[layout]
