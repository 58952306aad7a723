"""Weights that do not arrive as they were sent, in whole runs of one process: nothing is sampled from them.

The engine is the scripted one, which misbehaves from a version of the weights on: that of the start, or the one
after the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hrl.report.run_folder import read_metrics
from hrl.workers.rollout.scripted import Script, ScriptedEngine
from hrl.workers.weight_sync.shared_memory import SharedMemorySender
from tests.chaos.checkpoints import arguments, judged, run
from tests.chaos.faults import Fault, Outcome

NAME = "model.layers.1.mlp.down_proj.weight"
TIMEOUT_S = 1.0
#: How much longer than its deadline a run may take to end, with its start, on a machine that does other things too.
PATIENCE_S = 60.0
Misbehaves = Callable[[pytest.MonkeyPatch, int], None]


def script(**changes: Any) -> Misbehaves:
    """The engine follows a script from the sync of a version on."""

    def misbehaves(patch: pytest.MonkeyPatch, version: int) -> None:
        begin = ScriptedEngine._begin_weights

        async def begins(engine: ScriptedEngine, manifest: Any, handle: Mapping[str, object], begun: int) -> None:
            if begun >= version:
                engine._script = engine.writer._script = Script(**changes)
            await begin(engine, manifest, handle, begun)

        patch.setattr(ScriptedEngine, "_begin_weights", begins)

    return misbehaves


def flips_on_the_way(patch: pytest.MonkeyPatch, version: int) -> None:
    """A bit flips in the shared memory, between the sender's checksum and the receiver's."""
    publish, begin, begun = SharedMemorySender.publish, ScriptedEngine._begin_weights, -1

    async def begins(engine: ScriptedEngine, manifest: Any, handle: Mapping[str, object], new: int) -> None:
        nonlocal begun
        begun = new
        await begin(engine, manifest, handle, new)

    def flips(sender: SharedMemorySender, index: int) -> None:
        if begun >= version:
            sender.buffer(index)[7] ^= 1
        publish(sender, index)

    patch.setattr(ScriptedEngine, "_begin_weights", begins)
    patch.setattr(SharedMemorySender, "publish", flips)


def ends(misbehaves: Misbehaves, version: int, words: tuple[str, ...], folder: Path) -> Outcome:
    """The run ends with one message, in time, and no step was made with such weights."""
    with pytest.MonkeyPatch.context() as patch:
        misbehaves(patch, version)
        began = time.monotonic()
        status, said = run(
            arguments(
                folder / "run",
                "actor_rollout_ref.rollout.name=scripted",
                f"actor_rollout_ref.rollout.weight_sync.timeout_s={TIMEOUT_S}",
                "trainer.save_freq=-1",
            )
        )
    file = folder / "run" / "metrics.jsonl"
    made = [record["step"] for record in read_metrics(folder / "run")] if file.exists() else []
    missing = [word for word in words if word not in said]
    took = time.monotonic() - began
    wrong = [
        *([] if status == 1 else [f"exit status {status}"]),
        *([f"nothing says {missing}"] if missing else []),
        *(["a traceback"] if "Traceback" in said else []),
        *([] if max(made, default=0) <= version else [f"the steps {made} were made"]),
        *([] if took < TIMEOUT_S + PATIENCE_S else [f"it took {took:.0f} s"]),
    ]
    return judged(wrong, began, said, said[said.rfind("Error: ") - 20 :])


DROPS, CHANGES, STUCK, GONE = (
    "a sync drops a tensor",
    "a sync changes a tensor",
    "a sampler hangs in a sync",
    "a sampler dies in a sync",
)
KINDS: tuple[tuple[str, str, Misbehaves, tuple[str, ...]], ...] = (
    (DROPS, "in the receiver", script(drop_tensor=NAME), (NAME,)),
    (CHANGES, "in the receiver", script(corrupt_tensor=NAME), (NAME, "reads back differently")),
    (CHANGES, "a bit on the way", flips_on_the_way, ("checksum of 'model.", "corrupted")),
    (STUCK, "until its deadline", script(sync_hang=True), (f"took longer than {TIMEOUT_S:g} s", "timeout_s")),
    (GONE, "at the first bucket", script(sync_die=True), ("EngineDeadError", "has died")),
)
QUICK = {"a bit on the way", "until its deadline"}
FAULTS = [
    Fault(kind, f"{what}, {when}", partial(ends, misbehaves, version, words), is_quick=version == 1 and what in QUICK)
    for kind, what, misbehaves, words in KINDS
    for version, when in ((0, "at the start"), (1, "after a step"))
]
