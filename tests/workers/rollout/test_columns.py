"""Masks come from the sampler's lengths and never from what the tokens are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hrl.workers.rollout.base import RolloutError, SampleOutput
from hrl.workers.rollout.columns import prompt_tokens, response_columns
from tests.models.tiny import SHAPE

PAD, STOP, OTHER_STOP, VOCABULARY, WIDTH = 0, 1, 2, 5, 6
RESPONSE = st.lists(st.integers(0, VOCABULARY - 1), max_size=WIDTH)
PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)


def columns(prompts: list[list[int]], responses: list[list[int]], pad: int, pad_prompts_by: int = 0):
    width = max(map(len, prompts)) + pad_prompts_by
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    outputs = [SampleOutput(r, [-float(t) - 0.5 for t in r], "stop", 0) for r in responses]
    return response_columns(ids, mask, outputs, WIDTH, pad)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(PROMPT, RESPONSE), min_size=1, max_size=5), st.sampled_from([PAD, STOP, VOCABULARY - 1]))
@example([([1], [])], STOP)  # an empty response
@example([([1, 1], [STOP]), ([3], [STOP, STOP, 4])], STOP)  # the stop token is the padding, and comes first
@example([([3], [OTHER_STOP, 4]), ([3], [4, STOP])], PAD)  # several stop tokens
@example([([3], [4] * WIDTH), ([3], [PAD] * WIDTH)], PAD)  # none at all, and nothing but padding tokens
def test_lengths_are_the_samplers_whatever_the_tokens_are(rows: list[tuple[list[int], list[int]]], pad: int) -> None:
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    got = columns(prompts, responses, pad)
    assert got["response_mask"].sum(dim=1).tolist() == [len(r) for r in responses]
    assert torch.equal(got["attention_mask"][:, -WIDTH:], got["response_mask"])
    for row, response in enumerate(responses):
        assert got["responses"][row, : len(response)].tolist() == response
        assert got["rollout_log_probs"][row].tolist() == [-t - 0.5 for t in response] + [0.0] * (WIDTH - len(response))
    assert prompt_tokens(got["prompts"], got["attention_mask"][:, :-WIDTH]) == prompts
    same_lengths = columns([[3] * len(p) for p in prompts], [[4] * len(r) for r in responses], 2)
    for name in ("response_mask", "attention_mask", "position_ids"):
        assert torch.equal(got[name], same_lengths[name]), name


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(PROMPT, RESPONSE), min_size=1, max_size=4), st.integers(1, 5))
def test_position_ids_restart_with_each_row_and_know_of_no_padding(
    rows: list[tuple[list[int], list[int]]], more: int
) -> None:
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    for padding in (0, more):
        got = columns(prompts, responses, PAD, padding)
        for row, (prompt, response) in enumerate(rows):
            real = got["attention_mask"][row].bool()
            assert got["position_ids"][row][real].tolist() == list(range(len(prompt) + len(response)))


@pytest.mark.parametrize("more", [1, 3, 7])
def test_padding_a_prompt_on_the_left_changes_no_logit(more: int) -> None:
    """A plain transformers forward over the padded columns; the packed models never see padding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()
    prompts, responses = [[7, 3, 9], [5]], [[4, 4], [1, 2, 3]]
    logits = []
    for padding in (0, more):
        got = columns(prompts, responses, PAD, padding)
        with torch.no_grad():
            out = model(got["input_ids"], attention_mask=got["attention_mask"], position_ids=got["position_ids"]).logits
        logits.append(out[got["attention_mask"].bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-6)  # its norms are float32


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(RolloutError, match="row 1 has an empty prompt"):
        prompt_tokens(torch.ones(2, 3), torch.tensor([[0, 1, 1], [0, 0, 0]]))
