"""Steps that were measured on two cores with AVX512-BF16, in bfloat16, with the bundled model.

Each is one step of a run, with the run's own lengths and rows, and with nothing or little beside it on the machine.
`docs/scaling/compare.py` compares whole runs.
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
PPO = ("recipe=ppo",)

STEPS = [
    Recorded("16 × 8, step 4", SIXTEEN, 45, 20.578, 104 / 128,
             {"gen": 4.99, "update_actor": 8.43, "weight_sync": 0.289}, ("gen", "update_actor", "weight_sync")),
    Recorded("16 × 8, step 2", SIXTEEN, 45, 23.711, 120 / 128, {"gen": 5.47, "update_actor": 11.33}),
    Recorded("16 × 8, step 6", SIXTEEN, 45, 19.539, 120 / 128, {"gen": 5.32, "update_actor": 9.14}),
    Recorded("8 × 8, step 12", (), 45, 12.312, 56 / 64, {"gen": 2.50, "update_actor": 3.62}, ("gen",)),
    Recorded("8 × 8, step 2", (), 45, 21.609, 56 / 64, {"gen": 3.51, "update_actor": 6.06}),
    Recorded("8 × 8, step 4", (), 45, 19.609, 1.0, {"gen": 3.07, "update_actor": 5.54}),
    Recorded("8 × 8, step 9", (), 45, 15.922, 1.0, {"gen": 2.71, "update_actor": 4.74}),
    Recorded("8 × 8, step 14", (), 45, 12.297, 40 / 64, {"gen": 2.72, "update_actor": 3.12}),
    Recorded("PPO, step 2", PPO, 45, 19.141, 1.0,
             {"gen": 2.87, "old_log_prob": 1.64, "ref": 1.67, "values": 1.31, "update_critic": 5.00,
              "update_actor": 5.54}),
    Recorded("PPO, step 3", PPO, 45, 21.828, 1.0,
             {"gen": 3.07, "old_log_prob": 1.75, "ref": 1.75, "values": 1.40, "update_critic": 5.38,
              "update_actor": 6.08}),
]  # fmt: skip
"""Steps of three runs; the weight sync is `bench/RESULTS.md`'s."""

DECODING = {1: (0.054, True)}
"""Running requests → seconds of an iteration, and whether a constant comes from it."""
