"""Steps that were measured on two cores with AVX512-BF16, in bfloat16, with the bundled model.

Lengths and rows are the run's own metrics. The first lines are docs/status.md's; the others are single steps of runs
whose machine had light work beside.
"""

from __future__ import annotations

from typing import NamedTuple

from hrl.models.flops import ModelFlops
from hrl.models.footprint import Footprint
from hrl.plan.hardware import cpu
from hrl.plan.shapes import ModelShape

#: Products and copies as measured there.
TWO_CORES = cpu(340e9, 13.5e9, 24 * 2**30)
#: SmolLM2-135M, as `shapes_of` counts it.
SMOL = ModelShape(
    Footprint(134515008, 28311552, 0, 3540096, 30, 576, 49152, 20268, 1152, 23040),
    ModelFlops(212336640.0, 69120.0, 56623104.0),
    heads=9,
    tensors=272,
)


class Recorded(NamedTuple):
    """A measured step.

    Attributes:
        name: What it is.
        overrides: The run's.
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response.
        rows_run: Share of the rows that the update ran.
        seconds: Phase → seconds.
        fixes: Phases that a constant of the model comes from; all others are predicted.
    """

    name: str
    overrides: tuple[str, ...]
    prompt: float
    response: float
    rows_run: float
    seconds: dict[str, float]
    fixes: tuple[str, ...] = ()


SIXTEEN = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
PPO = ("recipe=ppo", "data.max_response_length=16")
CHAIN = ("quickstart=ppo", "actor_rollout_ref.actor.use_kl_loss=true", "data.max_prompt_length=256",
         "data.max_response_length=24")  # fmt: skip

STEPS = [
    Recorded("16 × 8", SIXTEEN, 45, 22, 1.0, {"gen": 7.3, "update_actor": 10.9, "weight_sync": 0.44},
             ("update_actor", "weight_sync")),
    Recorded("8 × 8, all rows", (), 45, 15.33, 1.0, {"update_actor": 4.92}),
    Recorded("8 × 8, 48 rows", (), 45, 14.03, 0.75, {"update_actor": 3.575, "gen": 3.79}),
    Recorded("8 × 8, 24 rows", (), 45, 11.77, 0.375, {"update_actor": 2.12}),
    Recorded("8 × 8, 40 rows", (), 45, 10.66, 0.625, {"update_actor": 2.83}),
    Recorded("8 × 8, longest responses", (), 45, 24.78, 0.875, {"gen": 4.64}),
    Recorded("8 × 8, long responses", (), 45, 21.55, 1.0, {"gen": 4.22, "weight_sync": 0.416}),
    Recorded("PPO, short responses", PPO, 45, 8.64, 1.0,
             {"gen": 2.77, "old_log_prob": 1.08, "ref": 1.03, "values": 0.88, "update_critic": 3.48,
              "update_actor": 3.98}),
    Recorded("PPO, shorter responses", PPO, 45, 8.23, 1.0,
             {"gen": 2.68, "old_log_prob": 1.03, "ref": 0.99, "values": 0.84, "update_critic": 3.38,
              "update_actor": 3.45}),
]  # fmt: skip
"""Whole steps."""

DECODING = {1: (0.054, True), 64: (0.147, False), 128: (0.244, True)}
"""Running requests → seconds of an iteration, and whether a constant comes from it."""
