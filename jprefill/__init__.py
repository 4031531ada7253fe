"""jprefill: label probabilities from one forward pass. Names load on first use; importing this costs nothing.

from jprefill import Scorer
with Scorer.load("checkpoints/smollm2") as scorer:
    print(scorer.score("Is ice cold? Answer:", [""], labels=[" yes", " no"]).items[0].probabilities)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jprefill.config import EngineConfig as EngineConfig
    from jprefill.config import ServerConfig as ServerConfig
    from jprefill.errors import JPrefillError as JPrefillError
    from jprefill.scorer import Scorer as Scorer
    from jprefill.tasks.questions import Choice as Choice
    from jprefill.tasks.questions import Level as Level
    from jprefill.tasks.questions import Option as Option
    from jprefill.tasks.questions import Predicate as Predicate
    from jprefill.tasks.questions import Rating as Rating

_HOME = {
    "Scorer": "jprefill.scorer",
    "EngineConfig": "jprefill.config",
    "ServerConfig": "jprefill.config",
    "Choice": "jprefill.tasks.questions",
    "Level": "jprefill.tasks.questions",
    "Option": "jprefill.tasks.questions",
    "Predicate": "jprefill.tasks.questions",
    "Rating": "jprefill.tasks.questions",
    "JPrefillError": "jprefill.errors",
    "InvalidRequestError": "jprefill.errors",
    "ContextLengthError": "jprefill.errors",
    "LabelError": "jprefill.errors",
    "UnsupportedFeatureError": "jprefill.errors",
    "DeadlineExceededError": "jprefill.errors",
    "QueueFullError": "jprefill.errors",
    "NotReadyError": "jprefill.errors",
    "EngineError": "jprefill.errors",
    "ConfigError": "jprefill.errors",
    "CheckpointError": "jprefill.errors",
    "UnsupportedModelError": "jprefill.errors",
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'jprefill' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jprefill")
    except PackageNotFoundError:
        return "0+source"  # run from a source tree that was never installed
