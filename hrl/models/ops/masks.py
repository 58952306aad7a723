"""The masks of transformers' models as what they mean, not as tensors.

A model asks transformers for its masks (causal, sliding, chunked) and hands one to each layer. In a packed row a mask
tensor would be wrong, and large. Registered for the packed attention, `packed_mask` hands out the mask's *reach*
instead; a mask that means anything else is refused by name rather than dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hrl.models.ops.layout import Reach


class MaskMeaningError(ValueError, AttributeError):
    """A model wants a mask that packed attention does not have (or an attribute that a mask without a tensor lacks)."""


@dataclass(frozen=True)
class PackedMask:
    """Stands where a layer expects its mask of shape `(batch, 1, queries, keys)`.

    Attributes:
        reach: How far back a token sees; `None` for a window of no token, which a family may make and not use.
        model_type: Of the model, for messages.
    """

    reach: Reach | None
    model_type: str

    def __getitem__(self, item: Any) -> PackedMask:
        """Return the mask itself: cutting it to the number of keys changes nothing. Other cuts are refused."""
        parts = item if isinstance(item, tuple) else (item,)
        if all(isinstance(part, slice) and part.start in (None, 0) and part.step is None for part in parts):
            return self
        raise self._computed()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask what an object has
            raise AttributeError(name)
        raise self._computed()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """No operation of torch takes part in a mask."""
        leaves = [*args, *(kwargs or {}).values()]
        raise next(leaf for leaf in leaves if isinstance(leaf, cls))._computed()

    def _computed(self) -> MaskMeaningError:
        return MaskMeaningError(
            f"{self.model_type} computes with its attention mask; packed attention has masks that depend on positions "
            "alone, so this model can't be trained packed"
        )


def packed_mask(
    *args: Any,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    config: Any = None,
    **kwargs: Any,
) -> PackedMask:
    """Return what a mask function of transformers means for a packed row.

    Raises:
        MaskMeaningError: More than causal, sliding and chunked attention.
    """
    model_type = getattr(config, "model_type", "the model")
    reach, is_empty = Reach(), False
    for part in _parts(mask_function):
        name = getattr(part, "__qualname__", repr(part))
        if name == "causal_mask_function":
            continue
        if name == "sliding_window_overlay.<locals>.inner_mask":
            window = _closed_over(part, "sliding_window")
            is_empty = window < 1
            reach = reach if is_empty else Reach(window, reach.chunk)
        elif name == "chunked_overlay.<locals>.inner_mask":
            reach = Reach(reach.window, _closed_over(part, "chunk_size"))
        else:
            raise MaskMeaningError(
                f"{model_type} asks for the attention mask {name}; packed attention knows causal, sliding and chunked "
                "masks"
            )
    if not any(getattr(part, "__qualname__", "") == "causal_mask_function" for part in _parts(mask_function)):
        raise MaskMeaningError(f"{model_type} asks for an attention mask that is not causal")
    return PackedMask(None if is_empty else reach, model_type)


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions that `and_masks` joined, or the function itself."""
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return [mask_function]
    return [leaf for part in _closed_over(mask_function, "mask_functions") for leaf in _parts(part)]


def _closed_over(function: Any, name: str) -> Any:
    """Return a variable of the function that made `function`."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def register_mask(attention_name: str) -> None:
    """Let models with this attention receive packed masks."""
    ALL_MASK_ATTENTION_FUNCTIONS.register(attention_name, packed_mask)
