"""From a command line to an ended run, for the trainers that learn from a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hrl.cluster.machine import available_cores
from hrl.cluster.precision import with_dtypes
from hrl.config.offline import OfflineConfig
from hrl.config.run_kind import RunKind
from hrl.preflight.offline import OfflinePreflight, offline_preflight
from hrl.report.html_report import LOSS
from hrl.report.reporter import RunReporter
from hrl.single_controller.worker import RayClassWithInitArgs
from hrl.trainer.offline.dpo import DPOTrainer
from hrl.trainer.offline.rm import RMTrainer
from hrl.trainer.offline.sft import SFTTrainer
from hrl.trainer.offline.trainer import OfflineTrainer
from hrl.trainer.offline.workers import OfflineWorkers, policy_worker, reward_model_worker
from hrl.trainer.session import device_of, display_of, run_guarded, run_session
from hrl.workers.runtime import Runtime


@dataclass(frozen=True)
class Parts:
    """What a kind of offline run is made of.

    Attributes:
        trainer: The driver.
        worker: The worker class with its arguments.
    """

    trainer: type[OfflineTrainer]
    worker: Callable[[Any, int, Runtime, str], RayClassWithInitArgs]


PARTS = {
    "dpo": Parts(DPOTrainer, policy_worker),
    "sft": Parts(SFTTrainer, policy_worker),
    "rm": Parts(RMTrainer, reward_model_worker),
}


def run_offline(kind: RunKind[Any], config: OfflineConfig, trainer_cls: type[OfflineTrainer] | None = None) -> int:
    """Trains as configured.

    Args:
        kind: Of the run.
        config: The validated configuration.
        trainer_cls: A subclass of the kind's trainer to run in its place.

    Returns:
        The exit status, see `run_guarded`.
    """
    parts = PARTS[kind.name]
    if trainer_cls is not None:
        parts = replace(parts, trainer=trainer_cls)
    return run_guarded(config, partial(_run, kind, config, parts))


def _run(kind: RunKind[Any], config: OfflineConfig, parts: Parts) -> None:
    ready = offline_preflight(kind.name, config)
    facts = [*kind.words.arithmetic(config, train_rows=len(ready.train_dataset)), *kind.words.placement(config)]
    run_session(
        config,
        partial(train, config, ready, parts),
        display=display_of(config, ready.total_training_steps, ["update"]),
        facts=facts,
        warnings=[*kind.words.warnings(config), *ready.notes],
        num_processes=config.num_processes,
        train_dataset=ready.train_dataset,
        batch_tokens=2 * config.data.train_batch_size * config.data.max_length,  # of pairs, a row is two answers
        curve=LOSS,
    )


def train(config: OfflineConfig, ready: OfflinePreflight, parts: Parts, reporter: RunReporter) -> None:
    """Build the trainer, fits it and end its workers, on a running Ray."""
    device = device_of(config, reporter)
    config = with_dtypes(config, device)
    reporter.console.note(f"on {device}: trainer in {config.model.fsdp_config.dtype}")
    for name, dataset in (("training", ready.train_dataset), ("validation", ready.val_dataset)):
        if dataset is not None:
            reporter.console.note(f"{name} data: {dataset.counts}")
    runtime = Runtime(
        device=device,
        num_threads=config.trainer.cpu_threads_per_worker
        or max(1, available_cores() // config.trainer.n_gpus_per_node),
        seed=config.trainer.seed,
        init_timeout_s=config.trainer.timeouts.rank_init_s,
        collective_timeout_s=config.trainer.timeouts.rank_call_s,
        max_prompt_length=config.data.max_length,
        max_response_length=config.data.max_length,
        pad_token_id=ready.ids.pad,
        stop_token_ids=ready.ids.stop,
        vocab_size=ready.ids.vocab_size,
        share_prefix=config.model.share_prefix,
        trust_remote_code=config.model.trust_remote_code,
        max_model_len=config.data.max_length,
        probe=config.model.probe,
        run_folder=str(reporter.folder.path),
    )
    worker = parts.worker(config, ready.total_training_steps, runtime, str(ready.model_path))
    trainer = parts.trainer(
        config,
        ready.tokenizer,
        partial(OfflineWorkers.start, config, parts.trainer.role, worker, use_gpu=device == "cuda"),
        train_dataset=ready.train_dataset,
        val_dataset=ready.val_dataset,
        reporter=reporter,
        total_training_steps=ready.total_training_steps,
    )
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
