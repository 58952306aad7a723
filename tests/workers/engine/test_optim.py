"""Schedules, clipping, the norm; AdamW: torch's numbers, state per parameter, offloaded moments, bfloat16 masters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.optim import Optimizer, learning_rate
from hrl.workers.engine.rounding import noise, round_stochastically, rounding_key
from hrl.workers.requests import Training
from tests.models.tiny import optim_config
from tests.workers.engine.fake_device import DEVICE, FakeDevice

CPU = torch.device("cpu")
BETAS = (0.9, 0.99)
SHAPES = ((7, 33), (130,), (3, 5, 11), (1, 1))


@pytest.mark.parametrize(
    "kind, rates",
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.88284271, 0.6, 0.31715729, 0.2]),
    ],
)
def test_schedules_by_hand(kind, rates):
    optim = optim_config(lr=1.0, lr_scheduler_type=kind, lr_warmup_steps=2, min_lr_ratio=0.2)
    assert [learning_rate(optim, 6, step) for step in range(7)] == pytest.approx(rates)
    assert learning_rate(optim, 6, 1000) == pytest.approx(rates[-1])


def test_warm_up_as_a_share_of_the_run():
    share = optim_config(lr=1.0, lr_warmup_steps=-1, lr_warmup_steps_ratio=0.25)
    steps = optim_config(lr=1.0, lr_warmup_steps=3, lr_warmup_steps_ratio=0.25)
    assert [learning_rate(share, 40, step) for step in (0, 8, 9)] == pytest.approx([0.1, 0.9, 1.0])
    assert [learning_rate(steps, 40, step) for step in (0, 1, 2)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert learning_rate(optim_config(lr=1.0), 40, 0) == 1.0


def make_optimizer(grad_clip: float, **changes) -> tuple[nn.Module, Optimizer]:
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    optim = optim_config(lr=0.1, **changes)
    training = Training(optim=optim, grad_clip=grad_clip, total_steps=1, seed=0, run_folder=None)
    return module, Optimizer(module, training, device=CPU)


def test_the_reported_norm_is_the_one_before_clipping():
    module, optimizer = make_optimizer(1.0, weight_decay=0.0)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    report = optimizer.step(torch.tensor(0.0))
    assert report.grad_norm == pytest.approx(5.0) and report.applied
    moments = optimizer.rule.state[module.weight]["exp_avg"]
    torch.testing.assert_close(moments, 0.1 * torch.tensor([[0.6, 0.8]]), rtol=1e-5, atol=0)


def test_a_small_gradient_is_not_scaled():
    module, optimizer = make_optimizer(10.0)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step(torch.tensor(0.0))
    torch.testing.assert_close(optimizer.rule.state[module.weight]["exp_avg"], torch.tensor([[0.3, 0.4]]))


def test_a_loss_that_is_not_finite_stops_the_step_even_with_finite_gradients():
    module, optimizer = make_optimizer(1.0)
    module.weight.grad = torch.ones(1, 2)
    assert not optimizer.step(torch.tensor(float("nan"))).applied
    assert torch.equal(module.weight.detach(), torch.ones(1, 2)) and module.weight.grad is None


def parameters_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def optimizer_of(parameters: list[nn.Parameter], **options) -> AdamW:
    names = {parameter: f"p{index}" for index, parameter in enumerate(parameters)}
    return AdamW(names, betas=BETAS, weight_decay=0.1, **({"device": CPU} | options))


def give_gradients(parameters: list[nn.Parameter], step: int, skipped: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index == skipped else gradient


def train(parameters: list[nn.Parameter], step_of: Callable[[], None], steps: range = range(5)) -> None:
    """Five steps, in the first three of which the first parameter gets no gradient."""
    for step in steps:
        give_gradients(parameters, step, skipped=0 if step < 3 else None)
        step_of()


# ---------------------------------------------------------------------------------------------- state per parameter


def test_the_numbers_are_torchs_also_where_a_parameter_gets_its_first_gradient_late() -> None:
    ours, theirs = parameters_of(), parameters_of()
    adamw = optimizer_of(ours, bucket_elements=50)  # where nothing moves, nothing is cut
    torchs = torch.optim.AdamW(theirs, lr=0.01, betas=BETAS, weight_decay=0.1, fused=True)
    train(ours, lambda: adamw.step(0.01))
    train(theirs, torchs.step)
    assert all(torch.equal(mine, yours) for mine, yours in zip(ours, theirs, strict=True))
    assert list(adamw.steps.values()) == [2, 5, 5, 5]


def test_a_parameter_without_a_gradient_keeps_weight_moments_and_count() -> None:
    parameters = parameters_of()
    before, adamw = parameters[0].detach().clone(), optimizer_of(parameters)
    train(parameters, lambda: adamw.step(0.01), range(3))
    assert torch.equal(parameters[0].detach(), before) and adamw.steps[parameters[0]] == 0
    assert not adamw.state[parameters[0]]["exp_avg"].any() and adamw.state[parameters[1]]["exp_avg"].any()


# ---------------------------------------------------------------------------------------------- moments in host memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bucket_elements", [64, 1 << 20])
def test_moments_that_visit_give_the_numbers_of_moments_that_stay(dtype: torch.dtype, bucket_elements: int) -> None:
    stayed, visited = parameters_of(dtype), parameters_of(dtype)
    one = optimizer_of(stayed)
    other = optimizer_of(visited, offload=True, bucket_elements=bucket_elements)
    train(stayed, lambda: one.step(0.01))
    train(visited, lambda: other.step(0.01))
    # Cut elsewhere, a kernel's last elements go another way through the CPU's registers: the last bit may differ.
    cut = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-7}[dtype] if bucket_elements == 64 else 0.0
    for mine, yours in zip(stayed, visited, strict=True):
        torch.testing.assert_close(mine, yours, rtol=cut, atol=0)
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one.state[mine][moment], other.state[yours][moment], rtol=cut, atol=0)


def test_moments_are_born_on_the_host_and_at_most_two_buckets_of_them_visit_the_device() -> None:
    parameters = [nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in ((100, 10), (500,), (4000,))]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with FakeDevice() as recorded:
        adamw = optimizer_of(parameters, device=DEVICE, offload=True, bucket_elements=1000)
        moments = [tensor for state in adamw.state.values() for tensor in state.values()]
        assert {tensor.device for tensor in moments} == {CPU} and recorded.peak_bytes == 0
        adamw.step(0.01)
        bucket_bytes = 2 * 4 * 1000
        counts_bytes = 4 * 7  # the step count of each of 7 pieces
        assert bucket_bytes < recorded.peak_bytes <= 2 * bucket_bytes + counts_bytes
        assert recorded.held_bytes == 0
    way = {"in": 0, "out": 0}
    for direction, nbytes in recorded.copies:
        way[direction] += nbytes
    assert way == {"in": 2 * 4 * 5500 + counts_bytes, "out": 2 * 4 * 5500}
    assert {tensor.device for tensor in moments} == {CPU}


def test_a_bucket_comes_while_the_one_before_it_is_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = parameters_of()
    give_gradients(parameters, 0)
    adamw = optimizer_of(parameters, offload=True, bucket_elements=200)
    order = []
    for name in ("_fetch", "_update", "_store"):
        original = getattr(adamw, name)

        def call(bucket, *rest, name=name, original=original):
            order.append((name.removeprefix("_"), sum(piece.stop - piece.start for piece in bucket)))
            return original(bucket, *rest)

        monkeypatch.setattr(adamw, name, call)
    adamw.step(0.01)
    assert order == [
        ("fetch", 200),
        ("fetch", 200),
        ("update", 200),
        ("store", 200),
        ("fetch", 127),
        ("update", 200),
        ("store", 200),
        ("update", 127),
        ("store", 127),
    ]


# ---------------------------------------------------------------------------------------------- bfloat16 masters


def test_chance_is_uniform_and_a_function_of_key_and_place_alone() -> None:
    drawn = noise(1 << 18, rounding_key(0, "w", 1), 0, CPU)
    assert drawn.min() >= 0 and drawn.max() <= 0xFFFF
    assert drawn.double().mean().item() == pytest.approx(0x7FFF + 0.5, abs=5 * 18918 / 512)  # five standard errors
    shares = torch.bincount(drawn >> 12, minlength=16).double() / drawn.numel()
    assert (shares - 1 / 16).abs().max() < 0.003
    for first in (5, (1 << 31) - 3, (1 << 32) - 7, 3 << 32):
        whole = noise(64, 12345678901234567, first, CPU)
        parts = [noise(1, 12345678901234567, first + place, CPU) for place in range(64)]
        assert torch.equal(whole, torch.cat(parts))
    others = [noise(1 << 16, rounding_key(*key), 0, CPU) for key in ((0, "w", 2), (1, "w", 1), (0, "v", 1))]
    for other in others:
        assert torch.corrcoef(torch.stack([drawn[: 1 << 16], other]).double())[0, 1].abs() < 0.02


def test_a_number_goes_to_a_neighbour_and_on_average_stays_where_it_is() -> None:
    for number in (1.001, -1.001, 3.1e-5, -250.3):
        wide = torch.full((1 << 16,), number)
        rounded = round_stochastically(wide, rounding_key(0, "w", 1), 0).double()
        low, high = sorted(rounded.unique().tolist())
        exact = wide[0].double().item()
        assert low < exact < high and high - low == pytest.approx(abs(number) * 2**-7, rel=0.6)
        share = (exact - low) / (high - low)
        error = (share * (1 - share) / wide.numel()) ** 0.5
        assert (rounded == high).double().mean().item() == pytest.approx(share, abs=5 * error)


def test_numbers_that_bfloat16_has_and_what_is_not_finite_stay() -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -0.5, 1.5, float("inf"), float("-inf")])
    assert torch.equal(round_stochastically(kept, 77, 0), kept.bfloat16())
    # Of every kind: cut off, the first would be an infinity; one more than the second is minus zero.
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).repeat(64).view(torch.float32)
    assert round_stochastically(nans, 77, 0).isnan().all()


def weights_after(dtype: torch.dtype, steps: int, *, seed: int = 0, offload: bool = False) -> tuple[Tensor, Tensor]:
    """Weights as of a trained model, 256 Ki of them, before and after steps of AdamW at 1e-6."""
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter((0.02 * torch.randn(512, 512, generator=generator)).to(dtype))
    before = weight.detach().double()
    adamw = AdamW(
        {weight: "w"}, betas=(0.9, 0.999), weight_decay=0.0, device=CPU, seed=seed, offload=offload, bucket_elements=999
    )
    gradient = torch.randn(512, 512, generator=generator)
    for _ in range(steps):
        weight.grad = gradient.to(dtype)
        adamw.step(1e-6)
    return before, weight.detach().double()


def test_at_a_rate_of_1e_6_bfloat16_masters_move_on_average_as_float32_ones_do() -> None:
    """Rounded to the nearest, 98 % of them would not move at all, and the others too far."""
    steps = 20
    before, after = weights_after(torch.bfloat16, steps)
    wide = nn.Parameter(before.float())  # the same weights, in float32
    reference = AdamW({wide: "w"}, betas=(0.9, 0.999), weight_decay=0.0, device=CPU)
    generator = torch.Generator().manual_seed(3)
    torch.randn(512, 512, generator=generator)
    gradient = torch.randn(512, 512, generator=generator).bfloat16().float()
    for _ in range(steps):
        wide.grad = gradient.clone()
        reference.step(1e-6)
    wanted, moved = wide.detach().double() - before, after - before
    assert wanted.abs().mean() == pytest.approx(steps * 1e-6, rel=1e-2)
    # Along the direction of the update, so that weights that rise and weights that fall count alike.
    along = moved * wanted.sign()
    error = along.std().item() / along.numel() ** 0.5
    assert along.mean().item() == pytest.approx(wanted.abs().mean().item(), abs=5 * error)
    assert error < 0.02 * wanted.abs().mean()
    nearest = (before + wanted / steps).float().bfloat16().double()
    assert (nearest != before).double().mean() < 0.03, "rounding to the nearest moves next to nothing"


def test_rounding_depends_on_the_seed_and_not_on_buckets_or_where_moments_lie() -> None:
    _, one = weights_after(torch.bfloat16, 3)
    _, again = weights_after(torch.bfloat16, 3, offload=True)
    _, other = weights_after(torch.bfloat16, 3, seed=1)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_moments_of_bfloat16_masters_are_float32() -> None:
    parameters = parameters_of(torch.bfloat16)
    for offload in (False, True):
        state = optimizer_of(parameters, offload=offload).state[parameters[0]]
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_bfloat16_masters_learn_a_regression_as_float32_ones_do() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 32, generator=generator)
    wanted = inputs @ torch.randn(32, 8, generator=generator)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(32, 8, dtype=dtype))
        adamw = AdamW({weight: "w"}, betas=(0.9, 0.99), weight_decay=0.0, device=CPU)
        # A step is an eighth of the spacing between weights of one: to the nearest, they would stay as they are.
        for _ in range(600):
            error = inputs @ weight.detach().float() - wanted
            weight.grad = (inputs.T @ error / len(inputs)).to(dtype)
            adamw.step(1e-3)
        losses[dtype] = error.square().mean().item()
    start = (inputs @ torch.ones(32, 8) - wanted).square().mean().item()
    assert losses[torch.float32] < start / 2
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.1)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"p0 is torch.float16.*model_dtype"):
        optimizer_of(parameters_of(torch.float16))
