"""Optimizers beside AdamW: torch's or torchao's numbers, the same on any number of ranks, and state that continues.

Ranks are forks of a process; what they run is below.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hrl.models.adapter import AdapterSource
from hrl.workers.engine import adamw_8bit
from hrl.workers.engine.adafactor import Adafactor
from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.adamw_8bit import AdamW8bit, coded, decoded
from hrl.workers.engine.muon import Muon
from hrl.workers.engine.optim import Optimizer
from hrl.workers.engine.update_rule import UpdateRule
from hrl.workers.requests import Training
from tests.models.tiny import (
    actor_config,
    fsdp_config,
    make_batch,
    model_config,
    optim_config,
    plan_rows,
    run_ranks,
    save_llama,
    save_mixture,
    world_of_one,
)
from tests.workers.asked import Actor
from tests.workers.engine.ranks import CPU, full, parameters

pytestmark = pytest.mark.cluster

NAMES = ("adafactor", "muon", "adamw8bit")
BETAS = (0.9, 0.99)
#: Rows that two ranks don't share evenly, one row alone, experts, a vector; a high and a wide matrix.
SHAPES = {"a": (33, 64), "b": (1, 300), "c": (5, 6, 11), "d": (130,), "e": (9, 520), "f": (40, 8)}
MATRICES = ("a", "b", "c", "e", "f")
DECAY = 0.1


@pytest.fixture(autouse=True, scope="module")
def torchao() -> Iterator[None]:
    """The folder of packages that are not for everybody."""
    folder = str(Path(sys.prefix) / "optimizers")
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments of small matrices have codes too."""
    monkeypatch.setattr(adamw_8bit, "SMALL", 64)


def start(name: str) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(ord(name)), dtype=torch.float64)


def gradient(name: str, step: int) -> Tensor:
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(1000 * step + ord(name)), dtype=torch.float64
    )


def rule_of(name: str, names: dict[nn.Parameter, str], **options: Any) -> UpdateRule:
    given = {"weight_decay": DECAY, "device": CPU} | options
    if name == "adafactor":
        return Adafactor(names, **given)
    if name == "muon":
        return Muon(names, MATRICES, betas=BETAS, **given)
    return AdamW8bit(names, betas=BETAS, **given)


def moved(name: str, dtype: torch.dtype, mesh: Any = None, replicas: int = 1, **options: Any) -> dict[str, Tensor]:
    """Weights and state after four steps, in the first two of which one parameter has no gradient; gathered."""

    def lay(tensor: Tensor) -> Tensor:
        if mesh is None:
            return tensor
        return distribute_tensor(tensor, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])

    device = options.get("device", CPU)
    mine = {each: nn.Parameter(lay(start(each).to(device, dtype))) for each in SHAPES}
    rule = rule_of(name, {parameter: each for each, parameter in mine.items()}, **options)
    keys = {each: rule.state[parameter].keys() for each, parameter in mine.items()}
    for step in range(4):
        for each, parameter in mine.items():
            parameter.grad = None if each == "c" and step < 2 else lay(gradient(each, step).to(device, dtype))
        rule.step(0.02)
    assert {each: rule.state[parameter].keys() for each, parameter in mine.items()} == keys
    assert [rule.steps[parameter] for parameter in mine.values()] == [4, 4, 2, 4, 4, 4]
    found = {each: full(parameter.detach()) for each, parameter in mine.items()}
    for each, parameter in mine.items():
        found |= {f"{part} of {each}": full(tensor) for part, tensor in rule.state[parameter].items()}
    return found


def learner(path: Path, name: str, **model: Any) -> Actor:
    """A policy whose gradients are clipped, with a rate that rises."""
    optim = optim_config(name=name, lr=2e-2, lr_warmup_steps=6)
    actor = actor_config(grad_clip=0.1, optim=optim)
    return Actor(model_config(path, **model), actor, fsdp_config("float64"), device=CPU, total_steps=10)


def trained(path: Path, name: str, folder: Path, **model: Any) -> dict[str, Any]:
    """Two steps that are saved, and two more."""
    policy, step = learner(path, name, **model), stepper()
    for _ in range(2):
        step(policy)
    policy.engine.save(folder)
    saved = state_of(policy)
    return {"saved": saved, "norm": [step(policy) for _ in range(2)], "after": state_of(policy)}


def resumed(path: Path, name: str, folder: Path, **model: Any) -> dict[str, Any]:
    policy, step = learner(path, name, **model), stepper()
    policy.engine.load(folder)
    saved = state_of(policy)
    return {"saved": saved, "norm": [step(policy) for _ in range(2)], "after": state_of(policy)}


def stepper() -> Callable[[Actor], float]:
    batch = make_batch()
    plan = plan_rows(batch, dist.get_world_size(), 2)
    rank = dist.get_rank()
    mine = batch.select_idxs(list(plan.rows[rank]))
    return lambda policy: policy.learn(mine, plan.ranks[rank])["actor/grad_norm"].result()


def state_of(policy: Actor) -> dict[str, Tensor]:
    optimizer = policy.engine.optimizer
    assert optimizer is not None
    return parameters(policy) | {name: full(tensor) for name, tensor in optimizer.state_tensors().items()}


ADAPTER = {"adapter": AdapterSource(4, 8, "all-linear", None, False, None, seed=3, merge=False)}


def on_rank(rank: int, llama: Path, root: Path) -> dict[str, Any]:
    """All that the tests want to know of two ranks."""
    adamw_8bit.SMALL = 64
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for name in NAMES:
        found[name] = {
            "moved": moved(name, torch.float64, mesh),
            "replicated": moved(name, torch.float64, replicated),
            "bfloat16": moved(name, torch.bfloat16, mesh),
            "trained": trained(llama, name, root / "two" / name),
            "resumed": resumed(llama, name, root / "two" / name),
            "from one": resumed(llama, name, root / "one" / name),
        }
    found["adapter"] = trained(llama, "muon", root / "two" / "adapter", **ADAPTER)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("optimizers")
    return {"llama": save_llama(root / "llama"), "mixture": save_mixture(root / "mixture", "qwen3_moe"), "root": root}


@pytest.fixture(scope="module", autouse=True)
def one(folders: dict[str, Path], torchao: None) -> Iterator[dict[str, Any]]:
    """What one rank computes; its world stays for the tests."""
    with world_of_one(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_8bit, "SMALL", 64)
        root, found = folders["root"], {}
        for name in NAMES:
            found[name] = {
                "moved": moved(name, torch.float64),
                "bfloat16": moved(name, torch.bfloat16),
                "trained": trained(folders["llama"], name, root / "one" / name),
            }
        found["adapter"] = trained(folders["llama"], "muon", root / "one" / "adapter", **ADAPTER)
        yield found


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], one: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two ranks computes."""
    return run_ranks(2, folders["root"] / "ranks", on_rank, *(folders[name] for name in ("llama", "root")))


def distance(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of the tensor that is furthest off."""
    assert mine.keys() == theirs.keys()
    return max(
        float((mine[name].double() - theirs[name].double()).norm() / theirs[name].double().norm().clamp(min=1e-30))
        for name in theirs
    )


# ---------------------------------------------------------------------------------------------- the numbers of others


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_adafactor_is_torchs(dtype: torch.dtype, tolerance: float) -> None:
    mine, theirs = ([nn.Parameter(start(each).to(dtype)) for each in SHAPES] for _ in range(2))
    ours = Adafactor(dict(zip(mine, SHAPES, strict=True)), weight_decay=DECAY, device=CPU)
    torchs = torch.optim.Adafactor(theirs, lr=0.02, weight_decay=DECAY)
    for step in range(5):
        for each, one, other in zip(SHAPES, mine, theirs, strict=True):
            one.grad = gradient(each, step).to(dtype) * 10.0 ** (step - 3)
            other.grad = one.grad.clone()
        ours.step(0.02)
        torchs.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for part, tensor in ours.state[one].items():
            torch.testing.assert_close(tensor, torchs.state[other][part], rtol=tolerance, atol=0)


def test_a_step_of_adafactor_by_hand() -> None:
    """Weights of one, so the rate is relative to one; the first step takes the squares of its gradient alone."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    rule = Adafactor({weight: "w"}, weight_decay=0.0, device=CPU)
    weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    rule.step(0.5)
    rows, columns = [2.5, 12.5], [5.0, 10.0]  # mean squares
    update = [
        [g / math.sqrt(r * c / 7.5) for g, c in zip(line, columns, strict=True)]
        for line, r in zip([[1.0, 2.0], [3.0, 4.0]], rows, strict=True)
    ]
    size = math.sqrt(sum(u * u for line in update for u in line) / 4)
    want = [[1.0 - 0.5 * u / max(1.0, size) for u in line] for line in update]
    torch.testing.assert_close(weight.detach(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)
    assert rule.state[weight]["row_var"].flatten().tolist() == pytest.approx(rows)
    assert rule.state[weight]["col_var"].flatten().tolist() == pytest.approx(columns)


def test_adafactor_sums_where_the_group_is_whatever_holds_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in host memory of a mesh of GPUs: a group of such a mesh may have no way to sum tensors of the CPU."""
    rule, summed_on = Adafactor({nn.Parameter(torch.ones(2, 2)): "w"}, weight_decay=0.0, device=CPU), list[str]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed_on.append(tensor.device.type))
    rule._group, rule._meets_on = dist.GroupMember, "meta"
    with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to bring back from there
        rule._sums([torch.ones(2)])
    rule._meets_on = "cpu"
    assert rule._sums([torch.ones(2), torch.ones(1, 3)])[1].shape == (1, 3)
    assert summed_on == ["meta", "cpu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(dtype: torch.dtype) -> None:
    mine, theirs = ({each: nn.Parameter(start(each).to(dtype)) for each in SHAPES} for _ in range(2))
    ours = rule_of("muon", {parameter: each for each, parameter in mine.items()})
    flat = [theirs[each] for each in ("a", "b", "e", "f")]
    experts = [nn.Parameter(matrix.clone()) for matrix in theirs["c"].detach()]
    matrices = torch.optim.Muon([*flat, *experts], lr=0.02, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW([theirs["d"]], lr=0.02, betas=BETAS, weight_decay=DECAY, fused=True)
    for step in range(4):
        for each in SHAPES:
            mine[each].grad = gradient(each, step).to(dtype)
            theirs[each].grad = mine[each].grad.clone()
        for place, expert in enumerate(experts):
            expert.grad = mine["c"].grad[place].clone()
        ours.step(0.02)
        matrices.step()
        rest.step()
    for each in ("a", "b", "d", "e", "f"):
        assert torch.equal(mine[each], theirs[each]), each
    assert torch.equal(mine["c"], torch.stack(experts))
    assert ours.state[mine["d"]].keys() == {"exp_avg", "exp_avg_sq"} and ours.state[mine["a"]].keys() == {
        "momentum_buffer"
    }


def test_muon_takes_the_matrices_of_layers_and_nothing_else(one: dict[str, Any], folders: dict[str, Path]) -> None:
    """Embedding, head, norms and biases are AdamW's; experts are Muon's."""
    fsdp, actor = fsdp_config("float32"), actor_config(optim=optim_config(name="muon"))
    policy = Actor(model_config(folders["mixture"]), actor, fsdp, device=CPU, total_steps=10)
    optimizer = policy.engine.optimizer
    assert optimizer is not None
    by_muon = {
        name for parameter, name in optimizer.names.items() if "momentum_buffer" in optimizer.rule.state[parameter]
    }
    shapes = {name: parameter.dim() for parameter, name in optimizer.names.items()}
    assert {name for name in shapes if ".layers." in name and shapes[name] > 1} == by_muon
    assert any(shapes[name] == 3 for name in by_muon) and any("embed" in name for name in shapes.keys() - by_muon)


def test_moments_in_8_bits_are_torchaos_where_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole blocks, and vectors. torchao would compile its step, which changes no number."""
    from torchao.optim import AdamW8bit as Theirs

    monkeypatch.setattr(adamw_8bit, "SMALL", 4096)
    shapes = ((16, 512), (8, 4, 256), (700,), (10, 10))
    generator = torch.Generator().manual_seed(5)
    begins = [torch.randn(shape, generator=generator) for shape in shapes]
    mine, theirs = ([nn.Parameter(begin.clone()) for begin in begins] for _ in range(2))
    ours = AdamW8bit(
        dict(zip(mine, "abcd", strict=True)), betas=BETAS, weight_decay=DECAY, device=CPU, bucket_elements=1024
    )
    reference = Theirs(theirs, lr=0.01, betas=BETAS, weight_decay=DECAY)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for _ in range(4):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        ours.step(0.01)
        reference.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        state = reference.state[other]["exp_avg_sq"]
        if one.numel() < 4096:
            torch.testing.assert_close(ours.state[one]["exp_avg_sq"], state, rtol=1e-5, atol=0)
            continue
        # A number in the middle of two codes may go to either, by its last bit.
        same = ours.state[one]["exp_avg_sq"] == state.codes
        assert same.double().mean() > 0.999
        torch.testing.assert_close(ours.state[one]["exp_avg_sq_scale"].flatten(), state.scale, rtol=1e-5, atol=0)


def test_codes_are_those_of_the_nearest_values_of_a_block() -> None:
    moment = torch.randn(3, 600, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moment[:, 256:512] *= 1e-6  # another block, another scale
    codes, scale = coded(moment, signed=True)
    assert codes.dtype == torch.uint8 and scale.shape == (3, 3)
    for row in range(3):
        for block in range(3):
            part = slice(256 * block, min(600, 256 * (block + 1)))
            assert scale[row, block] == moment[row, part].abs().max()
    back = decoded(codes, scale, signed=True)
    values = adamw_8bit._map(True, torch.float64, CPU)
    nearest = (moment[0, :256, None] / scale[0, 0] - values).abs().argmin(1)
    assert torch.equal(codes[0, :256].long(), nearest)
    error = (back - moment).abs() / scale.repeat_interleave(256, 1)[:, :600]
    assert error.max() < 0.008, "the widest gap of the map is 1.3 % of the scale"


def test_what_each_keeps_of_a_weight() -> None:
    """Bytes of state, of a matrix of 1,024 × 4,096."""
    weight = nn.Parameter(torch.empty(1024, 4096))
    kept = {}
    for name in ("adamw", *NAMES):
        module = nn.Module()
        module.weight = weight
        training = Training(optim=optim_config(name=name), grad_clip=1.0, total_steps=1, seed=0, run_folder=None)
        optimizer = Optimizer(module, training, device=CPU, matrices=["weight"])
        kept[name] = sum(tensor.nbytes for tensor in optimizer.state_tensors().values()) / weight.numel()
    assert kept == {
        "adamw": 8.0,
        "muon": 4.0,
        "adamw8bit": 2 + 2 * 4 / 256,
        "adafactor": pytest.approx(0.0049, rel=0.01),
    }


# ---------------------------------------------------------------------------------------------- any number of ranks


@pytest.mark.parametrize("name", NAMES)
def test_shards_move_as_the_whole(one, two, name):
    for rank in two:
        for layout in ("moved", "replicated"):
            assert distance(rank[name][layout], one[name]["moved"]) <= 1e-12, layout


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_masters_are_rounded_alike_on_any_number_of_ranks(one, two, name):
    alone = one[name]["bfloat16"]
    for rank in two:
        mine = rank[name]["bfloat16"]
        differ = sum(int((mine[each] != alone[each]).sum()) for each in SHAPES)
        assert differ <= 2e-3 * sum(alone[each].numel() for each in SHAPES)
    wide = one[name]["moved"]
    for each in SHAPES:
        assert alone[each].dtype == torch.bfloat16
        assert float((alone[each].double() - wide[each]).norm() / wide[each].norm()) < 0.02
    narrow = [
        part for part, tensor in alone.items() if " of " in part and tensor.dtype not in (torch.float32, torch.uint8)
    ]
    assert narrow == []


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_learns_with_clipped_gradients_as_on_one_rank(one, two, name):
    alone = one[name]["trained"]
    assert min(alone["norm"]) > 0.1, "the gradients have to be clipped"
    for rank in two:
        assert distance(rank[name]["trained"]["after"], alone["after"]) <= 1e-9
        assert rank[name]["trained"]["norm"] == pytest.approx(alone["norm"], rel=1e-9)


def test_an_adapter_learns_with_muon_as_on_one_rank(one, two):
    for rank in two:
        assert distance(rank["adapter"]["after"], one["adapter"]["after"]) <= 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_what_was_saved_is_continued_bit_for_bit_and_by_another_number_of_ranks(folders, one, two, name):
    alone = one[name]["trained"]
    again = resumed(folders["llama"], name, folders["root"] / "one" / name)
    fewer = resumed(folders["llama"], name, folders["root"] / "two" / name)
    pairs = [(again, alone), *((rank[name]["resumed"], rank[name]["trained"]) for rank in two)]
    for mine, straight in pairs:
        for half in ("saved", "after"):
            assert all(torch.equal(mine[half][part], straight[half][part]) for part in straight[half]), half
    for mine, straight in ((fewer, two[0][name]["trained"]), *((rank[name]["from one"], alone) for rank in two)):
        assert all(torch.equal(mine["saved"][part], straight["saved"][part]) for part in straight["saved"])
        assert distance(mine["after"], straight["after"]) <= 1e-9


# ---------------------------------------------------------------------------------------------- what is refused


def test_the_state_of_another_optimizer_is_refused_with_both_names(folders, one):
    policy = learner(folders["llama"], "adamw")
    said = r"holds the state of optim.name=muon, and this run has optim.name=adamw: set it to muon"
    with pytest.raises(ValueError, match=said):
        policy.engine.load(folders["root"] / "one" / "muon")
    policy.engine.load(folders["root"] / "one" / "muon", ["model", "extra"])
    assert parameters(policy).keys() < one["muon"]["trained"]["saved"].keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_moves_nothing(folders, name):
    policy = learner(folders["llama"], name)
    before, batch = state_of(policy), make_batch()
    batch.batch["advantages"][-1, 0] = float("inf")
    policy.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    optimizer = policy.engine.optimizer
    assert optimizer is not None and (optimizer.skipped_in_a_row, optimizer.steps_taken) == (1, 0)
    after = state_of(policy)
    assert all(torch.equal(after[part], tensor) for part, tensor in before.items())
    assert set(optimizer.moment_steps.values()) == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("name, tolerance", [("adafactor", 1e-5), ("muon", 5e-3), ("adamw8bit", 2e-3)])
def test_a_gpu_moves_weights_as_a_cpu_does(name, tolerance):
    """Products in bfloat16 and codes in the middle of two values may differ."""
    alone, there = moved(name, torch.float32), moved(name, torch.float32, device=torch.device("cuda", 0))
    for each in SHAPES:
        assert there[each].is_cuda
    assert distance({each: there[each].cpu() for each in SHAPES}, {each: alone[each] for each in SHAPES}) <= tolerance


def test_adamw_is_the_default(folders):
    policy = Actor(model_config(folders["llama"]), actor_config(), fsdp_config("float64"), device=CPU, total_steps=10)
    assert type(policy.engine.optimizer.rule) is AdamW
