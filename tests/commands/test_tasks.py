"""`hrl tasks`: every built-in task with an example that scores."""

import json
import re
from itertools import islice

import pytest

from hrl import cli
from hrl.data.tasks import bundled_rows
from hrl.data.tasks.reasoning_gym import OPTIONS


@pytest.fixture(scope="module")
def everything():
    """Everything that `hrl tasks --json` says."""
    with pytest.MonkeyPatch.context() as patch:
        written = []
        patch.setattr("hrl.commands.tasks._write_json", written.append)
        assert cli.main(["tasks", "--json"]) == 0
    return {task["name"]: task for task in json.loads(json.dumps(written[0]))["tasks"]}


def test_every_task_is_listed_with_a_row_and_how_to_train_on_it(everything):
    assert {"addition", "addition_pairs", "addition_answers", "chain_sum", "gsm_symbolic"} <= set(everything)
    assert len(everything) > 100
    for task in everything.values():
        (row,) = task["rows"]
        assert row["prompt"] and len(row) >= 2
        assert task["address"] in task["command"]


def test_the_right_response_of_every_task_scores_1_and_none_scores_next_to_nothing(everything):
    for task in everything.values():
        if "answer" in task["rows"][0] and task["responses"]:
            *right, wrong = task["responses"]
            assert all(one["score"] == pytest.approx(1) for one in right), task["name"]
            assert wrong["score"] <= 0.05, task["name"]
    assert everything["addition_pairs"]["responses"] == []


def test_a_line_per_task_fits_the_width(capsys):
    assert cli.main(["tasks"]) == 0
    text = capsys.readouterr().out
    assert "  chain_sum " in text and "→" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_task_is_shown_with_options_rows_prompt_and_scores(capsys):
    assert cli.main(["tasks", "chain_sum?answer=boxed&level=1"]) == 0
    text = capsys.readouterr().out
    assert "hrl train grpo 'data.train_files=reasoning_gym:chain_sum?answer=boxed&level=1'" in text
    assert all(option in text for option in OPTIONS)
    assert "max_terms" in text and "<|im_start|>assistant" in text
    assert "1  (correct 1.0, format 1.0)" in text and "0  (correct 0.0, format 0.0)" in text


def test_what_is_shown_of_a_task_for_a_model_that_sees_can_be_run(everything, capsys):
    assert cli.main(["tasks", "shapes"]) == 0
    text = capsys.readouterr().out
    assert (
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL" in everything["shapes"]["command"] and "as the model" not in text
    )
    (example,) = re.findall(r"as in '(\S+)'", text)
    assert list(islice(bundled_rows(example.removeprefix("bundled:")), 1))


@pytest.mark.parametrize(
    "name", ["addition", "bundled:addition", "bundled:addition/val", "bundled:addition/val?answer=tags"]
)
def test_a_task_is_found_by_its_name_and_its_addresses(name, capsys):
    assert cli.main(["tasks", name, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["name"], len(said["rows"])) == ("addition", 3)
    assert said["address"] == (name if "/" in name else "bundled:addition/train")


def test_a_misspelt_name_or_option_is_told(capsys):
    assert cli.main(["tasks", "chain_sums"]) == 2
    assert "Did you mean chain_sum?" in capsys.readouterr().err
    assert cli.main(["tasks", "chain_sum?answr=tags"]) == 2
    assert "no parameter 'answr'. Did you mean answer?" in capsys.readouterr().err


def test_reward_functions_are_listed_and_shown(capsys):
    from hrl.reward.library.catalogue import CATALOGUE

    assert cli.main(["tasks", "tags"]) == 0
    text = capsys.readouterr().out
    assert 'reward: {functions: [{"name": "tags"}]}' in text and "partial" in text and "<answer>12</answer>" in text
    for name in CATALOGUE:
        assert cli.main(["tasks", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rewards"] == CATALOGUE[name].rewards
    assert cli.main(["tasks", "repetitoin"]) == 2
    assert "Did you mean repetition?" in capsys.readouterr().err
