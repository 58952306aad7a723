"""Train from Python: `hrl.GRPO(model=…, reward=…, data=…).train()`.

A trainer here is a command line with objects in it. What it is given becomes `key=value` arguments, which are composed
and checked as a shell's are; rows and functions go along as objects. So a run means the same from both places, and
errors name the same keys.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hydra.core.override_parser.types import Quote, QuotedString

from hrl.config.compose import compose_kind, to_yaml
from hrl.config.run_kind import KINDS
from hrl.config.section import leaves, sections
from hrl.errors import HrlError
from hrl.nearest import did_you_mean
from hrl.preflight.given import TRAIN_ROWS, VAL_ROWS, Given
from hrl.report.run_folder import RolloutKind, read_jsonl, rollouts_file, rollouts_steps
from hrl.reward.weighted import Rewards, as_one

if TYPE_CHECKING:
    from hrl.config.outline import RunConfiguration
    from hrl.trainer.callbacks import Callback
    from hrl.trainer.loop import TrainingLoop

Rows = str | Path | Sequence[str] | Iterable[Mapping[str, Any]]
"""A source as `data.train_files` takes it, several of them, or the rows: a list of dicts, a `datasets.Dataset`, a
pandas `DataFrame`, any iterable of dicts."""

MODEL = "model"
"""The folder of the trained model in a run folder."""
_READ_AS_OTHERS = frozenset({"null", "true", "false", "nan", "inf"})


class UsageError(HrlError, TypeError):
    """A trainer was given something that it can't take, or asked for something that its kind can't do."""


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        path: The run folder.
        kind: `ppo`, `dpo`, `sft` or `rm`.
    """

    path: Path
    kind: str

    @property
    def config(self) -> RunConfiguration:
        """The configuration that it ran with, from `config.yaml` in the folder."""
        return compose_kind(KINDS[self.kind], _file_arguments(self.path / "config.yaml"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step, one dict per step, as in `metrics.jsonl`."""
        return list(read_jsonl(self.path / "metrics.jsonl"))

    @property
    def model_path(self) -> Path:
        """The trained model, a folder that transformers and vLLM load."""
        return self.path / MODEL

    @property
    def report(self) -> Path:
        """The page with curves, samples, times and configuration."""
        return self.path / "report.html"

    def samples(self, step: int | None = None, *, validation: bool = False) -> list[dict[str, Any]]:
        """Return the samples of a step, of the last one by default, or those of the validation after it."""
        kind: RolloutKind = "val" if validation else "train"
        steps = rollouts_steps(self.path / "rollouts", kind)
        if not steps:
            return []
        return list(read_jsonl(rollouts_file(self.path / "rollouts", steps[-1] if step is None else step, kind)))


class Trainer:
    """A run to be made, and the processes that make it.

    `train()` starts processes, trains and ends them. In a `with` block they stay for what comes next, such as
    `evaluate()` and `generate()`, and end with the block.

    Args:
        model: Folder or hub id of the model; the bundled one by default.
        data: Rows to train on.
        val_data: Rows to validate on.
        steps: Steps to train for; by default `trainer.total_epochs` passes over the rows.
        batch_size: Rows of a step (`data.train_batch_size`).
        lr: Learning rate of the model that is trained.
        folder: Run folder; `outputs/<project>/<experiment>` by default.
        name: Name of the run (`trainer.experiment_name`).
        recipe: A file of `configs/recipe`, whose values apply where nothing else is given.
        config: Any other keys: nested or dotted, or a YAML file's path.
        callbacks: See `Callback`.
        trainer_cls: A subclass of the trainer with hooks of your own.

    Raises:
        ConfigError: From `config`, `train` and the others: lists every problem at once.
    """

    kind: ClassVar[str]
    _recipe: ClassVar[str | None] = None
    _model_key: ClassVar[str] = "model.path"
    _lr_key: ClassVar[str] = "optim.lr"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        data: Rows | None = None,
        val_data: Rows | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        folder: str | Path | None = None,
        name: str | None = None,
        recipe: str | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        trainer_cls: type[TrainingLoop] | None = None,
    ) -> None:
        self._callbacks = list(callbacks)
        self._trainer_cls = trainer_cls
        self._recipe_name = recipe or self._recipe
        self._file: Path | None = None
        self._values: dict[str, Any] = {}
        if isinstance(config, str | Path):
            self._file = Path(config)
        elif config is not None:
            self._values |= _dotted(config)
        train_files, self._train_rows = _named(data, TRAIN_ROWS)
        val_files, self._val_rows = _named(val_data, VAL_ROWS)
        self._values |= {
            key: value
            for key, value in {
                self._model_key: None if model is None else str(model),
                "data.train_files": train_files,
                "data.val_files": val_files,
                "data.train_batch_size": batch_size,
                "trainer.total_training_steps": steps,
                "trainer.default_local_dir": None if folder is None else str(folder),
                "trainer.experiment_name": name,
                self._lr_key: lr,
            }.items()
            if value is not None
        }
        self._session: ExitStack | None = None
        self._loop: TrainingLoop | None = None

    # ------------------------------------------------------------------ what it is

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command line that means the same."""
        file = [] if self._file is None else _file_arguments(self._file)
        recipe = [] if self._recipe_name is None else [f"recipe={self._recipe_name}"]
        return [*file, *recipe, *(f"{key}={_as_override(value)}" for key, value in self._values.items())]

    @property
    def command(self) -> str:
        """The command line that means the same, where no object is given in place of a file."""
        return shlex.join([*KINDS[self.kind].program.split(), *self.arguments])

    @property
    def config(self) -> ConfigView:
        """The keys, to read and to set: `trainer.config.data.max_response_length = 64`."""
        return ConfigView(self, "")

    def resolved(self) -> RunConfiguration:
        """Return the configuration with all defaults.

        Raises:
            ConfigError: Lists every problem at once.
        """
        return compose_kind(KINDS[self.kind], self.arguments)

    def _given(self) -> Given:
        return Given(self._train_rows, self._val_rows)

    # ------------------------------------------------------------------ what it does

    def train(self) -> Run:
        """Train, and write the trained model, the report and the samples into the run folder.

        Raises:
            HrlError: The configuration can't be run (`ConfigError`), or the run failed. Nothing is left running.
        """
        with self._running() as loop:
            loop.fit()
            folder = loop.reporter.folder.path
            loop.export(folder / MODEL)
            return Run(folder, self.kind)

    def evaluate(self, data: Rows | None = None) -> dict[str, float]:
        """Return the `val/...` metrics of the present weights.

        Args:
            data: Rows to validate on in place of the run's own.
        """
        names, rows = _named(data, VAL_ROWS)
        with self._running() as loop:
            return loop.evaluate(names if rows is None else rows)

    def save_hf(self, folder: str | Path) -> Path:
        """Write the present weights as a folder that transformers and vLLM load."""
        with self._running() as loop:
            return loop.export(Path(folder).expanduser().resolve())

    def close(self) -> None:
        """End all processes. Does nothing if there are none."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        from hrl.trainer.run import running

        session = ExitStack()
        self._loop = session.enter_context(
            running(self.kind, self.resolved(), self._given(), trainer_cls=self._trainer_cls, callbacks=self._callbacks)
        )
        self._session = session
        return self

    def __exit__(self, *failure: Any) -> None:
        session, self._session, self._loop = self._session, None, None
        if session is not None:
            session.__exit__(*failure)

    @contextmanager
    def _running(self) -> Iterator[TrainingLoop]:
        if self._loop is not None:
            yield self._loop
            return
        with self:
            assert self._loop is not None
            yield self._loop


class PPO(Trainer):
    """Proximal policy optimisation, with a critic unless `algorithm.adv_estimator` needs none.

    Args:
        reward: Function that scores a response, or several of them, alone or in pairs with their weights; by default
            the built-in one of each row's `data_source`. It takes `response`, `answer` and any column by name.
        arguments: Those of `Trainer`.
    """

    kind = "ppo"
    _recipe = "ppo"
    _model_key = "actor_rollout_ref.model.path"
    _lr_key = "actor_rollout_ref.actor.optim.lr"

    def __init__(self, model: str | Path | None = None, *, reward: Rewards | None = None, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self._reward = None if reward is None else as_one(reward)

    def _given(self) -> Given:
        return Given(self._train_rows, self._val_rows, self._reward)

    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return responses of the present weights; they are neither scored nor trained on.

        Args:
            prompts: A prompt or several, each a text or a chat (a list of messages).
            n: Responses to each prompt, which follow each other.
            temperature: 0 takes the most likely token.
            top_p: Nucleus size; 1 is off.
            max_tokens: Longest response; `data.max_response_length` by default, and at most.

        Returns:
            A dict per response: `prompt`, `response`, `response_length`, `finish_reason`, ...
        """
        from hrl.workers.requests import SamplingParams

        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        with self._running() as loop:
            data: Any = loop.config.data
            policy: Any = loop
            rows = [{data.prompt_key: prompt, data.reward_fn_key: "generate"} for prompt in listed]
            sampling = SamplingParams(temperature, top_p, max_tokens=max_tokens or data.max_response_length)
            return list(policy.answer(rows, sampling, n))


class GRPO(PPO):
    """Group relative policy optimisation: the mean reward of a prompt's samples is their baseline."""

    _recipe = "grpo"


class DPO(Trainer):
    """Direct preference optimisation on pairs of a chosen and a rejected answer."""

    kind = "dpo"


class SFT(Trainer):
    """Supervised fine-tuning on answers."""

    kind = "sft"


class RewardModel(Trainer):
    """A reward model from pairs of a chosen and a rejected answer."""

    kind = "rm"


class ConfigView:
    """The keys of a trainer as attributes; what is set is checked when the configuration is next read."""

    def __init__(self, trainer: Trainer, prefix: str) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, name: str) -> Any:
        key, schema = self._key(name), KINDS[self._trainer.kind].schema
        if key in sections(schema):
            return ConfigView(self._trainer, f"{key}.")
        value: Any = self._trainer.resolved()
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._trainer._values |= _dotted({self._key(name): value})

    def __dir__(self) -> list[str]:
        schema = KINDS[self._trainer.kind].schema
        below = [key.removeprefix(self._prefix) for key in leaves(schema) if key.startswith(self._prefix)]
        return sorted({key.partition(".")[0] for key in below})

    def __repr__(self) -> str:
        return to_yaml(self._trainer.resolved()) if not self._prefix else f"<keys {self._prefix}*>"

    def _key(self, name: str) -> str:
        if name not in (known := dir(self)):
            hint = did_you_mean(name, known, f"There are {', '.join(known)}.")
            raise AttributeError(f"{self._prefix}{name} is not a key of hrl. {hint}")
        return f"{self._prefix}{name}"


def _file_arguments(file: Path) -> list[str]:
    return ["--config-path", str(file.parent), "--config-name", file.stem]


def _named(rows: Rows | None, name: str) -> tuple[list[str] | None, list[Mapping[str, Any]] | None]:
    """Return what stands in the configuration for these rows, and the rows themselves if they are objects.

    Raises:
        UsageError: These are no rows.
    """
    if rows is None:
        return None, None
    if isinstance(rows, str | Path):
        return [str(rows)], None
    if hasattr(rows, "to_dict") and hasattr(rows, "iterrows"):  # pandas, which need not be installed
        rows = rows.to_dict("records")
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise UsageError(f"data is a {type(rows).__name__}; give a list of rows (dicts), a data set, or a file's name")
    items: list[Any] = list(rows)
    if items and all(isinstance(item, str | Path) for item in items):
        return [str(item) for item in items], None
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise UsageError(f"row {index} of data is a {type(item).__name__}; a row is a dict of column to value")
    return [name], items


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as dotted keys; a dict below a key that holds one is flattened by its reader."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _dotted(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _as_override(value: Any) -> str:
    """Return a value in the grammar of hydra's overrides, which reads the same value back.

    Raises:
        UsageError: It is no plain value.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        text = str(value)
        return text if _is_plain_word(text) else QuotedString(text, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_as_override, value)) + "]"
    raise UsageError(f"a configuration holds plain values, not a {type(value).__name__}: {value!r}")


def _is_plain_word(text: str) -> bool:
    """Return whether hydra reads a text as itself without quotes."""
    return bool(re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_/.\-:]*", text)) and text.lower() not in _READ_AS_OTHERS
