"""88 cases computed with verl 0.9.1 in float64, and hrl's own numbers for them.

`python -m tests.algos.golden` writes docs/algorithms/golden.md anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hrl.algos.advantages import AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.aggregation import aggregate
from hrl.algos.groups import group_codes
from hrl.algos.kl import AdaptiveKLController, kl_penalty
from hrl.algos.masked import broadcast_rows, whiten
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.algos.reward_placement import place_scores
from hrl.algos.value_loss import value_loss

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "tests" / "golden" / "algos.json").read_text())["cases"]
PAGE = ROOT / "docs" / "algorithms" / "golden.md"
RTOL, ATOL = 1e-7, 1e-8
"""verl adds 1e-8 to the counts it divides by; that is the tolerance."""


def tensor(value: Any) -> Tensor:
    """float64."""
    return torch.tensor(value, dtype=torch.float64)


# ------------------------------------------------------------------------------------------- computing a case


def _ratio(metric: tuple[Tensor, Tensor]) -> Tensor:
    return metric[0] / metric[1]


def _advantage(name: str, params: dict, inputs: dict) -> dict:
    groups = group_codes(inputs["uid"]) if "uid" in inputs else None
    columns = {key: value for key, value in inputs.items() if key != "uid"}
    result = compute_advantages(name, AdvantageInput(**columns, group_ids=groups), AdvantageConfig(**params))
    return {"advantages": result[0], "returns": result[1]}


def _kl(name: str, params: dict, inputs: dict) -> dict:
    log_prob = inputs["log_prob"].requires_grad_()
    value = kl_penalty(log_prob, inputs["ref_log_prob"], name)
    (value * inputs["mask"]).sum().backward()
    return {"value": value.detach(), "grad": log_prob.grad}


def _agg(name: str, params: dict, inputs: dict) -> dict:
    return {"loss": aggregate(inputs["loss_mat"], inputs["loss_mask"], name, norm=inputs["loss_mat"].shape[1])}


def _value(name: str, params: dict, inputs: dict) -> dict:
    mask, vpreds = inputs["response_mask"], inputs["vpreds"].requires_grad_()
    loss_mat, metrics = value_loss(vpreds, inputs["values"], inputs["returns"], mask, **params)
    loss = aggregate(loss_mat, mask, name)
    loss.backward()
    return {"loss": loss.detach(), "grad": vpreds.grad, "clipfrac": _ratio(metrics["critic/vf_clipfrac"])}


def _policy(name: str, params: dict, inputs: dict) -> dict:
    mask, log_prob = inputs["response_mask"], inputs["log_prob"].requires_grad_()
    inp = PolicyLossInput(log_prob, inputs["old_log_prob"], inputs["advantages"], mask)
    output = policy_loss(name, inp, SimpleNamespace(clip_ratio=None, **params))
    loss = aggregate(output.loss_mat, mask, params["loss_agg_mode"], norm=mask.shape[1])
    loss.backward()
    metrics = {key.removeprefix("actor/").removeprefix("pg_"): _ratio(metric) for key, metric in output.metrics.items()}
    return {"loss": loss.detach(), "grad": log_prob.grad} | metrics


def _controller(name: str, params: dict, inputs: dict) -> dict:
    adaptive = AdaptiveKLController(params["kl_coef"], params["target_kl"], params["horizon"])
    adaptive.update(params["current_kl"], params["n_steps"])
    return {"value": tensor(adaptive.value)}


_COMPUTE = {
    "advantage": _advantage,
    "kl": _kl,
    "agg": _agg,
    "value_loss": _value,
    "policy_loss": _policy,
    "kl_controller": _controller,
}


def differing(case: dict) -> list[str]:
    """The outputs of a case that hrl computes otherwise."""
    inputs = {key: value if key == "uid" else tensor(value) for key, value in case["inputs"].items()}
    computed = _COMPUTE[case["group"]](case["name"], case["params"], inputs)
    return [
        key
        for key, expected in case["outputs"].items()
        if not torch.allclose(computed[key], tensor(expected), rtol=RTOL, atol=ATOL)
    ]


# ------------------------------------------------------------------------------------------- different on purpose


def k3_far_away() -> dict[str, tuple[float, float]]:
    """k3 five nats below the reference: (verl's number, ours)."""
    log_prob = tensor(-6.0).requires_grad_()
    value = kl_penalty(log_prob, tensor(-1.0), "k3")
    value.backward()
    assert log_prob.grad is not None
    return {"value": (10.0, value.item()), "gradient": (0.0, log_prob.grad.item())}


def grpo_group_of_one() -> dict[str, tuple[float, float]]:
    """A response of score 0.7 alone in its group: (verl's number, ours)."""
    mask = torch.ones(3, 2, dtype=torch.int64)
    rewards = place_scores(tensor([0.7, 1.0, 0.0]), mask)
    inp = AdvantageInput(rewards, mask, group_ids=group_codes(["alone", "pair", "pair"]))
    advantages, _ = compute_advantages("grpo", inp, AdvantageConfig())
    return {"advantage": (0.7 / (1.0 + 1e-6), advantages[0, 0].item())}


def gpg_of_negative_scores() -> dict[str, tuple[float, float]]:
    """Two groups with scores 0 and -1, one of two zeros: (verl's number, ours) of a response that scored 0."""
    mask = torch.ones(6, 1, dtype=torch.int64)
    rewards = place_scores(tensor([0.0, -1.0, 0.0, -1.0, 0.0, 0.0]), mask)
    advantages, _ = compute_advantages(
        "gpg", AdvantageInput(rewards, mask, group_ids=group_codes("aabbcc")), AdvantageConfig()
    )
    return {"advantage": (6 / 2 * 0.5, advantages[0, 0].item())}


def _equal_scores_beside_others() -> tuple[AdvantageInput, dict[str, Tensor]]:
    """Group a scores 1 with one token, 0 with three; group b 1 and 1, one token each. And verl's advantages."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]])
    scores = tensor([1.0, 0.0, 1.0, 1.0])
    inp = AdvantageInput(place_scores(scores, mask), mask, group_codes("aabb"), reward_parts=scores.unsqueeze(1))
    deviation = tensor([0.5, -0.5, 0.0, 0.0])
    centred = {"reinforce_plus_plus_baseline": deviation, "gdpo": deviation / (0.5**0.5 + 1e-6)}
    return inp, {name: whiten(broadcast_rows(rows, mask, rows.dtype), mask) for name, rows in centred.items()}


def whitening_with_equal_scores() -> dict[str, tuple[float, float]]:
    """What a group of equal scores gets, and the best response of the other: (verl's number, ours)."""
    inp, verl = _equal_scores_beside_others()
    numbers = {}
    for name, theirs in verl.items():
        ours, _ = compute_advantages(name, inp, AdvantageConfig())
        numbers[f"{name}, equal scores"] = (theirs[2, 0].item(), ours[2, 0].item())
        numbers[f"{name}, best of the other group"] = (theirs[0, 0].item(), ours[0, 0].item())
    return numbers


def token_baseline_of_equal_scores() -> dict[str, tuple[float, float]]:
    """Score 1 with two tokens and with five, at the longer one's last token: (verl's number, ours)."""
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    half = torch.full(mask.shape, 0.5, dtype=torch.float64)
    rewards = place_scores(tensor([1.0, 1.0]), mask)
    columns = {"old_log_probs": half.log(), "sum_pi_squared": half}
    inp = AdvantageInput(rewards, mask, group_codes("aa"), **columns)
    advantages, returns = compute_advantages("optimal_token_baseline", inp, AdvantageConfig())
    return {"advantage": (returns[1, 4].item(), advantages[1, 4].item())}


ON_PURPOSE = {
    "k3 where the policy is five nats below the reference": (
        """\
verl clamps k3 to [-10, 10], so the gradient is 0 exactly where the policy has moved furthest. hrl clamps nothing;
beyond e^20 the exponential continues as its tangent. The log-probs are -6 and -1.""",
        k3_far_away,
    ),
    "GRPO with a single response in a group": (
        """\
verl uses a mean of 0 and a deviation of 1, and so trains on the raw score, here 0.7. A single response has nothing to
be compared with: in hrl it gets 0 and is counted.""",
        grpo_group_of_one,
    ),
    "GPG with scores below 0": (
        """\
GPG scales advantages up to make up for responses that teach nothing, those of groups without spread. verl counts the
responses with score 0 instead, so its scale depends on where 0 is. Here two groups have the scores 0 and -1, and a
third has only zeros.""",
        gpg_of_negative_scores,
    ),
    "REINFORCE++-baseline and GDPO with a group of equal scores": (
        """\
verl whitens over all tokens. So it subtracts the mean of the other groups, which depends on their lengths, from a group
that teaches nothing, and pushes that group up or down as a whole. In hrl such a group is left out of the whitening and
gets 0. Group a has score 1 with one token and 0 with three; group b has 1 and 1 with one token each.""",
        whitening_with_equal_scores,
    ),
    "Optimal token baseline of equal scores": (
        """\
verl's baseline is 0 at positions that only one response of a group reaches, so the tail of the longest response is
trained on its raw score even if all scores are equal. In hrl such a group gets 0. Both responses score 1, with two
tokens and with five; the number is that of the fifth token.""",
        token_baseline_of_equal_scores,
    ),
}
"""What: why, and both numbers. None of the 88 cases has such an input."""


# ------------------------------------------------------------------------------------------- the page

_PAGE = """\
# The golden cases, one by one

These are {cases} cases computed with verl 0.9.1 on a CPU in float64: inputs, parameters, outputs, gradients. hrl's
numbers are equal in {equal} of {cases}, within {rtol:g} relative and {atol:g} absolute, because verl adds 1e-8 to the
counts it divides by.
`python -m tests.algos.golden` writes this page, and a test compares it with the code.

## Different on purpose

The cases above have no input for which hrl differs from verl. These have:

{on_purpose}

## All cases

| # | family | member | parameters | compared | hrl |
| --- | --- | --- | --- | --- | --- |
{rows}
"""


def _row(number: int, case: dict) -> str:
    wrong = differing(case)
    params = ", ".join(f"`{key}={value}`" for key, value in case["params"].items()) or "—"
    verdict = f"different: {', '.join(wrong)}" if wrong else "equal"
    return f"| {number} | {case['group']} | {case['name']} | {params} | {', '.join(case['outputs'])} | {verdict} |"


def _exception(what: str, why: str, numbers: dict[str, tuple[float, float]]) -> str:
    rows = [f"| {name} | {theirs:.6g} | {ours:.6g} |" for name, (theirs, ours) in numbers.items()]
    return "\n".join([f"### {what}", "", why, "", "| | verl 0.9.1 | hrl |", "| --- | --- | --- |", *rows])


def page() -> str:
    """docs/algorithms/golden.md."""
    rows = [_row(number, case) for number, case in enumerate(CASES)]
    return _PAGE.format(
        cases=len(CASES),
        equal=sum(row.endswith("| equal |") for row in rows),
        rtol=RTOL,
        atol=ATOL,
        on_purpose="\n\n".join(_exception(what, why, numbers()) for what, (why, numbers) in ON_PURPOSE.items()),
        rows="\n".join(rows),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
