"""Preflight checks of a run whose rows have pictures: which parts of a run read them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hrl.config.arithmetic import Fact, count
from hrl.config.outline import NamedModel, RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.data.chat import texts_in
from hrl.episodes.pictures import NO_VIDEOS
from hrl.pictures import PictureSource, Shown, VideoSource
from hrl.preflight.findings import Findings
from hrl.preflight.small_models import runs_on_gpus
from hrl.workers.rollout.server_http import OF_TEACHER


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
    frozen = _frozen(config)[1]
    return {"shows_pictures": trains or shows, "freeze_vision_tower": frozen or not trains}


def _frozen(config: RunConfiguration) -> tuple[str, bool]:
    """Return the key that freezes the tower of the trained model, and whether it does."""
    if isinstance(config, PPOTrainerConfig):
        return "actor_rollout_ref.actor.freeze_vision_tower", config.actor_rollout_ref.actor.freeze_vision_tower
    return "model.freeze_vision_tower", config.model.freeze_vision_tower


def _has_pictures(dataset: Any) -> bool:
    return bool(getattr(dataset, "has_pictures", False))


def _in_words(dataset: Any, kind: type[PictureSource] | type[VideoSource]) -> str | None:
    """Return how many pictures or videos the rows that are known show, and how many tokens stand for the largest.

    Args:
        dataset: Of the rows.
        kind: Which of the two.

    Returns:
        None if they show none.
    """
    numbers = [sum(isinstance(each, kind) for each in dataset.rows[index].images) for index in dataset.known]
    if not any(numbers):
        return None
    lengths = {dataset.picture_tokens(each): each for each in _of_each_size(dataset, kind)}
    most = max(lengths)
    few = f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(max(numbers))
    return f"{few} a row, {sum(numbers):,} in all; the largest, {_size_of(lengths[most])}, takes {count(most, 'token')}"


def _of_each_size(dataset: Any, kind: type[PictureSource] | type[VideoSource]) -> list[Shown]:
    """Return a picture or video of each size that the known rows show."""
    shown = (each for index in dataset.known for each in dataset.rows[index].images if isinstance(each, kind))
    names = ("width", "height", "limits", "num_frames", "rate", "wanted_rate")
    return list({tuple(getattr(each, name, None) for name in names): each for each in shown}.values())


def _size_of(shown: Shown) -> str:
    size = f"{shown.width} × {shown.height} pixels"
    return f"{shown.num_frames} frames of {size}" if isinstance(shown, VideoSource) else size


def shows_pictures(*datasets: Any) -> bool:
    """Return whether any of these rows show pictures."""
    return any(map(_has_pictures, datasets))


def vllm_shows_pictures_here() -> bool:
    """Return whether this machine has what vLLM's classes of models that see import."""
    return importlib.util.find_spec("torchvision") is not None


def look_at_pictures(
    findings: Findings,
    config: RunConfiguration,
    *datasets: Any,
    folders: Mapping[str, Path] | None = None,
    rm_reads_others: bool = False,
    runs_here: bool = True,
) -> None:
    """Refuse what reads no pictures in a run whose rows have some, or would not see them as the policy does.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        datasets: Rows to train and to validate on.
        folders: Role → folder of its model, of those that are here.
        rm_reads_others: The reward model has a tokenizer or a chat template of its own.
        runs_here: The run is this machine's, and not one that is only looked at here.
    """
    shown = [dataset for dataset in datasets if _has_pictures(dataset)]
    _look_at_empty_places(findings, config, datasets)
    if not shown:
        key, is_frozen = _frozen(config)
        if is_frozen:
            findings.notes.append(
                f"{key} has no effect: no row shows pictures (data.image_key, data.video_key), and text trains no tower"
            )
        return
    outline = outline_of(config)
    for name, kind in (("pictures", PictureSource), ("videos", VideoSource)):
        if (words := _in_words(shown[0], kind)) is not None:
            findings.facts.append(Fact(name, words))
    findings.unchecked.append(
        "memory: what the tower that reads pictures keeps for its backward pass is not in the account; its weights, "
        "gradients and moments are, as if it were trained"
    )
    plays = isinstance(config, PPOTrainerConfig) and config.environment.is_used
    if plays and any(dataset.has_videos for dataset in shown):
        findings.problem("environment.path", f"is set, and the rows have videos: {NO_VIDEOS}.", "Leave out either.")
    if isinstance(config, PPOTrainerConfig) and config.actor_rollout_ref.rollout.is_of_others:
        what = (
            f"is {config.actor_rollout_ref.rollout.name}, and the rows have pictures, which its engines are not sent."
        )
        findings.problem("actor_rollout_ref.rollout.name", what, "Set it to hf.")
    samples_by_vllm = isinstance(config, PPOTrainerConfig) and config.actor_rollout_ref.rollout.name == "vllm"
    if samples_by_vllm and any(dataset.has_videos and not dataset.says_times for dataset in shown):
        what = (
            "is vllm, and the rows have videos whose times are in their positions: vLLM lets the text behind a video "
            "begin where its time ends, and transformers 5 where its frames end."
        )
        findings.problem("actor_rollout_ref.rollout.name", what, "Set it to hf, or take Qwen3-VL.")
    if samples_by_vllm and runs_here and not vllm_shows_pictures_here():
        what = "is vllm, and the rows have pictures: its classes of models that see import torchvision."
        hint = "Install the torchvision that is built for this torch, or set it to hf."
        findings.problem("actor_rollout_ref.rollout.name", what, hint)
    elif samples_by_vllm and runs_on_gpus(config):
        findings.notes.append(
            "rollout.name=vllm with pictures has not been run on a GPU yet: look at rollout/logprob_diff_mean of the "
            "first step, which says how far its log-probs are from the trainer's"
        )
    if isinstance(config, PPOTrainerConfig):
        blind = [entry.name for entry in config.reward.entries if entry.name in ("remote", "judge")]
        if blind:
            findings.notes.append(
                f"{' and '.join(dict.fromkeys(blind))} of reward.functions: what is sent of a prompt is its words, in "
                "which <image> or <video> stands for what it shows"
            )
    if isinstance(config, PPOTrainerConfig) and config.teacher_is_served:
        what = "names a teacher, whose servers are sent text alone, and the rows have pictures."
        findings.problem(f"{OF_TEACHER}.urls", what, "Let the run hold the teacher: set its model_path.")
    first = next(iter(outline.models.values()))
    for role, model in outline.models.items():
        if role == "rm" and not model.is_scalar:
            what = "scores steps by a word, by which it reads text alone, and the rows have pictures."
            findings.problem(model.key, what, "Score by a function, or with a classifier.")
        elif role == "rm" and rm_reads_others:
            what = (
                "has a tokenizer or chat template of its own, and the rows have pictures, which only the policy's show."
            )
            findings.problem(model.key, what, "Score by a function, or with a model that reads the policy's tokens.")
        elif model.path != first.path and (folder := (folders or {}).get(role)) is not None:
            _look_at_eyes(findings, model, folder, shown, trust_remote_code=outline.model.trust_remote_code)
        for key, degree in model.degrees.items():
            if key.rpartition(".")[2] in ("tensor_parallel_size", "expert_parallel_size") and degree > 1:
                if key.startswith("actor_rollout_ref.rollout"):
                    continue
                what = f"is {degree}, and the rows have pictures: a tower is not cut."
                findings.problem(key, what, "Set it to 1; fsdp_config.fsdp_size shards it.")


def _look_at_empty_places(findings: Findings, config: RunConfiguration, datasets: Sequence[Any]) -> None:
    """Say which rows have the places of pictures in their words and show none, to a model that would see them."""
    if config.data.image_key is None or not any(getattr(dataset, "sees", False) for dataset in datasets):
        return
    found = [row.origin for dataset in datasets if dataset is not None for row in _with_empty_places(dataset)]
    if found:
        findings.notes.append(
            f"{count(len(found), 'row')} ({found[0]}{', …' if len(found) > 1 else ''}) with <image> or <video> in the "
            "prompt and nothing to show: the model reads a word there. If a column has what belongs there, name it: "
            "data.image_key, data.video_key"
        )


def _with_empty_places(dataset: Any) -> Iterator[Any]:
    """Yield the known rows that show nothing, and whose prompt says where something belongs."""
    for row in (dataset.rows[index] for index in dataset.known):
        chat: Any = getattr(row, "messages", None) or getattr(row, "prompt", ())
        asked = chat if isinstance(chat, str) else [each for each in chat if each["role"] != "assistant"]
        if not row.images and any(mark in text for text in texts_in(asked) for mark in ("<image>", "<video>")):
            yield row


def _look_at_eyes(
    findings: Findings, model: NamedModel, folder: Path, datasets: Sequence[Any], *, trust_remote_code: bool
) -> None:
    """Check that a model that reads the policy's tokens has as many for a picture as the policy has.

    Args:
        findings: Collects problems.
        model: Of a critic, reward model or teacher with a folder of its own.
        folder: The folder.
        datasets: Of rows that show pictures.
        trust_remote_code: The folder may run code.
    """
    from hrl.data.pictures import PictureTokens
    from hrl.models.tokenizer import load_tokenizer

    with findings.about(model.key):
        tokens = PictureTokens(load_tokenizer(folder, trust_remote_code=trust_remote_code))
        for dataset in datasets:
            for each in (*_of_each_size(dataset, PictureSource), *_of_each_size(dataset, VideoSource)):
                wanted = dataset.picture_tokens(each)
                try:
                    own = count(tokens.num_tokens(each), "token")
                except ValueError as error:
                    own = f"no tokens ({error})"
                if own != count(wanted, "token"):
                    what = (
                        f"names {folder.name}, in which {own} would stand for {_size_of(each)}, and the policy's "
                        f"prompts have {wanted}."
                    )
                    files = (
                        "video_preprocessor_config.json"
                        if isinstance(each, VideoSource)
                        else "preprocessor_config.json"
                    )
                    findings.problem(
                        model.key, what, f"Take one of the policy's family, with the same sizes in its {files}."
                    )
                    return
