"""The text of `--help`: usage, groups, the keys people set most, and examples."""

import textwrap

from hrl.config.run_kind import PPO, RunKind, config_folder
from hrl.config.section import WholeConfig, leaves

_WIDTH = 100


def run_help(program: str | None = None, kind: RunKind[WholeConfig] = PPO, options: str = "") -> str:
    """Return usage, groups, most used keys and examples.

    Args:
        program: The program in the usage line; the kind's own by default.
        kind: Kind of run.
        options: Further options of `program`, for the usage line.
    """
    program = program or kind.program
    groups = [line for group in kind.help.groups for line in _group_lines(group)]
    return "\n".join(
        [
            f"usage: {program} {options}{'[group=choice ...] ' if groups else ''}[key=value ...]",
            "",
            kind.help.summary,
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


def check_help(kind: RunKind[WholeConfig] = PPO) -> str:
    """Return the usage of `hrl check`: its own options, then those of the run."""
    own = [
        "hrl check makes the checks that a run makes before it starts: files, columns, model, reward function, run",
        "folder, packages and devices. It lists everything that is wrong, and starts and downloads nothing.",
        "",
        "  --full                    every value with its default, instead of a summary",
        "  --config-only             check the configuration alone, for a command meant for another machine",
        "  --json                    one JSON object; exit status 0, or 2 if something is wrong",
        "",
    ]
    return "\n".join([*own, run_help(kind.check, kind, "[--full] [--config-only] [--json] ")])


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
