"""Preflight checks of a run whose rows have pictures: which parts of a run read them."""

from __future__ import annotations

import importlib.util
from typing import Any

from hrl.config.arithmetic import Fact, count
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rollout import SERVED
from hrl.preflight.findings import Findings
from hrl.preflight.small_models import runs_on_gpus


def pictures_of(config: RunConfiguration, train_dataset: Any, val_dataset: Any) -> dict[str, bool]:
    """Return what the processes of a run are told of pictures.

    Args:
        config: The validated configuration.
        train_dataset: Rows to train on; None without.
        val_dataset: Rows to validate on; None without.

    Returns:
        `shows_pictures`; and `freeze_vision_tower`, which is true as well where no row trains the tower.
    """
    trains, shows = _has_pictures(train_dataset), _has_pictures(val_dataset)
    frozen = config.actor_rollout_ref.actor.freeze_vision_tower if isinstance(config, PPOTrainerConfig) else False
    return {"shows_pictures": trains or shows, "freeze_vision_tower": frozen or not trains}


def _has_pictures(dataset: Any) -> bool:
    return bool(getattr(dataset, "has_pictures", False))


def _in_words(dataset: Any) -> str:
    """Return how many pictures the rows that are known show, and how many tokens stand for the largest."""
    rows = [dataset.rows[index] for index in dataset.known]
    numbers = [len(row.images) for row in rows]
    sizes = {(each.width, each.height) for row in rows for each in row.images}
    lengths = {dataset.picture_tokens(*size): size for size in sizes}
    most = max(lengths)
    width, height = lengths[most]
    few = f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(max(numbers))
    return f"{few} a row, {sum(numbers):,} in all; the largest, {width} × {height} pixels, takes {count(most, 'token')}"


def look_at_pictures(findings: Findings, config: RunConfiguration, *datasets: Any) -> None:
    """Refuse what reads no pictures in a run whose rows have some.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        datasets: Rows to train and to validate on.
    """
    shown = [dataset for dataset in datasets if _has_pictures(dataset)]
    if not shown:
        if isinstance(config, PPOTrainerConfig) and config.actor_rollout_ref.actor.freeze_vision_tower:
            findings.notes.append(
                "actor_rollout_ref.actor.freeze_vision_tower has no effect: no row shows pictures (data.image_key), "
                "and text trains no tower"
            )
        return
    outline = outline_of(config)
    findings.facts.append(Fact("pictures", _in_words(shown[0])))
    findings.unchecked.append(
        "memory: what the tower that reads pictures keeps for its backward pass is not in the account; its weights, "
        "gradients and moments are, as if it were trained"
    )
    if isinstance(config, PPOTrainerConfig) and config.environment.is_used:
        what = "is set, and the rows have pictures: an episode's turns are text."
        findings.problem("environment.path", what, "Leave it out, or the pictures.")
    if isinstance(config, PPOTrainerConfig) and config.actor_rollout_ref.rollout.name in SERVED:
        what = f"is {config.actor_rollout_ref.rollout.name}, and the rows have pictures, which servers are not sent."
        findings.problem("actor_rollout_ref.rollout.name", what, "Set it to hf.")
    samples_by_vllm = isinstance(config, PPOTrainerConfig) and config.actor_rollout_ref.rollout.name == "vllm"
    if samples_by_vllm and not runs_on_gpus(config):
        what = "is vllm, and the rows have pictures: on a CPU its log-probs were seen to differ from the model's own."
        findings.problem("actor_rollout_ref.rollout.name", what, "Set it to hf.")
    elif samples_by_vllm and importlib.util.find_spec("torchvision") is None:
        what = "is vllm, and the rows have pictures: its classes of models that see import torchvision."
        hint = "Install the torchvision that is built for this torch, or set it to hf."
        findings.problem("actor_rollout_ref.rollout.name", what, hint)
    elif samples_by_vllm:
        findings.notes.append(
            "rollout.name=vllm with pictures has not been run on a GPU yet: look at rollout/logprob_diff_mean of the "
            "first step, which says how far its log-probs are from the trainer's"
        )
    for role, model in outline.models.items():
        if model.is_scalar:
            what = "reads text alone, and the rows have pictures."
            findings.problem(model.key, what, f"Do without the {role}: estimators such as grpo need no critic.")
        elif role == "ref":  # which has a model of its own
            findings.problem(model.key, "is a teacher, which reads text alone, and the rows have pictures.")
        for key, degree in model.degrees.items():
            if key.rpartition(".")[2] in ("tensor_parallel_size", "expert_parallel_size") and degree > 1:
                if key.startswith("actor_rollout_ref.rollout"):
                    continue
                what = f"is {degree}, and the rows have pictures: a tower is not cut."
                findings.problem(key, what, "Set it to 1; fsdp_config.fsdp_size shards it.")
