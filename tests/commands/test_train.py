"""`hrl train` and `hrl demo` are the trainers' own commands."""

import pytest

from hrl import cli
from hrl.trainer import entry


@pytest.fixture
def started(monkeypatch):
    """What was handed on: kind and arguments of each run."""
    seen = []
    monkeypatch.setattr(entry, "train", lambda kind, argv: seen.append((kind, list(argv))) or 0)
    return seen


@pytest.mark.parametrize(
    ("words", "kind", "arguments"),
    [
        (["trainer.seed=3"], "ppo", ["trainer.seed=3"]),
        (["grpo", "trainer.seed=3"], "ppo", ["recipe=grpo", "trainer.seed=3"]),
        (["ppo"], "ppo", ["recipe=ppo"]),
        (["grpo", "recipe=dapo"], "ppo", ["recipe=dapo"]),
        (["dpo", "algorithm.beta=0.2"], "dpo", ["algorithm.beta=0.2"]),
        (["kto"], "dpo", ["algorithm.loss_type=kto", "trainer.experiment_name=kto"]),
        (
            ["kto", "algorithm.loss_type=apo_zero_unpaired", "trainer.experiment_name=mine"],
            "dpo",
            ["algorithm.loss_type=apo_zero_unpaired", "trainer.experiment_name=mine"],
        ),
        (["sft", "--cfg"], "sft", ["--cfg"]),
        (["rm", "--cfg"], "rm", ["--cfg"]),
        (["--config-name", "mine", "trainer.seed=3"], "ppo", ["--config-name", "mine", "trainer.seed=3"]),
        (["grpo", "--config-name", "mine"], "ppo", ["recipe=grpo", "--config-name", "mine"]),
        (["python", "-m", "hrl.trainer.main_dpo", "trainer.seed=3"], "dpo", ["trainer.seed=3"]),
        (["python3", "-u", "-m", "verl.trainer.main_ppo", "trainer.seed=3"], "ppo", ["trainer.seed=3"]),
        (["hrl", "train", "grpo", "trainer.seed=3"], "ppo", ["recipe=grpo", "trainer.seed=3"]),
    ],
)
def test_the_first_word_or_the_program_names_the_algorithm_and_the_rest_is_the_runs(started, words, kind, arguments):
    assert cli.main(["train", *words]) == 0
    assert started == [(kind, arguments)]


def test_the_status_of_a_run_is_the_commands(monkeypatch):
    monkeypatch.setattr(entry, "train", lambda kind, argv: 3)
    assert cli.main(["train"]) == 3


def test_check_reads_the_first_word_as_train_does(capsys):
    assert cli.main(["check", "grpo", "--config-only", "--json"]) == 0
    assert '"experiment_name": "grpo"' in capsys.readouterr().out


def test_demo_is_a_run_with_the_same_arguments(monkeypatch):
    from hrl.trainer import main_ppo

    seen = []
    monkeypatch.setattr(main_ppo, "main", lambda argv: seen.append(argv) or 0)
    assert cli.main(["demo", "trainer.seed=3"]) == 0
    assert seen == [["trainer.seed=3"]]


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["train", "--help"], "usage: hrl train [ppo|grpo|dpo|kto|sft|rm] [group=choice ...] [key=value ...]"),
        (["train", "grpo", "-h"], "usage: hrl train grpo [group=choice ...] [key=value ...]"),
        (["train", "sft", "trainer.seed=3", "--help"], "usage: hrl train sft [key=value ...]"),
        (["demo", "--help"], "usage: hrl demo [group=choice ...] [key=value ...]"),
    ],
)
def test_help_names_the_command_and_not_a_module(capsys, words, usage):
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == usage
    assert "python -m" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "-h"], "hrl check [ppo|grpo|dpo|kto|sft|rm] [--full] [--config-only] [--json] [group=choice ...]\n"),
        (["check", "kto", "-h"], "usage: hrl check kto [--full] [--config-only] [--json] [key=value ...]"),
        (["train", "kto", "-h"], "the quickstart: KTO on sums that are labelled right or wrong."),
        (["plan", "--help"], "LINE [LINE ...]"),
        (["rehearse", "--help"], "LINE [LINE ...]"),
    ],
)
def test_help_says_what_a_command_takes(capsys, words, said):
    assert cli.main(words) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_misspelt_algorithm_is_told_the_nearest_one(capsys, command):
    assert cli.main([command, "gpro", "trainer.seed=3"]) == 2
    assert "gpro is no algorithm. Did you mean grpo?" in capsys.readouterr().err
