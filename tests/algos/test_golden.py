"""88 cases computed with verl 0.9.1 in float64, reproduced. Where we differ on purpose both numbers stand here.

verl adds 1e-8 to the counts it divides by; that is the tolerance.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hrl.algos.advantages import AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.aggregation import aggregate
from hrl.algos.groups import group_codes
from hrl.algos.kl import AdaptiveKLController, kl_penalty
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.algos.reward_placement import place_scores
from hrl.algos.value_loss import value_loss

CASES = json.loads((Path(__file__).parents[1] / "golden" / "algos.json").read_text())["cases"]


def tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def ratio(metric: tuple[Tensor, Tensor]) -> Tensor:
    return metric[0] / metric[1]


def advantage(name: str, params: dict, inputs: dict) -> dict:
    groups = group_codes(inputs["uid"]) if "uid" in inputs else None
    columns = {key: value for key, value in inputs.items() if key != "uid"}
    result = compute_advantages(name, AdvantageInput(**columns, group_ids=groups), AdvantageConfig(**params))
    return {"advantages": result[0], "returns": result[1]}


def kl(name: str, params: dict, inputs: dict) -> dict:
    log_prob = inputs["log_prob"].requires_grad_()
    value = kl_penalty(log_prob, inputs["ref_log_prob"], name)
    (value * inputs["mask"]).sum().backward()
    return {"value": value.detach(), "grad": log_prob.grad}


def agg(name: str, params: dict, inputs: dict) -> dict:
    return {"loss": aggregate(inputs["loss_mat"], inputs["loss_mask"], name, norm=inputs["loss_mat"].shape[1])}


def value(name: str, params: dict, inputs: dict) -> dict:
    mask, vpreds = inputs["response_mask"], inputs["vpreds"].requires_grad_()
    loss_mat, metrics = value_loss(vpreds, inputs["values"], inputs["returns"], mask, **params)
    loss = aggregate(loss_mat, mask, name)
    loss.backward()
    return {"loss": loss.detach(), "grad": vpreds.grad, "clipfrac": ratio(metrics["vf_clipfrac"])}


def policy(name: str, params: dict, inputs: dict) -> dict:
    mask, log_prob = inputs["response_mask"], inputs["log_prob"].requires_grad_()
    inp = PolicyLossInput(log_prob, inputs["old_log_prob"], inputs["advantages"], mask)
    output = policy_loss(name, inp, SimpleNamespace(clip_ratio=None, **params))
    loss = aggregate(output.loss_mat, mask, params["loss_agg_mode"], norm=mask.shape[1])
    loss.backward()
    metrics = {key.removeprefix("pg_"): ratio(metric) for key, metric in output.metrics.items()}
    return {"loss": loss.detach(), "grad": log_prob.grad} | metrics


def controller(name: str, params: dict, inputs: dict) -> dict:
    adaptive = AdaptiveKLController(params["kl_coef"], params["target_kl"], params["horizon"])
    adaptive.update(params["current_kl"], params["n_steps"])
    return {"value": tensor(adaptive.value)}


COMPUTE = {
    "advantage": advantage,
    "kl": kl,
    "agg": agg,
    "value_loss": value,
    "policy_loss": policy,
    "kl_controller": controller,
}


def test_there_are_88_cases() -> None:
    assert len(CASES) == 88


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c['group']}-{c['name']}" for i, c in enumerate(CASES)])
def test_golden_case(case: dict) -> None:
    inputs = {key: value if key == "uid" else tensor(value) for key, value in case["inputs"].items()}
    computed = COMPUTE[case["group"]](case["name"], case["params"], inputs)
    for key, expected in case["outputs"].items():
        torch.testing.assert_close(computed[key], tensor(expected), rtol=1e-7, atol=1e-8, msg=f"{key} differs")


def test_k3_keeps_the_gradient_that_verl_clamps_away() -> None:
    verl_value, verl_gradient = 10.0, 0.0
    log_prob = tensor(-6.0).requires_grad_()
    value = kl_penalty(log_prob, tensor(-1.0), "k3")
    value.backward()
    assert value.item() == pytest.approx(142.4131591025766, rel=1e-12)  # e^5 - 6
    assert log_prob.grad.item() == pytest.approx(-147.4131591025766, rel=1e-12)  # 1 - e^5
    assert value.item() > verl_value
    assert log_prob.grad.item() != verl_gradient


def test_grpo_group_of_one_teaches_nothing_where_verl_trains_on_the_raw_score() -> None:
    verl_advantage = 0.7 / (1.0 + 1e-6)
    mask = torch.ones(3, 2, dtype=torch.int64)
    rewards = place_scores(tensor([0.7, 1.0, 0.0]), mask)
    inp = AdvantageInput(rewards, mask, group_ids=group_codes(["alone", "pair", "pair"]))
    advantages, _ = compute_advantages("grpo", inp, AdvantageConfig())
    assert advantages[0].tolist() == [0.0, 0.0]
    assert verl_advantage == pytest.approx(0.7, rel=1e-5)
    assert advantages[1, 0].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-6))
