"""Which rows and which tokens of a batch an update treats differently, decided once over the whole batch."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from hrl.algos.episodes import episode_sums
from hrl.algos.policy_filtration import draw_rows
from hrl.algos.token_selection import select_tokens
from hrl.batching.episodes import episode_numbers
from hrl.config.actor import ActorConfig
from hrl.config.algorithm import PfPpoConfig
from hrl.protocol import DataProto
from hrl.trainer.ppo.samples import sample_sums


def step_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """Return the generator of one draw of one step: the same after a resume, independent of every other draw."""
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_by_score(
    batch: DataProto, settings: PfPpoConfig, generator: torch.Generator
) -> tuple[DataProto, dict[str, float]]:
    """Draw rows with replacement, those with decided scores more often (PF-PPO, arXiv:2409.06957).

    Args:
        batch: With advantages; its scores decide.
        settings: `algorithm.pf_ppo`.
        generator: Of this draw.

    Returns:
        As many rows, each with a `uid` of its own, since groups have no use any more and mini-batches are cut by rows;
        and `pf_ppo/distinct_rows`, the share of the rows that were drawn at all. An episode of several rows is drawn as
        one, with all of them.
    """
    scores = sample_sums(batch, batch.batch["token_level_scores"].sum(-1))
    counted = batch.batch["response_mask"].bool().any(-1)
    episodes = episode_numbers(batch)
    if episodes is not None:
        first = np.unique(episodes, return_index=True)[1]
        scores = scores[first]
        counted = episode_sums(counted, torch.from_numpy(episodes))[first] > 0
    rows = draw_rows(scores, counted, settings.reweight_method, settings.weight_pow, generator=generator)
    if episodes is None:
        drawn, places = batch.select_idxs(rows), range(len(rows))
    else:
        of_episodes = [np.flatnonzero(episodes == episode) for episode in rows.tolist()]
        drawn = batch.select_idxs(np.concatenate(of_episodes))
        places = np.repeat(np.arange(len(rows)), [len(of_episode) for of_episode in of_episodes]).tolist()
    drawn.non_tensor_batch["uid"] = np.array(
        [f"{uid}/{place}" for place, uid in zip(places, drawn.non_tensor_batch["uid"], strict=True)], dtype=object
    )
    return drawn, {"pf_ppo/distinct_rows": rows.unique().numel() / max(len(rows), 1)}


def mark_tokens(batch: DataProto, actor: ActorConfig, generator: torch.Generator) -> dict[str, float]:
    """Add `selected_tokens (B, R)`, those that the policy loss treats differently.

    Args:
        batch: `old_log_probs`, `advantages` and `response_mask`, each (B, R).
        actor: `actor_rollout_ref.actor`; its policy loss is a key of `TOKEN_SELECTORS`.
        generator: Of this draw.
    """
    name, columns = actor.policy_loss.loss_mode, batch.batch
    mask = columns["response_mask"]
    chosen = select_tokens(name, columns["old_log_probs"], columns["advantages"], mask, actor, generator)
    columns["selected_tokens"] = chosen
    return {"actor/selected_tokens": float(chosen.sum())}
