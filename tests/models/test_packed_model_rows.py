"""Packing: what enters the model and where its results go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.models.packed_model import TokenRows, pack_micro_batch
from hrl.protocol import DataProto
from tests.models.tiny import make_batch
from tests.models.trees import TREE_BATCHES, num_nodes, sequences_of

CPU = torch.device("cpu")


def small_batch() -> DataProto:
    """Three samples of one prompt (7 8) and one of another (9): lengths 3, 1, 0 and 2; a masked token in row 0."""
    prompts = torch.tensor([[0, 7, 8]] * 3 + [[0, 0, 9]])
    responses = torch.tensor([[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]])
    trained = attention[:, 3:].clone()
    trained[0, 1] = 0
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "attention_mask": attention, "response_mask": trained}
    )


def test_a_group_is_its_prompt_once_then_all_but_the_last_token_of_each_response():
    packed = pack_micro_batch(TokenRows.of(small_batch()), (0, 1, 2, 3), share_prefix=True, wanted="next", device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 9, 5]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.layout.prefix_length.tolist() == [0, 2, 0]
    assert packed.hidden_index.tolist() == [1, 3, 1, 4, 5]  # the prompt's last state twice: row 0 and row 1
    assert packed.labels.tolist() == [1, 3, 4, 5, 6]
    assert packed.mask.tolist() == [[True, False, True], [True, False, False], [False] * 3, [True, True, False]]


def test_without_sharing_every_row_brings_its_prompt():
    packed = pack_micro_batch(TokenRows.of(small_batch()), (1, 0, 3), share_prefix=False, wanted="next", device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 7, 8, 1, 2, 9, 5]]
    assert packed.layout.length.tolist() == [2, 4, 2] and not packed.layout.prefix_length.any()
    assert packed.labels.tolist() == [4, 1, 3, 5, 6]


def test_scores_want_the_last_token_of_every_row_empty_responses_too():
    packed = pack_micro_batch(TokenRows.of(small_batch()), (0, 1, 2, 3), share_prefix=True, wanted="last", device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 3, 4, 9, 5, 6]]
    assert packed.hidden_index.tolist() == [4, 5, 1, 8]
    assert packed.mask.shape == (4, 1) and packed.mask.all()


def test_results_return_to_their_rows():
    packed = pack_micro_batch(TokenRows.of(small_batch()), (3, 0), share_prefix=True, wanted="next", device=CPU)
    flat = packed.labels.float()
    assert packed.unpack(flat).tolist() == [[5, 6, 0], [1, 0, 3]]


@pytest.mark.parametrize("picked", [(), (2,)], ids=["no rows", "no trained token"])
def test_nothing_to_do_is_one_weightless_token(picked):
    packed = pack_micro_batch(TokenRows.of(small_batch()), picked, share_prefix=True, wanted="next", device=CPU)
    assert packed.is_empty and packed.input_ids.shape == (1, 1)
    assert packed.unpack(torch.ones(1)).shape == (len(picked), 1)
    assert not packed.unpack(torch.ones(1)).any()


def test_equal_prompts_are_shared_whatever_their_uid_and_wherever_they_stand():
    batch = small_batch().select_idxs([0, 3, 1])
    packed = pack_micro_batch(TokenRows.of(batch), (0, 1, 2), share_prefix=True, wanted="next", device=CPU)
    assert packed.input_ids[0].tolist().count(7) == 1


def test_the_packed_row_is_no_longer_than_prompts_once_and_responses():
    batch = make_batch(num_groups=5, samples=6)
    packed = pack_micro_batch(TokenRows.of(batch), tuple(range(30)), share_prefix=True, wanted="next", device=CPU)
    attention = batch.batch["attention_mask"]
    prompts = sum({tuple(p): len(p) for p in map(np.ndarray.tolist, TokenRows.of(batch).prompts)}.values())
    assert packed.layout.num_tokens <= prompts + int(attention[:, 9:].sum())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), more=st.integers(1, 6), shared=st.booleans())
def test_padding_a_prompt_on_the_left_changes_nothing_that_enters_the_model(seed, more, shared):
    """So no logit either; and positions restart with each sequence, behind a shared prompt at its length."""
    batch = make_batch(seed=seed)
    columns = {name: batch.batch[name] for name in ("prompts", "responses", "attention_mask", "response_mask")}
    left = {name: torch.nn.functional.pad(columns[name], (more, 0)) for name in ("prompts", "attention_mask")}
    packs = [
        pack_micro_batch(
            TokenRows.of(DataProto.from_dict(tensors=each)),
            tuple(range(12)),
            share_prefix=shared,
            wanted="next",
            device=CPU,
        )
        for each in (columns, columns | left)
    ]
    for name in ("input_ids", "position_ids", "hidden_index", "labels", "mask"):
        assert torch.equal(getattr(packs[0], name), getattr(packs[1], name)), name
    layout = packs[0].layout
    starts = np.cumsum(layout.length) - layout.length
    for start, length, prefix in zip(starts, layout.length, layout.prefix_length, strict=True):
        positions = packs[0].position_ids[0, start : start + length]
        assert positions.tolist() == list(range(prefix, prefix + length))


def branches() -> DataProto:
    """An episode of three rows: the second leaves the first behind token 2, the third is the second's beginning.

    The first trains 2 and 3; the second reads 2 untrained and trains 6; the third, of another prompt, trains 2 and 4.
    """
    prompts = torch.tensor([[0, 7, 8], [0, 7, 8], [7, 8, 1]])
    responses = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 6], [2, 4, 0, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    trained = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]])
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "attention_mask": attention, "response_mask": trained}
    )


def test_of_a_tree_each_row_brings_what_no_row_before_it_has():
    packed = pack_micro_batch(
        TokenRows.of(branches()), (0, 1, 2), share_prefix=True, is_tree=True, wanted="next", device=CPU
    )
    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 4]]  # the first row ends at 2, the third too
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert packed.hidden_index.tolist() == [2, 3, 4, 2, 3]  # of two states each predicts a token of two rows
    assert packed.labels.tolist() == [2, 3, 6, 2, 4]
    assert packed.mask.tolist() == [[False, True, True, False], [False] * 3 + [True], [True, True, False, False]]


def test_scores_of_a_tree_are_read_at_the_last_token_of_every_row():
    packed = pack_micro_batch(
        TokenRows.of(branches()), (2, 0, 1), share_prefix=True, is_tree=True, wanted="last", device=CPU
    )
    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 3, 4, 6]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    assert packed.hidden_index.tolist() == [5, 4, 6]


@settings(max_examples=60, deadline=None)
@given(TREE_BATCHES, st.sampled_from(["next", "last"]), st.randoms(use_true_random=False))
def test_a_tree_is_every_beginning_once_and_each_row_finds_its_own(batch, wanted, random):
    rows, sequences = TokenRows.of(batch), sequences_of(batch)
    picked = tuple(random.sample(range(len(sequences)), random.randint(1, len(sequences))))
    packed = pack_micro_batch(rows, picked, share_prefix=True, is_tree=True, wanted=wanted, device=CPU)
    used = rows.used(picked, wanted)
    if not used:
        assert packed.is_empty
        return
    assert packed.layout.num_tokens == num_nodes([sequences[row][: len(rows.prompts[row]) + n] for row, n in used])
    tokens, paths = packed.input_ids[0].numpy(), packed.layout.paths()
    ends = {int(path[end]): path[: end + 1] for path in paths for end in range(len(path))}
    assert all((packed.position_ids[0].numpy()[path] == np.arange(len(path))).all() for path in paths)
    read = [tokens[ends[at]].tolist() for at in packed.hidden_index.tolist()]
    if wanted == "last":
        assert read == [sequences[row].tolist() for row in picked]
        return
    places = [(row, len(rows.prompts[row]) + at) for row in picked for at in np.flatnonzero(rows.trained[row])]
    assert read == [sequences[row][:end].tolist() for row, end in places]
    assert packed.labels.tolist() == [sequences[row][end] for row, end in places]


def test_without_sharing_a_tree_is_rows():
    packed = pack_micro_batch(
        TokenRows.of(branches()), (0, 1, 2), share_prefix=False, is_tree=True, wanted="next", device=CPU
    )
    assert packed.layout.length.tolist() == [4, 5, 4] and not packed.layout.prefix_length.any()


def test_missing_columns_are_named():
    batch = small_batch()
    batch.pop(batch_keys=["response_mask"])
    with pytest.raises(KeyError, match="response_mask"):
        TokenRows.of(batch)
