"""The console script `hrl`: finds the command in the table, reads its arguments, runs it.

Nothing heavy is imported here, nor any command but the one that is called.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import NoReturn

from hrl.commands.table import COMMANDS, Command
from hrl.errors import HrlError, RefusedError, refusal_of_system
from hrl.masking import begin_masking, masked_text
from hrl.processes.terminal import write_any_text

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_OF_A_RUN = ("--config-path", "--config-name", "--config-dir", "--cfg", "--help")
"""Options that a run itself reads."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; the command line's if None.

    Returns:
        The exit status: 0 for success, 1 for a failure that explains itself, 2 for what can't work or is not there, 130
        after Ctrl-C; that of a run for `train` and `demo`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    write_any_text()
    try:
        try:
            status = _status_of(arguments)
        except SystemExit:  # a command's help
            _flush()
            raise
        _flush()
        return status
    except BrokenPipeError:  # `hrl rollouts RUN | head`: the reader has seen enough
        _write_no_more()
        return 0
    except OSError as error:
        told = refusal_of_system(error)
        if told:
            sys.stderr.write(masked_text(f"{told}\n"))
            return EXIT_FAILURE
        from hrl.report.run_folder import is_full

        if error.filename is not None or not is_full(error):
            raise
        _write_no_more()
        sys.stderr.write(f"the output can't be written: {error.strerror}; make room where it goes\n")
        return EXIT_FAILURE


def _status_of(arguments: Sequence[str]) -> int:
    commands = {command.name: command for command in COMMANDS}
    if not arguments or arguments[0] not in commands:
        return _without_command(arguments, commands)
    command = commands[arguments[0]]
    options = read_arguments(command, arguments[1:])
    begin_masking(arguments)
    try:
        return command.load().run(options)
    except HrlError as error:
        sys.stderr.write(masked_text(f"{error}\n"))
        return EXIT_USAGE if isinstance(error, RefusedError) else EXIT_FAILURE
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED


def _flush() -> None:
    """Write out what standard output holds: when the process ends, nobody could tell of an error."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _write_no_more() -> None:
    """Have what standard output still holds go nowhere, so that it is no error when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_arguments(command: Command, arguments: Sequence[str]) -> Namespace:
    """Return the options of a command; what is none of them ends the program with status 2."""
    module = command.load()
    parser = _Parser(
        prog=f"hrl {command.name}",
        description=module.__doc__ if command.takes_overrides else f"{command.help[0].upper()}{command.help[1:]}.",
        add_help=not command.takes_overrides,
        allow_abbrev=not command.takes_overrides,
    )
    module.add_arguments(parser)
    if not command.takes_overrides:
        return parser.parse_intermixed_args(arguments)  # options may stand between words
    parser.add_argument("--help", "-h", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    parser.refuse_misspelt(overrides)
    options.overrides = overrides
    return options


class _Parser(ArgumentParser):
    """Names the option that was probably meant by an unknown one."""

    def error(self, message: str) -> NoReturn:
        what, found, words = message.partition("unrecognized arguments: ")
        if found and not what:
            message = f"{message}. {self._hint(words.split()[0])}"
        super().error(message)

    def refuse_misspelt(self, words: Sequence[str]) -> None:
        """End with status 2 if a word among those that the run is to read looks like an option of the command."""
        for word in words:
            if word.startswith("--") and (hint := self._hint(word)):
                super().error(f"unrecognized arguments: {word}. {hint}")

    def _hint(self, word: str) -> str:
        from hrl.nearest import did_you_mean

        name = word.partition("=")[0]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        return "" if name in _OF_A_RUN else did_you_mean(name, [*known, *_OF_A_RUN])


def _without_command(arguments: Sequence[str], commands: dict[str, Command]) -> int:
    """Answer a command line that names no command, or none that there is."""
    parser = ArgumentParser(
        prog="hrl",
        usage="hrl COMMAND ...",
        description="Reinforcement learning for language models.",
        epilog="hrl COMMAND --help explains a command. hrl demo is a good first one.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="the version of hrl")
    listed = parser.add_argument_group("commands")  # the parser only writes the help: nothing is read with it
    for command in commands.values():
        listed.add_argument(command.name, help=command.help)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        (sys.stdout if arguments else sys.stderr).write(parser.format_help())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        from hrl import __version__

        sys.stdout.write(f"hrl {__version__}\n")
        return 0
    from hrl.nearest import did_you_mean

    hint = did_you_mean(arguments[0], commands, f"There are {', '.join(commands)}.")
    sys.stderr.write(f"hrl has no command {arguments[0]!r}. {hint}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
