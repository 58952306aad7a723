"""A whole GRPO step, and the way to the first.

SmolLM2-135M learns the bundled addition task: 16 prompts × 8 samples, at most 32 new tokens, one optimizer step. hrl is
its command with the quickstart's values and vLLM, TRL its `GRPOTrainer` on the prompts of hrl's steps, with its own
generation (vLLM in TRL fails on CPUs: it writes weights into layers that vLLM has repacked). `float32 weights` computes
in bfloat16 under autocast, as hrl does, and is otherwise TRL's default. `bfloat16 weights, activations kept` was the
fastest of the four settings that were tried: float32 weights with kept activations took longer than its default, and so
did bfloat16 weights with recomputed ones. Samples are each side's own: first steps must have the same prompts, one mean
length and reward within sampling noise, and one definition of the loss. hrl leaves out rows of groups whose rewards are
all equal, which have no gradient; `rows of the update` says how many are left. Times are from the end of a step to the
end of the next, of steps 2 and 3 on both sides, and of step 2 alone with TRL's second setting. The first step is in
`seconds to the end of the first step`, counted from the command, as is the first thing on the screen, whatever it is
(TRL's is a warning): these are of hrl's second run, so that files are in the page cache and what is compiled once is
there, as TRL finds its own.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Case, Comparison
from bench.peers import TRL
from bench.programs import grpo
from bench.programs.program import Ran

HEAVY = True
SECONDS = 545
THREADS = 2
_PROMPTS = 16
_BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
_SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {  # steps, and TRL's configuration
    "float32 weights": (3, {"bf16": True}),
    "bfloat16 weights, activations kept": (2, {"bf16": True, "gradient_checkpointing": False} | _BFLOAT16),
}
_PARTS = {"sampling": ("gen", "reward", "adv"), "update": ("update_actor", "weight_sync")}


def cases() -> Iterator[Case]:
    """Yield TRL's settings; hrl runs before each of them."""
    with tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        ours = _Hrl(Path(name))
        all_theirs: dict[str, _Trl] = {}
        *_, last = _SETTINGS
        for number, (label, (steps, config)) in enumerate(_SETTINGS.items()):
            theirs = all_theirs[label] = _Trl(Path(name, f"trl_{number}"), ours, steps, config)

            def others(label: str = label, theirs: _Trl = theirs) -> Iterator[Comparison]:
                yield from _parts(label, ours.runs[-1], theirs.runs[-1])
                if label == last:
                    yield from _starts(ours.runs[-1], {one: run.runs[-1] for one, run in all_theirs.items()})

            yield Case(
                label,
                TRL,
                partial(ours, steps),
                theirs,
                grpo.check_same_task,
                6.0 if label == "float32 weights" else None,
                rounds=1,
                others=others,
                seconds=_steps,
                warms_up=False,
            )


class _Hrl:
    """hrl's: called, it runs once more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runs: list[Ran] = []

    @property
    def last(self) -> Path:
        """The last run's folder."""
        return self._folder / f"hrl_{len(self.runs)}"

    def __call__(self, steps: int) -> Ran:
        self.runs.append(grpo.hrl(self._folder / f"hrl_{len(self.runs) + 1}", steps=steps, prompts=_PROMPTS))
        return self.runs[-1]


class _Trl:
    """TRL's: called, it trains in a process of its own, on the prompts of hrl's last run."""

    def __init__(self, folder: Path, ours: _Hrl, steps: int, config: Mapping[str, Any]) -> None:
        self._folder, self._ours, self._steps, self._config = folder, ours, steps, config
        self.runs: list[Ran] = []

    def __call__(self) -> Ran:
        self.runs.append(grpo.trl(self._folder, self._ours.last, steps=self._steps, config=self._config))
        return self.runs[-1]


def _steps(program: Ran) -> list[float]:
    return program.steps_s


def _parts(label: str, mine: Ran, other: Ran) -> Iterator[Comparison]:
    """Yield the parts of the same steps. What of TRL's is not sampling, with rewards and advantages, is its update."""
    sampled = [step["sampling_s"] for step in other.metrics[1:]]
    theirs = {"sampling": sampled, "update": [step - part for step, part in zip(other.steps_s, sampled, strict=True)]}
    for part, timings in _PARTS.items():
        ours = [sum(step[f"timing_s/{timing}"] for timing in timings) for step in mine.metrics[1:]]
        seconds = statistics.median(ours), statistics.median(theirs[part])
        yield Comparison(label, TRL, f"seconds of {part}", *seconds, rounds=(len(ours), len(theirs[part])))
    rows = [step["actor/rows_run"] for step in mine.metrics[1:]]
    peers = _PROMPTS * grpo.SAMPLES
    yield Comparison(label, TRL, "rows of the update", statistics.median(rows), peers, rounds=(len(rows),) * 2)


def _starts(mine: Ran, theirs: Mapping[str, Ran]) -> Iterator[Comparison]:
    """Yield what passes from the command on, with each of TRL's settings."""
    for label, other in theirs.items():
        yield Comparison(label, TRL, "seconds to the end of the first step", mine.ended_s[0], other.ended_s[0])
        yield Comparison(label, TRL, "seconds to the first output", mine.first_output_s, other.first_output_s)
