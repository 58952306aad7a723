import json
import re
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hrl.config.data import DataConfig
from hrl.data.chat import text_of
from hrl.data.dataset import RLHFDataset, collate_fn, dataset_class
from hrl.errors import DatasetError

OVERHEAD = len("<") + len("user\n") + len("<") + len("\n") + len("<") + len("assistant\n")  # template tokens per prompt


def test_a_prompt_is_left_padded_and_its_positions_start_at_zero(tokenizer, config, make_row):
    dataset = RLHFDataset([make_row("abc")], tokenizer, config)
    item = dataset[0]
    length = OVERHEAD + 3
    assert item["attention_mask"].tolist() == [0] * (40 - length) + [1] * length
    assert item["position_ids"].tolist() == [0] * (40 - length) + list(range(length))
    assert item["input_ids"][:-length].tolist() == [tokenizer.pad_token_id] * (40 - length)
    text = "<|start|>user\nabc<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(item["raw_prompt_ids"]) == text
    assert item["input_ids"][-length:].tolist() == item["raw_prompt_ids"]
    assert item["raw_prompt"] == [{"role": "user", "content": "abc"}]


def test_tokens_equal_the_tokenizers_own_chat_encoding(tokenizer, config, make_row):
    chat = [{"role": "system", "content": "é"}, {"role": "user", "content": "7 + 5"}]
    config.max_prompt_length = 100
    dataset = RLHFDataset([make_row(chat)], tokenizer, config)
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert dataset[0]["raw_prompt_ids"] == expected


def test_a_batch_holds_its_rows_in_the_order_asked_for(tokenizer, config, make_row):
    dataset = RLHFDataset([make_row("a" * (n + 1), extra_info={"n": n}) for n in range(5)], tokenizer, config)
    batch = dataset.batch([3, 0, 3])
    assert [info["n"] for info in batch.non_tensor_batch["extra_info"]] == [3, 0, 3]
    assert batch.non_tensor_batch["index"].tolist() == [3, 0, 3]
    assert batch.batch["attention_mask"].sum(1).tolist() == [OVERHEAD + 4, OVERHEAD + 1, OVERHEAD + 4]
    assert torch.equal(batch.batch["prompts"][0], dataset[3]["input_ids"])
    assert batch.batch["prompts"].dtype == torch.int64


def test_parquet_jsonl_and_list_give_the_same_data(tmp_path, tokenizer, config, make_row):
    rows = [make_row([{"role": "user", "content": f"q{n}"}], extra_info={"n": n}) for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    sources = [rows, str(tmp_path / "rows.parquet"), [str(tmp_path / "rows.jsonl")]]
    seen = [[RLHFDataset(source, tokenizer, config)[n] for n in range(3)] for source in sources]
    for other in seen[1:]:
        for item, same in zip(seen[0], other, strict=True):
            assert item["raw_prompt_ids"] == same["raw_prompt_ids"]
            assert (item["extra_info"], item["reward_model"]) == (same["extra_info"], same["reward_model"])


def test_several_files_are_read_one_after_the_other(tmp_path, tokenizer, config, make_row):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(make_row(name)) + "\n")
    dataset = RLHFDataset([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], tokenizer, config)
    assert [dataset[n]["raw_prompt"][0]["content"] for n in range(2)] == ["b", "a"]


BAD = {
    "no prompt": ({"prompt": None}, "'prompt' is missing or null"),
    "empty prompt": ({"prompt": ""}, "empty string"),
    "number as prompt": ({"prompt": 7}, "'prompt' is 7"),
    "no content": ({"prompt": [{"role": "user"}]}, "'content' of message 0"),
    "data source": ({"data_source": 3}, "'data_source' is 3"),
    "extra_info is text": ({"extra_info": "5"}, "'extra_info' is '5'"),
    "reward_model is text": ({"reward_model": "5"}, "'reward_model' is '5'"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_a_bad_row_is_refused_with_file_and_row(tmp_path, tokenizer, config, make_row, changes, message):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in (make_row(), make_row(**changes))))
    with pytest.raises(DatasetError) as error:
        RLHFDataset(str(file), tokenizer, config)
    assert f"{file} line 2" in str(error.value)
    assert message in str(error.value)


class Odd:
    """No JSON and no text."""


NOT_JSON = {
    "a time in extra_info": ({"extra_info": {"at": datetime(2020, 1, 1)}}, "extra_info.at is a datetime"),
    "bytes as ground truth": ({"reward_model": {"ground_truth": b"5"}}, "reward_model.ground_truth is a bytes"),
    "a number as key": ({"extra_info": {1: 2}}, "extra_info has the key 1"),
    "half a character in tools": ({"tools": [{"name": "\ud800"}]}, "'tools' holds half a character"),
    "half a character in a name in tools": ({"tools": [{"\ud800": 1}]}, "'tools' holds half a character"),
    "an object in tools": ({"tools": [{"name": Odd()}]}, "can't be rendered: Object of type Odd is not JSON"),
    "no content where one is added": (
        {"prompt": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "can't be rendered: can only concatenate str",
    ),
}
ADDS_AND_DUMPS = (
    "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.mark.parametrize("changes, message", NOT_JSON.values(), ids=NOT_JSON)
def test_a_row_from_python_that_json_could_not_hold_is_a_bad_row(tokenizer_with, config, make_row, changes, message):
    tokenizer = tokenizer_with(ADDS_AND_DUMPS)
    with pytest.raises(DatasetError, match=f"1 bad rows.*row 1 of the list: {re.escape(message)}"):
        RLHFDataset([make_row(), make_row(**changes)], tokenizer, config)
    config.bad_rows = "skip"
    assert len(RLHFDataset((row for row in (make_row(), make_row(**changes))), tokenizer, config)) == 1


PARQUET = {
    "a null prompt": ({"prompt": ["a", None], "data_source": ["s", "s"]}, "row 1: 'prompt' is missing or null"),
    "numbers as source": ({"prompt": ["a"], "data_source": [1]}, "'data_source' is 1"),
    "times": (
        {"prompt": ["a"], "data_source": ["s"], "extra_info": [{"at": datetime(2020, 1, 1)}]},
        "extra_info.at is a datetime",
    ),
    "no row": ({"prompt": pa.array([], pa.string()), "data_source": pa.array([], pa.string())}, "no row to use"),
}


@pytest.mark.parametrize("columns, message", PARQUET.values(), ids=PARQUET)
def test_parquet_columns_that_lack_something_say_so(tmp_path, tokenizer, config, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match=re.escape(message)):
        RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, config)


def test_columns_that_cannot_travel_are_named_with_why(tokenizer, config, make_row):
    rows = [
        make_row(made=datetime(2020, 1, 1), picture={"bytes": b"x", "path": None}, level=1),
        make_row(price=Decimal("1.5"), made=None),
    ]
    dataset = RLHFDataset(rows, tokenizer, config)
    assert "level" in dataset.columns and "picture" not in dataset.columns
    assert dataset.left_out == {
        "made": "made is a datetime",
        "picture": "picture.bytes is a bytes",
        "price": "price is a Decimal",
    }
    config.answer_key = "price"
    with pytest.raises(DatasetError, match=r"price is a Decimal; only numbers.*\(data\.answer_key\)"):
        RLHFDataset(rows[1:], tokenizer, config)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_chat_may_be_written_as_json(tokenizer, config, column):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (row,) = RLHFDataset([{column: json.dumps(chat)}], tokenizer, config).rows
    assert row.messages == chat
    with pytest.raises(
        DatasetError, match="is a chat written as text, but not as JSON" if column == "prompt" else None
    ):
        RLHFDataset([{column: str(chat)}], tokenizer, config)
    (row,) = RLHFDataset([{"prompt": '[{"a": 1}]'}], tokenizer, config).rows
    assert row.messages == [{"role": "user", "content": '[{"a": 1}]'}]


@pytest.mark.parametrize("prompt_key", ["prompt", "messages"])
def test_the_reply_of_a_whole_chat_is_its_answer(tokenizer, config, prompt_key):
    config.prompt_key = prompt_key
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    (row,) = RLHFDataset([{"messages": chat}], tokenizer, config).rows
    assert (row.messages, row.reward_model) == (chat[:1], {"ground_truth": "a"})


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"ground_truth": "g"}, "g"),
        ({"ground_truth": "g", "answer": "a"}, "g"),
        ({"ground_truth": None, "answer": "a"}, "a"),
        ({"ground_truth": "g", "reward_model": {"ground_truth": "r"}}, "r"),
    ],
)
def test_a_column_ground_truth_is_the_ground_truth(tokenizer, config, columns, truth):
    (row,) = RLHFDataset([{"prompt": "p", **columns}], tokenizer, config).rows
    assert row.reward_model["ground_truth"] == truth


def test_null_is_the_same_as_no_such_column(tmp_path, tokenizer, config):
    """Arrow gives every row every column, so a row that lacks one has null there."""
    columns = {"prompt": ["a", "b"], "data_source": ["s", None], "reward_model": [{"ground_truth": "1"}, None]}
    pq.write_table(pa.table(columns | {"extra_info": [None, {"a": 1}]}), tmp_path / "rows.parquet")
    first, second = RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, config).rows
    assert (first.data_source, second.data_source) == ("s", "rows")
    assert (first.extra_info, second.reward_model) == ({}, {})


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path, tokenizer, config, make_row):
    file = tmp_path / "rows.jsonl"
    good = json.dumps(make_row()).encode()
    file.write_bytes(b"\n".join([good, b'{"prompt": "\xff"}', b"{oops", b"[1]", good]))
    config.bad_rows = "skip"
    dataset = RLHFDataset(str(file), tokenizer, config)
    assert (dataset.counts.read, dataset.counts.bad, dataset.counts.kept) == (5, 3, 2)


def test_text_that_is_not_utf8_in_parquet_names_the_row(tmp_path, tokenizer, config):
    broken = pa.array([b"ok", b"\xff\xfe"], pa.binary()).view(pa.string())
    table = pa.table({"prompt": broken, "data_source": ["s", "s"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match="rows.parquet row 1: holds text that is not UTF-8"):
        RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, config)


def test_a_parquet_file_that_is_none_is_named(tmp_path, tokenizer, config):
    (tmp_path / "rows.parquet").write_text("hello")
    with pytest.raises(DatasetError, match="rows.parquet is not a readable Parquet file"):
        RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, config)


def test_overlong_prompts_are_refused_dropped_or_cut_as_configured(tokenizer, config, make_row):
    rows = [make_row("a"), make_row("b" * 100), make_row("c")]
    with pytest.raises(DatasetError, match=r"row 1 of the list \(\d+ tokens\).*data.truncation"):
        RLHFDataset(rows, tokenizer, config)

    config.filter_overlong_prompts = True
    dropped = RLHFDataset(rows, tokenizer, config)
    assert (len(dropped), dropped.counts.too_long) == (2, 1)
    config.filter_overlong_prompts = False

    config.truncation = "left"
    ids = RLHFDataset(rows, tokenizer, config)[1]["raw_prompt_ids"]
    assert (len(ids), tokenizer.decode(ids)[-10:]) == (40, "assistant\n")
    config.truncation = "right"
    cut = RLHFDataset(rows, tokenizer, config)
    assert tokenizer.decode(cut[1]["raw_prompt_ids"]).startswith("<|start|>user\nbbb")
    assert (cut.counts.truncated, cut.counts.kept) == (1, 3)
    # Having been asked whether its model sees, a data set goes on to cut: rows of a stream come later.
    assert not cut.sees and len(cut.fit(cut.encode([cut.render(cut.check(rows[1]))])[0])) == 40


def test_rows_that_are_matched_one_by_one_are_refused_if_any_was_left_out(tokenizer, config, make_row):
    config.filter_overlong_prompts, config.bad_rows = True, "skip"
    RLHFDataset([make_row("a"), make_row("c")], tokenizer, config).require_all()
    with pytest.raises(DatasetError, match=r"0 of .* bad and 1 too long.*row 1 of the list \(\d+ tokens\) is too long"):
        RLHFDataset([make_row("a"), make_row("b" * 100), make_row("c")], tokenizer, config).require_all()
    with pytest.raises(DatasetError, match=r"1 of .* bad and 0 too long.*row 0 of the list: .*prompt"):
        RLHFDataset([{"data_source": "s"}, make_row("c")], tokenizer, config).require_all()


def test_a_prompt_that_is_only_answered_needs_no_answer_and_no_mapped_column(tokenizer):
    config = DataConfig(
        answer_key="target", map={"prompt": "question"}, train_files=["rows"], train_batch_size=1, seed=1
    )
    dataset = RLHFDataset([{"question": "a", "target": "b"}], tokenizer, config)
    for row in ({"prompt": "c"}, {"question": "c"}):
        prompts = dataset.of_prompts([row])
        assert [one.messages[-1]["content"] for one in prompts.rows] == ["c"]


def test_data_with_nothing_left_says_what_became_of_it(tokenizer, config, make_row):
    config.filter_overlong_prompts = True
    with pytest.raises(DatasetError, match="2 rows read, 0 bad, 2 too long, 0 truncated, 0 kept"):
        RLHFDataset([make_row("b" * 100)] * 2, tokenizer, config)
    with pytest.raises(DatasetError, match="0 rows read"):
        RLHFDataset([], tokenizer, config)


def test_rows_may_be_any_objects_that_can_be_gone_through_once(tokenizer, config, make_row):
    rows = [make_row("a"), make_row("b")]
    dataset = RLHFDataset(iter(rows), tokenizer, config)
    assert dataset.fingerprint == RLHFDataset(rows, tokenizer, config).fingerprint
    assert [row.origin for row in dataset.rows] == ["row 0 of the list", "row 1 of the list"]


def test_max_samples_limits_the_usable_rows(tokenizer, config, make_row):
    assert len(RLHFDataset([make_row()] * 5, tokenizer, config, max_samples=2)) == 2


def test_a_missing_file_and_an_unknown_kind_are_named(tmp_path, tokenizer, config):
    with pytest.raises(DatasetError, match="does not exist"):
        RLHFDataset(str(tmp_path / "no.parquet"), tokenizer, config)
    (tmp_path / "rows.pkl").write_bytes(b"\x80")
    with pytest.raises(DatasetError, match="is none of .parquet, .jsonl, .json, .csv"):
        RLHFDataset(str(tmp_path / "rows.pkl"), tokenizer, config)


def test_a_chat_that_the_template_refuses_is_a_bad_row(tokenizer_with, config, make_row):
    strict = tokenizer_with("{{ raise_exception('no system role') }}")
    with pytest.raises(DatasetError, match="row 0 of the list: can't be rendered: no system role"):
        RLHFDataset([make_row()], strict, config)


def test_a_base_model_takes_a_string_as_it_is_and_refuses_a_chat(tokenizer_with, config, make_row):
    base = tokenizer_with(None)
    dataset = RLHFDataset([make_row("once upon")], base, config)
    assert base.decode(dataset[0]["raw_prompt_ids"]) == "once upon"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DatasetError, match="no chat template"):
        RLHFDataset([make_row(chat)], base, config)


def test_padding_is_known_from_lengths_even_when_pad_is_the_end_token(tokenizer_with, config, make_row):
    shared = tokenizer_with(pad_token="<|end|>")
    item = RLHFDataset([make_row("x")], shared, config)[0]
    assert int(item["attention_mask"].sum()) == OVERHEAD + 1
    assert np.count_nonzero(item["input_ids"].numpy() == shared.eos_token_id) > 40 - OVERHEAD - 1


CALLING = (
    "{% if tools %}{{ tools[0]['name'] }};{% endif %}{% for m in messages %}<|start|>{{ m['role'] }}:"
    "{{ m['content'] if m['content'] is not none }}"
    "{% if m['tool_calls'] is defined %}{{ m['tool_calls'][0]['arguments'] | tojson }}{% endif %}"
    "{% if m['name'] is defined %}({{ m['name'] }}){% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"city": "Bern"}}]}
RESULT = {"role": "tool", "content": "rain", "name": "weather"}


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
def test_tools_and_every_field_of_a_message_reach_the_template(tmp_path, tokenizer_with, config, make_row, kind):
    config.max_prompt_length = 200
    row = make_row([{"role": "user", "content": "Weather?"}, CALL, RESULT], tools=[{"name": "weather"}])
    path = str(tmp_path / f"rows.{kind}")
    if kind == "parquet":  # every message then has every field, null where it has none
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif kind == "jsonl":
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    dataset = RLHFDataset([row] if kind == "list" else path, tokenizer_with(CALLING), config)
    assert dataset.batch([0]).non_tensor_batch["raw_prompt"][0][1] == CALL
    assert tokenizer_with(CALLING).decode(dataset[0]["raw_prompt_ids"]) == (
        "weather;<|start|>user:Weather?<|end|>"
        '<|start|>assistant:{"city": "Bern"}<|end|><|start|>tool:rain(weather)<|end|><|start|>assistant:'
    )


def test_tools_may_be_json_and_arguments_keep_their_nulls(tmp_path, tokenizer_with, config, make_row):
    config.max_prompt_length = 200
    call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"unit": None}}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(make_row([call], tools='[{"name": "weather"}]')) + "\n")
    dataset = RLHFDataset(str(tmp_path / "rows.jsonl"), tokenizer_with(CALLING), config)
    text = tokenizer_with(CALLING).decode(dataset[0]["raw_prompt_ids"])
    assert text.startswith('weather;<|start|>assistant:{"unit": null}<|end|>')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": "{"}, "'tools' is a string, but not JSON"),
        ({"tools": ["f"]}, "'tools' is ['f'], expected a list of JSON schemas"),
        ({"prompt": [{"role": "user", "content": None}]}, "'content' of message 0 of 'prompt' is missing or null"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "one picture more than 'images' has"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "hrl trains on text, pictures and videos"),
        ({"prompt": [{"role": "user", "content": []}]}, "expected a string, a list of parts"),
        ({"prompt": [{"content": "hi"}]}, "'role' of message 0 of 'prompt' is missing or null"),
    ],
)
def test_messages_and_tools_of_a_wrong_form_are_named(tokenizer, config, make_row, changes, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        RLHFDataset([make_row(**changes)], tokenizer, config)


def test_what_a_message_says_is_its_text_its_parts_or_its_call():
    assert text_of({"role": "user", "content": "hi"}) == "hi"
    assert text_of({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}) == "ab"
    assert json.loads(text_of(CALL)) == {"tool_calls": CALL["tool_calls"]}


# ---------------------------------------------------------------------- batches


def test_tensors_are_stacked_and_lists_stay_lists():
    batch = collate_fn([{"x": torch.tensor([1, 2]), "y": [1, 2]}, {"x": torch.tensor([3, 4]), "y": [3, 4]}])
    assert batch["x"].tolist() == [[1, 2], [3, 4]]
    assert batch["y"].shape == (2,)
    assert list(batch["y"]) == [[1, 2], [3, 4]]


def test_items_with_other_keys_are_refused():
    with pytest.raises(ValueError, match=r"item 1 has other keys than item 0: \['y'\]"):
        collate_fn([{"x": 1}, {"x": 1, "y": 2}])


# ---------------------------------------------------------------------- a class of the user's own


def named(path, name):
    return SimpleNamespace(path=path, name=name)


def test_without_a_file_the_class_is_hrls_own():
    assert dataset_class(named(None, None)) is RLHFDataset


def test_a_class_is_loaded_from_its_file_with_its_neighbours_and_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_dataset.py").write_text("SUFFIX = '!'\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from hrl.data.dataset import RLHFDataset\n"
        "from neighbour_of_dataset import SUFFIX\n"
        "@dataclass\n"
        "class Row:\n"
        "    text: str = SUFFIX\n"
        "class Mine(RLHFDataset):\n"
        "    row = Row()\n"
    )
    found = dataset_class(named(str(file), "Mine"))
    assert issubclass(found, RLHFDataset) and found.row.text == "!"


def test_a_missing_file_or_class_is_told(tmp_path):
    with pytest.raises(DatasetError, match=r"data\.custom_cls\.path: .*no\.py does not exist"):
        dataset_class(named(str(tmp_path / "no.py"), "Mine"))
    file = tmp_path / "empty_dataset.py"
    file.write_text("Mine = dict\n")
    with pytest.raises(DatasetError, match="defines no subclass of .*RLHFDataset named 'Mine'"):
        dataset_class(named(str(file), "Mine"))
