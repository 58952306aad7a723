"""`hrl rehearse`: run a launch line small on this machine, with a kill and a resume.

It takes the launch line of a run: `hrl rehearse grpo key=value …`, `hrl rehearse python -m hrl.trainer.main_ppo
key=value …`. Its models become tiny ones of the same family with random weights, its processes a few on this machine's
cores, its responses short; rows, tokenizer, reward and environment are the line's own. Nothing of it is left behind.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hrl.commands.argument_types import positive
from hrl.commands.run_arguments import kind_and_arguments
from hrl.processes.imports import quick_imports


def add_arguments(parser: ArgumentParser) -> None:
    """Add how it is rehearsed."""
    parser.add_argument(
        "--processes", type=int, choices=(1, 2, 4), help="the largest pool; otherwise 4, or fewer where memory is short"
    )
    parser.add_argument("--kill", choices=("driver", "rank"), default="driver", help="what SIGKILL ends; driver")
    parser.add_argument(
        "--timeout", type=positive, default=900.0, metavar="S", help="seconds for each of the two starts; 900"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave models, logs and run folder in a folder there")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")


def run(options: Namespace) -> int:
    """Rehearse, and return 0 if everything passed, else the status of what failed."""
    if options.help:
        parser = ArgumentParser(prog="hrl rehearse", description=__doc__, add_help=False)
        parser.add_argument("line", nargs="+", metavar="LINE", help="the words of the launch line")
        add_arguments(parser)
        sys.stdout.write(parser.format_help())
        return 0
    from hrl.config.run_kind import KINDS

    with quick_imports():
        from hrl.rehearse.parts import Rehearsal, RehearsalError
        from hrl.rehearse.rehearsal import Options, rehearse
        from hrl.rehearse.show import Shown, as_data

    kind, arguments = kind_and_arguments(options.overrides)
    shown = Shown(quiet=options.as_json)
    found = Rehearsal(shown)
    how = Options(options.processes, options.kill, options.timeout, options.keep)
    try:
        rehearse(KINDS[kind], arguments, how, found)
    except RehearsalError:
        pass  # the table names it
    finally:
        shown.close()
    if options.as_json:
        sys.stdout.write(json.dumps(as_data(found), indent=2, ensure_ascii=False) + "\n")
    else:
        shown.table(found)
    return found.status
