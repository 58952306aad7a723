"""A checksum of weights sees every bit, adds up over ranks, and is compared where weights should have stayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hrl.workers.engine.checksum import STRIDE, Checksums, WeightsDifferError, _parts, places_of
from hrl.workers.engine.nonfinite import NonFiniteStepError, NonFiniteWeightsError
from hrl.workers.engine.update_rule import Place
from tests.models.tiny import make_batch, plan_rows
from tests.workers.asked import Actor
from tests.workers.engine.ranks import flip, policy_of

pytestmark = pytest.mark.usefixtures("world")

NAME = "model.model.layers.1.mlp.up_proj.weight"


def learned(llama: Path, dtype: str = "float32") -> Actor:
    """A policy after an update."""
    policy = policy_of(llama, dtype)
    learn(policy)
    return policy


def learn(policy: Actor) -> int:
    """Take a step; return the checksum after it."""
    batch = make_batch()
    return int(policy.learn(batch, plan_rows(batch, 1, 2).ranks[0])["actor/weights_checksum"].result())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    module = torch.nn.Linear(33, 65).to(dtype)
    begins = places_of(module)
    before = Checksums.of(module, begins)
    words = module.weight.detach().view(torch.uint8)
    for place in (0, 17, words.shape[1] - 1):  # bytes of a row
        for bit in range(8):
            for row in (0, 40, 64):
                words[row, place] ^= 1 << bit
                after = Checksums.of(module, begins)
                assert before.differ(after) == ["weight"]
                assert after.combined() != before.combined()
                words[row, place] ^= 1 << bit
    assert Checksums.of(module, begins) == before


@pytest.mark.parametrize("rows, columns", [(7, 3001), (5, 40)])
def test_blocks_of_a_matrix_add_up_to_the_checksum_of_the_matrix(rows: int, columns: int) -> None:
    """Of some columns, as a tensor group cuts them, and of some rows of these."""
    whole = torch.nn.Parameter(torch.randn(rows, columns))
    wanted = _parts("w", whole, Place(0, columns, columns))
    total = torch.zeros(2, dtype=torch.int64)
    for of_rows in (slice(0, 4), slice(4, rows)):
        for of_columns in (slice(0, columns // 2), slice(columns // 2, columns)):
            part = torch.nn.Parameter(whole.detach()[of_rows, of_columns].clone())
            first = of_rows.start * columns + of_columns.start
            total += _parts("w", part, Place(first, part.shape[1], columns))
    apart = total - wanted
    assert apart[0] % 2**32 == 0 and apart[1] == 0


def test_tensors_and_rows_that_change_places_are_seen() -> None:
    module = torch.nn.ModuleDict({name: torch.nn.Linear(STRIDE, 3, bias=False) for name in "ab"})
    begins = places_of(module)
    before = Checksums.of(module, begins).combined()
    a, b = module["a"].weight.detach(), module["b"].weight.detach()
    a[:] = a.roll(1, 0)
    rolled = Checksums.of(module, begins).combined()
    a[:] = a.roll(-1, 0)
    kept = a.clone()
    a[:], b[:] = b.clone(), kept
    swapped = Checksums.of(module, begins).combined()
    assert len({before, rolled, swapped}) == 3


def test_it_fits_the_whole_numbers_of_json_and_is_that_of_the_update(llama: Path) -> None:
    first, second = policy_of(llama, "float32"), policy_of(llama, "float32")
    steps = [learn(first) for _ in range(3)]
    assert [learn(second) for _ in range(3)] == steps and len(set(steps)) == 3
    assert all(number < 2**52 and json.loads(json.dumps(float(number))) == number for number in steps)


def test_a_bit_that_flips_between_updates_ends_the_run(llama: Path, tmp_path: Path) -> None:
    policy = learned(llama)
    flip(policy.engine.module, NAME, bit=3)
    named = f"weights of rank 0 changed outside of an update: 1 parameter.*{NAME}.*continues from the newest checkpoint"
    with pytest.raises(WeightsDifferError, match=named):
        learn(policy)
    with pytest.raises(WeightsDifferError, match=named):
        policy.engine.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    flip(policy.engine.module, NAME, bit=3)
    learn(policy)


def test_weights_that_come_back_otherwise_are_refused(llama: Path, tmp_path: Path) -> None:
    policy = learned(llama)
    policy.engine.save(tmp_path)
    before = policy.engine.weights_checksum()
    resumed = policy_of(llama, "float32")
    resumed.engine.load(tmp_path)
    assert resumed.engine.weights_checksum() == before
    (shard,) = tmp_path.glob("shard-*.safetensors")
    content = bytearray(shard.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start, _ = header[f"model.{NAME}"]["data_offsets"]
    content[8 + int.from_bytes(content[:8], "little") + start + 5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(WeightsDifferError, match=rf"{tmp_path} are not those that were written"):
        resumed.engine.load(tmp_path)


def test_weights_or_moments_that_are_no_numbers_end_the_run_at_once(llama: Path, tmp_path: Path) -> None:
    policy = learned(llama)
    parameter = policy.engine.module.get_parameter(NAME)
    policy.engine.optimizer.rule.state[parameter]["exp_avg_sq"].to_local()[0, 0] = float("inf")
    with pytest.raises(NonFiniteWeightsError, match=f"update actor of step 7.*rank 0: exp_avg_sq of {NAME}"):
        learn(policy)
    assert issubclass(NonFiniteWeightsError, NonFiniteStepError), "which has an exit status of its own"


def test_large_finite_weights_are_no_trouble(llama: Path) -> None:
    policy = policy_of(llama, "float32")
    with torch.no_grad():
        # Its square is beyond float32. The layer's output is divided by its norm, so the loss stays finite.
        policy.engine.optimizer.rule.state[policy.engine.module.get_parameter(NAME)]["exp_avg"].to_local()[0, 0] = 1e25
    learn(policy)
