"""`hrl replay`: compute a mini-batch that was not applied again, and say where its numbers stop being finite."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hrl.processes.imports import quick_imports


def add_arguments(parser: ArgumentParser) -> None:
    """Add the files, and where the weights come from."""
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="nonfinite/step_N_rank_R.UPDATE-K.json of each rank",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", type=Path, help="the weights' checkpoint; by default the run's newest from before the step"
    )
    weights.add_argument("--model", help="a model's folder with the weights instead")
    parser.add_argument(
        "--trust-code", action="store_true", help="run code of the model's folder, and the Python file of a loss"
    )


def run(options: Namespace) -> int:
    """Say what came of it; 0 if all numbers are those of the run, else 1."""
    with quick_imports():
        from hrl.trained.replay import replay

    found = replay(options.files, checkpoint=options.checkpoint, model=options.model, trust_code=options.trust_code)
    for line in found.lines():
        sys.stdout.write(f"{line}\n")
    return 0 if found.is_reproduced else 1
