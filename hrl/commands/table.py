"""The table of commands. The file of a command is imported only when it is called, so the table costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


class CommandModule(Protocol):
    """What the file of a command defines."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Describe the command's arguments."""

    def run(self, options: Namespace) -> int:
        """Do it, and return the exit status; an `HrlError` is shown without a traceback, with status 1 or 2."""


class Command(NamedTuple):
    """A line of the table.

    Attributes:
        name: What is typed after `hrl`; the file is `hrl/commands/<name>.py`, with `_` for `-`.
        help: What it does, in one line.
        takes_overrides: Whether it takes the arguments of a run: what its parser does not know, such as `key=value`, is
            in `options.overrides`, and `--help` is in `options.help`, for the command to answer.
    """

    name: str
    help: str
    takes_overrides: bool = False

    def load(self) -> CommandModule:
        """Return the module with the command's `add_arguments` and `run`."""
        module: CommandModule = import_module(f"{__package__}.{self.name.replace('-', '_')}")
        return module


COMMANDS: Sequence[Command] = (
    Command("train", "train a model: `train grpo`, `ppo`, `dpo`, `kto`, `sft` or `rm`, then the keys to set", True),
    Command("demo", "run the quickstart: GRPO teaches a small model to add", True),
    Command("check", "say what a run would do and everything that is wrong with it; starts nothing", True),
    Command("plan", "say what a step would take on other hardware, and the best layout; starts nothing", True),
    Command("rehearse", "run a launch line small on this machine: tiny models, real rows, a kill and a resume", True),
    Command("eval", "score a model on rows: mean@k, pass@k, maj@k, and a file with every sample"),
    Command("serve", "serve a model to programs that speak OpenAI's protocol, on this machine alone"),
    Command("export", "write a checkpoint as a folder that transformers and vLLM load, or to the hub"),
    Command("rollouts", "show samples of a run, with their rewards"),
    Command("replay", "recompute a mini-batch whose update was skipped: where do its numbers stop being finite"),
    Command("report", "write the page of a run anew, or compare several runs in one page"),
    Command("watch", "show the page of a run in a browser and follow it"),
    Command("tasks", "the built-in tasks and reward functions, each with an example and its score"),
    Command("reward", "try a reward on responses that are there already, without a model", True),
    Command("env-test", "play some episodes in an environment, and say whether it keeps to what a run relies on", True),
    Command("migrate", "turn a launch line of verl, OpenRLHF or TRL into one of hrl, with what is lost"),
    Command("completion", "completion of commands, options and keys for bash, zsh or fish"),
    Command("env", "versions, devices and a short self-test of this machine"),
)
"""All commands, in the order of the help text."""
