"""Drawing by one random number: the right token, the right shares, the right log-probs, whatever stands beside."""

import pytest
import torch

from hrl.workers.rollout.drawing import BLOCK, draw, seeded_number


def logits_of(rows: int, entries: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, entries, generator=torch.Generator().manual_seed(seed))


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_token_is_where_the_cumulated_probabilities_pass_the_number():
    probabilities = numbers(0.25, 0.0, 0.5, 0.0, 0.25, 0.0)
    uniform = numbers(0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53)
    tokens, log_probs = draw(probabilities.log().float().repeat(6, 1), uniform)
    assert tokens.tolist() == [0, 0, 2, 2, 4, 4]
    assert log_probs[0].exp().tolist() == pytest.approx([0.25, 0.0, 0.5, 0.0, 0.25, 0.0])


@pytest.mark.parametrize("entries", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 5 * BLOCK + 17])
def test_tokens_and_log_probs_agree_with_float64(entries):
    rows = 50
    logits, uniform = logits_of(rows, entries), torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64)
    log_p = logits.double().log_softmax(-1)
    bounds = log_p.exp().cumsum(-1)
    tokens, log_probs = draw(logits.clone(), uniform)
    torch.testing.assert_close(log_probs.double(), log_p, rtol=0, atol=1e-5)
    end = bounds.gather(1, tokens[:, None]).squeeze(1)
    start = end - log_p.exp().gather(1, tokens[:, None]).squeeze(1)
    assert (start <= uniform + 1e-6).all() and (uniform <= end + 1e-6).all()


def test_evenly_spread_numbers_give_every_token_its_share():
    count = 100_000
    logits = logits_of(1, 2 * BLOCK + 3)
    probabilities = logits.double().softmax(-1).squeeze(0)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = torch.zeros_like(probabilities)
    for part in uniform.split(1000):
        tokens, _ = draw(logits.repeat(len(part), 1), part)
        found += torch.bincount(tokens, minlength=len(found))
    assert (found - count * probabilities).abs().max() < 1.5


def test_excluded_tokens_are_never_drawn():
    logits = logits_of(64, 4 * BLOCK)
    kept = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.01
    kept[:, 700] = True
    logits.masked_fill_(~kept, -torch.inf)
    uniform = torch.cat([numbers(0.0, 1 - 2**-53), torch.rand(62, dtype=torch.float64)])
    tokens, log_probs = draw(logits, uniform)
    assert kept.gather(1, tokens[:, None]).all()
    assert torch.isfinite(log_probs.gather(1, tokens[:, None])).all()


def test_a_row_does_not_depend_on_the_others():
    logits, uniform = logits_of(21, 1000), torch.rand(21, dtype=torch.float64)
    tokens, log_probs = draw(logits.clone(), uniform)
    for row in range(21):
        token, alone = draw(logits[row : row + 1].clone(), uniform[row : row + 1])
        assert token.item() == tokens[row] and torch.equal(alone[0], log_probs[row])


def test_huge_logits_do_not_overflow():
    tokens, log_probs = draw(torch.tensor([[1e4, -1e4, 1e4]]), numbers(0.75))
    assert tokens.tolist() == [2] and log_probs[0].tolist() == pytest.approx([-0.6931472, -20000.6931, -0.6931472])


@pytest.mark.parametrize("entries", [3, BLOCK, 2 * BLOCK + 17])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_finite_gives_a_token_without_a_log_prob_and_leaves_the_others_alone(entries, broken):
    logits, uniform = logits_of(3, entries), numbers(0.3, 0.9, 0.6)
    whole, _ = draw(logits.clone(), uniform)
    logits[1, :: 2 if broken > 0 else 1] = broken
    tokens, log_probs = draw(logits, uniform)
    assert 0 <= tokens[1] < entries and log_probs[1, tokens[1]].isnan()
    assert torch.equal(tokens[[0, 2]], whole[[0, 2]]) and log_probs[[0, 2]].isfinite().all()


def test_the_numbers_of_seeds_are_spread_evenly_and_are_no_others_in_the_next_run():
    assert seeded_number(3, 5) == 0.07751155314723623
    found = torch.tensor([[seeded_number(seed, position) for position in range(100)] for seed in range(100)])
    assert (torch.histc(found, 10, 0, 1) - 1000).abs().max() < 130  # more than four standard deviations
    assert torch.corrcoef(found.T).fill_diagonal_(0).abs().max() < 0.5
    assert torch.corrcoef(found).fill_diagonal_(0).abs().max() < 0.5


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens():
    logits, uniform = logits_of(300, 5 * BLOCK + 17), torch.rand(300, dtype=torch.float64)
    tokens, log_probs = draw(logits.clone(), uniform)
    there, log_probs_there = draw(logits.cuda(), uniform.cuda())
    assert (there.cpu() == tokens).float().mean() > 0.99  # sums round differently
    torch.testing.assert_close(log_probs_there.cpu(), log_probs, rtol=0, atol=1e-4)
