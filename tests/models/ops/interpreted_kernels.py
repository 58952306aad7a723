"""A program: log-probs and gradients by the Triton kernels, run on a CPU by Triton's interpreter, against formulas.

Run it as ``TRITON_INTERPRET=1 python -m tests.models.ops.interpreted_kernels``; `test_log_prob_kernels` does.
"""

from __future__ import annotations

import itertools

import torch

from hrl.models.ops import log_prob, log_prob_kernels
from hrl.models.ops.log_prob import PLAIN, LogitForm, token_statistics

TOKENS, WIDTH, VOCABULARY = 7, 5, 37
LABELS = torch.tensor([0, 36, 12, 13, 35, 24, 23])  # first and last columns of tiles among them


def plain(hidden, weight, bias, temperature, form):
    logits = hidden @ weight.t()
    logits = form.scale * (logits if bias is None else logits + bias)
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, LABELS[:, None]).squeeze(1), -(p * log_p).sum(-1), p.square().sum(-1)


def compare(dtype, chunk, temperature, form, with_bias, weights) -> None:
    generator = torch.Generator().manual_seed(chunk)
    shapes = [(TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)][: 2 + with_bias]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scale = torch.linspace(-1.0, 2.0, TOKENS)

    def total(log_prob, entropy):
        parts = ((weights[0], scale * log_prob), (weights[1], scale.flip(0) * entropy))
        return sum((weight * part).sum() for weight, part in parts if weight)

    hidden, weight, *rest = leaves
    got = token_statistics(
        hidden,
        weight,
        LABELS,
        temperature,
        chunk=chunk,
        with_entropy=True,
        with_sum_pi_squared=True,
        bias=rest[0] if with_bias else None,
        form=form,
    )
    want = plain(*exact[:2], exact[2] if with_bias else None, temperature, form)
    for mine, theirs in zip(got[:3], want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)
    got_grads = torch.autograd.grad(total(*got[:2]), leaves)
    want_grads = torch.autograd.grad(total(*want[:2]), exact)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() <= bound * theirs.norm(), (dtype, chunk, temperature, form, weights)


def main() -> None:
    passes = []
    for name in ("fold_tile", "grad_of_tile"):
        inner = getattr(log_prob_kernels, name)
        setattr(log_prob_kernels, name, lambda *a, inner=inner, name=name: passes.append(name) or inner(*a))
    log_prob._has_kernels = lambda logits: logits.dtype == torch.float32
    log_prob_kernels._BLOCK = 8  # several blocks to a tile, the last of them not full
    forms = (PLAIN, LogitForm(0.5, None), LogitForm(1.0, 3.0))
    weights = ((1.0, 0.0), (0.0, 1.0), (1.0, 0.5))
    for case, (form, with_bias) in enumerate(itertools.product(forms, (False, True))):
        compare(torch.float32, (50, 1000)[case % 2], (1.0, 0.6)[case // 2 % 2], form, with_bias, weights[case % 3])
    compare(torch.float32, 3, 0.6, PLAIN, False, (1.0, 0.5))
    compare(torch.bfloat16, 50, 0.6, PLAIN, False, (1.0, 0.5))
    compare(torch.bfloat16, 1000, 1.0, LogitForm(1.0, 3.0), True, (1.0, 0.0))

    outside = token_statistics(torch.ones(1, 1), torch.ones(3, 1), torch.tensor([9]), 1.0, chunk=2, with_entropy=False)
    assert torch.isnan(outside.log_prob).all()
    broken = token_statistics(
        torch.tensor([[torch.nan]]), torch.ones(3, 1), torch.tensor([1]), 1.0, chunk=2, with_entropy=True
    )
    assert torch.isnan(broken.log_prob).all() and torch.isnan(broken.entropy).all()
    huge = token_statistics(
        torch.tensor([[1e4]]), torch.tensor([[-1.0], [1.0]]), torch.tensor([1]), 1.0, chunk=1, with_entropy=True
    )
    assert huge.log_prob.item() == 0.0 and huge.entropy.item() == 0.0
    print("passes", passes.count("fold_tile"), passes.count("grad_of_tile"))  # noqa: T201


if __name__ == "__main__":
    main()
