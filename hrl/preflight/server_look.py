"""Preflight checks of engines that somebody else started: whether a run can sample from them."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hrl.cluster.precision import with_dtypes
from hrl.config.arithmetic import Fact
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rollout import SERVED
from hrl.models.loading import ModelSource
from hrl.models.tokenizer import TokenIds
from hrl.preflight.findings import Findings
from hrl.preflight.small_models import runs_on_gpus
from hrl.workers.rollout.base import EngineSetup
from hrl.workers.rollout.host import ENGINES
from hrl.workers.rollout.server_engine import look_at_all
from hrl.workers.rollout.server_http import ServerGoneError, key_of

if TYPE_CHECKING:
    from hrl.workers.rollout.server_engine import Server

_LOOK_TIMEOUT_S = 15.0
_KEY = "actor_rollout_ref.rollout.server"


def look_at_servers(findings: Findings, config: PPOTrainerConfig, folder: Path | None, ids: TokenIds | None) -> None:
    """Ask every server of `rollout.server.urls` what a run has to know of it; nothing is changed there.

    One that does not answer is a problem if no other does.

    Args:
        findings: Collects problems, and a fact for each server.
        config: The validated configuration.
        folder: Of the policy's model; None where it was not found.
        ids: Its tokens.
    """
    if config.actor_rollout_ref.rollout.name not in SERVED:
        return
    config = with_dtypes(config, "cuda" if runs_on_gpus(config) else "cpu")
    rollout = config.actor_rollout_ref.rollout
    with findings.about(f"{_KEY}.api_key"):
        key_of(rollout.server.api_key)
    if findings.problems or folder is None or ids is None:
        findings.unchecked.append("the servers of rollout.server.urls, which are compared with the model")
        return
    model = config.actor_rollout_ref.model
    longest = rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    source = ModelSource.to_look_at(
        folder, model.override_config, trust_remote_code=model.trust_remote_code, max_model_len=longest
    )
    setup = EngineSetup(rollout, source, ids, torch.device("cpu"))
    module, name = ENGINES[rollout.name]
    kind: type[Server] = getattr(importlib.import_module(module), name).kind

    async def look() -> None:
        servers = [kind(url, setup) for url in rollout.server.urls]
        looked = await look_at_all(servers, _LOOK_TIMEOUT_S)
        some_are_there = any(isinstance(found, dict) for _, found in looked)
        for number, (server, found) in enumerate(looked, 1):
            if isinstance(found, dict):
                said = ", ".join(f"{label} {text}" for label, text in found.items())
                findings.facts.append(Fact(f"server {number}", f"{server.url}: {said}"))
            elif isinstance(found, ServerGoneError) and some_are_there:
                findings.notes.append(f"{found}; the run samples from the others until a weight sync finds it")
            else:
                with findings.about(f"{_KEY}.urls"):
                    raise found

    asyncio.run(look())
