"""`hrl migrate`: a launch line of verl, OpenRLHF or TRL as one of hrl, and what is lost on the way."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from hrl.commands.argument_types import at_least_one


def add_arguments(parser: ArgumentParser) -> None:
    """Add the file and its form."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = (
        "Nothing in the file is run. A shell script is read with its variables, arrays and simple conditions, a\n"
        "Python file for TRL's configuration and trainer. The answer is a shell script; its comments say what has no\n"
        "counterpart, what means something else, and what is not needed.\n\n"
        "  hrl migrate run_qwen2-7b.sh > run.sh\n"
        "  hrl migrate train_grpo.py --processes 8\n"
        "  echo 'trl grpo --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/tldr' | hrl migrate"
    )
    parser.add_argument("file", nargs="?", default="-", help="shell script or Python file; standard input by default")
    parser.add_argument("--processes", type=at_least_one, default=1, help="GPUs of a run of TRL, whose file names none")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a script", dest="as_json")


def run(options: Namespace) -> int:
    """Write the script, and return 0, or 1 if a line is not complete."""
    import json
    from pathlib import Path

    from hrl.migrate.line import MigrationError, script
    from hrl.migrate.migrate import migrate

    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MigrationError(f"{options.file} can't be read: {error}") from error
    found = migrate(text, options.file if options.file == "-" else Path(options.file).name, options.processes)
    if options.as_json:
        sys.stdout.write(json.dumps([each.as_json() for each in found], indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(script(each) for each in found))
    return 0 if all(each.composes for each in found) else 1
