"""No gradient depends on ranks, sequence groups, micro-batches or packing: FSDP2, every loss and aggregation.

What a step finds, packed and cut and sharded, is compared with a padded float64 forward of the whole batch through a
plain transformers model. The error is a distance over a norm: of the whole gradient over the whole gradient's norm, and
of every parameter's gradient over that gradient's own norm, so that none hides behind larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import world_of_one
from tests.workers.partition import (
    ALONE,
    CUTS,
    DTYPES,
    Gradients,
    World,
    errors_of_rank,
    every_registered,
    references,
    run_worlds,
    save_small_llama,
    single,
    whole,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
PARAMETERS = 2
"""How much more a single parameter may be off: what cancels out in a small one's gradient is of a larger one's size."""

Errors = dict[str, Tensor]
"""Squared distances ``(P,)`` by loss and cut."""


@dataclass
class Measured:
    """Gradients to be found, and how far from them those of each world are; worlds are started when first asked for."""

    folder: Path
    expected: dict[str, Gradients]
    errors: dict[tuple[World, str], Errors] = field(default_factory=dict)

    def of(self, world: World, dtype: str) -> Errors:
        if (world, dtype) not in self.errors:
            model = self.folder / "model"
            if world == ALONE:
                with world_of_one(), every_registered():
                    self.errors[ALONE, dtype] = errors_of_rank(0, ALONE, model, self.folder, dtype)
            else:
                self.errors |= run_worlds(tuple(other for other in DTYPES if other != ALONE), model, self.folder)
        return self.errors[world, dtype]

    def squared_norms(self, name: str) -> Tensor:
        """Of every parameter's gradient ``(P,)``."""
        return torch.stack([gradient.square().sum() for gradient in self.expected[name].values()])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is this small is slower on several
    folder = tmp_path_factory.mktemp("partition")
    path = save_small_llama(folder / "model")
    with every_registered():
        expected = references(path)
    torch.save(expected, folder / "references.pt")
    yield Measured(folder, expected)
    torch.set_num_threads(threads)


def of_world(world: World, *more: str) -> Any:
    return pytest.param(
        world,
        *more,
        marks=[pytest.mark.cluster] * (world != ALONE),
        id="-".join([str(world.ranks) if world.degree == 1 else f"{world.ranks} in groups of {world.degree}", *more]),
    )


@pytest.mark.parametrize(
    ("world", "dtype"), [of_world(world, dtype) for world, dtypes in DTYPES.items() for dtype in dtypes]
)
def test_no_gradient_depends_on_the_cut(measured: Measured, world: World, dtype: str) -> None:
    broken = {}
    for case, errors in measured.of(world, dtype).items():
        name = case.rsplit(", ", 1)[0]
        squares = measured.squared_norms(name)
        together, alone = float((errors.sum() / squares.sum()).sqrt()), (errors / squares).sqrt()
        if not together <= TOLERANCE[dtype]:
            broken[case] = together
        for parameter, error in zip(measured.expected[name], alone.tolist(), strict=True):
            if not error <= PARAMETERS * TOLERANCE[dtype]:
                broken[f"{case}, {parameter}"] = error
    assert not broken, broken


@pytest.mark.parametrize("world", [of_world(world) for world in DTYPES])
def test_every_sum_is_run_in_all_cuts_and_every_member_alone(measured: Measured, world: World) -> None:
    for dtype in DTYPES[world]:
        cases = measured.of(world, dtype).keys()
        assert {f"{name}, {cut} micro-batches" for name in whole() for cut in CUTS[world]} <= cases
        assert world != ALONE or single().keys() <= {case.rsplit(", ", 1)[0] for case in cases}


def test_a_member_that_is_wrong_can_not_hide_in_the_sum(measured: Measured) -> None:
    """No coefficient in a sum is below 1/100."""
    for name in single():
        kind = name.split(",")[0].rsplit(" ", 1)[0]
        everything = measured.squared_norms("policy" if kind in ("policy", "kl", "entropy") else kind).sum().sqrt()
        assert measured.squared_norms(name).sum().sqrt() / 100 > 10 * TOLERANCE["float32"] * everything, name
