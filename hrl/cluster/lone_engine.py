"""What an engine is opened with that has the machine to itself, beside no trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hrl.cluster.machine import available_cores
from hrl.cluster.precision import with_dtypes
from hrl.config.model import ModelConfig
from hrl.config.rollout import RolloutConfig
from hrl.models.hf_config import load_config
from hrl.models.loading import ModelSource
from hrl.models.probe import ProbeError, require_right
from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.base import EngineSetup, RolloutError

_LONGEST = 8192
"""Tokens of the longest context, where neither the model nor anybody else says less."""


def lone_engine(
    model: ModelConfig,
    rollout: RolloutConfig,
    folder: Path,
    ids: TokenIds,
    max_model_len: int | None = None,
    *,
    shows_pictures: bool = False,
) -> EngineSetup:
    """Return what an engine is opened with that has a model to itself.

    Args:
        model: `actor_rollout_ref.model`.
        rollout: `actor_rollout_ref.rollout`.
        folder: Of the model.
        ids: Those of its tokenizer that have a meaning.
        max_model_len: The longest context with its response; None asks the model.
        shows_pictures: Contexts show pictures.

    Raises:
        RolloutError: The engine is a server that somebody else started, which only a trainer gives weights.
    """
    if rollout.is_served:
        raise RolloutError(
            f"rollout.name={rollout.name}: nothing here gives the servers weights; ask them themselves, or use "
            "rollout.name=vllm"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = load_config(folder, model.override_config, trust_remote_code=model.trust_remote_code).get_text_config()
    longest = min(getattr(facts, "max_position_embeddings", None) or _LONGEST, _LONGEST)
    source = ModelSource.to_look_at(
        folder,
        model.override_config,
        trust_remote_code=model.trust_remote_code,
        max_model_len=max_model_len or longest,
    )
    if model.probe and (rollout.name == "hf" or device.type == "cpu"):
        source = replace(source, packs_rows=_packs_rows(source))
    return EngineSetup(
        with_dtypes(rollout, device.type),
        replace(source, shows_pictures=shows_pictures),
        replace(ids, vocab_size=max(ids.vocab_size, facts.vocab_size)),
        device,
        num_threads=available_cores() if device.type == "cpu" else None,
        shares_device=False,
    )


def _packs_rows(source: ModelSource) -> bool:
    """Return whether training would pack a model's rows, see `hrl.models.probe`; else an engine pads none."""
    try:
        return require_right(source, scalar=False).packs_rows
    except ProbeError:  # it can't be trained, and may well be sampled from
        return False
