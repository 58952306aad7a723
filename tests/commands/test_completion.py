"""The scripts complete commands, options and keys; bash's is run in bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hrl import cli
from hrl.commands.table import COMMANDS

TRY = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
_hrl_without_space hrl "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$COMP_CWORD - 1]}" 2> /dev/null
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = "import sys; from hrl.cli import main; main(['completion', 'bash']); "
    code += "sys.exit(sorted({'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr  # among others: it needs neither torch nor ray
    path = tmp_path_factory.mktemp("completion") / "hrl.bash"
    path.write_text(done.stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["hrl", "ch"], "check"),
        (["hrl", "train", "g"], "grpo"),
        (["hrl", "train", "grpo", "trainer.se"], "trainer.seed="),
        (["hrl", "train", "dpo", "data.shu"], "data.shuffle="),
        (["hrl", "check", "--conf"], "--config-only"),
        (["hrl", "eval", "model", "--engine", "v"], "vllm"),
    ],
)
def test_bash_completes(script: Path, words: list[str], offered: str) -> None:
    command = ["bash", "--norc", "-c", TRY, "bash", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [offered]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_key_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text for command in COMMANDS)
    assert "actor_rollout_ref.rollout.n=" in text and "algorithm.beta=" in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "cmd"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
