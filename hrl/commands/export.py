"""`hrl export`: a checkpoint as a folder that transformers and vLLM load."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hrl.processes.imports import quick_imports


def add_arguments(parser: ArgumentParser) -> None:
    """Add model, folder, dtype and hub."""
    parser.add_argument("checkpoint", help="run folder, checkpoint (with hf/ or shards alone), or any model")
    parser.add_argument("out", type=Path, help="the folder to write; new or empty")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights; the model's own by default"
    )
    parser.add_argument("--push", metavar="REPO", help="then send it to this repository of the Hugging Face hub")
    parser.add_argument("--public", action="store_true", help="make a new repository public; private by default")


def run(options: Namespace) -> int:
    """Export, say what was written, and return 0."""
    with quick_imports():
        from hrl.trained.export import export, push

    exported = export(options.checkpoint, options.out, options.dtype)
    size = f"{exported.weights_bytes / 1e9:.2f} GB"
    sys.stdout.write(f"wrote {exported.folder}: {size} of weights in {exported.dtype}\n")
    if options.push is not None:
        sys.stdout.write(f"sent to {push(exported, options.push, private=not options.public)}\n")
    return 0
