"""A whole GRPO step.

SmolLM2-135M learns the bundled addition task: 16 prompts × 8 samples, at most 32 new tokens, one optimizer step. hrl is
its command with the quickstart's values and vLLM, TRL its `GRPOTrainer` on the prompts of hrl's steps, with its own
generation (vLLM in TRL fails on CPUs: it writes weights into layers that vLLM has repacked). `float32 weights` computes
in bfloat16 under autocast, as hrl does, and is otherwise TRL's default. `bfloat16 weights, activations kept` is TRL's
fastest setting here: float32 weights with kept activations took longer than its default, and so did bfloat16 weights
with recomputed ones. First steps must have the same prompts, one mean length and reward within sampling
noise, and one definition of the loss. hrl leaves out rows of groups whose rewards are all equal, which have no
gradient. Times are from the end of a step to the end of the next, without a run's first step: of TRL, whose step takes
over a minute, that is one for each setting, of hrl four, from runs before either of TRL's.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.harness import Case, Comparison
from bench.peers import TRL
from bench.programs import grpo
from bench.programs.program import Ran

HEAVY = True
MINUTES = 8
THREADS = 2
_PROMPTS, _OUR_STEPS, _THEIR_STEPS = 16, 3, 2
_BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
_SETTINGS: dict[str, dict[str, Any]] = {
    "float32 weights": {"bf16": True},
    "bfloat16 weights, activations kept": {"bf16": True, "gradient_checkpointing": False} | _BFLOAT16,
}
_PARTS = {"sampling": ("gen", "reward", "adv"), "update": ("update_actor",), "weight sync": ("weight_sync",)}


def cases() -> Iterator[Case]:
    """Yield TRL's settings; hrl runs before each of them."""
    with tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        ours = _Hrl(Path(name))
        for number, (label, config) in enumerate(_SETTINGS.items()):
            theirs = _Trl(Path(name, f"trl_{number}"), ours, config)

            def others(label: str = label, theirs: _Trl = theirs) -> Iterator[Comparison]:
                return _parts(label, ours, theirs)

            yield Case(
                label,
                TRL,
                ours,
                theirs,
                _check,
                6.0 if label == "float32 weights" else None,
                rounds=1,
                others=others,
                seconds=_steps,
                warms_up=False,
            )


class _Hrl:
    """hrl's: called, it runs once more and gives all runs so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runs: list[Ran] = []

    @property
    def last(self) -> Path:
        """The last run's folder."""
        return self._folder / f"hrl_{len(self.runs)}"

    def __call__(self) -> list[Ran]:
        self.runs.append(grpo.hrl(self._folder / f"hrl_{len(self.runs) + 1}", steps=_OUR_STEPS, prompts=_PROMPTS))
        return list(self.runs)


class _Trl:
    """TRL's: called, it trains in a process of its own."""

    def __init__(self, folder: Path, ours: _Hrl, config: Mapping[str, Any]) -> None:
        self._folder, self._ours, self._config = folder, ours, config
        self.runs: list[Ran] = []

    def __call__(self) -> list[Ran]:
        self.runs.append(grpo.trl(self._folder, self._ours.last, steps=_THEIR_STEPS, config=self._config))
        return self.runs


def _check(ours: list[Ran], theirs: list[Ran]) -> None:
    grpo.check_same_task(ours[-1], theirs[-1])


def _steps(runs: list[Ran]) -> list[float]:
    return [seconds for one in runs for seconds in one.steps_s]


def _parts(label: str, ours: _Hrl, theirs: _Trl) -> Iterator[Comparison]:
    """Yield the parts of the same steps. What of TRL's is not sampling, with rewards and advantages, is its update."""
    other = {"sampling": [], "update": [], "weight sync": [0.0]}
    for one in theirs.runs:
        for step, seconds in zip(one.metrics[1:], one.steps_s, strict=True):
            other["sampling"].append(step["sampling_s"])
            other["update"].append(seconds - step["sampling_s"])
    for part, timings in _PARTS.items():
        mine = [sum(step[f"timing_s/{timing}"] for timing in timings) for one in ours.runs for step in one.metrics[1:]]
        yield Comparison(label, TRL, f"seconds of {part}", statistics.median(mine), statistics.median(other[part]))
