"""How often the host waits for the device: not once per micro-batch, and a fixed number of times per optimizer step.

Two ways to look: on a CPU, a dispatch mode counts what would make a GPU and its host wait for each other. And on meta
tensors, which have no data, such an operation is an error, as is a copy to the host.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hrl.algos.policy_losses import POLICY_LOSSES
from hrl.algos.preference import PairOptions
from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.config.actor import PolicyLossConfig
from hrl.config.algorithm import RolloutCorrectionConfig
from hrl.models.loading import load_causal_lm, load_scalar_model
from hrl.models.ops.layout import to_device
from hrl.models.packed_model import PackedCausalLM, PackedScalarModel, TokenRows, pack_micro_batch, take_columns
from hrl.protocol import DataProto
from hrl.workers.engine import engine
from hrl.workers.engine.optim import StepReport
from hrl.workers.requests import OldLogProbs
from tests.models.tiny import (
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    plan_rows,
)
from tests.workers.asked import Actor, Critic, learn_pairs
from tests.workers.engine.fake_device import DEVICE, FakeDevice
from tests.workers.engine.ranks import CPU, policy_of

pytestmark = pytest.mark.usefixtures("world")

#: Their result's size or value depends on data, which the host has to wait for.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero", "item"}


class Waits(TorchDispatchMode):
    """Counts operations that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.seen[name] += 1
        if name in ("index", "index_put", "index_put_"):
            self.seen["index by mask"] += any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        return func(*args, **(kwargs or {}))


def sampled(loss_mode: str) -> DataProto:
    batch = make_batch()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    batch.batch["rollout_is_weights"] = torch.ones_like(batch.batch["advantages"])
    if loss_mode in ("clip_cov", "kl_cov"):
        batch.batch["selected_tokens"] = batch.batch["response_mask"].clone()
    return batch


def policy_for(llama: Path, loss_mode: str) -> Actor:
    section = SimpleNamespace(**PolicyLossConfig().model_dump() | {"loss_mode": loss_mode, "dro_beta": 1.0})
    constants = {"tau_pos": 1.0, "tau_neg": 1.05}
    return policy_of(llama, "float32", policy_loss=section, use_kl_loss=True, entropy_coeff=0.1, **constants)


def waits_of(run: Any) -> Counter[str]:
    with Waits() as waits:
        run()
    return +waits.seen


def test_what_waits_is_seen() -> None:
    mask, matrix = torch.tensor([True, False]), torch.ones(2, 2)
    waiting = [
        lambda: matrix[mask],
        lambda: float(matrix.sum()),
        lambda: mask.nonzero(),
        lambda: torch.equal(mask, mask),
    ]
    assert all(waits_of(run) for run in (*waiting, lambda: matrix.masked_select(matrix > 0)))
    assert not waits_of(lambda: torch.where(mask, matrix, 0.0).sum())


def plans_of(batch: DataProto) -> list[RankPlan]:
    """The same two mini-batches in one micro-batch each and in five, of which one has no row."""
    return [RankPlan(plan_rows(batch, 1, *cut).ranks[0].mini_batches * 2) for cut in ((1,), (4,))]


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
def test_no_micro_batch_of_an_update_makes_anybody_wait(llama, loss_mode) -> None:
    batch, policy = sampled(loss_mode), policy_for(llama, loss_mode)
    for plan in plans_of(batch):
        assert waits_of(lambda plan=plan: policy.learn(batch, plan)) == Counter()


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_nor_does_bypass_mode(llama, loss_type) -> None:
    batch, policy = sampled("vanilla"), policy_of(llama, "float32")
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
    rejection = {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.1}
    asked = {
        "correction": RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type, **correction, **rejection),
        "old_log_probs": OldLogProbs.SAMPLER,
    }
    for plan in plans_of(batch):
        assert waits_of(lambda plan=plan: policy.learn(batch, plan, **asked)) == Counter()


def test_scoring_makes_nobody_wait_for_a_micro_batch(llama) -> None:
    batch, policy = make_batch(), policy_of(llama, "float32")
    everything = {"with_entropy": True, "with_sum_pi_squared": True}
    for cut in (1, 4):
        plan = plan_rows(batch, 1, cut).ranks[0]
        assert waits_of(lambda plan=plan: policy.log_probs(batch, plan, **everything)) == Counter()


def test_an_update_of_a_critic_waits_for_no_micro_batch(llama) -> None:
    batch = make_batch()
    critic = Critic(model_config(llama), critic_config(), fsdp_config("float32"), device=CPU, total_steps=10)
    for plan in plans_of(batch):
        assert waits_of(lambda plan=plan: critic.learn(batch, plan)) == Counter()


def test_numbers_come_to_the_host_once_per_step_once_per_update_and_once_per_scoring(llama, monkeypatch) -> None:
    batch, policy = sampled("vanilla"), policy_for(llama, "vanilla")
    fetched: Counter[str] = Counter()
    for name in ("tolist", "cpu", "item"):
        original = getattr(Tensor, name)

        def count(tensor: Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
            fetched[name] += 1
            return original(tensor, *args)

        monkeypatch.setattr(Tensor, name, count)
    in_rows = 4  # of the batch, which is there already
    plans = plans_of(batch)
    first = plans[0]
    for plan in plans:
        fetched.clear()
        policy.learn(batch, plan)
        looked_at = 2 if plan is first else 3  # whether the state is finite, its checksum, and that of what was left
        assert fetched == {"tolist": 2 + 1 + looked_at, "cpu": in_rows}, "two steps, the metrics and the state"
        fetched.clear()
        policy.log_probs(batch, RankPlan(plan.mini_batches[:1]), with_entropy=True)
        assert fetched == {"cpu": in_rows + 1}


# ---------------------------------------------------------------------------------------------- without data


def on_meta(model: Actor | Critic, module: torch.nn.Module) -> Actor | Critic:
    """The same model on a device without data; what ends a step or an update, which waits, is left out."""
    engine = model.engine
    engine._checksums, engine._after_update = None, lambda what: 0
    engine.module, engine.device = module.to(DEVICE), DEVICE
    engine.optimizer.step = lambda loss, *, fill_missing=False: StepReport(0.0, 0.0, applied=True)
    return model


def update_on_meta(model: Actor | Critic, batch: DataProto, plan: RankPlan) -> list[tuple[str, int]]:
    taken: list[Any] = []
    with FakeDevice() as recorded, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Meter, "metrics", lambda meter: taken.append(meter) or {})
        model.learn(batch, plan)
    assert len(taken) == 1
    return recorded.copies


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
def test_a_micro_batch_runs_forward_and_backward_without_a_number_on_the_host(llama, loss_mode) -> None:
    batch, policy = sampled(loss_mode), policy_for(llama, loss_mode)
    module = PackedCausalLM(load_causal_lm(model_config(llama), torch.float32, meta=True).model)
    plan = plan_rows(batch, 1, 3).ranks[0]
    copies = update_on_meta(on_meta(policy, module), batch, plan)
    assert {direction for direction, _ in copies} == {"in"}
    for parameter in module.parameters():
        assert parameter.grad is not None


def test_so_does_a_micro_batch_of_pairs(llama) -> None:
    batch, policy = make_batch(num_groups=6, samples=2), policy_of(llama, "float32")
    batch.batch["is_chosen"] = torch.tensor([1, 0] * 6)
    batch.batch["ref_sequence_log_prob"] = torch.zeros(12)
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    plan = RankPlan((MiniBatchPlan((tuple(range(4)), tuple(range(4, 12))), 40, 12, 6),))
    for place in (CPU, DEVICE):
        if place == DEVICE:
            on_meta(policy, PackedCausalLM(load_causal_lm(model_config(llama), torch.float32, meta=True).model))
        with FakeDevice() as recorded, Waits() as waits, pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.Meter, "metrics", lambda meter: {})
            learn_pairs(policy, batch, plan, options=PairOptions(0.1))
        assert +waits.seen == Counter()
    assert {direction for direction, _ in recorded.copies} == {"in"}


def test_a_critics_micro_batch_does_too(llama) -> None:
    batch = make_batch()
    critic = Critic(model_config(llama), critic_config(), fsdp_config("float32"), device=CPU, total_steps=10)
    module = PackedScalarModel(load_scalar_model(model_config(llama), torch.float32, meta=True).model)
    copies = update_on_meta(on_meta(critic, module), batch, plan_rows(batch, 1, 3).ranks[0])
    assert {direction for direction, _ in copies} == {"in"}


# ---------------------------------------------------------------------------------------------- copies


def test_a_micro_batchs_tokens_come_in_one_copy_and_its_columns_in_another() -> None:
    batch = make_batch()
    rows, picked = TokenRows.of(batch), tuple(range(12))
    there = pack_micro_batch(rows, picked, share_prefix=True, wanted="next", device=CPU)
    with FakeDevice() as recorded:
        packed = pack_micro_batch(rows, picked, share_prefix=True, wanted="next", device=DEVICE)
        assert [direction for direction, _ in recorded.copies] == ["in"]
        columns = take_columns(batch, ("advantages", "ref_log_prob", "response_mask"), picked, packed)
        assert [direction for direction, _ in recorded.copies] == ["in", "in"]
    for name in ("input_ids", "position_ids", "hidden_index", "labels", "mask_index", "mask"):
        mine, theirs = getattr(packed, name), getattr(there, name)
        assert (mine.device, mine.dtype, mine.shape) == (DEVICE, theirs.dtype, theirs.shape), name
    assert columns["response_mask"].dtype == torch.int64
    assert {column.shape for column in columns.values()} == {packed.mask.shape}


def test_what_is_copied_together_arrives_as_it_was(monkeypatch) -> None:
    tensors = [
        torch.arange(7),
        torch.rand(3, 5)[:, ::2],
        torch.tensor([True, False, True]),
        torch.rand(2, dtype=torch.float64),
        torch.zeros(0, 4),
    ]
    real_to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: self.clone() if args == (DEVICE,) else real_to(self, *args)
    )
    moved = to_device(tensors, DEVICE)
    assert all(
        torch.equal(mine, yours) and mine.dtype == yours.dtype for mine, yours in zip(moved, tensors, strict=True)
    )
