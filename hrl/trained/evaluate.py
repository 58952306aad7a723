"""`hrl eval`: samples and scores of a model, made as a run makes those of its validation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hrl.algos.registry import ESTIMATOR_TRAITS, POLICY_LOSS_TRAITS
from hrl.config.arithmetic import changed_values
from hrl.config.compose import compose_kind
from hrl.config.override import as_override
from hrl.config.run_kind import PPO
from hrl.config.saved import masked_keys
from hrl.config.section import flatten
from hrl.errors import HrlError, RefusedError
from hrl.files import expanded, write_whole
from hrl.models.source import no_folder
from hrl.report.run_folder import CONFIG, read_jsonl, rollouts_file
from hrl.trained.folders import Trained, find_trained, require_loadable
from hrl.trained.scores import Estimate, SourceScores, score_table

SAMPLES = "samples.jsonl"
SCORES = "scores.json"
_OF_THE_RUN = ("data", "environment", "reward", "actor_rollout_ref.model", "actor_rollout_ref.rollout")
"""Keys and sections of the model's own run that hold for its evaluation too, with the exceptions below."""
_NOT_OF_THE_RUN = (
    "data.train_files",
    "data.train_batch_size",
    "data.train_max_samples",
    "data.val_max_samples",
    "data.val_batch_size",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.serve",
    "actor_rollout_ref.rollout.server",
    "actor_rollout_ref.rollout.val_kwargs",
)
_ENGINE = "actor_rollout_ref.rollout.name"
_INSTEAD_OF = {
    "reward.custom_reward_function.path": "reward.functions",
    "reward.functions": "reward.custom_reward_function.path",
}
"""Keys that say the same in two ways: given for an evaluation, one of them replaces what the run has in the other."""
_ONLY_TRAINED_BY: dict[str, tuple[Collection[str], str]] = {
    "algorithm.adv_estimator": (ESTIMATOR_TRAITS, "reinforce_plus_plus"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (POLICY_LOSS_TRAITS, "vanilla"),
}
"""Keys that may name a function of the run's own, which only its session or a file has, and what stands in for one."""


class NoScoresError(HrlError, RuntimeError):
    """An evaluation has nothing to show."""


class EvaluationError(RefusedError, ValueError):
    """An evaluation that can't be made: there are no rows, or not enough samples of each."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        scores: Source → its scores.
        samples: The file with every sample.
        left_out: Number of samples that the reward function gave no score.
    """

    scores: dict[str, SourceScores]
    samples: Path
    left_out: int


@dataclass(frozen=True)
class Sampling:
    """How the responses are drawn.

    Attributes:
        n: Samples of each prompt.
        temperature: 0 takes the most likely token; None is 0 for one sample and 1 for several.
        sizes: Each k of pass@k and maj@k; n by default.
    """

    n: int = 1
    temperature: float | None = None
    sizes: tuple[int, ...] = ()

    @property
    def drawn_at(self) -> float:
        """The temperature."""
        return self.temperature if self.temperature is not None else float(self.n > 1)


def run_arguments(
    trained: Trained, sources: Sequence[str], sampling: Sampling, folder: Path, overrides: Sequence[str]
) -> list[str]:
    """Return the arguments of the run whose validation is the evaluation.

    A model that lies in the folder of a run brings that run's keys for data, chat template, reward and engine.

    Args:
        trained: The model.
        sources: As in `data.val_files`; none for the validation rows of the model's run.
        sampling: How the responses are drawn.
        folder: Run folder of the evaluation.
        overrides: Further keys; they win.

    Raises:
        EvaluationError: There is nothing to evaluate on.
    """
    own = keys_of_the_run(trained, _OF_THE_RUN, _NOT_OF_THE_RUN, overrides)
    model = require_loadable(trained)
    rows = list(sources) or own.get("data.val_files")
    if not rows:
        if trained.is_of_hub:
            raise EvaluationError(
                f"there is {no_folder(trained.name)}, so it is taken for a model of the hub, which brings no rows: "
                "name a run's folder, or rows behind the model"
            )
        raise EvaluationError(f"name the rows to evaluate {trained.name} on, behind it: {_why_none(trained)}")
    values = own | {
        "actor_rollout_ref.model.path": model,
        "data.train_files": list(rows)[:1],  # a run has some; none is looked at
        "data.train_max_samples": 1,
        "data.train_batch_size": 1,
        "data.val_files": list(rows),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.val_kwargs.n": sampling.n,
        "actor_rollout_ref.rollout.val_kwargs.temperature": sampling.drawn_at,
        "algorithm.adv_estimator": "reinforce_plus_plus",  # needs neither a critic nor groups
        "trainer.role_pools": {"actor": None, "rollout": "global"},  # the engine alone, with the weights of the folder
        "trainer.total_training_steps": 0,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": str(folder),
        "trainer.experiment_name": trained.label,
    }
    return [*(f"{key}={as_override(value)}" for key, value in values.items()), *overrides]


def keys_of_the_run(
    trained: Trained, kept: Sequence[str], left_out: Sequence[str], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the keys of the run that made a model, and that differ from their defaults; none without such a run.

    Args:
        trained: The model.
        kept: Keys, and sections for all that is in them.
        left_out: Those of them that are left out.
        overrides: Further keys, which replace what says the same in another way.

    Raises:
        ConfigError: The run's configuration lacks a secret that these keys need.
    """
    if trained.run is None or "actor_rollout_ref" not in trained.config:
        return {}
    of_the_run = dict(flatten(trained.config, PPO.schema))
    stand_ins = [
        f"{key}={name}" for key, (table, name) in _ONLY_TRAINED_BY.items() if of_the_run.get(key, name) not in table
    ]
    folder_of_the_run = ["--config-path", str(trained.run), "--config-name", Path(CONFIG).stem]
    lost = masked_keys(trained.config, PPO.schema)
    replaced = [own.removesuffix(".path") for own, instead in _INSTEAD_OF.items() if _is_set(instead, overrides)]
    unused = [f"~{key}" for key in lost if not _is_in(key, kept) or _is_in(key, [*left_out, *replaced])]
    again = [override for override in overrides if _is_in(_key(override), lost)]
    config = compose_kind(PPO, [*folder_of_the_run, *stand_ins, *unused, *again])
    own = {
        key: value
        for key, (value, _) in changed_values(config).items()
        if _is_in(key, kept) and not _is_in(key, left_out)
    }
    if config.actor_rollout_ref.rollout.is_served:  # servers of a run are not asked about its model: it may be over
        own.pop(_ENGINE, None)
    return {key: value for key, value in own.items() if not _is_set(_INSTEAD_OF.get(key), overrides)}


def _is_in(key: str, wholes: Sequence[str]) -> bool:
    """Return whether a key is one of these, or a part of one."""
    return any(f"{key}.".startswith(f"{whole}.") for whole in wholes)


def _is_set(key: str | None, overrides: Sequence[str]) -> bool:
    return any(_key(override) == key for override in overrides)


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _why_none(trained: Trained) -> str:
    if trained.run is None:
        return "it lies in no run's folder"
    if "actor_rollout_ref" in trained.config:
        return "its run has no validation rows"
    return "its run learnt from given answers, and has no prompts with a reward"


def evaluate(
    name: str, sources: Sequence[str], sampling: Sampling, folder: Path | None, overrides: Sequence[str]
) -> Evaluation:
    """Sample and score; write `samples.jsonl` and `scores.json` into the folder.

    Args:
        name: The model; see `find_trained`.
        sources: Rows, as `data.val_files` takes them.
        sampling: How the responses are drawn.
        folder: Where the files go; `outputs/eval/<label>` by default.
        overrides: Further keys of the run.

    Raises:
        HrlError: The model, the rows or the keys can't be used, or the run failed.
    """
    from hrl.trainer.run import running

    trained = find_trained(name)
    folder = expanded(folder or Path("outputs", "eval", trained.label)).resolve()
    config = compose_kind(PPO, run_arguments(trained, sources, sampling, folder, overrides))
    n = config.actor_rollout_ref.rollout.val_kwargs.n
    sizes = sampling.sizes or ((n,) if n > 1 else ())
    if any(k > n for k in sizes):
        raise EvaluationError(f"k is {max(sizes)}, but each prompt gets {n} samples: raise -n, or leave larger k out")
    with running(PPO.name, config) as trainer:
        metrics = trainer.evaluate()
        records = rollouts_file(trainer.reporter.folder.path / "rollouts", 0, "val")
        shutil.copyfile(records, folder / SAMPLES)
    samples = list(read_jsonl(folder / SAMPLES))
    left_out = int(sum(value for key, value in metrics.items() if key.startswith("val/") and key.endswith("/skipped")))
    if not samples:
        raise NoScoresError(f"the reward function gave none of the {left_out} samples a score")
    scores = score_table(samples, n, sizes)
    plain = {source: asdict(found) for source, found in scores.items()}
    write_whole(folder / SCORES, json.dumps(plain | {"left_out": left_out}, indent=1) + "\n")
    return Evaluation(scores, folder / SAMPLES, left_out)


def show(evaluation: Evaluation, console: Console) -> None:
    """Write the table of scores."""
    names = list(dict.fromkeys(name for found in evaluation.scores.values() for name in found.estimates))
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("source", overflow="fold")
    for name in ("prompts", *names, "tokens", "cut off"):
        table.add_column(name, justify="right", no_wrap=True)
    for source, found in evaluation.scores.items():
        cells = [_text(found.estimates.get(name)) for name in names]
        table.add_row(Text(source), str(found.prompts), *cells, f"{found.length:.0f}", f"{found.cut_off:.0%}")
    console.print(table)
    if evaluation.left_out:
        console.print(f"{evaluation.left_out} samples have no score: the reward function returned None.")
    if any(name.startswith("pass@") for name in names) and not any(name.startswith("maj@") for name in names):
        console.print("No maj@k: the reward function returns no `pred`, the answer that is voted on.")
    console.print(f"± is the standard error over prompts. Samples: {evaluation.samples}", soft_wrap=True)


def _text(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.3f}" + ("" if estimate.error is None else f" ± {estimate.error:.3f}")
