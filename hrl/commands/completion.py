"""`hrl completion`: a script that completes commands, options and keys in a shell."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

SHELLS = ("bash", "zsh", "fish")
_HOW = {
    "bash": 'eval "$(hrl completion bash)"                              in ~/.bashrc',
    "zsh": 'eval "$(hrl completion zsh)"                               in ~/.zshrc, after compinit',
    "fish": "hrl completion fish > ~/.config/fish/completions/hrl.fish",
}
_FILES = ("folder", "folders", "model", "checkpoint", "out", "data", "reward", "responses", "file")
"""Arguments whose value is the path of a file or folder, or may be one."""
# A key is followed by its value, not by a space.
_BASH_END = """
_hrl_without_space() {
    _shtab_hrl "$@"
    [[ ${#COMPREPLY[@]} -ne 1 || "${COMPREPLY[0]}" != *= ]] || compopt -o nospace
}
complete -o bashdefault -F _hrl_without_space hrl
"""


_ZSH_START = """
_hrl_words() {
    local -a keys words
    keys=(${(M)@:#*=}) words=(${@:#*=})
    compadd -S '' -a keys
    compadd -a words
}
"""
_ZSH_KEYS = re.compile(r'"\(\*\)::key\\=value:\(([^)]*)\)"')


def add_arguments(parser: ArgumentParser) -> None:
    """Add the shell."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = "\n".join(("to use it:", *(f"  {line}" for line in _HOW.values())))
    parser.add_argument("shell", choices=SHELLS)


def run(options: Namespace) -> int:
    """Write the script to standard output."""
    import shtab

    script = shtab.complete(whole_parser(), options.shell, preamble=_ZSH_START if options.shell == "zsh" else "")
    if options.shell == "zsh":
        script = _ZSH_KEYS.sub(r'"*:key\\=value: _hrl_words \1"', script)
        script = script.replace('"(*)::', '"*:')  # otherwise only the first of several words is completed
    sys.stdout.write(script + (_BASH_END if options.shell == "bash" else "") + "\n")
    return 0


def whole_parser() -> ArgumentParser:
    """Return a parser with every command, its arguments, and the keys of a run where a command takes them."""
    import shtab

    from hrl.commands.run_arguments import ALGORITHMS
    from hrl.commands.table import COMMANDS
    from hrl.config.run_kind import KINDS
    from hrl.config.section import leaves

    keys = dict.fromkeys(f"{key}=" for kind in KINDS.values() for key in leaves(kind.schema))
    parser = ArgumentParser(prog="hrl")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        inner = commands.add_parser(command.name, help=command.help)
        module = command.load()
        module.add_arguments(inner)
        if command.takes_overrides:
            words = [] if command.name == "demo" else ALGORITHMS
            inner.add_argument("overrides", nargs="*", choices=[*words, *keys], help="key=value")
        for action in inner._actions:
            if action.dest in _FILES and action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
