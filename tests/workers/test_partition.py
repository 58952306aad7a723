"""No gradient depends on ranks, micro-batches or packing: real FSDP2, every registered loss and aggregation.

What a step finds, packed and cut and sharded, is compared with a padded float64 forward of the whole batch through a
plain transformers model. The error is a distance over a norm: of the whole gradient over the whole gradient's norm, and
of every parameter's gradient over that gradient's own norm, so that none hides behind larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.tiny import world_of_one
from tests.workers.partition import (
    CUTS,
    DTYPES,
    Gradients,
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
    errors: dict[tuple[int, str], Errors] = field(default_factory=dict)

    def of(self, ranks: int, dtype: str) -> Errors:
        if (ranks, dtype) not in self.errors:
            model = self.folder / "model"
            if ranks == 1:
                with world_of_one(), every_registered():
                    self.errors[1, dtype] = errors_of_rank(0, 1, model, self.folder, dtype)
            else:
                self.errors |= run_worlds(tuple(size for size in DTYPES if size > 1), model, self.folder)
        return self.errors[ranks, dtype]

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


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        pytest.param(ranks, dtype, marks=[pytest.mark.cluster] * (ranks > 1))
        for ranks, dtypes in DTYPES.items()
        for dtype in dtypes
    ],
)
def test_no_gradient_depends_on_the_cut(measured: Measured, ranks: int, dtype: str) -> None:
    broken = {}
    for case, errors in measured.of(ranks, dtype).items():
        name = case.rsplit(", ", 1)[0]
        squares = measured.squared_norms(name)
        together, alone = float((errors.sum() / squares.sum()).sqrt()), (errors / squares).sqrt()
        if not together <= TOLERANCE[dtype]:
            broken[case] = together
        for parameter, error in zip(measured.expected[name], alone.tolist(), strict=True):
            if not error <= PARAMETERS * TOLERANCE[dtype]:
                broken[f"{case}, {parameter}"] = error
    assert not broken, broken


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=[pytest.mark.cluster] * (ranks > 1)) for ranks in DTYPES])
def test_every_sum_is_run_in_all_cuts_and_every_member_alone(measured: Measured, ranks: int) -> None:
    for dtype in DTYPES[ranks]:
        cases = measured.of(ranks, dtype).keys()
        assert {f"{name}, {cut} micro-batches" for name in whole() for cut in CUTS[ranks]} <= cases
        assert ranks > 1 or single().keys() <= {case.rsplit(", ", 1)[0] for case in cases}


def test_a_member_that_is_wrong_can_not_hide_in_the_sum(measured: Measured) -> None:
    """No coefficient in a sum is below 1/100."""
    for name in single():
        kind = name.split(",")[0].rsplit(" ", 1)[0]
        everything = measured.squared_norms("policy" if kind in ("policy", "kl", "entropy") else kind).sum().sqrt()
        assert measured.squared_norms(name).sum().sqrt() / 100 > 10 * TOLERANCE["float32"] * everything, name
