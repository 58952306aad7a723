"""Speculative decoding in vLLM whose samples are those of the same engine without it, and how often drafts are right.

A draft (an n-gram of the context, a smaller model, EAGLE's head) proposes the next k tokens, and the model computes the
distributions of all k + 1 places at once. vLLM's rejection sampler (Leviathan et al. 2022, arXiv:2211.17192) keeps a
draft with a chance, and draws another token otherwise, from numbers of its own: the distribution is the model's, and
what a seed gives depends on what was proposed. Here every place is drawn as it is without a draft, by the one number
that its seed has for that place, and a draft counts as accepted if it is the token drawn. Its chance is again the
model's probability of it, so of drafts without a distribution of their own (n-grams, a draft model's likeliest token)
as many are accepted; and a row's tokens and log-probs are those of the engine without speculative decoding.

This is for vLLM's first model runner, which a CPU has. The second one, which GPUs get from 0.29 on, keeps its own
rejection sampler: the same distributions and log-probs, but a seed gives other tokens than without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.outputs import SamplerOutput

from hrl.workers.rollout.drawing import Ahead, Positions

#: What stands in vLLM's table of sampled tokens behind a row's last one.
_NONE = -1


def draw_every_place(rejection_sampler: Any, positions: Positions) -> None:
    """Let vLLM's first model runner draw all places of a draft as it draws a single one.

    Args:
        rejection_sampler: vLLM's, whose `sampler` draws the only token of a row (`vllm_worker`).
        positions: How many tokens of its answer each generator has drawn, as that sampler counts them.
    """
    sampler = rejection_sampler.sampler

    def forward(metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> SamplerOutput:
        widths = [drafts + 1 for drafts in metadata.num_draft_tokens]
        generators = sampling_metadata.generators
        out = sampler(logits=logits, sampling_metadata=_each_place(sampling_metadata, widths, logits.device))
        tokens, places = accepted(out.sampled_token_ids[:, 0], metadata.draft_token_ids, widths)
        if generators:
            counts = (tokens != _NONE).sum(1).tolist()
            for row, generator in generators.items():
                positions.count(generator, counts[row])
        told = out.logprobs_tensors
        if told is not None:
            names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
            told = told._replace(**{name: getattr(told, name)[places.flatten()] for name in names})
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=told)

    rejection_sampler.forward = forward


def accepted(sampled: Tensor, drafts: Tensor, widths: list[int]) -> tuple[Tensor, Tensor]:
    """Return what is kept of the tokens that were drawn for drafts and for the place behind them.

    A token is kept while all drafts before it are what was drawn in their places.

    Args:
        sampled: `(sum of widths,)` int, drawn for each place, row by row.
        drafts: `(sum of widths - B,)` int, row by row; a number below 0 is no token.
        widths: Of each of the B rows, its drafts plus one.

    Returns:
        Tokens `(B, W)`, W the largest width, -1 behind a row's last one, and the place in `sampled` of each entry.
    """
    device = sampled.device
    width = torch.tensor(widths, device=device)[:, None]
    column = torch.arange(max(widths), device=device)[None]
    places = (width.cumsum(0) - width + column).clamp_max_(len(sampled) - 1)
    tokens = sampled[places]
    proposed = torch.full_like(tokens, _NONE)
    proposed[column < width - 1] = drafts.to(tokens.dtype)
    right = (tokens == proposed).cumprod(1).bool()
    kept = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), 1) & (column < width)
    return tokens.masked_fill(~kept, _NONE), places


def _each_place(sampling: Any, widths: list[int], device: torch.device) -> Any:
    """Return vLLM's `SamplingMetadata` with a row for each place."""
    rows = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths)).to(device)
    starts = torch.tensor([0, *widths]).cumsum(0).tolist()
    generators: Mapping[int, Ahead] = {
        starts[row] + ahead: Ahead(generator, ahead)
        for row, generator in sampling.generators.items()
        for ahead in range(widths[row])
    }
    fields = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    places = {name: None if values is None else values[rows] for name, values in fields.items()}
    return replace(sampling, generators=generators, **places)


class DraftCounts(StatLoggerBase):
    """Counts drafts and what was accepted of them. vLLM calls it after each iteration, in this process."""

    def __init__(self) -> None:
        self._drafts = self._proposed = self._accepted = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Add an iteration's counts."""
        stats = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._drafts += stats.num_drafts
            self._proposed += stats.num_draft_tokens
            self._accepted += stats.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM asks for the method."""

    def take(self) -> dict[str, float]:
        """Return the metrics that `RolloutEngine.take_counts` has of these, none without a draft, and begin at 0."""
        counts = {
            "rollout/drafts": float(self._drafts),
            "rollout/draft_tokens": float(self._proposed),
            "rollout/accepted_tokens": float(self._accepted),
        }
        self._drafts = self._proposed = self._accepted = 0
        return counts if counts["rollout/drafts"] else {}
