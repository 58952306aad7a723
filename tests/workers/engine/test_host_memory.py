"""Parameters that leave the device and come back; a CPU stands for the device, and every copy is a real one."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch

from hrl.workers.engine.casts import keeps_cast_parameters
from hrl.workers.engine.host_memory import HostCopies, host_zeros_like, local
from hrl.workers.policy import Policy
from tests.models.tiny import make_batch, plan_rows
from tests.workers.engine.fake_device import DEVICE, FakeDevice
from tests.workers.engine.ranks import CPU, parameters, policy_of

pytestmark = pytest.mark.usefixtures("world")


def addresses(policy: Policy) -> list[int]:
    return [local(parameter.detach()).data_ptr() for parameter in policy.engine.module.parameters()]


def offloading(llama: Path) -> Policy:
    """A policy whose engine takes its parameters to other memory between calls."""
    policy = policy_of(llama, "float32")
    policy.engine.host_copies = HostCopies(policy.engine.module, CPU)
    policy.engine._is_changed = False
    policy.engine.offload()
    return policy


def train(policy: Policy, steps: int = 2) -> None:
    batch = make_batch()
    for _ in range(steps):
        policy.learn(batch, plan_rows(batch, 1, 2).ranks[0])


def test_offloading_changes_no_number(llama) -> None:
    stayed, moved = policy_of(llama, "float32"), offloading(llama)
    batch = make_batch()
    for policy in (stayed, moved):
        train(policy)
    want, got = parameters(stayed), parameters(moved)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    scores = [policy.log_probs(batch).batch["old_log_probs"] for policy in (stayed, moved)]
    assert torch.equal(*scores)


def test_parameters_have_one_home_on_the_host_and_are_elsewhere_while_they_are_used(llama, monkeypatch) -> None:
    policy = offloading(llama)
    home, during = addresses(policy), []
    step = policy.engine.optimizer.step
    monkeypatch.setattr(
        policy.engine.optimizer,
        "step",
        lambda *args, **options: during.extend(addresses(policy)) or step(*args, **options),
    )
    train(policy)
    assert addresses(policy) == home and not set(during) & set(home)
    policy.engine.offload()
    assert addresses(policy) == home
    for _ in range(2):
        policy.engine.onload()
    assert not set(addresses(policy)) & set(home)


def test_what_did_not_change_is_not_copied_back(llama) -> None:
    policy = offloading(llama)
    name, parameter = next(iter(policy.engine.module.named_parameters()))
    before = parameters(policy)[name]
    for changed in (False, True):
        policy.engine.onload()
        with torch.no_grad():
            local(parameter).add_(1.0)  # behind the engine's back
        policy.engine._is_changed = changed
        policy.engine.offload()
        assert torch.equal(parameters(policy)[name], before + 1.0 if changed else before)


def test_a_checkpoint_is_loaded_into_the_home_and_seen_on_the_device(llama, tmp_path) -> None:
    trained = offloading(llama)
    train(trained)
    trained.engine.save(tmp_path)
    fresh = offloading(llama)
    home = addresses(fresh)
    fresh.engine.load(tmp_path)
    assert addresses(fresh) == home
    for policy in (trained, fresh):
        train(policy, 1)
    want, got = parameters(trained), parameters(fresh)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_an_offloaded_module_holds_nothing_of_the_device(llama) -> None:
    module = policy_of(llama, "float32").engine.module
    copies, num_bytes = HostCopies(module, DEVICE), sum(local(p.detach()).nbytes for p in module.parameters())
    copies.offload(changed=False)
    with FakeDevice() as recorded:
        copies.onload()
        assert {p.device for p in module.parameters()} == {DEVICE}
        assert num_bytes <= recorded.held_bytes <= recorded.peak_bytes == num_bytes
        copies.offload(changed=False)
        assert recorded.held_bytes == 0 and {p.device for p in module.parameters()} == {CPU}
    assert recorded.copies == [("in", local(p.detach()).nbytes) for p in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_pinned_shares_no_page_with_anything_else(llama, dtype) -> None:
    """CUDA pins pages, each once: to pin a page that two tensors share fails."""
    owned: list[tuple[int, int]] = []
    homes = [host_zeros_like(p, dtype, CPU) for p in policy_of(llama, "float32").engine.module.parameters()]
    for home in [*homes, host_zeros_like(torch.ones(3, 5), dtype, CPU), host_zeros_like(torch.ones(5000), dtype, CPU)]:
        shard = local(home)
        assert shard.dtype == dtype and not shard.any() and shard.is_contiguous()
        first = shard.data_ptr()
        assert first % mmap.PAGESIZE == 0
        storage = shard.untyped_storage()
        last = first + -(-shard.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert storage.data_ptr() <= first and last <= storage.data_ptr() + storage.nbytes()
        owned.append((first, last))
    ends = sorted(owned)
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(ends))


@pytest.mark.parametrize(
    "ranks, device, reshard, keeps",
    [(1, "cpu", True, True), (1, "cuda", True, False), (1, "cuda", False, True), (2, "cpu", False, False)],
)
def test_cast_copies_stay_where_there_is_memory_for_them(ranks, device, reshard, keeps) -> None:
    assert keeps_cast_parameters(ranks, torch.device(device), reshard) is keeps
