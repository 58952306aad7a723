"""No gradient depends on ranks, micro-batches or packing: real FSDP2, every registered loss and aggregation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.engine.tiny import world_of_one
from tests.workers.partition import (
    ALONE_IN,
    CUTS,
    WHOLE,
    Models,
    cases,
    every_registered,
    references,
    run_worlds,
    save_small_llama,
    single,
    squared_errors,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Relative error of the full gradient, by dtype and by loss, cut and number of ranks."""
    folder: Path = tmp_path_factory.mktemp("partition")
    path, found = save_small_llama(folder / "model"), {}
    with world_of_one(), every_registered():
        for dtype in TOLERANCE:
            expected = references(path, dtype)
            assert all(max(float(g.abs().max()) for g in grads.values()) > 0 for grads in expected.values())
            torch.save(expected, folder / f"{dtype}.pt")
            models = Models(path, dtype, share_prefix=True)
            found[dtype] = {
                f"{name}, {cut} micro-batches, 1 ranks": squared_errors(models, name, cut, 0, 1, expected[name]) ** 0.5
                for name, cut in cases(1, dtype)
            }
    for dtype, more in run_worlds((4, 2), path, folder, tuple(TOLERANCE)).items():
        found[dtype] |= more
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_gradient_depends_on_the_cut(errors: dict[str, dict[str, float]], dtype: str) -> None:
    broken = {case: error for case, error in errors[dtype].items() if not error <= TOLERANCE[dtype]}
    assert not broken, broken


def test_everything_registered_was_run_on_every_number_of_ranks(errors: dict[str, dict[str, float]]) -> None:
    for ranks, alone_in in ALONE_IN.items():
        for dtype, found in errors.items():
            assert {f"{name}, {cut} micro-batches, {ranks} ranks" for name in WHOLE for cut in CUTS} <= found.keys()
            here = {case.rsplit(", ", 2)[0] for case in found if case.endswith(f", {ranks} ranks")}
            assert (single().keys() <= here) == (dtype in alone_in)
