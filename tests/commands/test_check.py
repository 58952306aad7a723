"""What `hrl check` says, and its exit status."""

import json
import subprocess
import sys

import pytest

from hrl import cli

HEADINGS = [
    "Configuration", "Differs from the default", "Units", "Placement", "Arithmetic", "Summary",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_cached_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HRL_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")


def test_check_reports_and_starts_nothing(capsys):
    assert cli.main(["check", "--config-only", "--full", "recipe=ppo", "placement=pairs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in HEADINGS] == HEADINGS
    text = "\n".join(lines)
    assert "pool policy   1 process with actor, ref" in text
    assert "8 prompts × 8 samples = 64 sequences" in text
    assert "Memory of" not in text, "the model was not looked at"
    assert lines[-1] == "The configuration is valid. No file that it names was opened, and nothing was started."


@pytest.mark.parametrize("columns", [80, 120])
def test_check_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    cli.main(["check", "--config-only"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns
    cli.main(["check", "--config-only", "--full"])
    text = capsys.readouterr().out
    assert max(map(len, text[text.index("Differs") :].splitlines())) <= columns


def test_check_lists_all_problems_with_status_2(capsys):
    assert cli.main(["check", "algorithm.adv_estimatr=grpo", "trainer.total_epoch=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("2 problems in the configuration:")


def test_check_as_json(capsys):
    assert cli.main(["check", "--config-only", "--json", "trainer.seed=3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is True
    assert report["config"]["trainer"]["seed"] == 3
    assert report["differs_from_default"]["trainer.seed"] == {"value": 3, "default": 1}
    assert set(report) == {
        "valid", "config", "origins", "differs_from_default", "found", "placement", "arithmetic", "units", "memory",
        "changed", "warnings", "notes", "unchecked", "devices",
    }  # fmt: skip


def test_problems_as_json(capsys):
    assert cli.main(["check", "trainer.sed=3", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "valid": False,
        "problems": [
            {"key": "trainer.sed", "what": "is not a key of hrl.", "hint": "Did you mean trainer.seed?"},
        ],
    }


def test_check_help_explains_overrides(capsys):
    assert cli.main(["check", "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: hrl check" in text and "--config-only" in text and "--full" in text
    assert max(map(len, text.splitlines())) <= 110


def test_judging_the_configuration_alone_imports_neither_torch_nor_ray():
    code = (
        "import sys; from hrl.cli import main; main(['check', '--config-only', '--json']); "
        "sys.exit(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)) != [])"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=600, check=False)
    assert done.returncode == 0
