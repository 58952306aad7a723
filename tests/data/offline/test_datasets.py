"""Rows of pairs and demonstrations: every form that is read, what is refused, and the batches they become."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hrl.config.offline import DemonstrationDataConfig, PairDataConfig, ScoredPairDataConfig
from hrl.data.offline.demonstrations import Demonstration, DemonstrationDataset, check_demonstration
from hrl.data.offline.pairs import PairDataset, PairRow, check_pair
from hrl.data.tasks import bundled_rows
from hrl.errors import DatasetError, NonFiniteError

USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "?"), ("assistant", "y"), ("assistant", "n"))
)
TALK = [USER, NO, USER]
UNREAD = {"train_files": ["rows"], "val_files": [], "seed": 0, "shuffle": False}
KEYS = ScoredPairDataConfig(**UNREAD)
CHATS = DemonstrationDataConfig(**UNREAD)


def pairs(tokenizer, rows, **changes):
    data = ScoredPairDataConfig(**{"max_length": 64, **UNREAD, **changes})
    return PairDataset(rows, tokenizer, data, stop_ids=[tokenizer.eos_token_id])


def demonstrations(tokenizer, rows, most=-1, **changes):
    data = DemonstrationDataConfig(**{"max_length": 64, **UNREAD, **changes})
    return DemonstrationDataset(rows, tokenizer, data, most, stop_ids=[tokenizer.eos_token_id])


# ---------------------------------------------------------------------------------------------- rows

IN_CHAT = PairRow([USER], [YES], [NO], None)


@pytest.mark.parametrize(
    ("raw", "row"),
    [
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, IN_CHAT),
        ({"prompt": "?", "chosen": "y", "rejected": "n"}, IN_CHAT),
        ({"prompt": [USER], "chosen": "y", "rejected": [NO]}, IN_CHAT),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, IN_CHAT),
        ({"prompt": "?", "chosen": [USER, YES], "rejected": [USER, NO]}, IN_CHAT),
        ({"prompt": [USER], "chosen": [USER, YES], "rejected": "n"}, IN_CHAT),  # each side is stripped by itself
        ({"prompt": [USER], "chosen": [YES], "rejected": [USER, NO]}, IN_CHAT),
        ({"chosen": json.dumps([USER, YES]), "rejected": json.dumps([USER, NO])}, IN_CHAT),  # as in a CSV file
        ({"chosen": [*TALK, YES], "rejected": [*TALK, NO]}, PairRow(TALK, [YES], [NO], None)),
        ({"chosen": "The sky is blue", "rejected": "The sky is red"}, PairRow("The sky is", " blue", " red", None)),
        ({"chosen": "Q: a b A: yes", "rejected": "Q: a b A: yes no"}, PairRow("Q: a b A:", " yes", " yes no", None)),
        ({"prompt": "?", "chosen": "y", "rejected": "n", "margin": 2}, PairRow([USER], [YES], [NO], 2)),
    ],
)  # fmt: skip
def test_every_form_of_a_pair_is_read(raw, row):
    assert check_pair(raw, KEYS) == row


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"prompt": "?", "chosen": "y"}, "'rejected' is missing or null"),
        ({"prompt": "?", "chosen": "y", "rejected": ""}, "'rejected' is an empty string"),
        ({"prompt": [], "chosen": "y", "rejected": "n"}, "'prompt' is \\[\\], expected"),
        ({"prompt": "?", "chosen": "y", "rejected": "y"}, "are the same answer"),
        ({"chosen": [USER, YES], "rejected": [NO]}, "has no 'prompt', and its two chats share no first message"),
        ({"prompt": TALK, "chosen": [USER, YES], "rejected": [NO]}, "'chosen' has a message of role 'user' after the"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [USER]}, "'rejected' has nothing after the prompt"),
        ({"chosen": [USER, YES], "rejected": [USER, YES, USER, NO]}, "'chosen' has nothing after the prompt"),
        ({"chosen": "abc", "rejected": "abd"}, "share no beginning"),
        ({"chosen": "a b", "rejected": "a b"}, "the same text twice"),
        ({"prompt": "?", "chosen": [{"role": "assistant"}], "rejected": "n"}, "'content' of message 0 of 'chosen'"),
        (
            {"prompt": "?", "chosen": "y", "rejected": "n", "margin": "big"},
            "'margin' is 'big', expected a finite number",
        ),
    ],
)
def test_what_is_no_pair_says_why(raw, reason):
    found = check_pair(raw, KEYS)
    assert isinstance(found, str)
    assert re.search(reason, found), found


def test_a_trainer_that_reads_no_margin_ignores_the_column():
    without = PairDataConfig(**UNREAD)
    assert check_pair({"prompt": "?", "chosen": "y", "rejected": "n", "margin": "big"}, without) == IN_CHAT


@pytest.mark.parametrize(
    ("raw", "row"),
    [
        ({"messages": [USER, YES, USER, NO]}, Demonstration([USER, YES, USER, NO], 0)),
        ({"prompt": "?", "completion": "y"}, Demonstration([USER, YES], 1)),
        ({"prompt": "?", "response": "y"}, Demonstration([USER, YES], 1)),
        ({"prompt": [USER, NO, USER], "completion": [YES]}, Demonstration([USER, NO, USER, YES], 3)),
        ({"messages": None, "prompt": "?", "completion": "y"}, Demonstration([USER, YES], 1)),
        ({"prompt": [USER], "completion": [USER, YES]}, Demonstration([USER, YES], 1)),  # the whole chat
        ({"messages": json.dumps([USER, YES])}, Demonstration([USER, YES], 0)),
    ],
)
def test_every_form_of_a_demonstration_is_read(raw, row):
    assert check_demonstration(raw, CHATS) == row


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (
            {"question": "a"},
            "has neither 'messages', nor 'prompt' with 'completion' or 'response', nor 'chosen', nor 'text'; its "
            "columns are question",
        ),
        ({"prompt": "?"}, "'completion' is missing or null, expected a string or a non-empty list of messages"),
        (
            {"prompt": [USER], "completion": [USER]},
            "'completion' has no message of the assistant after the prompt, and only these are trained on",
        ),
        ({"messages": []}, "'messages' is [], expected a string or a non-empty list of messages"),
    ],
)
def test_what_is_no_demonstration_says_why(raw, reason):
    assert check_demonstration(raw, CHATS) == reason


# ---------------------------------------------------------------------------------------------- batches


def test_a_pair_is_two_rows_that_share_prompt_and_uid(tokenizer):
    rows = [
        {"prompt": "?", "chosen": "yes", "rejected": "n"},
        {"prompt": "why", "chosen": "y", "rejected": "n", "margin": 3},
    ]
    dataset = pairs(tokenizer, rows)
    dataset.set_reference([0, 1], torch.arange(4.0))
    batch = dataset.batch([1, 0])
    assert batch.non_tensor_batch["uid"].tolist() == ["1", "1", "0", "0"]
    assert batch.batch["is_chosen"].tolist() == [True, False, True, False]
    assert batch.batch["ref_sequence_log_prob"].tolist() == [2.0, 3.0, 0.0, 1.0]
    assert batch.batch["margin"].tolist() == [3.0, 3.0, 0.0, 0.0]
    assert batch.meta_info == {"temperature": 1.0}
    prompts, responses = batch.batch["prompts"], batch.batch["responses"]
    assert torch.equal(prompts[0], prompts[1]) and torch.equal(prompts[2], prompts[3])
    texts = [
        tokenizer.decode(ids[: int(n)]) for ids, n in zip(responses, batch.batch["response_mask"].sum(1), strict=True)
    ]
    assert texts == ["y<|end|>", "n<|end|>", "yes<|end|>", "n<|end|>"]


def test_a_pair_that_the_reference_was_not_asked_for_is_not_served(tokenizer):
    dataset = pairs(tokenizer, [{"prompt": "?", "chosen": "y", "rejected": "n"}] * 3)
    dataset.set_reference([2, 0], torch.arange(4.0))
    assert dataset.batch([0, 2]).batch["ref_sequence_log_prob"].tolist() == [2.0, 3.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="log-probs of row 1 were not computed"):
        dataset.batch([0, 1])
    with pytest.raises(NonFiniteError, match="answer of row 1 the log-prob nan"):
        dataset.set_reference([0, 1], torch.tensor([0.0, 0.0, 0.0, float("nan")]))


def test_the_context_of_a_pair_does_not_tell_its_sides_apart(tokenizer):
    dataset = pairs(tokenizer, [{"prompt": [USER], "chosen": [USER, YES], "rejected": "n"}])
    (chosen, rejected) = dataset.tokens[0]
    assert chosen.prompt.tolist() == rejected.prompt.tolist()
    assert tokenizer.decode(chosen.prompt).count("user") == 1


def test_a_batch_goes_through_the_whole_data_set_in_order(tokenizer):
    dataset = demonstrations(tokenizer, [{"prompt": str(n), "completion": "a"} for n in range(5)])
    assert [batch.non_tensor_batch["index"].tolist() for batch in dataset.in_order(2)] == [[0, 1], [2, 3], [4]]


def test_sources_are_named_by_the_row_or_by_the_file(tokenizer, tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "data_source": "own"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = demonstrations(tokenizer, [str(file), "bundled:addition_answers/val"], max_length=256)
    sources = dataset.batch(range(3)).non_tensor_batch["data_source"].tolist()
    assert sources == ["mine", "own", "bundled/addition_answers"]
    assert len(dataset) == 18


def test_parquet_and_lists_hold_the_same_pairs(tokenizer, tmp_path):
    rows = [{"chosen": [USER, YES], "rejected": [USER, NO]}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    from_file, from_list = pairs(tokenizer, str(tmp_path / "pairs.parquet")), pairs(tokenizer, rows)
    assert torch.equal(from_file.batch([0]).batch["responses"], from_list.batch([0]).batch["responses"])
    assert (from_file.first_prompt(), len(from_file)) == (([USER], None), 3)


# ---------------------------------------------------------------------------------------------- what does not fit

LONG = {"prompt": "p" * 30, "chosen": "c" * 20, "rejected": "r" * 4}  # 44 + 30 tokens of prompt with the template


def lengths(dataset):
    return [(len(answer.prompt), len(answer.answer)) for answer in dataset.tokens[0]]


def test_the_whole_row_must_fit(tokenizer):
    full = pairs(tokenizer, [LONG], max_length=200)
    (prompt, chosen), (same, rejected) = lengths(full)
    assert (prompt, chosen, rejected) == (same, 21, 5)
    assert lengths(pairs(tokenizer, [LONG], max_length=prompt + chosen)) == lengths(full)
    with pytest.raises(
        DatasetError, match=rf"1 rows are longer than data.max_length={prompt + 20}, .*row 0.*truncation=drop"
    ):
        pairs(tokenizer, [LONG], max_length=prompt + 20)


def test_overlong_rows_are_dropped_and_counted_or_cut_as_configured(tokenizer):
    prompt = lengths(pairs(tokenizer, [LONG], max_length=200))[0][0]
    short = {"prompt": "?", "chosen": "y", "rejected": "n"}
    limit = prompt + 15
    dropped = pairs(tokenizer, [LONG, short], max_length=limit, truncation="drop")
    assert (len(dropped), dropped.counts.too_long, dropped.counts.truncated) == (1, 1, 0)
    left = pairs(tokenizer, [LONG], max_length=limit, truncation="left")
    assert lengths(left) == [(prompt - 6, 21), (prompt - 6, 5)]  # both keep the same prompt
    assert left.counts.truncated == 1
    right = pairs(tokenizer, [LONG], max_length=limit, truncation="right")
    assert lengths(right) == [(prompt, 15), (prompt, 5)]
    for truncation, limit in (("left", 21), ("right", prompt)):
        with pytest.raises(DatasetError, match="longer than data.max_length"):
            pairs(tokenizer, [LONG], max_length=limit, truncation=truncation)


def test_bad_rows_stop_with_file_and_row_or_are_skipped_and_counted(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    file.write_text(f"{good}\n{{\n[]\n{json.dumps({'messages': [YES]})}\n{good}\n")
    with pytest.raises(
        DatasetError, match=r"3 bad rows.*rows.jsonl line 2: is not JSON.*line 3: is a list.*answers nothing"
    ):
        demonstrations(tokenizer, str(file))
    skipped = demonstrations(tokenizer, str(file), bad_rows="skip")
    assert (skipped.counts.read, skipped.counts.bad, len(skipped)) == (5, 3, 2)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "a\ud800", "chosen": "b", "rejected": "c"}, "prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "\ud800"}]}, "rejected"),
        ({"chosen": "a b\ud800", "rejected": "a c"}, "chosen"),
        ({"chosen": "a b", "rejected": "a c\ud800"}, "rejected"),
    ],
)
def test_half_a_character_makes_a_bad_pair(tokenizer, row, key):
    with pytest.raises(DatasetError, match=f"row 0 of the list: '{key}' holds half a character"):
        pairs(tokenizer, [row])


def test_a_source_may_be_of_any_type(tokenizer):
    rows = [{"prompt": "a", "completion": "b", "data_source": source} for source in (None, 3, [1, 2])]
    assert demonstrations(tokenizer, rows).sources == ["python", "3", "[1, 2]"]


def test_no_row_to_use_is_refused(tokenizer):
    with pytest.raises(DatasetError, match="no row to use"):
        demonstrations(tokenizer, [{"question": "a"}], bad_rows="skip")


def test_only_so_many_samples_are_read(tokenizer):
    rows = [{"prompt": "a", "completion": "b"}] * 5
    assert len(demonstrations(tokenizer, rows, most=2)) == 2


# ---------------------------------------------------------------------------------------------- bundled


@pytest.mark.parametrize(("split", "sums"), [("train", 65), ("val", 16)])
def test_bundled_pairs_hold_the_right_answer_beside_wrong_ones(split, sums):
    rows = list(bundled_rows(f"addition_pairs/{split}"))
    truths = {
        row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in bundled_rows(f"addition/{split}")
    }
    assert len(rows) == 4 * sums
    for row in rows:
        truth = truths[row["prompt"][0]["content"]]
        assert row["chosen"][0]["content"] == truth
        assert int(row["rejected"][0]["content"]) in set(range(2, 19)) - {int(truth)}
    answers = list(bundled_rows(f"addition_answers/{split}"))
    assert {row["messages"][0]["content"]: row["messages"][1]["content"] for row in answers} == truths


def test_tools_of_a_row_reach_both_answers_and_the_look_at_the_template(tokenizer_with):
    tokenizer = tokenizer_with(
        "{% if tools %}{{ tools[0]['name'] }};{% endif %}{% for m in messages %}<|start|>{{ m['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    dataset = pairs(tokenizer, [{"prompt": "?", "chosen": "y", "rejected": "n", "tools": [{"name": "f"}]}])
    assert dataset.first_prompt() == ([USER], [{"name": "f"}])
    assert [tokenizer.decode(answer.prompt) for answer in dataset.tokens[0]] == ["f;<|start|>?<|end|><|start|>"] * 2
    shown = demonstrations(tokenizer, [{"messages": [USER, YES], "tools": '[{"name": "f"}]'}])
    assert shown.first_prompt() == ([USER], [{"name": "f"}])
    assert tokenizer.decode(shown.tokens[0][0].prompt) == "f;<|start|>?<|end|><|start|>"
