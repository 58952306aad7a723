"""The text of `--help`: usage, groups, the keys people set most, and examples."""

import textwrap
from collections.abc import Sequence

from hrl.config.run_kind import KINDS, KTO_QUICKSTART, PPO, RunKind, config_folder
from hrl.config.section import WholeConfig, leaves

_WIDTH = 100
_BLANK = "\N{NO-BREAK SPACE}"


def run_help(
    program: str | None = None, kind: RunKind[WholeConfig] = PPO, options: str = "", quickstart: str | None = None
) -> str:
    """Return usage, groups, most used keys and examples.

    Args:
        program: The program in the usage line; the kind's own by default.
        kind: Kind of run.
        options: Further options of `program`, for the usage line.
        quickstart: What the run is without arguments, in words; the kind's own by default.
    """
    program = program or kind.program
    groups = [line for group in kind.help.groups for line in _group_lines(group)]
    arguments = ["[group=choice ...]"] * bool(groups) + ["[key=value ...]"]
    words = [*program.split(), *options.split(), *(argument.replace(" ", _BLANK) for argument in arguments)]
    usage = textwrap.wrap(" ".join(["usage:", *words]), _WIDTH, subsequent_indent=" " * len("usage: "))
    return "\n".join(
        [
            *(line.replace(_BLANK, " ") for line in usage),
            "",
            f"Without arguments the run is the quickstart: {quickstart or kind.help.quickstart}",
            "With a model, rows or a YAML file of your own, what you leave out has its default instead of the",
            f"quickstart's value; quickstart={kind.name} asks for these values there too.",
            "",
            *(["groups:", *groups, ""] if groups else []),
            "options:",
            f"  --config-path, -cp DIR    folder of your own YAML file (its defaults list may name {kind.config_name})",
            f"  --config-name, -cn NAME   its name; {kind.config_name} unless given",
            "  --config-dir, -cd DIR     one more folder to look for groups in",
            "  --cfg, -c                 print the resolved configuration and stop",
            "  --help, -h                this text",
            "",
            f"most used keys (all of them: {kind.help.page}):",
            *(line for key in kind.help.most_used for line in _key_lines(key, kind)),
            "",
            "examples:",
            *(f"  {program} {example}" for example in kind.help.examples),
            f"  {kind.check} {kind.help.check}    what a run would do, without starting it",
        ]
    )


def train_help(kind: str, words: Sequence[str]) -> str:
    """Return the usage of `hrl train`.

    Args:
        kind: Name of the kind of run.
        words: By which it can be named: one that was, or all.
    """
    return _named_help("hrl train", kind, words)


def check_help(kind: str, words: Sequence[str]) -> str:
    """Return the usage of `hrl check`: its own options, then those of the run; see `train_help`."""
    own = [
        "hrl check makes the checks that a run makes before it starts: files, columns, model, reward function, run",
        "folder, packages and devices. It lists everything that is wrong, and starts and downloads nothing.",
        "",
        "  --full                    every value with its default, instead of a summary",
        "  --config-only             check the configuration alone, for a command meant for another machine",
        "  --json                    one JSON object; exit status 0, or 2 if something is wrong",
        "",
    ]
    return "\n".join([*own, _named_help("hrl check", kind, words, "[--full] [--config-only] [--json] ")])


def _named_help(command: str, kind: str, words: Sequence[str], options: str = "") -> str:
    named = [*words] if len(words) == 1 else []
    options = options if named else f"[{'|'.join(words)}] {options}"
    quickstart = KTO_QUICKSTART if named == ["kto"] else None
    return run_help(" ".join([command, *named]), KINDS[kind], options, quickstart)


def _group_lines(group: str) -> list[str]:
    indent = 14
    choices = textwrap.wrap(", ".join(_choices(group)), _WIDTH - indent, break_on_hyphens=False)
    return [f"  {group + '=':<12}{choices[0]}", *(" " * indent + line for line in choices[1:])]


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def _key_lines(key: str, kind: RunKind[WholeConfig]) -> list[str]:
    leaf, room = leaves(kind.schema)[key], _WIDTH - 6
    text = leaf.help.split(". ")[0].split("; ")[0].rstrip(".")
    text += f": {', '.join(leaf.names)}" if leaf.names else ""
    text = text if len(text) <= room else text[: room - 1].rstrip() + "…"
    return [f"  {key}", f"      {text}"]
