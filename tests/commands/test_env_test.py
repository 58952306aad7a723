"""`hrl env-test`: a verdict, an exit status, and what would be trained, before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrl import cli
from hrl.environments.registry import ENVIRONMENTS
from tests.models.tiny_pictures import save_vl, tokenizer
from tests.preflight.small_run import save_model

TRIED = Path(__file__).parents[1] / "episodes" / "tried.py"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_a_good_environment_is_shown_with_its_masks_and_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Guess.", "hint": "From the row."}\n')
    keys = [f"data.train_files={rows}", "data.train_batch_size=1", "data.max_response_length=200"]
    assert cli.main(["env-test", f"{TRIED}:Good", "--say", "7", "--episodes", "2", *keys]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "user Guess. From the row." in lines and "assistant 7 +0.5" in lines
    assert "policy 2 tokens 7<|im_end|>" in lines and any(line.startswith("environment 1") for line in lines)
    assert "✓ repeats the same seed and actions give the same again" in " ".join(lines)
    assert lines[-1] == f"Good in {TRIED} fits: a run can be trained in it"
    assert out.count("episode 2") >= 1 and "\x1b" not in out


def test_one_that_does_not_fit_is_status_1_and_programs_get_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env-test", f"{TRIED}:Unseeded", "--json", "--episodes", "2"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in found["checks"] if check["is_right"] is False] == ["repeats"]
    assert not found["fits"]
    assert found["episodes"][0]["turns"][0]["tokens"] == 2


def test_a_model_of_ones_own_is_tried_with_the_rows_of_hrl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "policy")
    keys = ["data.max_prompt_length=200", "data.max_response_length=200", "--episodes", "1"]
    assert cli.main(["env-test", f"{TRIED}:Good", "--model", str(tmp_path / "policy"), *keys]) == 0
    facts = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rows", "bundled:addition/train"] in facts


def test_what_fails_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env-test", f"{TRIED}:Reads", "--episodes", "2"]) == 1
    out = capsys.readouterr().out
    assert out.count("NoColumnError") == 1 and "data.train_files" in out
    assert "masks" not in out and "as tokens" not in out


def test_a_typo_is_found_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env-test", f"{TRIED}:Goood", "--model", "/there/is/no/such/model"]) == 2
    assert "has no class or function 'Goood'" in capsys.readouterr().err


def test_one_that_is_not_there_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_env.py").write_text("import hrl\n\n\nclass Game(hrl.SingleTurn):\n    pass\n")
    assert cli.main(["env-test", f"{tmp_path}/my_env.py:Gane"]) == 2
    assert "my_env.py has no class or function 'Gane'; it has: Game\n" in capsys.readouterr().err
    assert cli.main(["env-test", "toolz"]) == 2
    assert "there is no environment 'toolz'" in capsys.readouterr().err
    assert cli.main(["env-test"]) == 2
    assert "my_env.py:Class" in capsys.readouterr().err


def test_the_list_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env-test", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ENVIRONMENTS)
    assert cli.main(["env-test", "--list", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == list(ENVIRONMENTS)


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env-test", "--help"]) == 0
    assert "--engine {scripted,hf,vllm}" in capsys.readouterr().out


@pytest.mark.engine
def test_a_real_engine_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["data.max_response_length=60", "environment.max_turn_tokens=8"]
    assert cli.main(["env-test", f"{TRIED}:Good", "--engine", "hf", "--episodes", "2", "--json", *keys]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and all(episode["policy_tokens"] >= 2 for episode in found["episodes"])


SEES = """
import hrl

class Twice(hrl.Environment):
    def reset(self, row):
        self.turns = 0
        return row["prompt"]

    def step(self, action):
        self.turns += 1
        return hrl.StepResult(observation="Look again.", reward=1.0, done=self.turns == 2)
"""


@pytest.mark.parametrize("engine", ["scripted", "hf"])
def test_pictures_of_the_rows_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    save_vl(tmp_path / "policy")
    (tmp_path / "twice.py").write_text(SEES)
    keys = ["data.train_files=bundled:shapes/train?size=2&side=64", "data.max_response_length=100"]
    keys += ["environment.max_turn_tokens=4", f"actor_rollout_ref.model.path={tmp_path}/policy"]
    asked = ["env-test", f"{tmp_path}/twice.py:Twice", "--json", "--episodes", "2", "--engine", engine, *keys]
    assert cli.main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and [episode["num_turns"] for episode in found["episodes"]] == [2, 2]
    for episode in found["episodes"]:
        assert episode["question"].startswith("<image>How many") and episode["prompt"].count("<|image_pad|>") == 1
        # A picture of 64 × 64 pixels takes two by two tokens, and people read one.
        prompt = episode["branches"][0][0]
        assert prompt["tokens"] == len(tokenizer()(prompt["text"])["input_ids"]) + 3
