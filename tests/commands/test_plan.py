"""What `hrl plan` says, and its exit status."""

import json

import pytest

from hrl import cli
from hrl.plan import hardware
from tests.plan.recorded import TWO_CORES


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(hardware, "this_machine", lambda: TWO_CORES)
    monkeypatch.setenv("COLUMNS", "120")


def test_the_bare_command_plans_the_quickstart_here(capsys):
    assert cli.main(["plan", "--prompt-tokens", "45", "--response-tokens", "22"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "8 prompts × 8 samples on 1 process of this machine (products 445 GFLOP/s, copies 35.0 GB/s)\n"
    )
    assert "As given: 9." in text
    assert "  bottleneck: policy's update (64% of the step), mostly products\n" in text
    assert "assumed" not in text
    assert "hrl has not run on a GPU" not in text


def test_a_plan_for_gpus_has_a_line_to_paste(capsys):
    line = "hrl train grpo quickstart=ppo data.train_batch_size=256"
    assert cli.main(["plan", *line.split(), "--gpus", "8", "--gpu", "a100"]) == 0
    text = capsys.readouterr().out
    assert "on 8 × a100" in text
    assert f"  {line} trainer.nnodes=1 trainer.n_gpus_per_node=8" in text
    assert "hrl has not run on a GPU" in text


def test_what_is_assumed_is_said_and_lines_are_not_broken(capsys):
    assert cli.main(["plan", "grpo", "data.max_response_length=32", "--gpus", "8", "--prompt-tokens", "40"]) == 0
    text = capsys.readouterr().out
    assert "prompts of 40 tokens, at most 64; responses of 16 tokens, at most 32 (means assumed, half" in text
    assert "(means assumed, half of the most: --response-tokens)" in text
    assert "weight sync           3.16 s" in text
    assert "of 79.1 GiB, in the phase" in text
    assert sum(line.startswith("  hrl train grpo ") for line in text.splitlines()) == 1


def test_a_plan_as_json(capsys):
    assert cli.main(["plan", "--json", "--gpus", "8"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["hardware"], said["devices"]) == ("h100", 8)
    assert said["given"]["seconds"] == pytest.approx(sum(p["seconds"] for p in said["given"]["phases"].values()))


@pytest.mark.parametrize("words", [["dpo"], ["--gpu", "h10"], ["trainer.sed=3"]])
def test_what_cannot_be_planned_is_an_error_with_status_2(words, capsys):
    assert cli.main(["plan", *words]) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--response-tokens", "-3"], ["--teaching", "2"]])
def test_numbers_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", *words])
    assert words[0] in capsys.readouterr().err


def test_help_names_the_hardware(capsys):
    assert cli.main(["plan", "--help"]) == 0
    assert "b200" in capsys.readouterr().out
