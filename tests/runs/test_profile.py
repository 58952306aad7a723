"""A whole run that profiles one of its steps: traces, tables, report, console; and a run that profiles none."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.config.compose import compose_kind
from hrl.config.run_kind import OFFLINE_KINDS
from hrl.profiling import recorder, spans
from hrl.profiling.operators import CLASSES
from hrl.report.run_folder import read_jsonl
from tests.runs.in_process import in_process, run_configured, run_in_process
from tests.runs.runner import Runner

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def profiled(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps whose second one is profiled, and that does not reach step 7."""
    folder = tmp_path_factory.mktemp("runs") / "profiled"
    with in_process(reports=True):
        arguments = runner.arguments(folder, "trainer.total_training_steps=2", "trainer.profile=[2,7]")
        run_in_process(*arguments, "actor_rollout_ref.actor.use_kl_loss=true", "trainer.logger=console-json")
    return folder


@pytest.fixture(scope="module")
def record(profiled: Path) -> dict[str, Any]:
    return json.loads((profiled / "profile" / "step_2.json").read_text())


def test_the_trace_of_a_rank_has_the_phases_and_what_is_inside_them(profiled: Path) -> None:
    (file,) = (profiled / "profile").glob("*.json.gz")
    assert file.name == "step_2_actor_rollout+ref_rank_0.json.gz"
    events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    spans_of = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    phases = {"generate_sequences", "compute_ref_log_prob", "update_actor", "sync_weights"}
    assert {name.removeprefix(spans.PHASE) for name in spans_of if name.startswith(spans.PHASE)} >= phases
    begin, end = spans_of["phase: update_actor"]
    for inside in ("forward", "backward", spans.OPTIMIZER):
        assert begin <= spans_of[inside][0] < spans_of[inside][1] <= end
    assert spans_of["forward"][1] <= spans_of["backward"][0] < spans_of[spans.OPTIMIZER][0]
    assert any(e["name"] == "aten::mm" and begin <= e["ts"] <= end for e in events)


def test_the_tables_shares_are_whole_and_its_phases_are_those_of_the_step(record: dict[str, Any]) -> None:
    (process,) = record["processes"]
    assert sum(row["share"] for row in process["classes"]) == pytest.approx(1)
    assert sum(row["seconds"] for row in process["classes"]) == pytest.approx(process["seconds"])
    by_phase = sum(sum(row["classes"].values()) for row in process["phases"])
    assert by_phase == pytest.approx(process["seconds"])
    kinds = [row["class"] for row in process["classes"]]
    assert kinds == [kind for kind in CLASSES if kind in kinds]
    assert {"matrix products", "attention", "copies and casts", "elementwise", "optimizer"} <= set(kinds)
    assert process["classes"][0]["gflop_per_s"] > 0
    driver = {row["phase"]: row["seconds"] for row in record["driver"]}
    rank = {row["phase"]: row for row in process["phases"]}
    for title, method in (("policy update", "update_actor"), ("generation", "generate_sequences")):
        assert 0 < rank[method]["busy"] <= rank[method]["seconds"] <= driver[title] <= driver["step"]
    assert "optimizer" in rank["update_actor"]["classes"]
    assert "optimizer" not in rank["generate_sequences"]["classes"]


def test_report_and_text_show_the_table(profiled: Path, record: dict[str, Any]) -> None:
    report = (profiled / "report.html").read_text()
    assert "Profile of step 2" in report
    text = (profiled / "profile" / "step_2.txt").read_text()
    (process,) = record["processes"]
    for row in process["classes"]:
        assert row["class"] in report
        assert re.search(rf"^  {row['class']} +{row['seconds']:,.3f} +{row['share']:.1%} ", text, re.M)


def test_only_the_profiled_step_is_and_the_others_pay_nothing(profiled: Path) -> None:
    *_, first, second = read_jsonl(profiled / "metrics.jsonl")
    assert "timing_s/profile" in second and "timing_s/profile" not in first
    assert recorder._running is None
    assert spans.span("a") is spans.span("b")  # one object that does nothing


def test_a_run_that_learns_from_a_data_set_is_profiled_too(runner: Runner, tmp_path: Path) -> None:
    arguments = [
        "quickstart=sft",
        f"model.path={runner.model}",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.device=cpu",
        "data.train_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.profile=1",
    ]
    with in_process():
        run_configured("sft", compose_kind(OFFLINE_KINDS["sft"], arguments))
    (process,) = json.loads((tmp_path / "profile" / "step_1.json").read_text())["processes"]
    assert process["name"] == "actor"
    assert {"matrix products", "optimizer"} <= {row["class"] for row in process["classes"]}
    assert [row["phase"] for row in process["phases"] if row["busy"] > 0.01] == ["update_actor"]


def test_a_step_that_the_run_does_not_reach_is_told(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", None)  # nothing asks for it
    with in_process():
        run_in_process(*runner.arguments(tmp_path, "trainer.total_training_steps=1", "trainer.profile=[3,2]"))
    told = " ".join(capsys.readouterr().out.split())
    assert "trainer.profile: nothing is profiled in step 2, 3; this run makes the steps 1 to 1" in told
    assert not (tmp_path / "profile").exists()
