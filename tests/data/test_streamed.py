"""Rows on disk give the batches that rows in memory give, resume exactly, and pass over what is left out."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hrl.data import streamed as streamed_rows
from hrl.data.dataset import RLHFDataset
from hrl.data.hub import converted
from hrl.data.order import EpochOrder, Position
from hrl.data.streamed import FIRST_ROWS, StreamedRows
from hrl.data.tokenised_dataset import DatasetCounts
from hrl.errors import DatasetError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def batches(dataset, position, size, count):
    for _ in range(count):
        indices, position = dataset.draw(position, size)
        batch = dataset.batch(indices)
        yield [chat[0]["content"] for chat in batch.non_tensor_batch["raw_prompt"]], position


def test_the_batches_are_those_of_rows_in_memory(tmp_path, tokenizer, config):
    config.train_batch_size = 4
    first = write(tmp_path / "a.jsonl", [{"prompt": f"a{n}", "answer": str(n)} for n in range(11)])
    (tmp_path / "b.csv").write_text("question,answer\n" + "".join(f"b{n},{n}\n" for n in range(5)))
    sources = [
        {"path": first, "weight": 1.0},
        {"path": str(tmp_path / "b.csv"), "weight": 2.0, "prompt_key": "question"},
    ]
    held = RLHFDataset(sources, tokenizer, config)
    streamed = RLHFDataset([{**source, "streaming": True} for source in sources], tokenizer, config)
    assert streamed.is_streamed and not held.is_streamed
    assert (len(streamed), streamed.sizes) == (len(held), held.sizes) == (16, [11, 5])
    wanted = list(batches(held, Position(), 4, 10))
    assert list(batches(streamed, Position(), 4, 10)) == wanted
    # from the middle on, in a new process so to speak
    again = RLHFDataset([{**source, "streaming": True} for source in sources], tokenizer, config)
    assert again.fingerprint == streamed.fingerprint
    assert list(batches(again, wanted[4][1], 4, 5)) == wanted[5:]
    row = streamed.rows[15]
    assert row.origin == f"{tmp_path}/b.csv row 4" and row.reward_model["ground_truth"] == "4"
    assert (streamed.columns, streamed.data_sources) == (held.columns, held.data_sources)


def test_rows_that_are_left_out_are_passed_over_and_counted(tmp_path, tokenizer, config):
    config.train_batch_size, config.bad_rows, config.filter_overlong_prompts = 3, "skip", True
    rows = [{"prompt": f"p{n}"} for n in range(12)]
    rows[2]["prompt"], rows[5]["prompt"], rows[7]["prompt"] = "", "x" * 100, ""
    dataset = RLHFDataset({"path": write(tmp_path / "r.jsonl", rows), "streaming": True}, tokenizer, config)
    assert list(dataset.known) == [0, 1, 3, 4, 6, 8, 9, 10, 11]
    seen = [text for batch, _ in batches(dataset, Position(), 3, 3) for text in batch]
    assert sorted(seen) == sorted(f"p{index}" for index in dataset.known)
    assert dataset.metrics() == {"data/dropped_overlong": 1.0, "data/dropped_bad": 2.0}
    (_, position), *_ = batches(dataset, Position(), 3, 1)
    assert list(batches(dataset, position, 3, 4))[:2] == list(batches(dataset, Position(), 3, 3))[1:]


def test_a_row_that_is_read_again_is_counted_once(tmp_path, tokenizer, config, monkeypatch):
    config.train_batch_size, config.bad_rows, config.truncation = 2, "skip", "left"
    monkeypatch.setattr(streamed_rows, "_LEAST_KEPT", 4)
    monkeypatch.setattr(streamed_rows, "FIRST_ROWS", 2)
    rows = [{"prompt": "x" * 100 if n % 2 else f"p{n}"} for n in range(20)]
    rows[6]["prompt"] = ""
    dataset = RLHFDataset({"path": write(tmp_path / "r.jsonl", rows), "streaming": True}, tokenizer, config)
    for _ in range(3):
        for index in range(20):
            dataset._streamed.get([index])
    assert dataset.counts == DatasetCounts(read=20, bad=1, too_long=0, truncated=10, kept=19)


def test_nulls_that_parquet_adds_are_no_part_of_a_streamed_row(tmp_path, tokenizer, config):
    config.train_batch_size = 1
    chats = [
        [{"role": "user", "content": "a", "name": "Ann"}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "tool_calls": [{"a": 1}]}],
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": "p", "turns": chat} for chat in chats]), tmp_path / "r.parquet")
    for streaming in (False, True):
        source = {"path": str(tmp_path / "r.parquet"), "streaming": streaming}
        dataset = RLHFDataset(source, tokenizer, config)
        assert [row.columns["turns"] for row in dataset.rows] == chats


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path, tokenizer, config):
    config.train_batch_size, config.bad_rows = 1, "skip"
    text = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "r.parquet")
    dataset = RLHFDataset({"path": str(tmp_path / "r.parquet"), "streaming": True}, tokenizer, config)
    assert [dataset.rows[index].messages[0]["content"] for index in dataset.known] == ["a", "c"]
    assert "holds text that is not UTF-8" in dataset._intake.bad[0].reason
    table = converted([tmp_path / "r.parquet"])
    assert [getattr(row, "reason", row) for row in table] == [getattr(table[n], "reason", table[n]) for n in range(3)]


def test_a_date_that_python_has_none_for_is_a_bad_row_also_of_a_streamed_file(tmp_path, tokenizer, config):
    config.train_batch_size, config.bad_rows = 1, "skip"
    days = pa.array([0, 10_000_000, 1], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "created_at": days}), tmp_path / "r.parquet")
    dataset = RLHFDataset({"path": str(tmp_path / "r.parquet"), "streaming": True}, tokenizer, config)
    assert [dataset.rows[index].messages[0]["content"] for index in dataset.known] == ["a", "c"]
    (bad,) = dataset._intake.bad
    assert bad.origin.endswith("r.parquet row 1") and "in 'created_at', of the type 'date32[day]'" in bad.reason
    table = converted([tmp_path / "r.parquet"])
    assert [getattr(row, "reason", row) for row in table] == [getattr(table[n], "reason", table[n]) for n in range(3)]


def test_a_limit_takes_of_each_source_its_share(tmp_path, tokenizer, config):
    config.train_batch_size = 1
    paths = [write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}"} for n in range(30)]) for name in "ab"]
    for streaming in (False, True):
        weighted = [
            {"path": path, "weight": weight, "streaming": streaming}
            for path, weight in zip(paths, (3.0, 1.0), strict=True)
        ]
        assert RLHFDataset(weighted, tokenizer, config, 12).sizes == [9, 3]
        assert RLHFDataset(weighted, tokenizer, config, 44).sizes == [30, 11]
        plain = [{"path": path, "streaming": streaming} for path in paths]
        assert RLHFDataset(plain, tokenizer, config, 40).sizes == [30, 10]
        with pytest.raises(DatasetError, match=r"b\.jsonl has no row to use for its share.*train_max_samples"):
            RLHFDataset(weighted, tokenizer, config, 1)


def test_a_bad_row_beyond_the_first_ends_the_run_with_its_place(tmp_path, tokenizer, config):
    config.train_batch_size, config.shuffle = 10, False
    rows = [{"prompt": f"p{n}"} for n in range(FIRST_ROWS)] + [{"prompt": ""}, {"prompt": "last"}]
    dataset = RLHFDataset({"path": write(tmp_path / "r.jsonl", rows), "streaming": True}, tokenizer, config)
    dataset.draw(Position(0, FIRST_ROWS - 10), 10)
    with pytest.raises(DatasetError, match=rf"r\.jsonl row {FIRST_ROWS}: 'prompt' is an empty string"):
        dataset.draw(Position(0, FIRST_ROWS - 9), 10)


def test_an_epoch_with_too_few_usable_rows_is_an_error():
    streamed = StreamedRows(
        [list(range(6))], lambda wanted, again: [(raw, raw) if raw < 2 else None for _, _, raw in wanted]
    )
    with pytest.raises(DatasetError, match="epoch 1 has 2 rows that can be used, too few for a batch of 3"):
        streamed.draw(EpochOrder(6, 0), Position(), 3)


def test_only_so_many_rows_are_kept():
    loads: list[int] = []

    def load(wanted, again):
        loads.extend(index for _, index, _ in wanted)
        return [(raw, raw) for _, _, raw in wanted]

    streamed = StreamedRows([range(5000)], load, keep=0)
    for start in range(0, 5000, 100):
        streamed.get(range(start, start + 100))
    assert len(streamed._kept) == 1024
    streamed.get([4999, 4999])
    assert len(loads) == 5000
    streamed.get([0])
    assert len(loads) == 5001
    assert StreamedRows([range(10), range(10)], load, 13).sizes == [10, 3]


def test_columns_of_several_types_are_refused_with_the_way_out(tmp_path, tokenizer, config):
    config.train_batch_size = 2
    first, second = tmp_path / "rows" / "a.parquet", tmp_path / "rows" / "b.parquet"
    first.parent.mkdir()
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"]}), first)
    pq.write_table(pa.table({"prompt": ["b"], "answer": [[2]]}), second)
    assert len(RLHFDataset(str(first.parent), tokenizer, config)) == 2
    with pytest.raises(DatasetError, match="can't be converted to rows on disk.*Leave out streaming"):
        RLHFDataset({"path": str(first.parent), "streaming": True}, tokenizer, config)


@pytest.mark.parametrize("name", ["r.parquet", "r.jsonl.gz", "r.jsonl.zst", "r.json", "r.tsv"])
def test_every_format_gives_the_same_rows(tmp_path, tokenizer, config, name):
    config.train_batch_size = 2
    rows = [{"prompt": f"p{n}", "answer": f"0{n}"} for n in range(5)]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif name.endswith("zst"):
        with pa.output_stream(path, compression="zstd") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_text("prompt\tanswer\n" + "".join(f"{row['prompt']}\t{row['answer']}\n" for row in rows))
    dataset = RLHFDataset({"path": str(path), "streaming": True}, tokenizer, config)
    assert [row.columns for row in dataset.rows] == rows
