"""The names and pieces of a model's tensors in its checkpoint.

transformers keeps some models in memory in another form than on disk: the experts of a mixture, for instance, are one
tensor per layer. What leaves the trainer has the form of the checkpoint, which vLLM and transformers read. The matrices
of an adapter have the names that peft gives them in a file; the model's own have the names that they have without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hrl.models.adapter import is_part, name_in_file, name_without
from hrl.models.four_bit import layers_in_4bit


class CheckpointTensor(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


class CheckpointForm:
    """Turns each tensor of a model, without the others, into its pieces in the checkpoint it was loaded from."""

    def __init__(
        self, model: PreTrainedModel, pieces: Mapping[str, tuple[CheckpointTensor, ...]], same: frozenset[str]
    ) -> None:
        self._model = model
        self._pieces = pieces
        self._same = same

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Revert, without data, what transformers did when it loaded the model.

        Raises:
            ValueError: A tensor can't be reverted without the others; names model and tensors.
        """
        tensors = dict(saved_tensors(model))
        parts = {
            name: (CheckpointTensor(name_in_file(name), (*tensors[name].shape,)),) for name in filter(is_part, tensors)
        }
        empty = {
            name_without(name): torch.empty_like(tensor, device="meta")
            for name, tensor in tensors.items()
            if name not in parts
        }
        for name, layer in layers_in_4bit(model):
            empty[name_without(name)] = torch.empty(layer.out_features, layer.in_features, device="meta")
        who = f"{type(model).__name__} at {model.config.name_or_path}"
        try:
            together = revert_weight_conversion(model, empty)
            alone = {name: revert_weight_conversion(model, {name: tensor}) for name, tensor in empty.items()}
        except (NotImplementedError, ValueError, RuntimeError, KeyError) as error:
            raise ValueError(
                f"{who}: transformers converts its weights at loading and cannot convert them back ({error}), so that "
                "they could be neither synced nor exported. Train another model"
            ) from error
        strange = [name for name, pieces in alone.items() if not _covers(pieces, together, empty[name])]
        if strange or sum(map(len, alone.values())) != len(together):
            raise ValueError(
                f"{who}: {', '.join(strange[:8] or ['its weights'])} cannot be brought into the form of the checkpoint "
                "tensor by tensor, which the weight sync and the export need. Train another model"
            )
        same = frozenset(name for name, pieces in alone.items() if empty[name] is next(iter(pieces.values())))
        return cls(model, {name: _described(pieces) for name, pieces in alone.items()} | parts, same | parts.keys())

    def pieces(self, name: str) -> tuple[CheckpointTensor, ...]:
        """Return the pieces of the tensor with the name `name` in memory."""
        return self._pieces[name_without(name)]

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return `(name, tensor)` of every piece, in the order of `pieces`.

        Args:
            name: Name in memory.
            tensor: The whole tensor of that name; of one that is held in 4 bits, its numbers.
        """
        name = name_without(name)
        pieces = self._pieces[name]
        if name in self._same:
            return [(pieces[0].name, tensor)]
        found = revert_weight_conversion(self._model, {name: tensor})
        return [(piece.name, found[piece.name]) for piece in pieces]

    def is_whole(self, name: str) -> bool:
        """Return whether only the name of the tensor differs in the checkpoint, if anything."""
        return name_without(name) in self._same

    def positions(self, name: str, shape: torch.Size) -> dict[str, Tensor]:
        """Return where the elements of each piece are in the flattened tensor: int64, in the piece's shape."""
        return dict(self.split(name, torch.arange(shape.numel()).view(shape)))


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in memory, tensor) of everything that a checkpoint holds of a module; tied parameters once."""
    yield from module.named_parameters()
    saved = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def _described(pieces: Mapping[str, Tensor]) -> tuple[CheckpointTensor, ...]:
    return tuple(CheckpointTensor(name, (*tensor.shape,)) for name, tensor in pieces.items())


def _covers(pieces: Mapping[str, Tensor], together: Mapping[str, Tensor], whole: Tensor) -> bool:
    """Return whether a tensor's pieces are the same alone and with all other tensors, and hold all its elements."""
    known = all(name in together and together[name].shape == piece.shape for name, piece in pieces.items())
    return known and sum(piece.numel() for piece in pieces.values()) == whole.numel()
