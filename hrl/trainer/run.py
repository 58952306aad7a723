"""From a validated configuration to an ended run: what ``main_ppo`` does once the configuration is right.

The order is: look at the files (``preflight``), lock the run folder, start Ray, start the workers, train, and take
everything down again whatever happened.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import hrl
from hrl.data.chat_template import ChatTemplateError
from hrl.data.errors import DatasetError
from hrl.data.model_source import ModelSourceError
from hrl.reward.function import RewardFunctionError
from hrl.reward.loop import RewardError
from hrl.single_controller.base.errors import PlacementError, WorkerError
from hrl.trainer.checkpoint import CheckpointError, CheckpointStore, load_state
from hrl.trainer.cluster import available_cores, choose_device, run_cluster
from hrl.trainer.config import resolve_placement
from hrl.trainer.config.arithmetic import batch_arithmetic, placement_facts
from hrl.trainer.config.names import JSON_CONSOLE
from hrl.trainer.config.rules import warnings
from hrl.trainer.console import RunConsole
from hrl.trainer.display import Display
from hrl.trainer.json_console import JsonConsole
from hrl.trainer.phases import PHASES
from hrl.trainer.ppo.dynamic_sampling import DynamicSamplingError
from hrl.trainer.ppo.generation import PolicyVersionError
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer, needs_old_log_prob
from hrl.trainer.ppo.reward_parts import RewardPartError
from hrl.trainer.ppo.rewards import RewardService
from hrl.trainer.ppo.roles import Role, pool_manager_of
from hrl.trainer.ppo.worker_groups import worker_mapping
from hrl.trainer.precision import with_dtypes
from hrl.trainer.preflight import Preflight, PreflightError, preflight
from hrl.trainer.reporting import RunReporter
from hrl.trainer.run_folder import RunFolder, RunFolderError
from hrl.workers.runtime import Runtime

if TYPE_CHECKING:
    from hrl.trainer.config import PPOTrainerConfig

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

#: Errors that explain themselves: the terminal gets their message, the log their traceback.
EXPLAINED = (
    ChatTemplateError,
    CheckpointError,
    DatasetError,
    DynamicSamplingError,
    ModelSourceError,
    PlacementError,
    PolicyVersionError,
    PreflightError,
    RewardError,
    RewardFunctionError,
    RewardPartError,
    RunFolderError,
    WorkerError,
)


def run_training(config: PPOTrainerConfig, trainer_cls: type[RayPPOTrainer] | None = None) -> int:
    """Trains as configured.

    Args:
        config: the validated configuration.
        trainer_cls: a subclass of ``RayPPOTrainer`` to run in its place.

    Returns:
        0 for success, 1 for a failure that explains itself, 130 after Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _end_on_signals()
    try:
        _run(config, trainer_cls or RayPPOTrainer)
    except EXPLAINED as error:
        logger.debug("the run failed", exc_info=error)
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n{_resume_hint(config)}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted\n{_resume_hint(config)}")
        return EXIT_INTERRUPTED
    return 0


def _end_on_signals() -> None:
    """Ctrl-C and SIGTERM both raise ``KeyboardInterrupt``.

    Set explicitly, since a background job of a shell starts with SIGINT ignored; and once more when Ray runs, whose
    core answers SIGTERM with a stack trace and an abort.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _resume_hint(config: PPOTrainerConfig) -> str:
    steps = CheckpointStore(RunFolder.checkpoints_in(config.trainer.default_local_dir)).steps()
    return f"the same command continues after step {steps[-1]}\n" if steps else ""


def _run(config: PPOTrainerConfig, trainer_cls: type[RayPPOTrainer]) -> None:
    ready = preflight(config)
    console = display_of(config, ready.total_training_steps)
    facts = [*batch_arithmetic(config, train_rows=len(ready.train_dataset)), *placement_facts(config)]
    console.banner(f"hrl {hrl.__version__}", {fact.label: fact.text for fact in facts})
    for warning in warnings(config):
        console.note(f"warning: {warning}")
    folder = open_run_folder(config, console)
    placement = resolve_placement(config)
    num_processes = sum(map(sum, placement.pools.values()))
    with (
        RunReporter(config, folder, console, ready.tokenizer, num_processes) as reporter,
        run_cluster(config.trainer.ray_kwargs, num_processes),
    ):
        _end_on_signals()
        train(config, ready, reporter, trainer_cls)


def display_of(config: PPOTrainerConfig, total_steps: int) -> Display:
    """Where the run is shown: lines for people, unless ``trainer.logger`` asks for JSON."""
    if JSON_CONSOLE in config.trainer.logger:
        return JsonConsole(total_steps)
    return RunConsole(total_steps, phases=phases_of(config))


def open_run_folder(config: PPOTrainerConfig, console: Display) -> RunFolder:
    """Locks the run folder and takes it back to where the run begins, before its log is opened for appending.

    Only a checkpoint that lies in the folder continues what the folder holds; one of another run starts a new log here.

    Raises:
        CheckpointError: the checkpoint to resume from is missing or torn; the folder is then left as it is.
        RunFolderError: the folder is in use, or holds checkpoints that this run would not continue.
    """
    trainer = config.trainer
    store = CheckpointStore(RunFolder.checkpoints_in(trainer.default_local_dir))
    checkpoint = store.find(trainer.resume_mode, trainer.resume_from_path)
    state = {} if checkpoint is None else load_state(checkpoint)
    continues = checkpoint is not None and checkpoint.resolve().is_relative_to(store.folder)
    folder = RunFolder(trainer.default_local_dir, resume=continues)
    for leftover in store.interrupted():
        console.note(f"ignoring {leftover}, left by an interrupted save")
    if continues:
        step = state["step"]
        folder.rewind(step)
        superseded = store.supersede(after=step)
        if superseded is not None:
            console.note(f"checkpoints of steps after {step}, which are made again, are now in {superseded}")
    return folder


def train(config: Any, ready: Preflight, reporter: RunReporter, trainer_cls: type[RayPPOTrainer]) -> None:
    """Builds the trainer, fits it and ends its workers, on a running Ray."""
    device = choose_device(config.trainer.device)
    config = with_dtypes(config, device)
    roles = config.actor_rollout_ref
    reporter.console.note(f"on {device}: trainer in {roles.actor.fsdp_config.dtype}, engine in {roles.rollout.dtype}")
    manager = pool_manager_of(config, use_gpu=device == "cuda")
    largest_node = max(max(counts) for counts in manager.resource_pool_spec.values())
    runtime = Runtime(
        device=device,
        num_threads=config.trainer.cpu_threads_per_worker or max(1, available_cores() // largest_node),
        seed=config.trainer.seed,
        init_timeout_s=config.trainer.timeouts.init_s,
        collective_timeout_s=config.trainer.timeouts.call_s,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        pad_token_id=ready.ids.pad,
        stop_token_ids=ready.ids.stop,
        vocab_size=ready.ids.vocab_size,
        share_prefix=config.actor_rollout_ref.model.share_prefix,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
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
    """The phases of a step, in order, for the phase bar."""
    optional = {
        "old_log_prob": needs_old_log_prob(config),
        "ref": config.needs_reference,
        "values": config.needs_critic,
        "update_critic": config.needs_critic,
        "testing": False,  # few steps have it; it is drawn when it runs
    }
    return [phase.name for phase in PHASES if optional.get(phase.name, True)]
