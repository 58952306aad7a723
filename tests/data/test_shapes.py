"""Rows as TRL, OpenAI and ShareGPT write them are read as they are."""

from __future__ import annotations

import pytest

from hrl.config.offline import DemonstrationDataConfig
from hrl.data.dataset import check_prompt
from hrl.data.offline.demonstrations import DemonstrationDataset, check_demonstration
from hrl.metrics import validation_of

USER, REPLY = {"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}
CHATS = DemonstrationDataConfig(train_files=["rows"], val_files=[], shuffle=False, seed=0, max_length=200)


def prompt(row, **keys):
    return check_prompt(row, "prompt", **keys)


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"prompt": "?"}, None),
        ({"prompt": [USER], "completion": [REPLY]}, None),
        ({"messages": [USER, REPLY]}, "42"),
        ({"messages": [USER, REPLY], "answer": "7"}, "7"),
        ({"messages": [USER]}, None),
        ({"messages": [{"from": "human", "value": "?"}]}, None),
        ({"prompt": "?", "chosen": "42", "rejected": "7"}, None),
    ],
)
def test_a_prompt_is_found_in_every_shape(row, truth):
    found = prompt(row)
    assert found.messages == [USER]
    assert found.reward_model.get("ground_truth") == truth
    assert found.columns.items() >= row.items()


def test_the_answer_key_goes_before_verls_place():
    row = {"prompt": "?", "solution": "1", "answer": "2", "reward_model": {"ground_truth": "3", "style": "rule"}}
    assert prompt(row).reward_model["ground_truth"] == "3"
    found = prompt(row, answer_key="solution")
    assert found.reward_model["ground_truth"] == found.columns["answer"] == "1"
    assert found.columns["reward_model"] == {"style": "rule"}  # the truth travels once
    assert prompt(row, answer_key="gone") == "'gone' is missing or null (data.answer_key)"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": ["a", "b"]}, "message 0 of 'prompt' is 'a', expected an object with role and content, such as"),
        ({"prompt": "?", "functions": [{"name": "f"}]}, "'functions' is OpenAI's older form of 'tools'"),
        ({"prompt": [USER, {**REPLY, "function_call": {"name": "f"}}]}, "has 'function_call', OpenAI's older form"),
        ({"question": "?"}, "'prompt' is missing or null"),
    ],
)
def test_what_is_no_prompt_says_why(row, what):
    assert what in prompt(row)


@pytest.mark.parametrize(
    ("row", "first_trained"),
    [
        ({"prompt": [USER], "chosen": [REPLY], "rejected": [{**REPLY, "content": "7"}]}, 1),
        ({"chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "7"}]}, 1),
        ({"chosen": [USER, REPLY]}, 0),
        ({"messages": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "42"}]}, 0),
    ],
)
def test_the_preferred_answer_is_imitated(row, first_trained):
    found = check_demonstration(row, CHATS)
    assert (found.messages, found.first_trained) == ([USER, REPLY], first_trained)


def test_a_text_is_trained_on_from_its_second_token_on(tokenizer):
    (answer,) = DemonstrationDataset([{"text": "abc"}], tokenizer, CHATS, stop_ids=[257]).tokens[0]
    assert tokenizer.decode(answer.prompt) == "a" and tokenizer.decode(answer.answer) == "bc<|end|>"
    assert answer.trained.all()


def test_a_reply_of_weight_0_is_context(tokenizer):
    chat = [USER, {**REPLY, "content": "bad", "weight": 0}, USER, REPLY]
    (answer,) = DemonstrationDataset([{"messages": chat}], tokenizer, CHATS, stop_ids=[257]).tokens[0]
    assert "bad" in tokenizer.decode(answer.prompt)
    assert tokenizer.decode(answer.answer[answer.trained]) == "42<|end|>"


@pytest.mark.parametrize(
    ("source", "name"),
    [("openai/gsm8k", "val/openai/gsm8k"), ("my rows\n(1)", "val/my_rows_(1)"), ("/ä//../b", "val/_/ä/_/_/b")],
)
def test_odd_sources_are_names_of_metrics(source, name):
    assert validation_of(source) == name
