"""A model's backbone, and what the model does between its last hidden states and its logits, found by measuring.

Families differ: Cohere multiplies its logits, Granite divides them, Gemma caps them, MiniCPM3 divides the hidden
states, and two families use the same field name for opposite things. So no field of a configuration is read here. The
model's own forward runs once around a stand-in backbone that returns chosen hidden states and a stand-in head that
returns chosen products; the logits show what was done to these. No weight is read, so the model needs no storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from hrl.models.ops.exchange import SlicedLayout
from hrl.models.ops.layout import AttentionLayout, PaddedLayout
from hrl.models.ops.log_prob import LogitForm
from hrl.models.pictures import PackedPictures, shown

#: Products of the stand-in head: large ones show a cap, small ones a scale.
_PRODUCTS = (-1e9, -300.0, -20.0, -3.0, -0.5, -1e-2, 0.0, 1e-2, 0.5, 3.0, 20.0, 300.0, 1e9)
#: Relative error, since some forwards go through float32.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class HeadForm:
    """From hidden states to logits: `logits(head(hidden_scale * hidden))`.

    Attributes:
        hidden_scale: Factor of the hidden states before the head.
        logits: What happens to the head's products.
    """

    hidden_scale: float
    logits: LogitForm


def head_form(model: PreTrainedModel) -> HeadForm:
    """Return how `model.forward` makes logits from the backbone's hidden states.

    Raises:
        ValueError: It does anything but apply the head, factors and a soft-cap.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} has no language-model head")
    vocabulary, width = head.weight.shape
    hidden = torch.ones(len(_PRODUCTS), width)
    hidden[:, 1::2] = -0.5  # so that a norm or another layer in between does not look like a factor
    products = torch.tensor(_PRODUCTS, dtype=torch.float64)
    head_input, logits = _forward_around(model, head, hidden, products[:, None].expand(-1, vocabulary).contiguous())
    if head_input is None or head_input.shape != hidden.shape or logits.shape != (len(_PRODUCTS), vocabulary):
        raise ValueError(f"{name} does not make its logits by applying its head to the last hidden states")
    ratios = head_input.double() / hidden.double()
    hidden_scale = float(ratios[0, 0])
    if not torch.allclose(ratios, torch.full_like(ratios, hidden_scale), rtol=_TOLERANCE):
        raise ValueError(f"{name} computes something between its last hidden states and its head")
    if not torch.equal(logits, logits[:, :1].expand_as(logits)):
        raise ValueError(f"{name} treats the entries of its vocabulary differently after its head")
    form = _fit(products, logits[:, 0].double())
    if form is None:
        raise ValueError(f"{name} changes its logits in a way that is neither a factor nor a soft-cap")
    return HeadForm(hidden_scale, form)


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that ends with the last hidden states.

    Raises:
        ValueError: There is none, or several modules could be it.
    """
    if model.base_model is not model:
        return model.base_model
    # The model's prefix may be wrong, as Llama 4's is.
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(inner) != 1:
        raise ValueError(f"{type(model).__name__} has no backbone under {model.base_model_prefix!r}, its own prefix")
    return inner[0]


def last_hidden_states(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    layout: AttentionLayout | SlicedLayout | PaddedLayout,
    pictures: PackedPictures | None = None,
) -> Tensor:
    """Run the backbone on one packed row, on this rank's slice of one, or on padded rows.

    Args:
        model: Whose attention is `hrl.models.ops.attention.ATTENTION_NAME`; its own for padded rows.
        ids: Tokens of the row `(1, L)`; of padded rows `(S, L)`.
        positions: Their positions, each in its own sequence `(1, L)`; `(3, 1, L)` beside pictures. Of padded rows they
            are `(S, L)` and not told, or `(3, S, L)`.
        layout: Which tokens attend to which.
        pictures: What the row shows.

    Returns:
        `(1, L, H)`; of padded rows, one after the other, `(1, S * L, H)`.
    """
    backbone = backbone_of(model)
    is_padded = isinstance(layout, PaddedLayout)
    told: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    # Given neither mask nor positions, a model takes every row for what it is: tokens from its first position on.
    if not is_padded or pictures is not None:
        told["position_ids"] = positions
    if not isinstance(layout, PaddedLayout):
        told |= {"attention_mask": layout.full_mask(ids.device), "packing": layout}
    with _nothing_is_packed() if is_padded else nullcontext():
        if pictures is None:
            hidden = backbone(**told).last_hidden_state
        else:
            with shown(backbone, pictures) as (seen, zero):
                hidden = backbone(**told, **seen).last_hidden_state + zero
    return hidden.flatten(0, 1)[None] if is_padded else hidden  # type: ignore[no-any-return]


@contextmanager
def _nothing_is_packed() -> Iterator[None]:
    """Keep transformers from looking for packed rows in the positions that it has made itself: the host would wait."""
    token = _rows_are_padded.set(True)
    try:
        yield
    finally:
        _rows_are_padded.reset(token)


_rows_are_padded: ContextVar[bool] = ContextVar("rows are padded", default=False)
_find_packed = masking_utils.find_packed_sequence_indices


def _find_packed_unless_padded(position_ids: Tensor) -> Tensor | None:
    return None if _rows_are_padded.get() else _find_packed(position_ids)


# No argument of a forward says it: states are multiplied with a mask, and layers keep a cache. So this is set once, and
# each thread says of its own forward what it runs.
masking_utils.find_packed_sequence_indices = _find_packed_unless_padded


def _fit(products: Tensor, logits: Tensor) -> LogitForm | None:
    """Return the factor, or factor and cap, that turn `products` into `logits`."""
    by_product = dict(zip(products.tolist(), logits.tolist(), strict=True))
    small, largest = 1e-2, by_product[1e9]
    candidates = [LogitForm(_rounded(by_product[small] / small))]
    if largest > abs(by_product[small]):
        scale = largest * math.atanh(by_product[small] / largest) / small
        candidates.append(LogitForm(_rounded(scale), _rounded(largest)))
    for form in candidates:
        want = form.scale * products
        if form.softcap is not None:
            want = form.softcap * torch.tanh(want / form.softcap)
        if torch.allclose(logits, want, rtol=_TOLERANCE, atol=1e-12):
            return form
    return None


def _rounded(number: float) -> float:
    """Drop the last digits, which hold the fit's rounding: 0.0625 instead of 0.06250000000000001."""
    return float(f"{number:.12g}")


def _forward_around(
    model: PreTrainedModel, head: nn.Module, hidden: Tensor, products: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Run `model.forward` with stand-ins; return what reached the head, `(n, H)`, and the logits, `(n, V)`."""
    seen: list[Tensor] = []

    def stand_in_head(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(states)
        return products[None].clone()

    backbones = {id(part): part for part in (backbone_of(model), model.get_decoder()) if part is not model}
    with ExitStack() as stack, torch.no_grad():
        for backbone in backbones.values():
            stack.enter_context(forward_replaced(backbone, lambda *args, **kwargs: _BackboneOutput(hidden[None])))
        stack.enter_context(forward_replaced(head, stand_in_head))
        ids = torch.zeros(1, len(hidden), dtype=torch.int64)
        try:
            logits = model.forward(input_ids=ids, use_cache=False).logits
        except (
            AttributeError,
            IndexError,
            KeyError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{type(model).__name__} has a forward whose part from hidden states to logits could not be followed: "
                f"{type(error).__name__}: {error}"
            ) from error
    return (seen[0][0] if len(seen) == 1 and seen[0].ndim == 3 else None), logits[0]


@contextmanager
def forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """Give a module another forward inside the block."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _BackboneOutput(SimpleNamespace):
    """A backbone's output with nothing but hidden states: anything else that a forward reads from it is `None`."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        super().__init__(last_hidden_state=last_hidden_state)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, item: Any) -> Any:
        return (self.last_hidden_state,)[item]
