"""The scripts complete commands, options and keys; bash's is run in bash."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr  # among others: it needs neither torch nor ray
    path = tmp_path_factory.mktemp("completion") / "hrl.bash"
    path.write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def script_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the script of a shell."""

    def write(shell: str) -> Path:
        command = [sys.executable, "-m", "hrl.cli", "completion", shell]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        path = tmp_path_factory.mktemp("completion") / f"hrl.{shell}"
        path.write_text(done.stdout)
        return path

    return write


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["hrl", "ch"], "check"),
        (["hrl", "train", "g"], "grpo"),
        (["hrl", "train", "grpo", "trainer.see"], "trainer.seed="),
        (["hrl", "train", "dpo", "data.shu"], "data.shuffle="),
        (["hrl", "check", "--conf"], "--config-only"),
        (["hrl", "eval", "model", "--engine", "v"], "vllm"),
    ],
)
def test_bash_completes(script: Path, words: list[str], offered: str) -> None:
    command = ["bash", "--norc", "-c", TRY, "bash", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split() == [offered]


WORDS = [
    ("hrl chec", "hrl check "),
    ("hrl train gr", "hrl train grpo "),
    ("hrl train grpo trainer.see", "hrl train grpo trainer.seed="),  # a later word, and no space behind it
    ("hrl check --conf", "hrl check --config-only "),
    ("hrl eval model --engine v", "hrl eval model --engine vllm "),
]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(script_of: Callable[[str], Path]) -> None:
    asked = "".join(f"complete -C '{typed}' | string split -f 1 \\t; echo END\n" for typed, _ in WORDS)
    command = ["fish", "--no-config", "-c", f"source {script_of('fish')}\n{asked}"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    # fish itself puts a space behind a word, unless it ends in `=`.
    assert told.split("\nEND\n")[:-1] == [completed.split()[-1] for _, completed in WORDS]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(script_of: Callable[[str], Path], tmp_path: Path) -> None:
    start = f"PS1='> '; autoload -U compinit; compinit -u -d {tmp_path}/dump; eval \"$(cat {script_of('zsh')})\"; "
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "dumb", "COLUMNS": "200"}
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        os.write(terminal, f"{start}print rea''dy\n".encode())
        assert "ready" in _until(terminal, "ready\r\n")
        for typed, completed in WORDS:
            os.write(terminal, f"{typed}\t".encode())
            assert completed in _until(terminal, completed)
            os.write(terminal, b"?\x15")  # one more character, then the line is taken away
            assert (" " in _until(terminal, "?").split("?")[0]) is completed.endswith(" ")
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _until(terminal: int, end: str) -> str:
    told, deadline = "", time.monotonic() + 30
    while end not in told and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            told += os.read(terminal, 4096).decode(errors="replace")
    return told


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
