"""Rehearses the sizes of `configs/size`, as somebody does who has their models' descriptions and no weights.

    python -m tests.rehearse.sizes [SIZE …]

The hub's cache is made here: each model's config as its `config.json` has it, and the tokenizer of the bundled model,
which knows fewer tokens. Prints the table of each rehearsal; the exit status is 1 if one failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hrl.models.source import resolve_model
from tests.plan.models import NAMED, folder_of
from tests.plan.sizes import SIZES

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
_REVISION = "0" * 40
_REWARD = '''"""What a sum is worth: 1 if the last number of the answer is right."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.findall(r"[0-9]+", solution_str)[-1:] == [ground_truth])
'''


def cache_in(home: Path) -> Path:
    """Make a hub's cache that has config and tokenizer of every model of `configs/size`, and no weights."""
    tokenizer = resolve_model("bundled:smollm2-135m-instruct")
    for name, config in NAMED.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder_of(config, repository / "snapshots" / _REVISION)
        for file in tokenizer.iterdir():
            if file.name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges")):
                shutil.copyfile(file, snapshot / file.name)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(_REVISION)
    return home


def line_in(folder: Path, size: str) -> list[str]:
    """Write rows and a reward function, and return the line that trains on them with this size."""
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the final number only.", "answer": str(a + b)}
        for a in range(40)
        for b in range(40)
    ]
    train, held_out, reward = folder / "train.jsonl", folder / "held_out.jsonl", folder / "sums.py"
    train.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:8]))
    reward.write_text(_REWARD)
    return [
        *("grpo", f"size={size}", f"data.train_files={train}", f"data.val_files={held_out}"),
        f"reward.functions=[{reward}]",
    ]


def rehearsed(
    size: str, home: Path, folder: Path, options: Sequence[str] = (), keys: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `hrl rehearse` on a size, offline."""
    environ = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "150"}
    command = [sys.executable, "-m", "hrl", "rehearse", *options, *line_in(folder, size), *keys]
    return subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, timeout=LIMIT_S, check=False)


def main(sizes: Sequence[str]) -> int:
    """Rehearse these sizes, or all."""
    failed = []
    with tempfile.TemporaryDirectory(prefix="sizes-") as name:
        folder = Path(name)
        home = cache_in(folder / "home")
        for size in sizes or SIZES:
            began = time.monotonic()
            done = rehearsed(size, home, folder)
            sys.stdout.write(f"\n== {size}: exit status {done.returncode} in {time.monotonic() - began:.0f} s\n")
            sys.stdout.write(done.stdout + done.stderr)
            sys.stdout.flush()
            failed += [size] if done.returncode else []
    sys.stdout.write(f"\nfailed: {', '.join(failed)}\n" if failed else "\nall passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
