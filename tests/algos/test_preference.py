import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hrl.algos.preference import (
    PAIR_LOSSES,
    LabelledOptions,
    PairOptions,
    kto_baseline,
    labelled_loss,
    mean_over_pairs,
    pair_margins,
    preference_loss,
    reward_model_loss,
    sequence_log_prob,
    sft_loss,
)
from hrl.algos.registry import pair_loss_traits


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LEADS = vector(0.5, -1.0), vector(-1.0, 1.0)
"""Of the chosen and the rejected response over the reference: 0.5 - (-1) = 1.5 and -1 - 1 = -2."""


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", PairOptions(beta=0.5), [-log_sigmoid(0.75), -log_sigmoid(-1.0)]),
        (
            "sigmoid",
            PairOptions(beta=0.5, label_smoothing=0.1),
            [
                -0.9 * log_sigmoid(0.75) - 0.1 * log_sigmoid(-0.75),
                -0.9 * log_sigmoid(-1.0) - 0.1 * log_sigmoid(1.0),
            ],
        ),
        ("ipo", PairOptions(beta=0.5), [0.25, 9.0]),
        ("hinge", PairOptions(beta=0.5), [0.25, 2.0]),
    ],
)
def test_by_hand(name: str, options: PairOptions, expected: list[float]) -> None:
    losses, metrics = preference_loss(name, *LEADS, options)
    assert losses.tolist() == pytest.approx(expected)
    assert [number.item() for number in metrics["rewards/accuracies"]] == [1.0, 2.0]
    assert metrics["rewards/margins"][0].item() == pytest.approx(options.beta * -0.5)


def test_simpo_has_a_margin() -> None:
    losses, _ = preference_loss("simpo", *LEADS, PairOptions(beta=2.0, target_margin=0.5))
    assert losses.tolist() == pytest.approx([-log_sigmoid(2.5), -log_sigmoid(-4.5)])


def test_orpo_by_hand() -> None:
    """Mean token probabilities 1/2 and 1/4: odds 1 and 1/3, so the log odds ratio is log 3."""
    halves = vector(math.log(0.5)), vector(math.log(0.25))
    losses, metrics = preference_loss("orpo", *halves, PairOptions(beta=0.3))
    assert losses.tolist() == pytest.approx([math.log(2.0) - 0.3 * log_sigmoid(math.log(3.0))])
    assert [number.item() for number in metrics["rewards/accuracies"]] == [1.0, 1.0]


def test_orpo_is_finite_at_probability_one() -> None:
    certain = vector(0.0).requires_grad_()
    losses, _ = preference_loss("orpo", certain, vector(-1.0), PairOptions())
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert certain.grad is not None
    assert torch.isfinite(certain.grad).all()


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
def test_every_loss_pulls_chosen_up_and_rejected_down(name: str) -> None:
    chosen, rejected = vector(-3.0).requires_grad_(), vector(-3.0).requires_grad_()
    preference_loss(name, chosen, rejected, PairOptions())[0].sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() < 0 < rejected.grad.item()
    likelihood = 1.0 if name == "orpo" else 0.0  # its first term raises the chosen response for its own sake
    assert chosen.grad.item() == pytest.approx(-rejected.grad.item() - likelihood)


def test_far_apart_pairs_stay_finite() -> None:
    chosen = vector(-5000.0).requires_grad_()
    losses, _ = preference_loss("sigmoid", chosen, vector(0.0), PairOptions(beta=1.0))
    losses.sum().backward()
    assert losses.item() == pytest.approx(5000.0)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1.0)


def test_reward_model_loss() -> None:
    losses, metrics = reward_model_loss(vector(2.0, 0.0), vector(1.0, 0.5), target_margin=vector(0.0, 1.0))
    assert losses.tolist() == pytest.approx([-log_sigmoid(1.0), -log_sigmoid(-1.5)])
    assert [number.item() for number in metrics["rewards/accuracies"]] == [1.0, 2.0]
    assert [number.item() for number in metrics["rewards/margins"]] == [0.5, 2.0]


def test_log_probs_of_sequences_and_tokens() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, math.nan], [-5.0, -5.0, -5.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert sequence_log_prob(log_prob, mask).tolist() == [-3.0, 0.0]
    assert sft_loss(log_prob, mask).tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_log_prob_of_a_long_answer_keeps_its_digits() -> None:
    """In float32 this sum would be off by 1e-4, and so would differences of two that are nearly the same."""
    log_prob = -3 * torch.rand(1, 4096, generator=torch.Generator().manual_seed(0))
    found = sequence_log_prob(log_prob, torch.ones(1, 4096)).item()
    assert found == pytest.approx(math.fsum(log_prob[0].tolist()), abs=1e-9)


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
def test_pairs_of_responses_are_sums_or_means_as_the_loss_wants_them(name: str) -> None:
    """Responses of 2, 0, 4 and 1 tokens; the pairs are (2, 0) and (1, 3)."""
    sums, reference = vector(-3.0, 0.0, -4.0, -1.0), vector(-2.0, 0.0, -8.0, -3.0)
    lengths = torch.tensor([2, 0, 4, 1])
    divisors = vector(2.0, 1.0, 4.0, 1.0) if pair_loss_traits(name).mean_log_prob else vector(1.0, 1.0, 1.0, 1.0)
    free = sums / divisors
    leads = (sums - reference) / divisors if pair_loss_traits(name).reference else free
    for expected, given in ((leads, reference), (free, None)):
        chosen, rejected = pair_margins(name, sums, lengths, [2, 1], [0, 3], given)
        assert torch.equal(chosen, expected[[2, 1]])
        assert torch.equal(rejected, expected[[0, 3]])


def test_pairs_are_divided_by_those_of_the_whole_mini_batch() -> None:
    assert mean_over_pairs(vector(1.0, 2.0), num_pairs=6).item() == 0.5
    assert mean_over_pairs(vector(), num_pairs=0).item() == 0.0


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
@pytest.mark.parametrize("constant", ["label_smoothing", "target_margin"])
def test_a_constant_moves_the_loss_or_is_refused(name: str, constant: str) -> None:
    pair, options = (vector(-1.0, -0.2), vector(-0.3, -2.0)), PairOptions(**{constant: 0.25})
    if not getattr(pair_loss_traits(name), constant):
        with pytest.raises(ValueError, match=f"'{name}' does not read {constant}"):
            preference_loss(name, *pair, options)
    else:
        plain, moved = (preference_loss(name, *pair, each)[0] for each in (PairOptions(), options))
        assert (moved != plain).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'dpo'.*sigmoid"):
        preference_loss("dpo", *LEADS, PairOptions())
    with pytest.raises(ValueError, match=r"'bt'.*bradley_terry"):
        reward_model_loss(*LEADS, name="bt")
    with pytest.raises(ValueError, match=r"'mle'.*nll"):
        sft_loss(torch.zeros(1, 1), torch.ones(1, 1), name="mle")
    with pytest.raises(ValueError, match="beta"):
        PairOptions(beta=0.0)
    with pytest.raises(ValueError, match="label_smoothing"):
        PairOptions(label_smoothing=0.5)


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "kto.json").read_text())["cases"]
GOOD = torch.tensor([True, False, True, True, False, False])


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{case['loss_type']} {case['kl']:.2f}" for case in GOLDEN])
def test_losses_of_labelled_answers_are_those_of_trl(case: dict[str, Any]) -> None:
    name, sums, reference = case["loss_type"], vector(*case["sums"]).requires_grad_(), vector(*case["ref"])
    point = kto_baseline(vector(*case["klr"])) if name == "kto" else 0.0
    assert point == pytest.approx(case["kl"], rel=1e-12, abs=1e-15)
    options = LabelledOptions(case["beta"], case["dw"], case["uw"])
    losses, metrics = labelled_loss(name, sums - reference, GOOD, point, options)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(case["loss"], rel=1e-12) and sums.grad is not None
    assert sums.grad.tolist() == pytest.approx(case["grad"], rel=1e-10)
    means = {metric: (total / count).item() for metric, (total, count) in metrics.items()}
    for metric in ("rewards/chosen", "rewards/rejected"):
        assert means[metric] == pytest.approx(case[metric], rel=1e-12)
    ratios = (sums - reference).tolist()
    right = [(ratio > point) == good for ratio, good in zip(ratios, GOOD.tolist(), strict=True)]
    assert means["rewards/accuracies"] == pytest.approx(sum(right) / 6)


def test_labelled_answers_by_hand() -> None:
    losses, _ = labelled_loss("kto", vector(1.0, 1.0), torch.tensor([True, False]), 0.5, LabelledOptions(2.0, 1.0, 3.0))
    # 1 - sigmoid(2 (1 - 0.5)) and 3 (1 - sigmoid(2 (0.5 - 1)))
    assert losses.tolist() == pytest.approx([1 / (1 + math.e), 3 * math.e / (1 + math.e)])
    assert kto_baseline(vector(-1.0, 0.5)) == 0.0 and kto_baseline(vector(1.0, 0.5)) == 0.75
    with pytest.raises(ValueError, match="desirable_weight must be positive, got 0"):
        LabelledOptions(desirable_weight=0.0)
