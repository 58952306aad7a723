"""The update alone.

One optimizer step of GRPO's policy loss on the same 32 rows: 4 prompts of 45 tokens, each with 8 responses of 4 to 32
tokens, every row with an advantage; SmolLM2-135M with float32 weights, products in bfloat16, activations kept. hrl's
is `Policy.update` as its trainer plans and asks for it. verl's is `train_batch` of its FSDP engine, with FSDP2, on
rows as its trainer prepares them; `padded` and `packed` are its two ways (`use_remove_padding`; the flash attention
that packing is for has no CPU build, so attention is PyTorch's, of which transformers masks what is packed).
OpenRLHF's is `ActorPPOTrainer.training_step` with its `Actor` and its loss, which needs DeepSpeed: in its place stand
PyTorch's backward pass and AdamW, on bfloat16 weights. Old log-probs are each one's own. Of the first step the losses
must agree to 0.001 and the norms of the gradients, whose products are in bfloat16, to 5 %; the gradients themselves are
not compared. The prompt of a group is computed once by hrl, and 8 times by the others.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import Case
from bench.peers import OPENRLHF, OPENRLHF_NEEDS, VERL, VERL_NEEDS, stand_ins
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_cli
from hrl.models.loading import ModelSource
from hrl.models.source import resolve_model
from hrl.protocol import DataProto
from hrl.trainer.ppo.old_log_probs import policy_update
from hrl.workers.policy import Policy
from hrl.workers.requests import Training

SECONDS = 140
THREADS = 2
_PROMPTS, _SAMPLES, _PROMPT_TOKENS, _RESPONSE_TOKENS = 4, 8, 45, 32
_ROWS = _PROMPTS * _SAMPLES
_MAX_TOKENS, _LEARNING_RATE = 4096, 2e-5
# A loss of advantages that are about 1, and a norm relatively: in float32 it is 5.56, and with products in bfloat16
# hrl's is 5.45 and verl's 5.63.
_LOSS_APART, _NORM_APART = 1e-3, 0.05


def cases() -> Iterator[Case]:
    """Yield the peers in turn; each has a policy of its own, and so has hrl each time."""
    model = str(resolve_model("bundled:smollm2-135m-instruct"))
    batch = _batch()
    with world():
        for label, peer, theirs in (
            ("padded", VERL, lambda: _Verl(model, batch, packed=False)),
            ("packed", VERL, lambda: _Verl(model, batch, packed=True)),
            ("padded, bfloat16 weights", OPENRLHF, lambda: _OpenRLHF(model, batch)),
        ):
            yield Case(label, peer, _Hrl(model, batch), theirs(), _equal, rounds=2)


@contextmanager
def world() -> Iterator[None]:
    """A world of one rank."""
    with tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _batch() -> DataProto:
    """Return rows as they are before an update; advantages are those of rewards that are 0 or 1."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(4, _RESPONSE_TOKENS + 1, _ROWS)
    mask = (np.arange(_RESPONSE_TOKENS) < lengths[:, None]).astype(np.int64)
    prompts = np.repeat(generator.integers(100, 40_000, (_PROMPTS, _PROMPT_TOKENS)), _SAMPLES, axis=0)
    rewards = np.zeros((_PROMPTS, _SAMPLES))
    rewards[:, : _SAMPLES // 4] = 1.0
    rows = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, ddof=1, keepdims=True)
    tensors = {
        "prompts": prompts,
        "responses": generator.integers(100, 40_000, mask.shape) * mask,
        "attention_mask": np.concatenate([np.ones_like(prompts), mask], axis=1),
        "response_mask": mask,
        "advantages": (rows.reshape(-1, 1) * mask).astype(np.float32),
    }
    uid = np.repeat(np.array([f"prompt {number}" for number in range(_PROMPTS)], object), _SAMPLES)
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(column) for name, column in tensors.items()},
        non_tensors={"uid": uid},
        meta_info={"temperature": 1.0},
    )


Result = tuple[float, float]
"""Loss and norm of the gradient."""


def _equal(ours: Result, theirs: Result) -> None:
    """Check loss and norm of the gradient."""
    assert abs(ours[0] - theirs[0]) <= _LOSS_APART, f"loss: {ours[0]:.5g} and {theirs[0]:.5g}"
    assert abs(ours[1] / theirs[1] - 1) <= _NORM_APART, f"gradient norm: {ours[1]:.5g} and {theirs[1]:.5g}"


class _Hrl:
    """hrl's: called, it takes a step."""

    def __init__(self, path: str, batch: DataProto) -> None:
        config = with_dtypes(compose_cli([f"actor_rollout_ref.actor.optim.lr={_LEARNING_RATE}"]), "cpu")
        actor = config.actor_rollout_ref.actor
        model = ModelSource(path, {}, False, True, False, _PROMPT_TOKENS + _RESPONSE_TOKENS)
        training = Training(optim=actor.optim, grad_clip=actor.grad_clip, total_steps=100, seed=0, run_folder=None)
        self._policy = Policy(model, training, actor.fsdp_config, device=torch.device("cpu"))
        plan = Planner(share_prefix=model.share_prefix).update(
            batch, 1, MicroBatchLimits(_MAX_TOKENS, None, ""), mini_batch_rows=_ROWS, epochs=1
        )
        request = policy_update(config, plan, step=1, temperature=1.0, bypasses=False)
        # There is no sampler whose log-probs could be compared.
        self._request = replace(request, measures_mismatch=False).for_rank(0)
        self._batch = batch.select_idxs(plan.rows[0])

    def __call__(self) -> Result:
        found = self._policy.update(self._batch, self._request)
        return found["actor/pg_loss"].value, found["actor/grad_norm"].value


# ---- verl --------------------------------------------------------------------------------------------------------


class _Verl:
    """verl's: called, it takes a step, as `TrainingWorker.train_batch` does."""

    def __init__(self, model: str, batch: DataProto, *, packed: bool) -> None:
        engines, self._tensordicts = _verl()
        from verl.trainer.config import CheckpointConfig
        from verl.workers import config as configs
        from verl.workers.utils.losses import ppo_loss
        from verl.workers.utils.padding import no_padding_2_padding

        model_config = configs.HFModelConfig(
            path=model,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
            use_remove_padding=packed,
        )
        optimizer = configs.FSDPOptimizerConfig(lr=_LEARNING_RATE, total_training_steps=100)
        # A compiled entropy would be compiled for nothing: it isn't asked for.
        sharding = configs.FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
        self._engine = engines.FSDPEngineWithLMHead(model_config, sharding, optimizer, CheckpointConfig())
        self._engine.initialize()
        actor = configs.FSDPActorConfig(
            strategy="fsdp2", rollout_n=_SAMPLES, use_dynamic_bsz=True, ppo_mini_batch_size=_ROWS
        )
        self._loss: Callable[..., Any] = lambda **given: ppo_loss(actor, **given)
        self._packed, self._batch = packed, batch
        rows = self._rows(torch.zeros(batch.batch["advantages"].shape))
        with self._engine.eval_mode():
            found = self._engine.infer_batch(rows)
        self._old = no_padding_2_padding(found["model_output"]["log_probs"], rows)

    def __call__(self) -> Result:
        rows = self._rows(self._old)
        with self._engine.train_mode():
            found = self._engine.train_batch(rows, loss_function=self._loss)
        return float(np.sum(found["loss"])), float(found["metrics"]["grad_norm"])

    def _rows(self, old_log_probs: Tensor) -> Any:
        """Return the rows as verl's trainer makes them."""
        from tensordict import TensorDict
        from verl.workers.utils.padding import left_right_2_no_padding

        columns = dict(self._batch.batch.items()) | {"old_log_probs": old_log_probs}
        mask = columns["attention_mask"]
        columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], dim=1)
        columns["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        rows = left_right_2_no_padding(TensorDict(columns, batch_size=[len(mask)]))
        self._tensordicts.assign_non_tensor(
            rows,
            temperature=1.0,
            calculate_entropy=False,
            global_batch_size=len(mask),
            use_remove_padding=self._packed,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=_MAX_TOKENS,
            use_fused_kernels=False,
        )
        return rows


@cache
def _verl() -> tuple[Any, Any]:
    """Return verl's FSDP engine and its tensordicts. It has no platform without an accelerator, so one stands in."""
    from verl.plugin.platform import set_platform

    nothing = lambda *_, **__: None  # noqa: E731
    module = SimpleNamespace(
        empty_cache=nothing,
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        mem_get_info=lambda: (0, 0),
        is_available=lambda: False,
    )
    set_platform(
        MagicMock(
            device_name="cpu",
            vendor_name="cpu",
            device_module=module,
            current_device=lambda: "cpu",
            communication_backend_name=lambda: "gloo",
        )
    )
    with stand_ins(*VERL_NEEDS):
        engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    # It patches a class of TRL that this one no longer has, where TRL is there.
    importlib.import_module("verl.models.transformers.monkey_patch").is_trl_available = lambda: False  # type: ignore[attr-defined]
    return engines, importlib.import_module("verl.utils.tensordict_utils")


# ---- OpenRLHF ----------------------------------------------------------------------------------------------------


class _OpenRLHF:
    """OpenRLHF's: called, it takes a step."""

    def __init__(self, model: str, batch: DataProto) -> None:
        self._trainer, actors, experiences = _openrlhf()
        self._actor = actors.Actor(model, attn_implementation="sdpa", param_dtype="bf16")
        self._optimizer = torch.optim.AdamW(self._actor.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
        self._grad_norm = 0.0
        self._itself = SimpleNamespace(
            actor=self._actor,
            strategy=self,
            actor_optim=self._optimizer,
            actor_scheduler=SimpleNamespace(get_last_lr=lambda: [_LEARNING_RATE]),
            actor_loss_fn=actors.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=3.0),
            args=SimpleNamespace(
                train=SimpleNamespace(dynamic_batch_enable=False),
                actor=SimpleNamespace(entropy_coef=None),
                algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
            ),
            replay_buffer=None,
            aux_loss=False,
            ema_model=None,
        )
        columns = batch.batch
        self._experience = experiences.Experience(
            sequences=torch.cat([columns["prompts"], columns["responses"]], dim=1),
            attention_mask=columns["attention_mask"],
            action_mask=columns["response_mask"].bool(),
            advantages=columns["advantages"],
        )
        rows = self._experience
        with torch.no_grad():
            rows.action_log_probs = self._actor(rows.sequences, rows.action_mask, attention_mask=rows.attention_mask)

    def __call__(self) -> Result:
        found = self._trainer.training_step(self._itself, self._experience, 0.0, 0)
        return found["metrics"]["policy_loss"].item(), found["metrics"]["actor_grad_norm"]

    # What of its strategy, which is DeepSpeed, a training step calls.

    ring_attn_group = None

    def backward(self, loss: Tensor, model: Any, optimizer: Any) -> None:
        """Compute the gradient."""
        loss.backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str) -> None:
        """Clip the gradient and take the step."""
        self._grad_norm = torch.nn.utils.clip_grad_norm_(self._actor.parameters(), 1.0).item()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def get_grad_norm(self, model: Any) -> float:
        """Return the norm before clipping."""
        return self._grad_norm


def _openrlhf() -> tuple[Any, Any, Any]:
    """Return its trainer, its models and its rows."""
    with stand_ins(*OPENRLHF_NEEDS):
        trainer = importlib.import_module("openrlhf.trainer.ray.ppo_actor").ActorPPOTrainer
        models = importlib.import_module("openrlhf.models")
        experiences = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
        importlib.import_module("openrlhf.utils.utils")
    return trainer, models, experiences
