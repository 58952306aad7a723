"""Check files, models, tokenizers and data after the configuration and before anything is started.

All problems with the user's files are found here, in seconds, in the driver, at once, each with a sentence that says
what to change. `hrl check` and a run make the same checks, for every kind of run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.config.arithmetic import total_steps
from hrl.config.offline import RMTrainerConfig
from hrl.config.outline import Outline, RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reward import RewardModelConfig
from hrl.data.other_reader import OtherReader
from hrl.models.tokenizer import TokenIds
from hrl.preflight.data_look import look_at_batch, look_at_rows, look_at_template
from hrl.preflight.environment_look import look_at_environment
from hrl.preflight.findings import Findings
from hrl.preflight.folder_plan import has_checkpoints, look_at_run_folder, look_at_store
from hrl.preflight.given import Given
from hrl.preflight.layout_look import has_layouts, look_at_layouts
from hrl.preflight.machine_look import (
    look_at_4_bits,
    look_at_cpu_engine,
    look_at_devices,
    look_at_engine,
    look_at_optimizers,
    look_at_shared_memory,
    look_at_trackers,
)
from hrl.preflight.memory_look import device_and_capacity, look_at_memory
from hrl.preflight.model_look import (
    head_size,
    look_at_families,
    look_at_ids,
    look_at_models,
    look_at_tokens_of_teacher,
    padding_of_classifier,
)
from hrl.preflight.pictures_look import look_at_pictures, pictures_of
from hrl.preflight.resume_look import look_at_changes
from hrl.preflight.reward_look import ALL_SCORED, Scored, look_at_reward
from hrl.preflight.reward_model_look import look_at_reward_model, look_at_served_model
from hrl.preflight.run_inputs import run_inputs
from hrl.preflight.server_look import look_at_served_teacher, look_at_servers, look_at_teachers_of_rows
from hrl.preflight.small_models import look_at_rate
from hrl.report.live import ShowStage, in_silence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preflight:
    """Everything that a run needs from files.

    Attributes:
        outline: Outline of the run.
        folders: Role → local folder of its model, for `outline.models`.
        tokenizer: Tokenizer of the trained model.
        ids: Padding and stop tokens.
        train_dataset: Rows to train on.
        val_dataset: Rows to validate on, None if none are configured.
        total_training_steps: From `trainer.total_training_steps`, or the epochs and the size of the data.
        findings: Facts for the banner and notes on what was not checked, or is probably not meant.
        inputs: What the run depends on beside its configuration and rows, for its checkpoints.
        packs_rows: Models run packed rows; else padded ones.
        reward_reader: How a reward model reads the policy's answers that does not read its tokens; None of one that
            does, and without one.
        served_model: Local folder of a reward model that the run serves; None without one.
        scored: Whose samples are scored.
    """

    outline: Outline
    folders: Mapping[str, Path]
    tokenizer: PreTrainedTokenizerBase
    ids: TokenIds
    train_dataset: Any
    val_dataset: Any | None
    total_training_steps: int
    findings: Findings
    inputs: Mapping[str, Any] = field(default_factory=dict)
    packs_rows: bool = True
    reward_reader: OtherReader | None = None
    served_model: Path | None = None
    scored: Scored = ALL_SCORED


def preflight(config: RunConfiguration, given: Given | None = None, stage: ShowStage = in_silence) -> Preflight:
    """Find models and data, downloading models from the hub, and check that they fit.

    Args:
        config: The validated configuration.
        given: Objects that replace files of the configuration.
        stage: Shows what is looked at.

    Raises:
        PreflightError: Lists all problems, each with what to do.
    """
    ready, findings = inspect_run(config, given, stage=stage)
    findings.raise_problems()
    if ready is None:
        raise RuntimeError("a preflight without problems has to find everything")
    return ready


def inspect_run(
    config: RunConfiguration,
    given: Given | None = None,
    *,
    download: bool = True,
    stage: ShowStage = in_silence,
) -> tuple[Preflight | None, Findings]:
    """Check everything that a run needs, without starting anything.

    Args:
        config: The validated configuration.
        given: Objects that replace files of the configuration.
        download: Download hub models that are not on this machine; otherwise they are reported as unchecked.
        stage: Shows what is looked at.

    Returns:
        What the run needs, None if something is missing; and the findings.
    """
    findings, given, outline = Findings(), given or Given(), outline_of(config)
    look_at_trackers(findings, config.trainer.logger)
    look_at_optimizers(findings, config)
    look_at_4_bits(findings, outline)
    if isinstance(config, PPOTrainerConfig):
        look_at_engine(findings, config.actor_rollout_ref.rollout)
    with stage("looking at the model and its tokenizer"):
        folders, tokenizer = look_at_models(findings, outline, download=download)
        ids = look_at_ids(findings, outline, folders.get(next(iter(outline.models))), tokenizer)
        settings = config.reward.reward_model if isinstance(config, PPOTrainerConfig) else RewardModelConfig()
        reader = look_at_reward_model(findings, outline, folders, tokenizer, settings)
        served = look_at_served_model(findings, settings, download=download)
    if isinstance(config, PPOTrainerConfig):
        device, width = device_and_capacity(config.trainer)[0], head_size(outline, folders)
        look_at_cpu_engine(findings, config.actor_rollout_ref.rollout, device, width)
        look_at_tokens_of_teacher(findings, config, folders, tokenizer)
        look_at_servers(findings, config, folders.get(next(iter(outline.models))), ids)
        look_at_served_teacher(findings, config, folders.get(next(iter(outline.models))), tokenizer)
    with stage("reading the rows"):
        train, val = look_at_rows(findings, config, given, tokenizer, ids)
    shown_tools: Sequence[Mapping[str, Any]] | None = []
    scored = ALL_SCORED
    if isinstance(config, PPOTrainerConfig):
        look_at_teachers_of_rows(findings, config, train)
        shown_tools = look_at_environment(findings, config, given, tokenizer, train, val)
        scored = Scored.of(config, given, train, val)
        look_at_reward(findings, config, given, train, val, scored)
    elif given.reward is not None:
        findings.problem("reward", "was given, and this kind of run scores nothing.", "Leave it out.")
    look_at_batch(findings, config, train)
    look_at_pictures(findings, config, train, val, folders=folders, rm_reads_others=reader is not None)
    look_at_rate(findings, config)
    look_at_devices(findings, config.trainer, outline.num_processes)
    look_at_shared_memory(findings, config.trainer)
    look_at_memory(findings, config, outline, folders)
    with stage("reading the newest checkpoint") if has_checkpoints(config.trainer) else nullcontext():
        plan = look_at_run_folder(findings, config.trainer, train if tokenizer is not None else None)
    look_at_store(findings, config.trainer, plan)
    if tokenizer is None or ids is None or train is None:
        return None, findings
    inputs = run_inputs(config, given, folders, tokenizer, val)
    if plan is not None:
        look_at_changes(findings, config, outline, plan, inputs)
    look_at_template(findings, config, train, tokenizer, ids, shown_tools)
    if isinstance(config, RMTrainerConfig):
        with findings.about("model.tokenizer_path"):
            ids = replace(ids, pad=padding_of_classifier(tokenizer, ids))
    packs_rows = True
    if not outline.model.probe:
        findings.notes.append(f"{outline.section}.probe=false: no model is compared with its own forward")
    elif not findings.problems:
        with stage("comparing the model's forward pass in training with its own"):
            shows = pictures_of(config, train, val)["shows_pictures"]
            packs_rows = look_at_families(findings, outline, folders, shows_pictures=shows)
        if not findings.problems and has_layouts(outline, packs_rows=packs_rows):
            with stage("comparing the model over several processes, or with its adapter, with itself"):
                look_at_layouts(findings, outline, folders, config.trainer.seed, packs_rows=packs_rows)
    if findings.problems or folders.keys() < outline.models.keys():
        return None, findings
    steps = total_steps(config, len(train))
    if settings.is_served and served is None:
        return None, findings
    ready = (outline, folders, tokenizer, ids, train, val, steps, findings, inputs, packs_rows, reader, served, scored)
    return Preflight(*ready), findings
