"""Divergences over the whole vocabulary against autograd on all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.models.ops.divergence import TeacherHead, divergence_from_teacher
from hrl.models.ops.log_prob import PLAIN, LogitForm
from tests.models.ops.test_log_prob import logits_of

FORMS = st.builds(LogitForm, st.sampled_from([1.0, 0.0625, 1.7]), st.sampled_from([None, 0.8, 30.0]))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 23),
    more=st.integers(-1, 3),
    chunk=st.integers(1, 300),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    forms=st.tuples(FORMS, FORMS),
    with_bias=st.booleans(),
    is_reverse=st.booleans(),
)
def test_values_and_gradients_for_any_tiling_and_heads_of_other_sizes(
    tokens, vocabulary, more, chunk, temperature, forms, with_bias, is_reverse
):
    hidden, weight = normal(tokens, 5, seed=1).requires_grad_(), normal(vocabulary, 5, seed=2).requires_grad_()
    bias = normal(vocabulary, seed=3).requires_grad_() if with_bias else None
    teacher_hidden, wide = normal(tokens, 3, seed=4), vocabulary + more
    head = TeacherHead(normal(wide, 3, seed=5), normal(wide, seed=6) if with_bias else None, forms[1])
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    shared = min(vocabulary, wide)
    student = (logits_of(hidden, weight, bias, forms[0])[:, :shared] / temperature).log_softmax(-1)
    teacher = (logits_of(teacher_hidden, head.weight, head.bias, head.form)[:, :shared] / temperature).log_softmax(-1)
    over, other = (student, teacher) if is_reverse else (teacher, student)
    want = (over.exp() * (over - other)).sum(-1)
    got = divergence_from_teacher(
        hidden, weight, teacher_hidden, head, temperature, chunk=chunk, is_reverse=is_reverse, bias=bias, form=forms[0]
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    scale = torch.linspace(-1.0, 2.0, tokens, dtype=torch.float64)
    grads = [torch.autograd.grad((scale * value).sum(), leaves) for value in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_logits_of_all_tokens_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from hrl.models.ops import divergence

    sizes, make = [], divergence.logits_of_tile

    def noted(*inputs):
        tile = make(*inputs)
        sizes.append(tile.numel())
        return tile

    monkeypatch.setattr(divergence, "logits_of_tile", noted)
    hidden = normal(40, 4, seed=1).requires_grad_()
    head = TeacherHead(normal(50, 4, seed=2), None, PLAIN)
    found = divergence_from_teacher(hidden, head.weight * 2, hidden.detach(), head, 1.0, chunk=200, is_reverse=True)
    found.sum().backward()
    # 2,000 logits of each model, forwards and backwards, in tiles of at most half of the chunk.
    assert max(sizes) <= 100 and sum(sizes) == 2 * 2 * 40 * 50


def test_states_of_another_number_of_tokens_are_refused() -> None:
    head = TeacherHead(normal(3, 4, seed=1))
    with pytest.raises(ValueError, match="the student has 2 tokens, and the teacher 3"):
        divergence_from_teacher(
            normal(2, 4, seed=1), head.weight, normal(3, 4, seed=1), head, 1.0, chunk=9, is_reverse=True
        )
