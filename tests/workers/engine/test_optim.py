"""Schedules, clipping, the norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hrl.workers.engine.optim import Optimizer, Schedule
from tests.models.tiny import optim_config


@pytest.mark.parametrize(
    "kind, rates",
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.88284271, 0.6, 0.31715729, 0.2]),
    ],
)
def test_schedules_by_hand(kind, rates):
    schedule = Schedule(1.0, kind, warmup_steps=2, total_steps=6, min_ratio=0.2)
    assert [schedule.lr(step) for step in range(7)] == pytest.approx(rates)
    assert schedule.lr(1000) == pytest.approx(rates[-1])


def test_warm_up_as_a_share_of_the_run():
    assert Schedule.of(optim_config(lr_warmup_steps=-1, lr_warmup_steps_ratio=0.25), 40).warmup_steps == 10
    assert Schedule.of(optim_config(lr_warmup_steps=3, lr_warmup_steps_ratio=0.25), 40).warmup_steps == 3
    assert Schedule.of(optim_config(), 40).total_steps == 40


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lr_scheduler_type": "cosine"}, "length of the run"),
        ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1}, "length of the run"),
        ({"lr_scheduler_type": "step"}, "not constant"),
    ],
)
def test_schedules_that_cannot_be_drawn_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule.of(optim_config(**changes), None)


def make_optimizer(grad_clip: float, **changes) -> tuple[nn.Module, Optimizer]:
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    return module, Optimizer(module, optim_config(lr=0.1, **changes), grad_clip, None)


def test_the_reported_norm_is_the_one_before_clipping():
    module, optimizer = make_optimizer(1.0, weight_decay=0.0)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    report = optimizer.step(torch.tensor(0.0))
    assert report.grad_norm == pytest.approx(5.0) and report.applied
    moments = optimizer.adamw.state[module.weight]["exp_avg"]
    torch.testing.assert_close(moments, 0.1 * torch.tensor([[0.6, 0.8]]), rtol=1e-5, atol=0)


def test_a_small_gradient_is_not_scaled():
    module, optimizer = make_optimizer(10.0)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step(torch.tensor(0.0))
    torch.testing.assert_close(optimizer.adamw.state[module.weight]["exp_avg"], torch.tensor([[0.3, 0.4]]))


def test_a_loss_that_is_not_finite_stops_the_step_even_with_finite_gradients():
    module, optimizer = make_optimizer(1.0)
    module.weight.grad = torch.ones(1, 2)
    assert not optimizer.step(torch.tensor(float("nan"))).applied
    assert torch.equal(module.weight.detach(), torch.ones(1, 2)) and module.weight.grad is None
