"""From the command to the first optimizer step.

hrl's quickstart (SmolLM2-135M, the bundled addition task, 8 prompts × 8 samples, vLLM) against a program with TRL's
`GRPOTrainer` and its own generation on the same prompts, with float32 weights and products in bfloat16 as hrl has:
seconds from the command to the end of the first step, and to the first thing on the screen, whatever it is (TRL's is
a warning). hrl's first step ends when the sampler has the new weights. Both run without validation, and for the second
time: files are in the page cache, and what a first run compiles for later ones is there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.harness import Case, Comparison
from bench.peers import TRL
from bench.programs import grpo
from bench.programs.program import Ran

HEAVY = True
MINUTES = 4
THREADS = 2
_PROMPTS = 8
_LABEL = "quickstart"


def cases() -> Iterator[Case]:
    """Yield the first step; the first line is read off the same runs."""
    with tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        folder = Path(name)
        mine: list[Ran] = []
        other: list[Ran] = []

        def ours() -> Ran:
            mine.append(grpo.hrl(folder / f"hrl_{len(mine)}", steps=1, prompts=_PROMPTS))
            return mine[-1]

        def theirs() -> Ran:
            sampled = folder / f"hrl_{len(other)}"
            other.append(grpo.trl(folder / f"trl_{len(other)}", sampled, steps=1, config={"bf16": True}))
            return other[-1]

        def first_output() -> Iterator[Comparison]:
            seconds = (mine[-1].first_output_s, other[-1].first_output_s)
            yield Comparison(_LABEL, TRL, "seconds to the first output", *seconds)

        yield Case(
            _LABEL, TRL, ours, theirs, grpo.check_same_task, rounds=1, others=first_output, seconds=_end_of_first_step
        )


def _end_of_first_step(program: Ran) -> list[float]:
    return [program.ended_s[0]]
