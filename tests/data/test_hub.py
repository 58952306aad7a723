"""Data sets of the hub, with local folders in their place: they are read by name, and what is missing is explained."""

from __future__ import annotations

import json

import pytest

import hrl.data.hub
from hrl.data.dataset import PromptRow, check_prompt
from hrl.data.sources import read_rows
from hrl.errors import DatasetError, UnreachableError

datasets = pytest.importorskip("datasets")

README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train.jsonl
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with `openai/gsm8k`, as it lies there; the package's own loader reads it from a folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "hub" / "openai" / "gsm8k"
    for name, numbers in (("main/train", range(3)), ("main/test", range(3, 5)), ("socratic/train", range(1))):
        file = repository / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "".join(
                json.dumps({"question": f"{n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}) + "\n"
                for n in numbers
            )
        )
    (repository / "README.md").write_text(README)
    for name in ("load_dataset", "get_dataset_split_names"):
        own = getattr(datasets, name)
        monkeypatch.setattr(datasets, name, lambda path, *a, own=own, **k: own(str(tmp_path / "hub" / path), *a, **k))
    monkeypatch.setattr(hrl.data.hub.socket, "getaddrinfo", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prompts(*sources) -> list[PromptRow]:
    rows = list(read_rows(sources, lambda raw: check_prompt(raw, "question")))
    assert all(isinstance(row, PromptRow) for row in rows)
    return rows


def test_gsm8k_is_read_and_scored_as_it_lies_there(hub):
    from hrl.reward.score import compute_score

    rows = prompts("openai/gsm8k:main:train")
    assert [row.messages[0]["content"] for row in rows] == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert rows[0].origin == "openai/gsm8k:main:train row 0"
    row = rows[2]
    assert row.data_source == "openai/gsm8k"
    assert compute_score(row.data_source, "so #### 3", row.reward_model["ground_truth"]) == 1.0
    assert compute_score(row.data_source, "so #### 4", row.reward_model["ground_truth"]) == 0.0


def test_a_split_may_be_a_part_and_is_train_where_none_is_named(hub):
    assert len(prompts("openai/gsm8k:main:train[:2]")) == 2
    assert len(prompts("openai/gsm8k:main")) == 3
    assert len(prompts("openai/gsm8k:socratic")) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("openai/gsm8k", "it has several configurations, name one: main, socratic"),
        ("openai/gsm8k:mian:train", "it has no configuration 'mian'; it has main, socratic. Did you mean main?"),
        ("openai/gsm8k:main:trian", "it has no split 'trian'; it has train, test"),
    ],
)
def test_what_the_data_set_has_instead_is_named(hub, source, message):
    with pytest.raises(DatasetError) as caught:
        prompts(source)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."),
            "data set a/b is not there: neither a file or folder a/b, nor a data set of the hub that you can read",
        ),
        (
            datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub. You must be ..."),
            "data set a/b is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN",
        ),
        (RuntimeError("Dataset scripts are no longer supported, but found b.py"), "made by a script, which is not run"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(hub, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DatasetError) as caught:
        prompts("a/b::train")
    assert message in str(caught.value)


def test_a_hub_that_gives_no_answer_is_no_mistake_of_the_data_set(hub, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UnreachableError, match=r"can't be reached \(Couldn't reach 'a/b' on the Hub\), and is not in"):
        prompts("a/b::train")


def test_without_a_network_only_the_cache_is_asked(tmp_path, monkeypatch):
    def unknown(*_):
        raise hrl.data.hub.socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(hrl.data.hub.socket, "getaddrinfo", unknown)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreachableError, match="can't be reached .*OfflineMode.* is not in the cache of this machine"):
        prompts("nobody/nothing::train")
    assert datasets.config.HF_HUB_OFFLINE is False


def test_saved_folders_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_list([{"question": f"{n}?", "answer": str(n)} for n in range(4)])
    rows.save_to_disk("one")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk("both")
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk("neither")
    assert len(prompts("one")) == len(prompts("both")) == 4
    assert len(prompts("both::test")) == 1
    assert prompts("both::test")[0].data_source == "both"
    with pytest.raises(DatasetError, match="was saved as one split; leave out the split 'test'"):
        prompts("one::test")
    with pytest.raises(DatasetError, match="has no split 'tset'; it has train, test. Did you mean test"):
        prompts("both::tset")
    with pytest.raises(DatasetError, match="has no split 'train'; name one of a, b"):
        prompts("neither")


def test_pictures_stay_behind_undecoded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features = datasets.Features({"question": datasets.Value("string"), "picture": datasets.Image()})
    rows = datasets.Dataset.from_dict({"question": ["a"], "picture": [{"bytes": b"no png", "path": None}]}, features)
    rows.save_to_disk("pictures")
    (row,) = prompts("pictures")
    assert row.columns == {"question": "a"}


def test_pictures_in_lists_and_fields_are_not_decoded_either_and_the_callers_rows_stay_as_they_are():
    stored = {"bytes": b"no png", "path": None}
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "beside": {"picture": datasets.Image(), "n": datasets.Value("int64")},
        }
    )
    rows = datasets.Dataset.from_dict({"images": [[stored, stored]], "beside": [{"picture": stored, "n": 1}]}, features)
    (row,) = hrl.data.hub.undecoded(rows)
    assert row == {"images": [stored, stored], "beside": {"picture": stored, "n": 1}}
    assert rows.features == features
    (row,) = hrl.data.hub.undecoded(rows.to_iterable_dataset())
    assert row["images"] == [stored, stored]
