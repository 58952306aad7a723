"""The CPU engine's head: float32 logits that do not depend on what else is sampled."""

from __future__ import annotations

import torch
from torch import nn

from hrl.workers.rollout.vllm_precision import HEAD_ROWS, _apply_head


def test_logits_are_the_exact_product_and_do_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(96, 700, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(3 * HEAD_ROWS + 5, 96, generator=generator).bfloat16()
    logits = _apply_head(head, hidden, None)
    assert logits.shape == (len(hidden), 700)
    torch.testing.assert_close(logits.double(), hidden.double() @ head.weight.double().T, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 7, HEAD_ROWS, HEAD_ROWS + 1):
        rows = torch.randperm(len(hidden), generator=generator)[:count]
        assert torch.equal(_apply_head(head, hidden[rows], None), logits[rows])


def test_a_bias_is_added_in_float32():
    head, bias = nn.Linear(8, 5, dtype=torch.bfloat16), torch.full((5,), 1 / 3).bfloat16()
    hidden = torch.zeros(2, 8).bfloat16()
    assert torch.equal(_apply_head(head, hidden, bias), bias.float().expand(2, 5))
