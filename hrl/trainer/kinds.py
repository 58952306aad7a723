"""The kinds of run: for each its configuration, its trainer, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from hrl.config.offline import DPOTrainerConfig, OfflineConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import DPO, PPO, RM, SFT, RunKind
from hrl.config.section import WholeConfig
from hrl.data.dataset import columns_of_rows
from hrl.data.other_reader import OtherReader
from hrl.data.steps import StepMarks
from hrl.models.hf_config import vocabulary_of
from hrl.models.tokenizer import resolve_tokenizer
from hrl.preflight.given import Given
from hrl.preflight.preflight import Preflight
from hrl.report.charts import LOSS, REWARD, Picture
from hrl.report.health import validation_loss, validation_score
from hrl.report.phases import PHASES, phase_groups
from hrl.report.step_line import Field, StepLine
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.offline.dpo import DPOTrainer
from hrl.trainer.offline.kto import KTOTrainer
from hrl.trainer.offline.rm import RMTrainer
from hrl.trainer.offline.sft import SFTTrainer
from hrl.trainer.ppo.episodes import EpisodeDriver
from hrl.trainer.ppo.old_log_probs import needs_old_log_prob
from hrl.trainer.ppo.online_dpo import OnlineDPOTrainer
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.trainer.ppo.reward_model_rows import RewardModelRows
from hrl.trainer.ppo.rewards import RewardService
from hrl.trainer.ppo.served_teacher import ServedTeacher

Services = AbstractContextManager[Mapping[str, Any]]
C = TypeVar("C", bound=WholeConfig)
OfflineC = TypeVar("OfflineC", bound=OfflineConfig)


@dataclass(frozen=True)
class Kind(Generic[C]):
    """A kind of run.

    Attributes:
        config: Its configuration: schema, rules, spellings.
        trainer: The trainer that a configuration asks for.
        phases: The phases of a step, in order, for the phase bar.
        line: The numbers that the line of a step shows; none that is 0 in all of them.
        picture: The picture of the run's curve.
        batch_tokens: Tokens of the largest batch, with all rows at their full length.
        notes: What is shown when the processes start, from a configuration without `auto` dtypes.
        services: Further arguments of the trainer by name; the context ends with the run.
    """

    config: RunKind[C]
    trainer: Callable[[C], type[TrainingLoop]]
    phases: Callable[[C], list[str]]
    line: Callable[[C], StepLine]
    picture: Picture
    batch_tokens: Callable[[C, Preflight], int]
    notes: Callable[[C, Preflight], list[str]]
    services: Callable[[C, Preflight, Given], Services]


# ---------------------------------------------------------------------- PPO and its relatives

_UPDATE = phase_groups()["update"]
_EPISODE_FIELDS = (
    Field("turns", ("episode/turns/mean",), "4.1f", drop=2),
    Field("tools", ("episode/tool_calls/mean",), "4.1f", drop=3, optional=True, waits=True),
    Field("fail", ("episode/failed_ratio",), "4.2f", drop=1, optional=True, waits=True),
)


def _ppo_line(config: PPOTrainerConfig) -> StepLine:
    validates = (Field("val", validation_score, "5.3f"),) if config.data.val_files else ()
    # Without a reference there is only the KL divergence within a step, which is 0 at its first optimizer step.
    reference = (Field("kl", ("actor/reward_kl_penalty", "actor/kl_loss", "distillation/loss"), "7.4f", drop=3),)
    within = (Field("kl", ("actor/ppo_kl",), "7.4f", drop=4, optional=True, waits=True),)
    return StepLine(
        (
            Field("reward", ("reward/mean",), "6.3f"),
            *validates,
            Field("len", ("response_length/mean",), "4.0f", drop=2),
            *(_EPISODE_FIELDS if config.environment.is_used else ()),
            *(reference if config.needs_reference else within),
            Field("ent", ("actor/entropy",), "5.2f", drop=6, optional=True),
            Field("grad", ("actor/grad_norm",), "5.2f", drop=3),
            Field("lr", ("actor/lr",), "7.1e", drop=7, optional=True),
        ),
        {"gen": ("gen",), "upd": _UPDATE},
        parts="reward/*/mean",
    )


def _ppo_trainer(config: PPOTrainerConfig) -> type[RayPPOTrainer]:
    return RayPPOTrainer if config.algorithm.preference_loss is None else OnlineDPOTrainer


def _ppo_phases(config: PPOTrainerConfig) -> list[str]:
    optional = {
        "rm": False,  # part of the reward, except where it runs beside other phases
        "old_log_prob": needs_old_log_prob(config),
        "ref": config.needs_reference,
        "values": config.needs_critic,
        "update_critic": config.needs_critic,
        "update": False,  # of the offline trainers
        "testing": False,  # few steps have it; it is shown while it runs
    }
    return [phase.name for phase in PHASES if optional.get(phase.name, True)]


def _ppo_batch_tokens(config: PPOTrainerConfig, ready: Preflight) -> int:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    val_rows = 0 if ready.val_dataset is None else len(ready.val_dataset)
    validated = val_rows * rollout.val_kwargs.n
    return max(data.train_batch_size * rollout.n, validated) * ready.outline.lengths.total


def _ppo_notes(config: PPOTrainerConfig, ready: Preflight) -> list[str]:
    roles = config.actor_rollout_ref
    trainer = f"trainer in {roles.actor.fsdp_config.dtype}, " if ready.outline.placement.trains else ""
    return [f"{trainer}engine in {roles.rollout.dtype}"]


def _step_marks(config: PPOTrainerConfig, reader: OtherReader) -> StepMarks | None:
    model = config.reward.reward_model
    if model.step_token is None:
        return None
    return StepMarks.of(reader.tokenizer, model.step_token, model.step_separator, model.reward_tokens)


@contextmanager
def _services(config: PPOTrainerConfig, ready: Preflight, given: Given) -> Iterator[Mapping[str, Any]]:
    both = zip((ready.train_dataset, ready.val_dataset), ready.scored, strict=True)
    datasets = [rows for rows, is_scored in both if rows is not None and is_scored]
    sources = sorted({source for rows in datasets for source in rows.data_sources})
    with ExitStack() as services:
        columns = columns_of_rows(datasets)
        service = RewardService(config, tuple(sources), given.reward, columns, *ready.scored)
        rewards, episodes = services.enter_context(service), None
        if config.environment.is_used:
            model = config.actor_rollout_ref.model
            tokenizer = resolve_tokenizer(model.tokenizer_path or str(ready.folders["actor"]))
            episodes = services.enter_context(EpisodeDriver(config, given.environment, tokenizer, ready.ids))
        reader = ready.reward_reader
        rows = None if reader is None else RewardModelRows(ready.tokenizer, reader, _step_marks(config, reader))
        teacher = None
        if config.teacher_is_served:
            pupil, folder = config.actor_rollout_ref.model, ready.folders["actor"]
            vocabulary = vocabulary_of(folder, pupil.override_config, trust_remote_code=pupil.trust_remote_code)
            teacher = ServedTeacher(config, vocabulary)
        yield {"rewards": rewards, "episodes": episodes, "reward_model_rows": rows, "teacher": teacher}


# ---------------------------------------------------------------------- trainers that learn from a data set


def _offline_line(config: OfflineConfig) -> StepLine:
    validates = (
        Field("val", validation_loss, "6.4f"),
        Field("val acc", ("val/*/rewards_accuracies",), "5.3f", drop=1, optional=True),
    )
    return StepLine(
        (
            Field("loss", ("train/loss",), "6.4f"),
            Field("acc", ("rewards/accuracies",), "5.3f", optional=True),
            Field("margin", ("rewards/margins",), "6.3f", drop=3, optional=True),
            *(validates if config.data.val_files else ()),
            Field("len", ("response_length/mean",), "4.0f"),
            Field("grad", ("train/grad_norm",), "5.2f", drop=4),
            Field("lr", ("train/lr",), "7.1e", drop=6, optional=True),
        ),
        {"upd": _UPDATE},
    )


def _offline_batch_tokens(config: OfflineConfig, ready: Preflight) -> int:
    return 2 * config.data.train_batch_size * config.data.max_length  # of pairs, a row is two answers


def _offline_notes(config: OfflineConfig, ready: Preflight) -> list[str]:
    datasets = {"training": ready.train_dataset, "validation": ready.val_dataset}
    counts = [f"{name} data: {rows.counts}" for name, rows in datasets.items() if rows is not None]
    return [f"trainer in {config.model.fsdp_config.dtype}", *counts]


def _dpo_trainer(config: DPOTrainerConfig) -> type[DPOTrainer]:
    return KTOTrainer if config.learns_from_labels else DPOTrainer


def _offline(config: RunKind[OfflineC], trainer: type[TrainingLoop]) -> Kind[OfflineC]:
    return Kind(
        config=config,
        trainer=lambda _: trainer,
        phases=lambda _: ["update"],
        line=_offline_line,
        picture=LOSS,
        batch_tokens=_offline_batch_tokens,
        notes=_offline_notes,
        services=lambda *_: nullcontext({}),
    )


KINDS: dict[str, Kind[Any]] = {
    "ppo": Kind(PPO, _ppo_trainer, _ppo_phases, _ppo_line, REWARD, _ppo_batch_tokens, _ppo_notes, _services),
    "dpo": replace(_offline(DPO, DPOTrainer), trainer=_dpo_trainer),
    "sft": _offline(SFT, SFTTrainer),
    "rm": _offline(RM, RMTrainer),
}
"""Name → kind. A run is started with `hrl.trainer.run.run(name, configuration)`, or by `main_<name>`."""
