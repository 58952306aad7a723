"""One rank and two are the same model that sees, also where only one of them has a picture to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import run_ranks, world_of_one
from tests.models.tiny_pictures import save_vl
from tests.workers.engine.picture_ranks import learnt, on_two_ranks

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vl(tmp_path_factory.mktemp("seen") / "model", "qwen3_vl", dtype=torch.float64)


@pytest.fixture(scope="module")
def one(model: Path) -> dict[str, torch.Tensor]:
    with world_of_one():
        return learnt(0, model, 1)


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vl(tmp_path_factory.mktemp("states") / "model", "qwen3_5")


@pytest.fixture(scope="module")
def two(model: Path, with_states: Path, one: Any) -> dict[str, Any]:
    return run_ranks(2, model.parent / "two", on_two_ranks, model, with_states)[0]


@pytest.mark.parametrize("layout", ["apart", "together"])
def test_gradients_do_not_depend_on_the_ranks(one: dict[str, torch.Tensor], two: dict[str, Any], layout: str) -> None:
    assert one.keys() == two[layout].keys() and any("visual" in name for name in one)
    for name, mine in one.items():
        assert float(mine.norm()) > 0, name
        torch.testing.assert_close(two[layout][name], mine, rtol=1e-9, atol=1e-12, msg=name)


def test_nor_do_those_of_padded_rows(with_states: Path, two: dict[str, Any]) -> None:
    with world_of_one():
        one = learnt(0, with_states, 1, packs_rows=False)
    assert one.keys() == two["padded"].keys() and any("visual" in name for name in one)
    for name, mine in one.items():
        assert float((two["padded"][name] - mine).norm()) <= 1e-3 * float(mine.norm()), name  # float32


def test_a_frozen_tower_gets_none_and_the_decoder_s_are_the_same(
    one: dict[str, torch.Tensor], two: dict[str, Any]
) -> None:
    assert two["frozen"].keys() == {name for name in one if "visual" not in name}
    for name, mine in two["frozen"].items():
        torch.testing.assert_close(mine, one[name], rtol=1e-9, atol=1e-12, msg=name)
