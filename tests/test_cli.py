"""The console script: it finds a command, imports nothing else, and turns errors into a status."""

import errno
import io
import os
import subprocess
import sys
from argparse import ArgumentParser

import pytest

from hrl import cli
from hrl.commands.table import COMMANDS
from hrl.errors import ConfigError, DatasetError, HrlError, Problem

HEAVY = ("torch", "ray", "vllm", "transformers", "hydra", "omegaconf", "pydantic", "rich", "numpy", "yaml")


def test_help_lists_every_command_with_its_line(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert all(f"{command.name} {command.help}" in text for command in COMMANDS)
    assert f"\ncommands:\n  {COMMANDS[0].name} " in out  # no empty line between


@pytest.mark.parametrize("command", ["report", "watch", "rollouts", "eval", "export", "tasks", "migrate"])
def test_what_is_not_there_is_status_2_and_named(capsys, tmp_path, command):
    missing = str(tmp_path / "nosuch")
    more = {"eval": ["rows.jsonl"], "export": [str(tmp_path / "out")]}.get(command, [])
    assert cli.main([command, missing, *more]) == 2
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "rollouts", "eval", "export"])
def test_a_folder_of_an_unknown_user_is_not_there(capsys, tmp_path, command):
    more = {"eval": ["rows.jsonl"], "export": [str(tmp_path / "out")]}.get(command, [])
    assert cli.main([command, "~nobody-has-this-name/run", *more]) == 2
    assert "there is no folder ~nobody-has-this-name/run" in capsys.readouterr().err


def test_without_a_command_the_help_is_an_error(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "commands:" in err


def test_an_unknown_command_is_refused_with_the_nearest_name(capsys):
    assert cli.main(["chek", "trainer.seed=3"]) == 2
    assert capsys.readouterr().err == "hrl has no command 'chek'. Did you mean check?\n"
    assert cli.main(["xyzzy"]) == 2
    err = capsys.readouterr().err
    assert all(command.name in err for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_file_with_arguments_and_a_line_of_help(command):
    module = command.load()
    parser = ArgumentParser()
    module.add_arguments(parser)
    assert callable(module.run)
    assert module.__doc__ and f"`hrl {command.name}" in module.__doc__
    assert command.help and not command.help.endswith(".") and len(command.help) < 100


def _loaded_by(*arguments: str) -> set[str]:
    code = f"import sys; from hrl.cli import main\ntry: main({list(arguments)!r})\nexcept SystemExit: pass\n"
    code += "sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    return set(done.stderr.split())


def test_help_imports_nothing_heavy_and_no_command():
    loaded = _loaded_by("--help")
    assert not loaded & set(HEAVY)
    assert not loaded & {f"hrl.commands.{command.name}" for command in COMMANDS}


def test_help_of_all_commands_without_overrides_imports_nothing_heavy():
    plain = [command.name for command in COMMANDS if not command.takes_overrides]
    code = "import sys; from hrl.cli import main\n"
    for name in plain:
        code += f"try: main([{name!r}, '--help'])\nexcept SystemExit as ended: assert ended.code == 0\n"
    code += f"sys.exit(sorted(set({HEAVY!r}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_console_script():
    done = subprocess.run(
        [sys.executable, "-m", "hrl.cli", "--version"], capture_output=True, text=True, timeout=600, check=True
    )
    from hrl import __version__

    assert done.stdout == f"hrl {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (HrlError("no such thing; make it"), 1),
        (ConfigError([Problem("trainer.seed", "is no number.")]), 2),
        (DatasetError("rows.jsonl is not there"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_that_explains_itself_is_shown_without_a_traceback(monkeypatch, capsys, error, status):
    from hrl.commands import env

    def fails(options):
        raise error

    monkeypatch.setattr(env, "run", fails)
    assert cli.main(["env"]) == status
    assert capsys.readouterr().err.strip() == (str(error) or "interrupted")


def test_what_the_system_refuses_is_a_line_and_what_may_be_a_bug_a_traceback(monkeypatch, capsys):
    from hrl.commands import env

    def fails(options):
        raise error

    monkeypatch.setattr(env, "run", fails)
    error = PermissionError(errno.EACCES, "Permission denied", "/theirs/config.yaml")
    assert cli.main(["env"]) == 1
    told = "/theirs/config.yaml: Permission denied; its owner can allow it, or name another place\n"
    assert capsys.readouterr().err == told
    for error in (FileNotFoundError(errno.ENOENT, "No such file", "/ours"), OSError(errno.EIO, "I/O error")):
        with pytest.raises(type(error)):
            cli.main(["env"])
    error = OSError(errno.ENOSPC, "No space left on device", "rollouts/a", None, "samples")  # as `copyfile` raises it
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err.startswith("rollouts/a → samples: No space left on device; make room there")


@pytest.mark.parametrize("command", ["report", "watch", "rollouts"])
def test_a_folder_that_may_not_be_looked_into_is_not_said_to_be_missing(monkeypatch, capsys, command):
    stat = os.stat

    def refuses(path, *arguments, **keywords):
        if str(path) == "/theirs/run":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **keywords)

    monkeypatch.setattr("os.stat", refuses)
    assert cli.main([command, "/theirs/run"]) == 1
    assert capsys.readouterr().err.startswith("/theirs/run: Permission denied; ")


def test_a_reader_that_has_seen_enough_is_no_error():
    shell = f"{sys.executable} -c 'import sys, hrl.commands.env as env, hrl.cli\n"
    shell += 'env.run = lambda options: [sys.stdout.write("x" * 80 + "\\n") for _ in range(100000)] and 0\n'
    shell += 'sys.exit(hrl.cli.main(["env"]))\' | head -1'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["--help"], ["check", "--config-only"], ["tasks", "--help"]])
def test_a_full_disk_is_a_line_and_a_failure(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hrl.cli", *words],
            stdout=full,
            stderr=-1,
            env=dict(os.environ, PYTHONUNBUFFERED=""),  # else argparse meets the error, and says nothing
            text=True,
            timeout=600,
            check=False,
        )
    told = "the output can't be written: No space left on device; make room where it goes\n"
    assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(["--help"], ""), (["--help"], "1"), (["tasks", "--help"], ""), (["check", "--config-only"], "")],
)
def test_a_closed_pipe_ends_a_command_without_a_word(words, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "hrl.cli", *words],
        stdout=writing,
        stderr=-1,
        env=dict(os.environ, PYTHONUNBUFFERED=unbuffered),
        timeout=600,
        check=False,
    )
    os.close(writing)
    assert done.returncode in (0, 1) and not done.stderr


def test_what_the_encoding_lacks_is_no_error(monkeypatch):
    from hrl.commands import env

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(env, "run", lambda options: sys.stdout.write("a/rün/report.html \udcff\n") and 0)
    assert cli.main(["env"]) == 0
    assert written.getvalue() == b"a/r\\xfcn/report.html \\udcff\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval", "model", "--temprature", "3"], "unrecognized arguments: --temprature 3. Did you mean --temperature?"),
        (["check", "--config-onyl"], "unrecognized arguments: --config-onyl. Did you mean --config-only?"),
        (["train", "--confg-name", "mine"], "unrecognized arguments: --confg-name. Did you mean --config-name?"),
        (["watch", "run", "--port", "x"], "argument --port: 'x' is no whole number"),
        (["eval"], "the following arguments are required: model\n"),
    ],
)
def test_a_misspelt_option_is_told_the_nearest_one(capsys, words, told):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_package_by_its_name_is_the_console_script():
    done = subprocess.run([sys.executable, "-m", "hrl", "--version"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.split()[0]) == (0, "hrl")
