"""Micro-batches through a model: padded rows become one packed row, which a backbone runs with the head for training.

A model whose layers carry a state along the row gets no packed row: its rows stay side by side, padded on the right to
one length (`PaddedLayout`), and nothing of the next paragraph but its last two points is left out.

Three things are left out of a packed row, none of which changes a number:

- Repeated prompts: rows with the same prompt share it (`share_prefix`). Attention is causal, so the prompt's hidden
  states do not depend on the response that follows. For the same reason rows may share any beginning: those of episodes
  of several turns form a tree (`is_tree`), in which each row is one segment, which continues an earlier row's sequence
  from where the two part. Which tokens are trained does not matter to it: what is computed once may be read by several
  rows, whose labels and masks differ.
- Tokens after which nothing is predicted: for log-probs or values of `r` response tokens the model reads the prompt and
  the first `r - 1` of them.
- Rows without a trained token.

Pictures of a prompt are shared with it. Tokens that stand for one are the same for every picture of a size, so while
rows are compared each picture has a number of its own in their place.

Several ranks may run one packed row together (`hrl.models.ops.exchange`). Then each packs the same rows and keeps a
slice of the tokens, with those of the wanted hidden states that lie in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, relu
from transformers import PreTrainedModel

from hrl.batching.trie import Trie
from hrl.models.experts import PackedRouting, followed_experts
from hrl.models.head import head_form, last_hidden_states
from hrl.models.ops.divergence import TeacherHead, divergence_from_teacher
from hrl.models.ops.exchange import SequenceGroup, SlicedLayout, join_results
from hrl.models.ops.layout import AttentionLayout, PaddedLayout, to_device
from hrl.models.ops.log_prob import TokenStatistics, default_chunk, token_statistics
from hrl.models.ops.tensor_parallel import WeightGroup, shared
from hrl.models.pictures import PackedPictures, Sight, places_of
from hrl.models.scalar_head import STEP_LABELS
from hrl.models.tensor_parallel import cut, own, share_out_experts
from hrl.pictures import MULTI_MODAL_DATA, Picture
from hrl.routing import ROUTED_EXPERTS, is_missing, missing

if TYPE_CHECKING:
    from hrl.protocol import DataProto

#: `next`: the hidden state before each trained token. `last`: the hidden state at the last token of each row.
Wanted = Literal["next", "last"]


@dataclass(frozen=True)
class TokenRows:
    """The columns of a batch that say what the sequences are, checked once.

    Attributes:
        prompts: The prompt tokens of each row, `(P_i,)` int64.
        responses: `(B, R)` int64.
        response_lengths: `(B,)` int64 true lengths of the responses, in tokens.
        trained: `(B, R)` bool, tokens to train on or to score.
        routed: The experts that each token of a row goes to, `(tokens, L, K)` of the layers that have some, prompt and
            response without padding; as many tokens as are known, the others choose by themselves. None where all do.
        pictures: Those of each row's prompt; None in a run without pictures.
    """

    prompts: list[np.ndarray]
    responses: np.ndarray
    response_lengths: np.ndarray
    trained: np.ndarray
    routed: list[np.ndarray] | None = None
    pictures: list[tuple[Picture, ...]] | None = None

    @classmethod
    def of(cls, batch: DataProto, *, routed: bool = False, pictures: bool = False) -> TokenRows:
        """Read `prompts`, `responses`, `attention_mask` and `response_mask` of a batch.

        Args:
            batch: Rows of any number.
            routed: Also read `routed_experts`.
            pictures: Also read `multi_modal_data`.

        Raises:
            KeyError: A column is missing.
            ValueError: A prompt is not left-padded or empty, a response is not right-padded, a trained token lies
                beyond its response, experts are given for more tokens than there are, or a picture stands beyond its
                prompt.
        """
        missing = {"prompts", "responses", "attention_mask", "response_mask"} - set(batch.batch.keys())
        if missing:
            raise KeyError(f"the batch lacks the columns {sorted(missing)}; it has {sorted(batch.batch.keys())}")
        prompts = batch.batch["prompts"].cpu().numpy()
        responses = batch.batch["responses"].cpu().numpy()
        width = prompts.shape[1]
        mask = batch.batch["attention_mask"].cpu().numpy().astype(bool)
        trained = batch.batch["response_mask"].cpu().numpy().astype(bool)
        prompt_mask, response_mask = mask[:, :width], mask[:, width:]
        _require((np.diff(prompt_mask.astype(np.int8), axis=1) >= 0).all(1), "its prompt is not left-padded")
        _require((np.diff(response_mask.astype(np.int8), axis=1) <= 0).all(1), "its response is not right-padded")
        _require(prompt_mask.any(1), "its prompt is empty")
        _require(~(trained & ~response_mask).any(1), "response_mask trains on a token beyond the response's length")
        prompt_lengths = prompt_mask.sum(1)
        experts = None
        if routed:
            if ROUTED_EXPERTS not in batch.non_tensor_batch:
                raise KeyError(f"the batch lacks the column {ROUTED_EXPERTS!r}, which has the experts to replay")
            experts = list(batch.non_tensor_batch[ROUTED_EXPERTS])
            fits = np.array([len(row) for row in experts], np.int64) <= prompt_lengths + response_mask.sum(1)
            _require(fits, f"{ROUTED_EXPERTS} has experts for more tokens than it has")
        shown = None
        if pictures:
            if MULTI_MODAL_DATA not in batch.non_tensor_batch:
                raise KeyError(f"the batch lacks the column {MULTI_MODAL_DATA!r}, which has the prompts' pictures")
            shown = [tuple(row) for row in batch.non_tensor_batch[MULTI_MODAL_DATA]]
            ends = np.array([max((each.start + each.length for each in row), default=0) for row in shown], np.int64)
            _require(ends <= prompt_lengths, f"{MULTI_MODAL_DATA} has a picture beyond its prompt")
        return cls(
            [row[width - n :] for row, n in zip(prompts, prompt_lengths.tolist(), strict=True)],
            responses,
            response_mask.sum(1),
            trained,
            experts,
            shown,
        )

    @cached_property
    def compared(self) -> list[np.ndarray]:
        """The prompts with each picture's own negative number in the place of its tokens, `(P_i,)` int64."""
        if self.pictures is None:
            return self.prompts
        numbers: dict[str, int] = {}
        found = []
        for prompt, shown in zip(self.prompts, self.pictures, strict=True):
            tokens = prompt.copy() if shown else prompt
            for picture in shown:
                number = numbers.setdefault(picture.digest, len(numbers))
                tokens[picture.start : picture.start + picture.length] = -1 - number
            found.append(tokens)
        return found

    @cached_property
    def _before_last_trained(self) -> np.ndarray:
        """`(B,)` int64 response tokens before the last trained one; -1 for a row without any."""
        return (self.trained * np.arange(1, self.trained.shape[1] + 1)).max(axis=1, initial=0) - 1

    def used(self, picked: Sequence[int], wanted: Wanted) -> list[tuple[int, int]]:
        """Return (row, response tokens that must enter the model) of the picked rows that are needed."""
        lengths = self.response_lengths if wanted == "last" else self._before_last_trained
        return [
            (row, length) for row, length in zip(picked, lengths[list(picked)].tolist(), strict=True) if length >= 0
        ]


def _require(ok: Any, complaint: str) -> None:
    if not ok.all():
        raise ValueError(f"row {int(np.flatnonzero(~ok)[0])} of the batch is unusable: {complaint}")


@dataclass(frozen=True)
class PackedMicroBatch:
    """One forward.

    Attributes:
        input_ids: `(1, T)` int64; `(S, L)` of padded rows, whose tokens are counted row by row, T of them.
        position_ids: Of the same shape; in a run with pictures with three axes before it.
        layout: Which token attends to which.
        hidden_index: `(N,)` int64, the positions in the packed row whose hidden states are wanted.
        labels: `(N,)` int64, the token id that follows each of them (0 for `last`).
        mask: `(b, r)` bool, where the N results belong in the micro-batch's rows, row-major; `r` is the longest.
        mask_index: `(N,)` int64, the same as flat positions, because indexing by a mask on a GPU waits for it.
        is_empty: Nothing is wanted. One token still runs, so that every rank joins every collective.
        picked: Positions on this rank of the micro-batch's rows.
        routing: What is known of the tokens' experts, for a model that has some.
        pictures: What the row shows; None in a run without pictures.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: AttentionLayout | SlicedLayout | PaddedLayout
    hidden_index: Tensor
    labels: Tensor
    mask: Tensor
    mask_index: Tensor
    is_empty: bool
    picked: tuple[int, ...]
    routing: PackedRouting | None
    pictures: PackedPictures | None

    def own_results(self, results: Tensor) -> Tensor:
        """Return those `(N, ...)` of all results that are computed here, as many as there are labels."""
        return results if len(results) else results.new_zeros(1, *results.shape[1:])

    def join(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the ranks that run the row together have computed, `(N,)` each; here one rank has all of it."""
        return results

    def unpack(self, flat: Tensor) -> Tensor:
        """Spread `(N,)` results over `(b, r)`, zero outside the mask. Differentiable."""
        if self.is_empty:
            return flat.new_zeros(self.mask.shape)
        return flat.new_zeros(self.mask.numel()).index_copy(0, self.mask_index, flat).view(self.mask.shape)

    def of_tokens(self, matrix: Tensor) -> Tensor:
        """Return the `(N,)` entries of a `(b, r)` matrix that belong to the results: the inverse of `unpack`."""
        return matrix.reshape(-1).index_select(0, self.mask_index)


@dataclass(frozen=True)
class SlicedMicroBatch(PackedMicroBatch):
    """One rank's slice of a forward that several ranks make together.

    The slice has t tokens, and M of the N wanted hidden states lie in it. `input_ids` and `position_ids` are `(1, t)`,
    `hidden_index` and `labels` `(M,)`; where M is 0 they have one entry, because every rank has to join the collectives
    of the head. `mask` and `mask_index` are those of the whole micro-batch.

    Attributes:
        own: `(M,)` int64, which of the N results are computed here.
        num_results: N.
    """

    layout: SlicedLayout
    own: Tensor
    num_results: int

    def own_results(self, results: Tensor) -> Tensor:
        """Return those `(N, ...)` of all results that are computed here, as many as there are labels."""
        return super().own_results(super().own_results(results).index_select(0, self.own))

    def join(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results of all ranks, `(N,)` each; see `join_results`."""
        return join_results(results, self.own, self.num_results, self.layout.group)


def pack_micro_batch(
    rows: TokenRows,
    picked: tuple[int, ...],
    *,
    share_prefix: bool,
    is_tree: bool = False,
    packs_rows: bool = True,
    wanted: Wanted,
    device: torch.device,
    group: SequenceGroup | None = None,
    with_routing: bool = False,
    sight: Sight | None = None,
) -> PackedMicroBatch:
    """Pack the rows `picked` into one row, or pad them to one length.

    Args:
        rows: The rank's rows.
        picked: Positions of rows on this rank; none gives an empty micro-batch.
        share_prefix: Compute equal prompts once.
        is_tree: Compute all that rows have in common at their beginning once, instead of equal prompts alone.
        packs_rows: False leaves each row by itself, whatever it has in common with others, and pads it.
        wanted: Which hidden states are wanted.
        device: Of the result.
        group: Ranks that run the row together, of which this one gets its slice; None where it is alone.
        with_routing: The model has experts; a token that several rows have goes to those of the first row that says.
        sight: How the model sees, if the rows have pictures.
    """
    used = rows.used(picked, wanted)
    if not packs_rows and group is not None:
        raise ValueError("padded rows are run by one rank")
    if not used:
        return _empty(picked, device, group, rows if with_routing else None, sight, packs_rows=packs_rows)
    writer = _Writer() if packs_rows else _PaddingWriter()
    write = _write_rows if not share_prefix or not packs_rows else _write_tree if is_tree else _write_groups
    segment = write(writer, rows, used)
    layout = writer.layout()
    paths = layout.paths()
    width = 1 if wanted == "last" else max(length for _, length in used) + 1
    index, labels, places = [], [], []
    for slot, row in enumerate(picked):
        if row not in segment:
            continue
        path = paths[segment[row]]
        if wanted == "last":
            index.append(path[-1:])
            labels.append(np.zeros(1, np.int64))
            places.append(np.array([slot]))
            continue
        columns = np.flatnonzero(rows.trained[row])
        index.append(path[len(rows.prompts[row]) - 1 + columns])
        labels.append(rows.responses[row, columns])
        places.append(slot * width + columns)
    positions, seen = layout.position_ids(), None
    if sight is not None:
        ways = [(row, paths[segment[row]][: len(rows.prompts[row]) + length]) for row, length in used]
        positions, seen = _Pictures.of(rows, ways, layout.num_tokens, sight)
    arrays = [writer.row(), positions, *map(np.concatenate, (index, labels, places))]
    routing = None
    if with_routing:
        of_rows = {row: paths[segment[row]][: len(rows.prompts[row]) + length] for row, length in used}
        routing = _Routing.of(rows, [of_rows.get(row) for row in picked], picked, layout.num_tokens)
    return _on_device(arrays, layout, width, device, group, is_empty=False, picked=picked, routing=routing, seen=seen)


@dataclass(frozen=True)
class _Pictures:
    """`PackedPictures` on the host, of the whole packed row.

    Attributes:
        patches: `(P, C)` of all pictures.
        grids: Of each.
        places: `(T,)` int64, which of the tower's results goes to each token; -1 for text.
    """

    patches: Tensor
    grids: list[tuple[int, int, int]]
    places: np.ndarray

    @classmethod
    def of(
        cls, rows: TokenRows, paths: Sequence[tuple[int, np.ndarray]], num_tokens: int, sight: Sight
    ) -> tuple[np.ndarray, _Pictures]:
        """Return the positions `(T, 3)` of the row's tokens, and its pictures, each once.

        Args:
            rows: The rank's rows.
            paths: Row → where in the packed row its tokens are.
            num_tokens: T.
            sight: How the model sees.
        """
        assert rows.pictures is not None, "a run that sees has the column"
        found, first = dict[str, Picture](), dict[str, int]()
        end = 0
        positions, places = np.zeros((num_tokens, 3), np.int64), np.full(num_tokens, -1, np.int64)
        for row, path in paths:
            for picture in rows.pictures[row]:
                if picture.digest not in found:
                    found[picture.digest], first[picture.digest] = picture, end
                    end += picture.length
            prompt = len(rows.prompts[row])
            tokens = np.concatenate([rows.prompts[row], rows.responses[row, : len(path) - prompt]])
            positions[path] = sight.positions(tokens, rows.pictures[row])
            places[path] = places_of(rows.pictures[row], first, len(path))
        pixels = [sight.processor.pixels(picture) for picture in found.values()] or [sight.processor.blank]
        patches = torch.cat([each.patches for each in pixels])
        return positions, cls(patches, [each.grid for each in pixels], places)

    @classmethod
    def none(cls, sight: Sight) -> _Pictures:
        """Return those of a row of one token of text."""
        return cls(sight.processor.blank.patches, [sight.processor.blank.grid], np.full(1, -1, np.int64))

    def on_device(self, device: torch.device, layout: SlicedLayout | None, shape: tuple[int, int]) -> PackedPictures:
        """Return it on the device; in a sequence group every rank runs the tower, and puts its slice's results.

        Args:
            device: Where it is wanted.
            layout: Of this rank's slice; None of the whole.
            shape: Of the tokens as the model gets them.
        """
        places = self.places if layout is None else _slice_of(self.places, layout, -1)
        is_place = torch.from_numpy(places >= 0).view(shape)
        index = torch.from_numpy(places[places >= 0])
        return PackedPictures(*to_device([self.patches, torch.tensor(self.grids), is_place, index], device))


@dataclass(frozen=True)
class _Routing:
    """`PackedRouting` on the host, of the whole packed row."""

    num_rows: np.ndarray
    paths: tuple[np.ndarray | None, ...]
    replayed: np.ndarray | None

    @classmethod
    def of(
        cls, rows: TokenRows, paths: Sequence[np.ndarray | None], picked: Sequence[int], num_tokens: int
    ) -> _Routing:
        counts = np.zeros(num_tokens, np.float32)
        for path in paths:
            if path is not None:
                counts[path] += 1
        first = next((routed for routed in rows.routed or () if len(routed)), None)
        if first is None or rows.routed is None:
            return cls(counts, tuple(paths), None)
        none = missing(first.dtype)
        replayed = np.full((num_tokens, *first.shape[1:]), none, first.dtype)
        for row, path in zip(picked, paths, strict=True):
            if path is not None and len(known := rows.routed[row][: len(path)]):
                at = path[: len(known)]
                unset = is_missing(replayed[at])
                replayed[at[unset]] = known[unset]
        return cls(counts, tuple(paths), replayed)

    def on_device(self, device: torch.device, layout: SlicedLayout | None) -> PackedRouting:
        """Return it on the device; in a sequence group, of this rank's slice, but for the paths."""
        num_rows, replayed = self.num_rows, self.replayed
        if layout is not None:
            num_rows = _slice_of(num_rows, layout, 0)
            replayed = None if replayed is None else _slice_of(replayed, layout, missing(replayed.dtype))
        unknown = np.ones(len(num_rows), bool) if replayed is None else is_missing(replayed)
        arrays = [num_rows] if replayed is None else [num_rows, replayed]
        tensors = to_device([*map(torch.from_numpy, arrays)], device)
        return PackedRouting(
            tensors[0],
            self.paths,
            None if replayed is None else tensors[1],
            has_missing=bool(unknown.any()),
            is_known=not (unknown & (num_rows > 0)).any(),
        )


def take_columns(
    batch: DataProto, names: Iterable[str], picked: Sequence[int], packed: PackedMicroBatch
) -> dict[str, Tensor]:
    """Return columns `(B, R)` of the picked rows as `(b, r)` on the device of `packed`, after one copy."""
    names, rows = tuple(names), list(picked)
    host = [batch.batch[name][rows, : packed.mask.shape[1]] for name in names]
    return dict(zip(names, to_device(host, packed.mask.device), strict=True))


class _Writer:
    """Builds a packed row, segment by segment."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.parent: list[int] = []
        self.prefix_length: list[int] = []

    def add(self, tokens: np.ndarray, parent: int = 0, prefix_length: int = 0) -> int:
        """Append one segment and return its number."""
        self.tokens.append(tokens)
        self.parent.append(parent)
        self.prefix_length.append(prefix_length)
        return len(self.tokens) - 1

    @property
    def _lengths(self) -> np.ndarray:
        return np.array([len(t) for t in self.tokens], np.int64)

    def layout(self) -> AttentionLayout | PaddedLayout:
        """Return the layout of what was written."""
        return AttentionLayout(self._lengths, np.array(self.parent), np.array(self.prefix_length))

    def row(self) -> np.ndarray:
        """Return what was written, `(T,)`."""
        return np.concatenate(self.tokens)


class _PaddingWriter(_Writer):
    """Builds rows that are padded to one length, each a segment."""

    def layout(self) -> PaddedLayout:
        """Return the layout of what was written."""
        return PaddedLayout(self._lengths)

    def row(self) -> np.ndarray:
        """Return the rows one after the other, `(S * L,)`."""
        rows = np.zeros(self.layout().shape, np.int64)
        for row, tokens in zip(rows, self.tokens, strict=True):
            row[: len(tokens)] = tokens
        return rows.reshape(-1)


# Each writes the rows that are used and returns, by row, the segment whose path is what is used of it.


def _write_rows(writer: _Writer, rows: TokenRows, used: list[tuple[int, int]]) -> dict[int, int]:
    """Write each row by itself."""
    return {row: writer.add(_tokens(rows, row, length)) for row, length in used}


def _write_groups(writer: _Writer, rows: TokenRows, used: list[tuple[int, int]]) -> dict[int, int]:
    """Write equal prompts once, each before its responses, in order of appearance."""
    groups: dict[bytes, list[tuple[int, int]]] = {}
    for row, length in used:
        groups.setdefault(rows.compared[row].tobytes(), []).append((row, length))
    segment: dict[int, int] = {}
    for members in groups.values():
        if len(members) == 1:
            segment |= _write_rows(writer, rows, members)
            continue
        tokens = rows.prompts[members[0][0]]
        prompt = writer.add(tokens)
        for row, length in members:
            response = rows.responses[row, :length]
            segment[row] = writer.add(response, prompt, len(tokens)) if length else prompt
    return segment


def _write_tree(writer: _Writer, rows: TokenRows, used: list[tuple[int, int]]) -> dict[int, int]:
    """Write of each row what it does not have in common with a row before it."""
    sequences = [_tokens(rows, row, length) for row, length in used]
    compared = [np.concatenate([rows.compared[row], rows.responses[row, :length]]) for row, length in used]
    trie, segment, last = Trie.of(compared), dict[int, int](), 0
    for at, common in zip(trie.order.tolist(), trie.shared.tolist(), strict=True):
        tokens = sequences[at]
        if common < len(tokens):  # else it is equal to the row before it, since of two the shorter comes first
            last = writer.add(tokens[common:], last, common)
        segment[used[at][0]] = last
    return segment


def _tokens(rows: TokenRows, row: int, length: int) -> np.ndarray:
    return np.concatenate([rows.prompts[row], rows.responses[row, :length]])


def _empty(
    picked: tuple[int, ...],
    device: torch.device,
    group: SequenceGroup | None,
    routed: TokenRows | None,
    sight: Sight | None,
    *,
    packs_rows: bool,
) -> PackedMicroBatch:
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    layout = AttentionLayout(one, zero, zero) if packs_rows else PaddedLayout(one)
    routing = None if routed is None else _Routing.of(routed, [None] * len(picked), [0] * len(picked), 1)
    positions = zero if sight is None else np.zeros((1, 3), np.int64)
    seen = None if sight is None else _Pictures.none(sight)
    arrays = [zero, positions, zero, zero, zero[:0]]
    return _on_device(arrays, layout, 1, device, group, is_empty=True, picked=picked, routing=routing, seen=seen)


def _on_device(
    arrays: list[np.ndarray],
    layout: AttentionLayout | PaddedLayout,
    width: int,
    device: torch.device,
    group: SequenceGroup | None,
    *,
    is_empty: bool,
    picked: tuple[int, ...],
    routing: _Routing | None,
    seen: _Pictures | None,
) -> PackedMicroBatch:
    """Return a packed row on the device, or this rank's slice of it.

    Args:
        arrays: Tokens `(T,)` and positions, `(T,)` or `(T, 3)`; wanted hidden states and their labels `(N,)`; the flat
            positions of the results in the micro-batch's rows `(N,)`, none where nothing is wanted.
        layout: Of the row.
        width: Columns of the micro-batch's mask.
        device: Where it is wanted.
        group: Ranks that run the row together.
        is_empty: Nothing is wanted.
        picked: Positions on this rank of the rows.
        routing: What is known of the tokens' experts.
        seen: The row's pictures.
    """
    shape = len(picked), width
    sliced = None if group is None or isinstance(layout, PaddedLayout) else SlicedLayout(layout, group)
    num_results = len(arrays[2])
    if sliced is not None:
        arrays = _of_slice(arrays, sliced)
    tensors = to_device([*map(torch.from_numpy, arrays)], device)
    input_ids, position_ids, hidden_index, labels, at = tensors[:5]
    mask = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=device).index_fill(0, at, True).view(shape)
    of_row = layout.shape if sliced is None else (1, len(input_ids))
    positions = position_ids.view(of_row) if position_ids.dim() == 1 else position_ids.T.reshape(3, *of_row)
    row = input_ids.view(of_row), positions
    known = None if routing is None else routing.on_device(device, sliced)
    shown = None if seen is None else seen.on_device(device, sliced, of_row)
    index = hidden_index, labels, mask, at
    if sliced is None:
        return PackedMicroBatch(*row, layout, *index, is_empty, picked, known, shown)
    return SlicedMicroBatch(*row, sliced, *index, is_empty, picked, known, shown, tensors[5], num_results)


def _of_slice(arrays: list[np.ndarray], layout: SlicedLayout) -> list[np.ndarray]:
    """Cut the arrays of `_on_device` to a slice, and add which results are its own `(M,)`."""
    tokens, positions, index, labels, at = arrays
    size, start = layout.num_tokens, layout.start
    slices = [_slice_of(of_row, layout, 0) for of_row in (tokens, positions)]
    local = index - start
    (mine,) = np.nonzero((local >= 0) & (local < size))
    computed = (local[mine], labels[mine]) if len(mine) else (np.zeros(1, np.int64), np.zeros(1, np.int64))
    return [*slices, *computed, at, mine]


def _slice_of(of_row: np.ndarray, layout: SlicedLayout, filling: int) -> np.ndarray:
    """Cut what a packed row has for each token, `(T, ...)`, to a slice `(t, ...)`, filled up where the row ends."""
    own = of_row[layout.start : layout.start + layout.num_tokens]
    widths = [(0, layout.num_tokens - len(own))] + [(0, 0)] * (own.ndim - 1)
    return np.pad(own, widths, constant_values=filling)


# ---- models ----------------------------------------------------------------------------------------------------


class PackedModel(nn.Module):
    """A transformers model on packed micro-batches.

    Attributes:
        group: Ranks over which it is cut, each with a part of every large weight; None where it is whole.
    """

    group: WeightGroup | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.experts = followed_experts(model)

    def cut(self, group: WeightGroup) -> None:
        """Cut it over the ranks of a tensor group, see `hrl.models.tensor_parallel.cut`."""
        cut(self.model, group)
        self.group = group

    def share_out_experts(self, group: WeightGroup) -> None:
        """Share out its experts to the ranks of a group, see `hrl.models.tensor_parallel.share_out_experts`."""
        share_out_experts(self.model, group)

    def hidden_states(self, packed: PackedMicroBatch) -> Tensor:
        """Return the last hidden states at the wanted tokens, `(N, H)`."""
        hidden = last_hidden_states(self.model, packed.input_ids, packed.position_ids, packed.layout, packed.pictures)
        return hidden[0].index_select(0, packed.hidden_index)


class PackedCausalLM(PackedModel):
    """Log-probs of the sampled tokens, from logits as the model's own forward makes them.

    Raises:
        ValueError: The model makes logits in a way that can't be followed (see `head_form`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.form = head_form(model)
        head = model.get_output_embeddings()
        # Computed inside the head's own `forward`, where FSDP has gathered its weight.
        head.forward = MethodType(_head_forward, head)

    def forward(
        self,
        packed: PackedMicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
        *,
        at: Tensor | None = None,
        num_top: int = 0,
        vocabulary: int | None = None,
        with_states: bool = False,
        teacher: Taught | None = None,
    ) -> TokenStatistics:
        """Return log-probs `(N,)` and what else is asked for, in float32; see `token_statistics`.

        With `vocabulary` they are of the distribution over so many first tokens alone. With a `teacher` there is also
        the divergence from its distribution.
        """
        hidden = self.hidden_states(packed)
        if self.form.hidden_scale != 1.0:
            hidden = hidden * self.form.hidden_scale
        found: TokenStatistics = self.model.get_output_embeddings()(
            hidden,
            packed.labels,
            temperature=temperature,
            chunk=default_chunk(hidden.device),
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            form=self.form.logits,
            group=self.group,
            at=at,
            num_top=num_top,
            vocabulary=vocabulary,
            teacher=teacher,
        )
        return found._replace(states=hidden.detach()) if with_states else found

    @property
    def width(self) -> int:
        """Of a last hidden state."""
        return int(self.model.get_output_embeddings().weight.shape[1])

    @torch.no_grad()
    def teacher_head(self, dtype: torch.dtype) -> TeacherHead:
        """Return a copy of the head on the CPU, whole, in a dtype; every rank calls this."""
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else _whole(head.bias).to(dtype).cpu()
        return TeacherHead(_whole(head.weight).to(dtype).cpu(), bias, self.form.logits)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach().clone()


class Taught(NamedTuple):
    """A teacher's last hidden states `(N, H)` of a micro-batch, its head, and which divergence is wanted."""

    states: Tensor
    head: TeacherHead
    is_reverse: bool


def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor | None = None,
    group: WeightGroup | None = None,
    vocabulary: int | None = None,
    teacher: Taught | None = None,
    **options: Any,
) -> Any:
    """Return logits as the head's own forward does, or with labels `(N,)` statistics of the tokens after `(N, H)`."""
    if labels is None:
        return type(head).forward(head, hidden)
    weight, bias = own(head.weight), None if head.bias is None else own(head.bias)
    first = 0 if group is None else group.part(len(head.weight)).start
    if vocabulary is not None:
        weight, bias = (None if part is None else part[: max(vocabulary - first, 0)] for part in (weight, bias))
    hidden = hidden.to(weight.dtype)
    found = token_statistics(hidden, weight, labels, bias=bias, first=first, group=group, **options)
    if teacher is None:
        return found
    if group is not None:
        raise ValueError("a divergence over all tokens needs the whole head, which a tensor group's ranks do not have")
    divergence = divergence_from_teacher(
        hidden,
        weight,
        teacher.states.to(teacher.head.weight.dtype),
        teacher.head,
        options["temperature"],
        chunk=options["chunk"],
        is_reverse=teacher.is_reverse,
        bias=bias,
        form=options["form"],
    )
    return found._replace(divergence=divergence)


class PackedScalarModel(PackedModel):
    """One number per wanted token, for value and reward models."""

    def forward(self, packed: PackedMicroBatch) -> Tensor:
        """Return `(N,)` float32."""
        # The product is in float32 too: bfloat16 has two to three digits, too few for a value.
        hidden = self.hidden_states(packed)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        *inner, head = (layer for layer in self.model.score.modules() if isinstance(layer, nn.Linear))
        values = hidden.to(wide)
        for layer in inner:
            values = relu(linear(values, layer.weight.to(wide), None if layer.bias is None else layer.bias.to(wide)))
        outputs = head.weight.to(wide)
        bias = None if head.bias is None else head.bias.to(wide)
        if len(outputs) == STEP_LABELS:  # the probability of the second of two labels
            outputs, bias = outputs[1:] - outputs[:1], None if bias is None else bias[1:] - bias[:1]
        values = torch.mv(values, outputs[0])
        values = values if bias is None else values + bias
        values = values.sigmoid() if len(head.weight) == STEP_LABELS else values
        return values if self.group is None else shared(values, self.group)
