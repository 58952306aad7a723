"""From a validated configuration to an ended run: what `main_ppo` does once the configuration is right.

First it looks at the files (`preflight`); the rest goes on inside a session, which starts Ray and takes everything
down again whatever happened.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hrl.cluster.machine import available_cores
from hrl.cluster.precision import with_dtypes
from hrl.cluster.roles import Role, pool_manager_of
from hrl.cluster.worker_groups import worker_mapping
from hrl.config import resolve_placement
from hrl.config.arithmetic import Fact, batch_arithmetic, placement_facts
from hrl.config.rules import ppo_warnings as warnings
from hrl.preflight.ppo import Preflight, preflight
from hrl.report.phases import PHASES
from hrl.report.reporter import RunReporter
from hrl.trainer.ppo.online_dpo import OnlineDPOTrainer
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer, needs_old_log_prob
from hrl.trainer.ppo.rewards import RewardService
from hrl.trainer.session import device_of, display_of, run_guarded, run_session
from hrl.workers.runtime import Runtime

if TYPE_CHECKING:
    from hrl.config import PPOTrainerConfig


def run_training(config: PPOTrainerConfig, trainer_cls: type[RayPPOTrainer] | None = None) -> int:
    """Trains as configured.

    Args:
        config: The validated configuration.
        trainer_cls: A subclass of `RayPPOTrainer` to run in its place.

    Returns:
        The exit status, see `run_guarded`.
    """
    return run_guarded(config, partial(_run, config, trainer_cls or trainer_class(config)))


def trainer_class(config: PPOTrainerConfig) -> type[RayPPOTrainer]:
    """Return the trainer of the configured algorithm: the one of advantages, or that of preferences."""
    return RayPPOTrainer if config.algorithm.preference_loss is None else OnlineDPOTrainer


def _run(config: PPOTrainerConfig, trainer_cls: type[RayPPOTrainer]) -> None:
    ready = preflight(config)
    run_session(
        config,
        partial(train, config, ready, trainer_cls),
        display=display_of(config, ready.total_training_steps, phases_of(config)),
        facts=[
            *batch_arithmetic(config, train_rows=len(ready.train_dataset)),
            *placement_facts(config),
            Fact("first prompt", ready.template.shown_prompt),
        ],
        warnings=[*warnings(config), *ready.notes],
        num_processes=sum(map(sum, resolve_placement(config).pools.values())),
        train_dataset=ready.train_dataset,
        batch_tokens=largest_batch_tokens(config, len(ready.val_dataset) if ready.val_dataset is not None else 0),
    )


def largest_batch_tokens(config: PPOTrainerConfig, val_rows: int) -> int:
    """Tokens of the largest batch of a run, of training or of validation, with all rows at their full length."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    validated = min(data.val_batch_size or val_rows, val_rows) * rollout.val_kwargs.n
    rows = max(data.train_batch_size * rollout.n, validated)
    return rows * (data.max_prompt_length + data.max_response_length)


def train(config: Any, ready: Preflight, trainer_cls: type[RayPPOTrainer], reporter: RunReporter) -> None:
    """Build the trainer, fits it and end its workers, on a running Ray."""
    device = device_of(config, reporter)
    config = with_dtypes(config, device)
    roles = config.actor_rollout_ref
    reporter.console.note(f"on {device}: trainer in {roles.actor.fsdp_config.dtype}, engine in {roles.rollout.dtype}")
    manager = pool_manager_of(config, use_gpu=device == "cuda")
    largest_node = max(max(counts) for counts in manager.resource_pool_spec.values())
    runtime = Runtime(
        device=device,
        num_threads=config.trainer.cpu_threads_per_worker or max(1, available_cores() // largest_node),
        seed=config.trainer.seed,
        init_timeout_s=config.trainer.timeouts.rank_init_s,
        collective_timeout_s=config.trainer.timeouts.rank_call_s,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        pad_token_id=ready.ids.pad,
        stop_token_ids=ready.ids.stop,
        vocab_size=ready.ids.vocab_size,
        share_prefix=config.actor_rollout_ref.model.share_prefix,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        max_model_len=roles.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
        probe=config.actor_rollout_ref.model.probe,
        run_folder=str(reporter.folder.path),
        engine_threads=config.trainer.cpu_threads_per_worker,
    )
    policy_path = str(ready.model_path)
    paths = dict.fromkeys(Role, policy_path) | {
        Role.Critic: str(ready.critic_path),
        Role.RewardModel: str(ready.reward_model_path),
    }
    sources = {*ready.train_dataset.data_sources, *(ready.val_dataset.data_sources if ready.val_dataset else ())}
    with RewardService(config, tuple(sorted(sources))) as rewards:
        trainer = trainer_cls(
            config,
            ready.tokenizer,
            worker_mapping(config, list(manager.mapping), runtime, paths, ready.total_training_steps),
            manager,
            train_dataset=ready.train_dataset,
            val_dataset=ready.val_dataset,
            rewards=rewards,
            reporter=reporter,
            total_training_steps=ready.total_training_steps,
        )
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.shutdown()


def phases_of(config: Any) -> list[str]:
    """Return the phases of a step, in order, for the phase bar."""
    optional = {
        "old_log_prob": needs_old_log_prob(config),
        "ref": config.needs_reference,
        "values": config.needs_critic,
        "update_critic": config.needs_critic,
        "update": False,  # the one of the offline trainers
        "testing": False,  # few steps have it; it is drawn when it runs
    }
    return [phase.name for phase in PHASES if optional.get(phase.name, True)]
