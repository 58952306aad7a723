"""`hrl eval`: what a model is worth on rows, sampled and scored as a run's validation is."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from hrl.commands.argument_types import at_least_one
from hrl.processes.imports import quick_imports


def add_arguments(parser: ArgumentParser) -> None:
    """Add model, rows and sampling."""
    parser.add_argument("model", help="run folder, checkpoint, model folder, hub id or bundled:...")
    parser.add_argument(
        "data",
        nargs="*",
        default=[],
        help="rows, as data.val_files takes them; the run's own by default. "
        "And keys of a run, such as environment.path=my_env.py:Class",
    )
    parser.add_argument("-n", type=at_least_one, default=1, help="samples of each prompt; 1 by default")
    parser.add_argument("-k", type=_sizes, default=(), help="each k of pass@k and maj@k, such as 1,4,8; n by default")
    parser.add_argument("--temperature", type=float, help="0 for one sample by default, 1 for several")
    parser.add_argument("--max-tokens", type=at_least_one, help="longest response")
    parser.add_argument("--limit", type=at_least_one, help="use only the first rows")
    parser.add_argument("--engine", choices=("vllm", "hf"), help="what samples; vllm by default")
    parser.add_argument("--reward", help="Python file with the reward function")
    parser.add_argument("--folder", type=Path, help="where the samples go; outputs/eval/<model> by default")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table", dest="as_json")


def run(options: Namespace) -> int:
    """Evaluate, show the table, and return 0."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from hrl.config.compose import require_no_blanks
    from hrl.config.override import as_override
    from hrl.processes.signals import interrupt_on_signals

    with quick_imports():
        from hrl.trained.evaluate import Sampling, evaluate, show

    interrupt_on_signals()
    require_no_blanks(options.data)
    data = [word for word in options.data if not _is_key(word)]
    keys = [word for word in options.data if _is_key(word)]
    given = {
        "data.max_response_length": options.max_tokens,
        "data.val_max_samples": options.limit,
        "actor_rollout_ref.rollout.name": options.engine,
        "reward.custom_reward_function.path": options.reward,
    }
    overrides = [f"{key}={as_override(value)}" for key, value in given.items() if value is not None]
    found = evaluate(
        options.model, data, Sampling(options.n, options.temperature, options.k), options.folder, [*overrides, *keys]
    )
    if options.as_json:
        scores = {source: asdict(scores) for source, scores in found.scores.items()}
        sys.stdout.write(
            json.dumps({"scores": scores, "left_out": found.left_out, "samples": str(found.samples)}) + "\n"
        )
    else:
        show(found, Console(highlight=False))
    return 0


def _is_key(word: str) -> bool:
    """Return whether a word is `key=value` of a run and no source, whose options come behind a `?`."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.lstrip("+~").replace(".", "").replace("_", "").isalnum()


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = (0,)
    if sizes[0] < 1:
        raise ArgumentTypeError(f"{text!r} is no list of numbers such as 1,4,8")
    return sizes
