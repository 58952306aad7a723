"""hrl: reinforcement learning for language models, one driver that reads like the textbook."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hrl.protocol import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]

_LAZY = {"DataProto": "hrl.protocol"}  # torch costs a second: it loads when a name that needs it is first read


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hrl' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
