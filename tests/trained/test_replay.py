"""Which files `hrl replay` takes for a mini-batch of a rank, wherever it is called; what comes of it: tests/runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hrl import cli
from hrl.columns import object_column
from hrl.routing import ROUTED_EXPERTS
from hrl.trained.replay import Dump, ReplayError, _checkpoint_before, _request
from hrl.workers.engine.nonfinite import unpadded
from tests.models.tiny import make_batch

RECORD: dict[str, Any] = {
    "update": "actor",
    "step": 3,
    "mini_batch": 0,
    "rank": 0,
    "world_size": 1,
    "grad_norm": "NaN",
    "micro_batches": [{"loss": "-Infinity", "uids": ["ü"]}],
    "not_finite": {"columns": ["advantages"]},
    "is_tree": True,
    "counts": {"num_tokens": 1, "num_sequences": 1, "num_groups": 1},
    "response_width": 1,
    "asked_for": "PolicyUpdate",
    "request": {},
    "config": {"optim": {}, "grad_clip": 1.0, "total_steps": 3, "seed": 1},
    "num_threads": 1,
    "model": {},
    "fsdp": {},
    "weights_checksum": 15,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What a rank kept, in the folder of a run."""
    folder = tmp_path / "run" / "nonfinite"
    folder.mkdir(parents=True)
    columns = ("prompts", "responses", "prompt_lengths", "response_lengths", "micro_batch")
    save_file({name: torch.ones(1, dtype=torch.int64) for name in columns}, folder / "a.safetensors")
    (folder / "a.json").write_text(json.dumps(RECORD, ensure_ascii=False), encoding="utf-8")
    return folder / "a.json"


@pytest.mark.parametrize("place", ["", "..", "../.."])
def test_the_run_of_a_file_is_known_wherever_it_is_named_from(
    place: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = (file.parent / place).resolve()
    monkeypatch.chdir(here)
    dump = Dump.read(file.relative_to(here))
    assert dump.record == RECORD and _checkpoint_before(dump) is None


@pytest.mark.parametrize("name", [".", "/", "..", "no/such.json", "n\0l", "loop"])
def test_what_is_no_file_is_told(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    Path("loop").symlink_to("loop")
    assert cli.main(["replay", name]) == 2
    assert "can't be read: " in capsys.readouterr().err


@pytest.mark.parametrize("field", RECORD)
def test_a_field_that_is_missing_or_of_another_kind_is_named(field: str, file: Path) -> None:
    lacking = {name: value for name, value in RECORD.items() if name != field}
    # Files of runs that knew no trees lack `is_tree`.
    for record in (*([lacking] if field != "is_tree" else []), RECORD | {field: None}):
        file.write_text(json.dumps(record))
        with pytest.raises(ReplayError, match=f"a.json was not written by a run of this version of hrl: {field}: "):
            Dump.read(file)


def test_rows_are_packed_as_they_were(file: Path) -> None:
    asked = {
        "step": 3,
        "temperature": 1.0,
        "loss_type": "nll",
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
    }
    for is_tree in (True, False):
        file.write_text(json.dumps(RECORD | {"asked_for": "SupervisedUpdate", "request": asked, "is_tree": is_tree}))
        plan = _request([Dump.read(file)]).plan
        assert plan.is_tree is is_tree and plan.mini_batches[0].num_tokens == 1
    before_there_were_trees = {name: value for name, value in RECORD.items() if name != "is_tree"}
    file.write_text(json.dumps(before_there_were_trees | {"asked_for": "SupervisedUpdate", "request": asked}))
    assert _request([Dump.read(file)]).plan.is_tree is False


def test_a_column_that_is_missing_is_named(file: Path) -> None:
    save_file({"prompts": torch.ones(1)}, file.with_suffix(".safetensors"))
    with pytest.raises(ReplayError, match="has no column micro_batch, prompt_lengths, response_lengths, responses"):
        Dump.read(file)


def test_experts_to_replay_are_those_of_the_rows_that_ran(tmp_path: Path) -> None:
    batch, rng = make_batch(), np.random.default_rng(0)
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    routed = [rng.integers(0, 9, (length - 1, 2, 3), np.uint8) for length in lengths]
    routed[5] = np.zeros((0, 0, 0), np.uint8)  # of a response that was aborted
    batch.non_tensor_batch[ROUTED_EXPERTS] = object_column(routed)
    for ran in (((5, 2), (7,)), ((5,),)):
        columns = unpadded(batch, ran)
        save_file(columns, tmp_path / "a.safetensors")
        record = RECORD | {"response_width": 7, "micro_batches": [{"uids": ["g"] * len(rows)} for rows in ran]}
        found = Dump(tmp_path / "a.json", record, load_file(tmp_path / "a.safetensors")).batch(9)
        for row, experts in zip(
            [row for rows in ran for row in rows], found.non_tensor_batch[ROUTED_EXPERTS], strict=True
        ):
            assert len(experts) == len(routed[row]) and (not len(experts) or np.array_equal(experts, routed[row]))
        assert ROUTED_EXPERTS not in found.batch.keys()
