"""Steps that were measured on two cores with AVX512-BF16, in bfloat16, with the bundled model.

Three runs, all their steps but the first, which compiles: each with its own lengths and rows, and with nothing or
little beside it on the machine. `docs/scaling/compare.py` compares other runs.
"""

from __future__ import annotations

from typing import NamedTuple

from hrl.models.flops import ModelFlops
from hrl.models.footprint import Footprint
from hrl.plan.hardware import cpu
from hrl.plan.lengths import Lengths
from hrl.plan.shapes import ModelShape

#: Products and copies as measured there.
TWO_CORES = cpu(445e9, 35e9, 24 * 2**30)
#: SmolLM2-135M, as `shapes_of` counts it.
SMOL = ModelShape(
    Footprint(134515008, 28311552, 0, 3540096, 30, 576, 49152, 20268, 1152, 22572, 2304, 23040, 3),
    ModelFlops(212336640.0, 69120.0, 56623104.0),
    heads=9,
    tensors=272,
)

#: Qwen2.5-7B, likewise.
SEVEN = ModelShape(
    Footprint(7615616512, 544997376, 544997376, 233057792, 28, 3584, 152064, 0, 7168, 0, 14336, 57344, 4),
    ModelFlops(13050576896.0, 401408.0, 1089994752.0),
    heads=28,
    tensors=339,
)


class Recorded(NamedTuple):
    """A measured step.

    Attributes:
        run: Name of its run.
        number: Its number there.
        overrides: The run's.
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response.
        rows_run: Share of the rows that the update ran.
        seconds: Phase → seconds.
        fixes: Phases that a constant of the model comes from; all others are predicted.
    """

    run: str
    number: int
    overrides: tuple[str, ...]
    prompt: float
    response: float
    rows_run: float
    seconds: dict[str, float]
    fixes: tuple[str, ...] = ()


_PHASES = ("gen", "update_actor")
_PHASES_OF_PPO = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")
_SIXTEEN = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
_FIXES = {("16 × 8", 4): ("gen", "update_actor"), ("8 × 8", 12): ("gen",)}
_RUNS: tuple[tuple[str, tuple[str, ...], int, tuple[str, ...], tuple[tuple[float, ...], ...]], ...] = (
    (
        "16 × 8", _SIXTEEN, 128, _PHASES,
        (
            (2, 23.711, 120, 5.47, 11.33), (3, 21.078, 88, 4.90, 7.29), (4, 20.578, 104, 4.99, 8.43),
            (5, 19.648, 120, 4.92, 9.94), (6, 19.539, 120, 5.32, 9.14),
        ),
    ),
    (
        "8 × 8", (), 64, _PHASES,
        (
            (2, 21.609, 56, 3.51, 6.06), (3, 20.719, 56, 3.33, 5.34), (4, 19.609, 64, 3.07, 5.54),
            (5, 19.484, 56, 3.21, 5.22), (6, 19.188, 64, 3.22, 5.64), (7, 18.125, 64, 3.58, 5.63),
            (8, 14.891, 48, 2.85, 3.53), (9, 15.922, 64, 2.71, 4.74), (10, 13.656, 64, 2.62, 4.18),
            (11, 12.688, 56, 2.59, 3.73), (12, 12.312, 56, 2.50, 3.62), (13, 11.359, 56, 2.71, 3.77),
            (14, 12.297, 40, 2.71, 3.12),
        ),
    ),
    (
        "PPO", ("recipe=ppo",), 64, _PHASES_OF_PPO,
        (
            (2, 19.141, 64, 2.87, 1.64, 1.67, 1.31, 5.00, 5.54), (3, 21.828, 64, 3.07, 1.74, 1.75, 1.40, 5.38, 6.08),
            (4, 20.062, 64, 3.30, 1.82, 1.77, 1.49, 5.52, 5.43),
        ),
    ),
)  # fmt: skip
"""Run, overrides, rows, phases; for each step its number, mean tokens of a response, rows run, seconds of phases."""

STEPS = [
    Recorded(
        run, int(number), overrides, 45, response, ran / rows, dict(zip(phases, seconds, strict=True)),
        _FIXES.get((run, int(number)), ()),
    )
    for run, overrides, rows, phases, steps in _RUNS
    for number, response, ran, *seconds in steps
]  # fmt: skip

EPISODES_OVERRIDES = (
    "recipe=grpo", "data.max_prompt_length=96", "data.max_response_length=128", "environment.path=tools",
    "environment.max_turns=3", "environment.max_turn_tokens=48",
)  # fmt: skip
_EPISODES = (
    (46.344, 1.438, 8.844, 0.061, 0.565, 7.69, 2.73, 10.07), (54.203, 1.453, 10.234, 0.028, 0.509, 8.83, 3.30, 12.82),
    (36.828, 1.312, 6.250, 0.026, 0.584, 7.53, 2.54, 8.41), (45.266, 1.469, 10.031, 0.043, 0.574, 7.06, 2.59, 9.18),
    (55.562, 1.594, 12.516, 0.026, 0.544, 7.94, 3.43, 11.89), (61.250, 1.766, 15.641, 0.034, 0.597, 8.62, 3.47, 10.95),
    (52.297, 1.750, 12.328, 0.037, 0.668, 7.74, 2.38, 7.76), (52.844, 1.766, 13.016, 0.036, 0.665, 7.72, 2.43, 7.79),
    (59.375, 1.938, 15.719, 0.033, 0.724, 8.70, 2.72, 7.89), (59.188, 2.000, 15.547, 0.069, 0.754, 8.52, 2.58, 8.25),
    (63.391, 2.047, 16.938, 0.053, 0.743, 8.75, 2.70, 7.39), (59.391, 2.016, 16.797, 0.049, 0.774, 7.93, 2.08, 6.78),
    (55.266, 2.000, 14.828, 0.069, 0.817, 8.24, 1.76, 5.62), (51.844, 1.984, 13.781, 0.069, 0.863, 5.69, 1.24, 4.22),
    (54.562, 2.000, 14.438, 0.063, 0.839, 7.35, 1.61, 6.60), (54.438, 1.984, 14.750, 0.096, 0.819, 8.07, 2.33, 5.45),
)  # fmt: skip
EPISODES = [
    (
        Lengths(57, response, turns=turns, environment_tokens=environment, environment_s=wait_s, shared=shared),
        dict(zip(("gen", "ref", "update_actor"), seconds, strict=True)),
    )
    for response, turns, environment, wait_s, shared, *seconds in _EPISODES
]
"""Steps of `examples/calculator.py`, 8 prompts × 8 episodes, but the first and those behind a validation: what was
known of their rows, and seconds of phases. No constant comes from them; other jobs may have run beside some."""

DECODING = {1: (0.033, True), 16: (0.046, False), 64: (0.102, False), 128: (0.179, True)}
"""Requests of 45 + 32 tokens, sampled by vLLM alone → seconds of the batch over its 32 tokens, and whether a constant
comes from it."""

SYNC_S = (0.289, 0.36)
"""Seconds of a weight sync: the median of a run (`make bench NAME=grpo_step`), and of another."""

HOPS = {8: 0.023, 64: 0.0405, 512: 0.195, 1024: 0.539}
"""Ranks → seconds of a hop of 1,024 rows (`make bench NAME=driver_hop`)."""
HOP_TOKENS = 1024 * (320 + 544)
"""Mean tokens of these rows: prompts of 128 to 512, responses of 64 to 1,024."""
