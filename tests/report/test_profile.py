"""The tables of a profile: files, text, line; several processes; damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrl.profiling.operators import ELEMENTWISE, PRODUCTS, Phase, Profile, Spent
from hrl.report.profile import profile_line, profile_record, profile_text, read_profiles, write_profile
from hrl.report.run_folder import DamagedFileError

G = 10**9
UPDATE = Phase(10.0, 9.0, {PRODUCTS: Spent(6.0, 3, 1800 * G, 6.0), ELEMENTWISE: Spent(2.0, 5)})
RANK = Profile({"update_actor": UPDATE, "generate_sequences": Phase(8.0, 0.0), "sleep_rollout": Phase(1e-4, 0.0)})
ENGINE = Profile({"sampling": Phase(0.0, 7.0, {PRODUCTS: Spent(7.0, 9)})})
METRICS = {"timing_s/gen": 8.5, "timing_s/step": 20.0, "reward/mean": 1.0}


def test_shares_are_of_the_time_in_operators() -> None:
    record = profile_record(3, {"actor_rollout": [RANK], "engine": [ENGINE]}, METRICS)
    assert record["driver"] == [{"phase": "generation", "seconds": 8.5}, {"phase": "step", "seconds": 20.0}]
    rank, engine = record["processes"]
    assert [(row["class"], row["share"], row["gflop_per_s"]) for row in rank["classes"]] == [
        (PRODUCTS, 0.75, 300.0),
        (ELEMENTWISE, 0.25, None),
    ]
    assert [row["phase"] for row in rank["phases"]] == ["update_actor", "generate_sequences"]  # one that did nothing
    assert rank["phases"][0]["classes"] == {PRODUCTS: 6.0, ELEMENTWISE: 2.0}
    assert engine["seconds"] == 7.0
    assert profile_line(record) == (
        "actor_rollout: matrix products 75% at 300 GFLOP/s, elementwise 25%; engine: matrix products 100%"
    )


def test_the_text_is_in_columns() -> None:
    text = profile_text(profile_record(3, {"actor_rollout": [RANK, RANK]}, METRICS))
    assert "actor_rollout (mean of 2 processes): 8.000 s in operators" in text
    assert "  class            seconds  share  calls  GFLOP/s\n" in text
    assert "  matrix products    6.000  75.0%      3      300\n" in text
    assert "  generate_sequences    8.000  0.000                –            –        –\n" in text


def test_a_process_in_which_nothing_ran_is_told() -> None:
    record = profile_record(1, {"ref": [Profile()]}, {})
    assert profile_line(record) == "ref: no operator ran"
    assert "ref: 0.000 s in operators" in profile_text(record)


def test_profiles_are_read_back_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 2):
        assert write_profile(tmp_path, profile_record(step, {"a": [RANK]}, METRICS)).name == f"step_{step}.txt"
    (tmp_path / "profile" / "step_2_a_rank_0.json.gz").touch()
    assert [record["step"] for record in read_profiles(tmp_path)] == [2, 10]
    assert read_profiles(tmp_path)[0] == profile_record(2, {"a": [RANK]}, METRICS)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, ""),
        ({"step": "x"}, r"\(step: .*integer"),
        ({"driver": None}, r"\(driver: .*list"),
        ({"processes": "x"}, r"\(processes: .*list"),
        ({"processes": [{"name": "a"}]}, r"\(processes\.0\.count: "),
        ({"driver": [{"phase": "step", "seconds": 10**400}]}, r"\(driver\.0\.seconds: "),
    ],
)
def test_a_file_that_holds_something_else_is_named_with_what_is_wrong(tmp_path: Path, changes, what: str) -> None:
    write_profile(tmp_path, profile_record(3, {"a": [RANK]}, METRICS))
    file = tmp_path / "profile" / "step_3.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes if changes else {}))
    with pytest.raises(DamagedFileError, match=r"step_3\.json is damaged: it holds no profile " + what):
        read_profiles(tmp_path)
