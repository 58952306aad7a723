"""Log-probs and entropies over a large vocabulary.

Hidden states of 128 tokens, half of them of prompts, and a head of 896 times up to 152k entries, all in float32.
verl's eager way makes all logits and calls `entropy_from_logits` and `logprobs_from_logits`; its fused way is
`FusedLinearForPPO` (torch backend); TRL's is the head that its trainer adds to a model, here around one that returns
the given hidden states. On CPUs these score every token, hrl those of responses (on a GPU TRL leaves prompts out
too). `forward` is without gradients, as old log-probs are computed; `update` also computes the gradients of hidden
states and head, of which the head's alone is 519 MiB. Memory is the growth of the process's resident set at its peak.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Case, Comparison
from bench.peers import TRL, VERL
from hrl.models.ops.log_prob import default_chunk, token_statistics

AXIS = "entries of the vocabulary"
SECONDS = 48
THREADS = 2
_TOKENS, _HIDDEN, _LARGEST = 128, 896, 151_936
_FUSED = f"{VERL}, fused"

Run = Callable[[], tuple[Tensor, ...]]


def cases() -> Iterator[Case]:
    """Yield growth in the vocabulary against TRL, then verl's two ways, then the update."""
    # Three rounds of the largest, of which the peers take several seconds each.
    for size in (_LARGEST // 4, _LARGEST // 2, _LARGEST):
        floor = 1.2 if size == _LARGEST else None
        yield _case(_Input(size), TRL, _trl, "forward", floor, rounds=3 if size == _LARGEST else 5)
    given = _Input(_LARGEST)
    yield _case(given, VERL, _verl_eager, "forward", None)
    yield _case(given, _FUSED, _verl_fused, "forward", None)
    given = _Input(_LARGEST, with_gradient=True)
    yield _case(given, TRL, _trl, "update", 1.2)
    yield _case(given, _FUSED, _verl_fused, "update", None)


class _Input:
    """Hidden states `(T, H)`, the head `(V, H)`, the sampled tokens `(T,)` and which of them are a response's."""

    def __init__(self, vocabulary: int, *, with_gradient: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.vocabulary = vocabulary
        self.with_gradient = with_gradient
        self.hidden = torch.randn(_TOKENS, _HIDDEN, generator=generator)
        self.weight = torch.randn(vocabulary, _HIDDEN, generator=generator) * 0.05
        self.labels = torch.randint(0, vocabulary, (_TOKENS,), generator=generator)
        self.is_response = torch.arange(_TOKENS) >= _TOKENS // 2
        self.rows = self.is_response.nonzero().squeeze(1)
        for tensor in (self.hidden, self.weight):
            tensor.requires_grad_(with_gradient)


def _case(
    given: _Input, peer: str, theirs: Callable[[_Input], Run], series: str, floor: float | None, rounds: int = 3
) -> Case:
    ours, other = _finished(given, _hrl(given)), _finished(given, theirs(given))
    label = f"{given.vocabulary:,} entries, {series}, {peer.removeprefix(VERL + ', ')}"

    def memory() -> Iterator[Comparison]:
        limit = 2.0 if floor is not None and series == "forward" else None
        yield Comparison(
            label, peer, "MiB at the peak", _peak_mib(ours), _peak_mib(other), limit, given.vocabulary, series
        )

    x = given.vocabulary if series == "forward" and peer == TRL else None
    return Case(label, peer, ours, other, _equal, floor, x, series, rounds, memory)


def _finished(given: _Input, run: Run) -> Run:
    """Return the log-probs and entropies of the response, and with gradients those of hidden states and head."""

    def finished() -> tuple[Tensor, ...]:
        if not given.with_gradient:
            with torch.no_grad():
                return run()
        log_prob, entropy = run()
        loss = -(log_prob.sum() + 0.01 * entropy.sum()) / len(given.rows)
        return (log_prob.detach(), entropy.detach(), *torch.autograd.grad(loss, (given.hidden, given.weight)))

    return finished


def _equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Check equality up to the rounding of sums over the vocabulary."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ---- the four ways -----------------------------------------------------------------------------------------------


def _hrl(given: _Input) -> Run:
    chunk = default_chunk(given.hidden.device)

    def run() -> tuple[Tensor, ...]:
        hidden, labels = given.hidden[given.rows], given.labels[given.rows]
        found = token_statistics(hidden, given.weight, labels, 1.0, chunk=chunk, with_entropy=True)
        assert found.entropy is not None
        return found.log_prob, found.entropy

    return run


def _verl_eager(given: _Input) -> Run:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    def run() -> tuple[Tensor, ...]:
        logits = nn.functional.linear(given.hidden, given.weight)
        entropy = entropy_from_logits(logits)
        log_prob = logprobs_from_logits(logits, given.labels, inplace_backward=False)
        return log_prob[given.rows], entropy[given.rows]

    return run


def _verl_fused(given: _Input) -> Run:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO()

    def run() -> tuple[Tensor, ...]:
        log_prob, entropy = fused(given.hidden, given.weight, given.labels, 1.0)
        return log_prob[given.rows], entropy[given.rows]

    return run


def _trl(given: _Input) -> Run:
    from trl.trainer.utils import add_fused_lm_head

    model = _Model(given)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))  # as GRPOTrainer does
    # The label of a position is the token behind it; those of prompts are masked as GRPOTrainer masks them.
    labels = given.labels.masked_fill(~given.is_response, -100)
    labels = torch.cat([labels.new_full((1,), -100), labels])[None]

    def run() -> tuple[Tensor, ...]:
        output = model(labels=labels, fused_lm_head=True)
        return output.log_probs[0][given.rows], output.entropy[0][given.rows]

    return run


class _Model(nn.Module):
    """A model whose backbone returns given hidden states, with one position more at the end, as sequences have."""

    def __init__(self, given: _Input) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=SimpleNamespace)
        last = torch.zeros(1, _HIDDEN)
        self._states = lambda: torch.cat([given.hidden, last])[None]
        self._head = SimpleNamespace(weight=given.weight, bias=None)

    def forward(self) -> None:
        """Stand for the forward that TRL replaces."""

    def base_model(self, use_cache: bool) -> Any:
        """Return the hidden states."""
        return SimpleNamespace(last_hidden_state=self._states())

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self._head


# ---- memory ------------------------------------------------------------------------------------------------------


def _peak_mib(run: Run) -> float:
    """Return how far the resident set rises above where it was, at most, while a function runs."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_kib("VmRSS")
    result = run()
    peak = _status_kib("VmHWM")
    del result
    return (peak - before) / 1024


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
