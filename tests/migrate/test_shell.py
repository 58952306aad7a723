"""A script is read as bash reads it, as far as it can be without running anything."""

from __future__ import annotations

import pytest

from hrl.migrate.shell import Command, commands_of


def words_of(script: str) -> list[str]:
    return commands_of(script)[-1].words


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run a=1 \\\n    b=2 # a remark\n", ["run", "a=1", "b=2"]),
        ("x=a\nrun $x ${x}b \"$x c\" '$x' \"\\$x\"", ["run", "a", "ab", "a c", "$x", "$x"]),
        ("run ${y:-7} ${y-8} ${z:=9} $z", ["run", "7", "8", "9", "9"]),
        ("x=3; run $((x * 2 + 1)) $((1024 * (x - 1))) $((x / 0))", ["run", "7", "2048", "$((x / 0))"]),
        ("run $HOME/data \"${HOME}/x\" ${HOME}data", ["run", "$HOME/data", "$HOME/x", "${HOME}data"]),
        ("run name=run_$(date +%s)", ["run", "name=run_$(date +%s)"]),
        ('a=(x "y z")\na+=(w)\nrun "${a[@]}" ${a[@]}', ["run", "x", "y z", "w", "x", "y", "z", "w"]),
        ("a=(\n  x=1 # one\n  y=2\n)\nrun \"${a[@]}\"", ["run", "x=1", "y=2"]),
        ("x='a b'\nrun $x \"$x\"", ["run", "a", "b", "a b"]),
        ("run l=['console','wandb'] \"m=['x y']\"", ["run", "l=[console,wandb]", "m=['x y']"]),
        ("A=1 B=2 run x", ["run", "x"]),
        ("export N=4; run $N > out.log 2>&1", ["run", "4"]),
        ("run a $@ \"$@\" $1 ${2} b${3:-c}", ["run", "a", "bc"]),
        ("run $'a\\nb'", ["run", "a\nb"]),
        ("read -r -d '' args <<EOF\nmodule \\\n  --x 1\nEOF\nrun $args", ["run", "module", "--x", "1"]),
    ],
)  # fmt: skip
def test_words_are_those_of_bash(script: str, words: list[str]) -> None:
    assert words_of(script) == words


CASE = """
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "${DEVICE}" in
    gpu) n=8; [ -n "$x" ] && n=9 ;;
    npu | ascend)
        export HCCL=1
        n=16
        ;;
    *) n=0; exit 1 ;;
esac
case $n in 1?) kind=many;; *) kind=few;; esac
case $(hostname) in a) first=1;; *) first=2;; esac
run $DEVICE $n $kind $first
"""


def test_the_branch_of_a_case_that_fits_is_read_and_no_machine_has_npus() -> None:
    command = commands_of(CASE)[-1]
    assert command.words == ["run", "gpu", "8", "few", "1"] and command.exported == []
    assert commands_of("DEVICE=npu\n" + CASE)[-1] == Command(["run", "npu", "16", "many", "1"], exported=["HCCL"])


def test_what_a_command_within_a_word_reads_of_the_script_is_named() -> None:
    command = commands_of('HERE=/x\nrun a=$(dirname "$HERE/b") c=$(date +%H) d=$HOME')[-1]
    assert command.reads == ["HERE"] and commands_of("HERE=/x\nrun $HERE $(date)")[-1].reads == []


def test_a_pipe_ends_the_command() -> None:
    assert commands_of("run a=1 2>&1 | tee log\n") == [Command(["run", "a=1"]), Command(["tee", "log"])]


def test_an_option_whose_value_the_script_is_called_with_is_left_out_with_it() -> None:
    assert words_of("run --a $1 --b 2 c=$2 d=x$3 --e $@ f=") == ["run", "--b", "2", "d=x", "--e", "f="]


@pytest.mark.parametrize(
    ("script", "environment", "arguments"),
    [
        ("A=1 B=2 run x", ["A", "B"], []),
        ("env A=1 B=2 run x", ["A", "B"], []),
        ("export A=1\nB=2\nrun x", [], []),
        ('run $1 a=${2} "$@" ${3:-c} $1', [], ["$1", "$2", "$@"]),
        ("n=$1\nm=$n\necho $2\nrun x=$m", [], ["$1"]),  # by way of variables
        ("x=$1\nx=2\nrun $x", [], []),
        ("a=(x $1)\na+=(y)\nrun ${a[@]}", [], ["$1"]),
        ('if [[ ${1} != "slurm" ]]; then run x; fi', [], []),  # it decides, and is not in the line
    ],
)
def test_what_a_command_has_beside_its_words(script: str, environment: list[str], arguments: list[str]) -> None:
    command = commands_of(script)[-1]
    assert (command.environment, command.arguments) == (environment, arguments)


@pytest.mark.parametrize(
    ("script", "taken"),
    [
        ('b=vllm\nif [ "$b" = vllm ]; then\n  x=1\nelse\n  x=2\nfi\nrun $x', "1"),
        ('b=hf\nif [ "$b" = vllm ]; then x=1; else x=2; fi\nrun $x', "2"),
        ("b=hf\nif [[ $b == vllm ]]; then x=1; elif [[ $b == hf ]]; then x=3; else x=2; fi\nrun $x", "3"),
        ("n=8\nif [ $n -gt 4 ]; then x=1; fi\nrun $x", "1"),
        ('x=2\n[ -z "$UNSET" ] && x=1\nrun $x', "1"),
        ('x=2\n[ -n "$(program)" ] && x=1\nrun $x', "2"),  # what only a shell can tell changes nothing
        ('x=2\n[ "$x" = 2 ] || x=1\nrun $x', "2"),
        ("x=2\nif command -v program; then x=1; else x=3; fi\nrun $x", "1"),
        ("if [ 1 -gt 2 ]; then if [ 1 -lt 2 ]; then x=1; fi; fi\nx=${x:-0}\nrun $x", "0"),
    ],
)
def test_the_branch_that_holds_is_read(script: str, taken: str) -> None:
    assert words_of(script) == ["run", taken]


@pytest.mark.parametrize("script", ["", "# nothing", "'unclosed", 'x="', "if", "$((", "a=(", "fi; done; }"])
def test_a_broken_script_is_no_crash(script: str) -> None:
    commands_of(script)
