"""What is looked at once the configuration is right and before anything is started: files, models, tokenizers, data.

Everything that can be wrong with the user's files is found here, in seconds, in the driver, all of it at once, with a
sentence that says what to change. `hrl check` and a run take the same look.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.config.arithmetic import Fact, count, step_sizes, total_steps
from hrl.config.placement import resolve_placement
from hrl.data.base import DatasetCounts, Intake
from hrl.data.chat_template import TemplateReport, inspect_chat_template, with_tools
from hrl.data.rows import PromptRow, check_prompt, read_rows
from hrl.data.user_file import functions_in_user_file, names_in_user_file
from hrl.models.source import check_scores
from hrl.models.tokenizer import TokenIds, load_tokenizer, token_ids
from hrl.nearest import nearest
from hrl.preflight.findings import Findings, PreflightError, sentence
from hrl.preflight.looks import (
    gpus_here,
    joins_a_cluster,
    look_at_columns,
    look_at_devices,
    look_at_engine,
    look_at_family,
    look_at_model,
    look_at_positions,
    look_at_run_folder,
    look_at_size,
    look_at_tokenizer,
    look_at_trackers,
    model_in_words,
    rows_in_words,
)
from hrl.preflight.memory_look import look_at_memory
from hrl.reward.function import RewardFunctionError, RewardSpec
from hrl.reward.pool import RewardPool
from hrl.reward.score import find_scorer, why_no_scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config import PPOTrainerConfig
    from hrl.config.data import DataConfig
    from hrl.config.reward import RewardConfig
    from hrl.data.dataset import RLHFDataset

__all__ = ["Preflight", "PreflightError", "inspect_run", "preflight"]

_MODEL = "actor_rollout_ref.model"
_FUNCTION = "reward.custom_reward_function"
_BATCH = "data.train_batch_size"
_CPU_BATCH = 8
"""Prompts of a step that a CPU makes in seconds to minutes, which is what the hints name."""
_PATIENT_ON_CPU = 1024
"""Sequences of a step beyond which a CPU takes hours, where nobody asked for so many."""


@dataclass(frozen=True)
class Preflight:
    """What a run needs and the files gave.

    Attributes:
        model_path: Local folder of the policy.
        critic_path: Of the model the critic starts from; `None` without a critic.
        reward_model_path: Of the reward model; `None` without one.
        tokenizer: The policy's.
        ids: Padding and stop tokens.
        template: The first prompt as it is sent, and what the chat template can't do.
        train_dataset: Prompts to train on.
        val_dataset: Prompts to validate on, `None` where none are configured.
        total_training_steps: From `trainer.total_training_steps`, or the epochs and the size of the data.
        notes: What was not checked, or is probably not meant.
    """

    model_path: Path
    critic_path: Path | None
    reward_model_path: Path | None
    tokenizer: PreTrainedTokenizerBase
    ids: TokenIds
    template: TemplateReport
    train_dataset: RLHFDataset
    val_dataset: RLHFDataset | None
    total_training_steps: int
    notes: tuple[str, ...] = ()


def preflight(config: PPOTrainerConfig) -> Preflight:
    """Find models and data, fetching what is on the hub, and checks that they fit.

    Raises:
        PreflightError: Lists everything that is wrong, with the way out.
    """
    ready, findings = inspect_run(config)
    findings.raise_problems()
    if ready is None:
        raise RuntimeError("a preflight without problems has to find everything")
    return ready


def inspect_run(config: PPOTrainerConfig, *, download: bool = True) -> tuple[Preflight | None, Findings]:
    """Look at everything that a run needs before it starts anything.

    Args:
        config: The validated configuration.
        download: Fetch models of the hub that are not on this machine; otherwise what can't be checked is noted.

    Returns:
        What the files gave, None where something is missing; and what was found.
    """
    findings = Findings()
    look_at_trackers(findings, config.trainer.logger)
    look_at_engine(findings, config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.engine_kwargs)
    model = config.actor_rollout_ref.model
    path = look_at_model(
        findings,
        f"{_MODEL}.path",
        model.path,
        override=model.override_config,
        download=download,
        trust_remote_code=model.trust_remote_code,
    )
    tokenizer = look_at_tokenizer(findings, _MODEL, model, path, download=download)
    if path is not None:
        findings.facts.append(Fact("model", model_in_words(model.path, path)))
        lengths = ("data.max_prompt_length", "data.max_response_length")
        wanted = config.data.max_prompt_length + config.data.max_response_length
        look_at_positions(findings, path, model, wanted, lengths)
    critic, reward_model = _other_models(findings, config, path, tokenizer, download=download)
    train, val = _datasets(findings, config, tokenizer)
    _look_at_reward(findings, config, train, val)
    _look_at_batch(findings, config, train)
    look_at_devices(findings, config.trainer, sum(map(sum, resolve_placement(config).pools.values())))
    if path is not None and (critic is not None or not config.needs_critic):
        look_at_memory(findings, config, path, critic, reward_model)
    look_at_run_folder(findings, config.trainer, train if tokenizer is not None else None)
    if path is None or tokenizer is None or train is None:
        return None, findings
    ids, template = None, None
    with findings.about(f"{_MODEL}.path"):
        ids = token_ids(tokenizer, path)
    if ids is None:
        return None, findings
    with findings.about("data.train_files"):
        first = train[0]
        kwargs = with_tools(config.data.apply_chat_template_kwargs, first.get("tools"))  # not every data set has tools
        template = inspect_chat_template(tokenizer, first["raw_prompt"], ids.stop, kwargs)
        findings.facts.append(Fact("first prompt", template.shown_prompt))
        findings.notes += template.warnings_for_sampling()
    if template is None or findings.problems:
        return None, findings
    if model.probe:
        _look_at_families(findings, config, path, critic, reward_model)
        if findings.problems:
            return None, findings
    ready = Preflight(
        model_path=path,
        critic_path=critic,
        reward_model_path=reward_model,
        tokenizer=tokenizer,
        ids=ids,
        template=template,
        train_dataset=train,
        val_dataset=val,
        total_training_steps=total_steps(config, len(train)),
        notes=tuple(findings.notes),
    )
    return ready, findings


# ---------------------------------------------------------------------- models


def _look_at_families(
    findings: Findings, config: PPOTrainerConfig, policy: Path, critic: Path | None, reward_model: Path | None
) -> None:
    """No model of the run is of a family that packed training would compute wrongly."""
    roles = config.actor_rollout_ref
    data = config.data
    longest = roles.rollout.max_model_len or data.max_prompt_length + data.max_response_length
    look = partial(look_at_family, findings, trust_remote_code=roles.model.trust_remote_code, max_model_len=longest)
    look(f"{_MODEL}.path", policy, override=roles.model.override_config)
    if critic is not None:
        look("critic.model.path", critic, override=config.critic.model.override_config, is_scalar=True)
    if reward_model is not None:
        look("reward.reward_model.model_path", reward_model, override={}, is_scalar=True)


def _other_models(
    findings: Findings,
    config: PPOTrainerConfig,
    policy: Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    download: bool,
) -> tuple[Path | None, Path | None]:
    """Folders of critic and reward model, where the run has them."""
    reward_model = config.reward.reward_model
    wanted = {
        "critic.model.path": config.critic.model.path if config.needs_critic else None,
        "reward.reward_model.model_path": reward_model.model_path if config.needs_reward_model else None,
    }
    found: list[Path | None] = []
    trust = config.actor_rollout_ref.model.trust_remote_code
    for key, name in wanted.items():
        override = config.critic.model.override_config if key.startswith("critic") else {}
        # A critic in the policy's own folder reads what the policy reads, whichever tokenizer that is.
        if name is None or (name == config.actor_rollout_ref.model.path and not override):
            found.append(None if name is None else policy)
            continue
        folder = look_at_model(findings, key, name, override=override, download=download, trust_remote_code=trust)
        if folder is not None and folder != policy and tokenizer is not None:
            with findings.about(key):
                _look_at_vocabulary(findings, key, folder, tokenizer, trust_remote_code=trust)
        if folder is not None and key.startswith("reward"):
            with findings.about(key):
                check_scores(folder)
        found.append(folder)
    return found[0], found[1]


def _look_at_vocabulary(
    findings: Findings, key: str, folder: Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> None:
    """Critic and reward model read the policy's token ids, so they must mean the same by them."""
    if load_tokenizer(folder, trust_remote_code=trust_remote_code).get_vocab() != tokenizer.get_vocab():
        what = (
            f"names {folder.name}, which has another vocabulary than the policy: it reads the policy's ids as they are."
        )
        findings.problem(key, what, "Take one of the same family.")


# ---------------------------------------------------------------------- data


@dataclass
class _Unrendered:
    """Rows that were read without a tokenizer, where the model is not on this machine yet."""

    rows: list[PromptRow]
    counts: DatasetCounts

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def data_sources(self) -> tuple[str, ...]:
        return tuple(sorted({row.data_source for row in self.rows}))


def _datasets(
    findings: Findings, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Any, Any]:
    """Rows to train and to validate on; None where they can't be read, or none are configured."""
    data = config.data
    needed = {"data.prompt_key": (data.prompt_key,), "data.reward_fn_key": (data.reward_fn_key,)}
    from hrl.data.dataset import dataset_class

    cls = None
    with findings.about("data.custom_cls.path"):
        cls = dataset_class(data.custom_cls)
    if data.custom_cls.path is not None:
        needed = {}  # a class of the user's own reads what it likes,
        cls = cls if tokenizer is not None else None  # and with a tokenizer
    found = []
    for key, noun, sources, most in (
        ("data.train_files", "rows", data.train_files, data.train_max_samples),
        ("data.val_files", "validation rows", data.val_files, data.val_max_samples),
    ):
        rows = None
        if sources and look_at_columns(findings, key, sources, needed) and cls is not None:
            with findings.about(key):
                rows = _unrendered(data, sources, most) if tokenizer is None else cls(sources, tokenizer, data, most)
                lengths = getattr(rows, "lengths", None)
                text = rows_in_words(rows, sources, lengths, "prompts", data.max_prompt_length)
                findings.facts.append(Fact(noun, text))
        found.append(rows)
    return found[0], found[1]


def _unrendered(data: DataConfig, sources: list[str], most: int) -> _Unrendered:
    intake = Intake(sources)
    check = partial(check_prompt, prompt_key=data.prompt_key, source_key=data.reward_fn_key)
    kept = [row for block in intake.blocks(read_rows(sources, check), most) for row in block]
    counts = intake.close(len(kept), skip_bad=data.bad_rows == "skip", too_long=None)
    return _Unrendered(kept, counts)


def _look_at_batch(findings: Findings, config: PPOTrainerConfig, train: Any) -> None:
    """A step can be filled, and was meant to be as large as it is."""
    gpus = joins_a_cluster(config.trainer) or (config.trainer.device != "cpu" and gpus_here() > 0)
    sizes = step_sizes(config)
    if train is not None and len(train) < sizes.prompts:
        most = sizes.prompts if gpus else _CPU_BATCH
        if isinstance(train, _Unrendered):
            findings.problem(_BATCH, f"is {sizes.prompts:,}, but there are only {len(train):,} rows.", "Lower it.")
        else:
            look_at_size(findings, _BATCH, train, sizes.prompts, suggested_at_most=most)
        return
    chosen = config.origins is None or _BATCH in config.origins
    if not chosen and not gpus and sizes.sequences > _PATIENT_ON_CPU:
        what = (
            f"is not set, and one step of its default, {sizes.prompts:,} prompts × {count(sizes.samples, 'sample')}, "
            "takes hours without a GPU."
        )
        findings.problem(_BATCH, what, f"Set it, e.g. {_BATCH}={_CPU_BATCH}.")


# ---------------------------------------------------------------------- rewards


def _look_at_reward(findings: Findings, config: PPOTrainerConfig, train: Any, val: Any) -> None:
    """What scores the rows can be loaded, and knows them."""
    reward, custom = config.reward, config.reward.custom_reward_function
    if reward.function_weight == 0:
        findings.facts.append(Fact("reward", f"the reward model {reward.reward_model.model_path} alone"))
        return
    if custom.path is None:
        known = _look_at_scorers(findings, {"data.train_files": train, "data.val_files": val})
        words = "; ".join(f"{source} pays for {find_scorer(source).rule}" for source in known) or "built-in"
    elif _look_at_function(findings, custom):
        known, words = (), f"{custom.name} of {custom.path}"
        bare = sum(len(_without_ground_truth(rows)) for rows in (train, val))
        if bare:
            rows = count(bare, "row")
            findings.notes.append(f"{rows} without reward_model.ground_truth: {custom.name} gets None there")
    else:
        return
    also = f", and the reward model {reward.reward_model.model_path}" if config.needs_reward_model else ""
    findings.facts.append(Fact("reward", words + also))
    if custom.path is None and not known:
        return
    _load_where_it_runs(findings, config.reward, known)


def _without_ground_truth(rows: Any) -> list[PromptRow]:
    """Rows whose answer nobody said; a data set of the user's own may not tell."""
    return [row for row in getattr(rows, "rows", ()) if row.reward_model.get("ground_truth") is None]


def _look_at_scorers(findings: Findings, datasets: dict[str, Any]) -> tuple[str, ...]:
    """Built-in scorers know every data source, and find the ground truth in every row."""
    known: dict[str, None] = {}
    for key, rows in datasets.items():
        for source in () if rows is None else rows.data_sources:
            reason = why_no_scorer(source)
            if reason is None:
                known[source] = None
            else:
                findings.problem(key, f"has rows that can't be scored: {sentence(reason)}")
        lacking = _without_ground_truth(rows)
        if lacking:
            what = (
                f"has {count(len(lacking), 'row')} without reward_model.ground_truth, which the built-in scorers "
                f"compare answers with; the first is {lacking[0].origin}."
            )
            findings.problem(key, what, f"Add it, or score with a function of your own: {_FUNCTION}.path.")
    return tuple(known)


def _look_at_function(findings: Findings, custom: Any) -> bool:
    """Return the user's file is there and defines the function; it is only read here."""
    names: set[str] | None = None
    before = len(findings.problems)
    with findings.about(f"{_FUNCTION}.path"):
        names = names_in_user_file(custom.path)
    if len(findings.problems) > before:
        return False
    if names is None or custom.name in names:
        return True
    public = sorted(name for name in names if not name.startswith("_"))
    close = nearest(custom.name, public) or functions_in_user_file(custom.path)[-1:]  # helpers stand above
    hint = f"Set {_FUNCTION}.name={close[0]}?" if close else "Define it there."
    what = f"is {custom.name}, which {custom.path} does not define; it has: {', '.join(public) or 'nothing'}."
    findings.problem(f"{_FUNCTION}.name", what, hint)
    return False


def _load_where_it_runs(findings: Findings, reward: RewardConfig, data_sources: tuple[str, ...]) -> None:
    """Load the function, or the built-in scorers of the data sources, in a process as a run has them."""
    spec = RewardSpec.of_config(reward, data_sources)
    key = f"{_FUNCTION}.path" if spec.path is not None else "data.train_files"
    try:
        with RewardPool(spec, num_workers=1, timeout_s=reward.timeout_s, memory_limit_gib=reward.memory_limit_gib):
            pass
    except (RewardFunctionError, ValueError) as error:
        findings.problem(key, f"can't be used: {sentence(str(error))}")
