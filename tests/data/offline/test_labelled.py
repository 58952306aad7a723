"""Labelled answers: the rows that are read, and prompts with the answers to other ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hrl.config.offline import PreferenceDataConfig
from hrl.data.offline.labelled import LabelledDataset, LabelledRow, check_labelled
from hrl.errors import NonFiniteError

USER, YES = {"role": "user", "content": "?"}, {"role": "assistant", "content": "y"}
UNREAD = {"train_files": ["rows"], "val_files": [], "seed": 0, "shuffle": False}
KEYS = PreferenceDataConfig(**UNREAD)


@pytest.mark.parametrize(
    ("raw", "label"),
    [
        ({"prompt": "?", "completion": "y", "label": True}, True),
        ({"prompt": [USER], "completion": [YES], "label": 0}, False),
        ({"prompt": [USER], "completion": [USER, YES], "label": 1.0}, True),
    ],
)
def test_every_form_of_a_row_is_read(raw: dict[str, Any], label: bool) -> None:
    assert check_labelled(raw, KEYS) == LabelledRow([USER], [YES], label)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": None}, "'label' is missing or null, expected true for a good answer or false for a bad one"),
        ({"label": "yes"}, "'label' is 'yes', expected true"),
        ({"label": 0.5}, "'label' is 0.5, expected true"),
        ({"completion": [USER]}, "'completion' has nothing after the prompt, expected the assistant's"),
        ({"completion": None}, "'completion' is missing or null, expected a string"),
        ({"prompt": ""}, "'prompt' is an empty string"),
    ],
)
def test_what_is_no_labelled_answer_is_told(changes: dict[str, Any], message: str) -> None:
    found = check_labelled({"prompt": [USER], "completion": "y", "label": True} | changes, KEYS)
    assert isinstance(found, str) and message in found


def answers_of(rows: Any) -> list[list[int]]:
    trained = rows.batch["response_mask"].bool()
    return [ids[mask].tolist() for ids, mask in zip(rows.batch["responses"], trained, strict=True)]


def test_answers_move_on_within_a_block_and_have_the_references_log_probs(tokenizer: Any) -> None:
    raw = [{"prompt": f"{n}?", "completion": f"{n}{n}", "label": n % 2} for n in range(5)]
    data = PreferenceDataConfig(**{**UNREAD, "max_length": 64})
    rows = LabelledDataset(raw, tokenizer, data, stop_ids=[tokenizer.eos_token_id])
    own = answers_of(rows.batch(range(5)))
    assert rows.batch([1, 2]).batch["is_desirable"].tolist() == [True, False] and not rows.is_mismatched
    rows.mismatch([[3, 0], [1, 2], [4]])
    others = rows.mismatched([3, 0, 1, 2, 4])
    assert answers_of(others) == [own[0], own[3], own[2], own[1], own[2]]
    assert torch.equal(others.batch["prompts"], rows.batch([3, 0, 1, 2, 4]).batch["prompts"])
    rows.set_reference([3, 0], torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0]))
    assert rows.batch([0, 3]).batch["ref_sequence_log_prob"].tolist() == [-2.0, -1.0]
    assert rows.mismatched([0, 3]).batch["ref_sequence_log_prob"].tolist() == [-4.0, -3.0]
    with pytest.raises(ValueError, match="reference's log-probs of row 1 were not computed"):
        rows.batch([1])
    with pytest.raises(NonFiniteError, match="an answer of row 2 the log-prob nan"):
        rows.set_reference([1, 2], torch.zeros(2), torch.tensor([0.0, torch.nan]))


def test_a_prompt_with_a_longer_answer_is_cut_to_the_limit(tokenizer: Any) -> None:
    raw = [
        {"prompt": "a long prompt of words", "completion": "y", "label": True},
        {"prompt": "?", "completion": "a long answer of words", "label": False},
    ]
    longest = 1 + max(
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
            )["input_ids"]
        )
        for row in raw
    )
    data = PreferenceDataConfig(**{**UNREAD, "max_length": longest})
    rows = LabelledDataset(raw, tokenizer, data, stop_ids=[tokenizer.eos_token_id])
    rows.mismatch([[0, 1]])
    lengths = rows.mismatched([0, 1]).batch["attention_mask"].sum(-1).tolist()
    assert lengths[0] == longest and lengths[1] < longest
