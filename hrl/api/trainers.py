"""Train from Python: `hrl.GRPO(model=…, reward=…, data=…).train()`.

A trainer here is a command line with objects in it. What it is given becomes `key=value` arguments, which are composed
and checked as a shell's are; rows and functions go along as objects. So a run means the same from both places, and
errors name the same keys.
"""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hrl.api.arguments import dotted, file_arguments
from hrl.api.choices import chosen
from hrl.api.config_view import ConfigView
from hrl.api.listeners import as_callbacks
from hrl.api.rows import Rows, UsageError, as_sources_or_rows
from hrl.api.run import Run
from hrl.api.signature import attribute_problem, explains_its_arguments
from hrl.config.arithmetic import Fact
from hrl.config.compose import compose_kind
from hrl.config.load import value_problems
from hrl.config.outline import outline_of
from hrl.config.override import as_override
from hrl.config.run_kind import KINDS
from hrl.config.run_kind import KTO as KTO_VALUES
from hrl.config.section import Section, leaves
from hrl.config.trainer import WITHOUT_TRACKER
from hrl.errors import ConfigError, DatasetError, Problem
from hrl.files import expanded
from hrl.preflight.given import TRAIN_ROWS, VAL_ROWS, Given, functions_named, name_of_environment
from hrl.processes.imports import quick_imports
from hrl.report.run_folder import MODEL
from hrl.reward.weighted import Rewards, entries_of
from hrl.user_file import refuse_while_reading

if TYPE_CHECKING:
    from hrl.config.outline import RunConfiguration
    from hrl.trainer.callbacks import Callback
    from hrl.trainer.loop import TrainingLoop


class Trainer:
    """A run to be made, and the processes that make it.

    `train()` starts processes, trains and ends them. In a `with` block they stay for what comes next, such as
    `evaluate()` and `generate()`, and end with the block; `start()` and `close()` do the same over several cells of a
    notebook.

    Args:
        values: Dotted key → value; None for what is not given.
        data: Rows to train on.
        val_data: Rows to validate on.
        recipe: A file of `configs/recipe`.
        config: Further keys.
        callbacks: Are called at the moments of the run.
        trainer_cls: A subclass of the trainer.
    """

    kind: ClassVar[str]
    _recipe: ClassVar[str | None] = None
    _model_key: ClassVar[str] = "model.path"
    _begins_with: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        data: Rows | None,
        val_data: Rows | None,
        recipe: str | None,
        config: Mapping[str, Any] | Section | str | Path | None,
        callbacks: Callback | Sequence[Callback],
        trainer_cls: type[TrainingLoop] | None,
    ) -> None:
        self._callbacks = as_callbacks(callbacks)
        self._trainer_cls = trainer_cls
        self._recipe_name = recipe or self._recipe
        self._file: Path | None = None
        self._values: dict[str, Any] = dict(self._begins_with)
        self._keys = leaves(KINDS[self.kind].schema)
        if isinstance(config, str | Path):
            self._file = Path(config)
        elif isinstance(config, Section):
            self._values |= dotted(config.model_dump(), self._keys)
        elif config is not None:
            self._values |= dotted(config, self._keys)
            _require_once(self._values, data, val_data)
        train_files, self._train_rows = as_sources_or_rows(data)
        val_files, self._val_rows = as_sources_or_rows(val_data)
        self._values |= {
            key: value
            for key, value in {
                "data.train_files": [TRAIN_ROWS] if self._train_rows is not None else train_files,
                "data.val_files": [VAL_ROWS] if self._val_rows is not None else val_files,
                **values,
            }.items()
            if value is not None
        }
        self._chosen: tuple[list[str], dict[str, Any]] | None = None
        self._session: ExitStack | None = None
        self._loop: TrainingLoop | None = None
        self._closed_because: str | None = None
        self._trained: Run | None = None
        self._failed = False

    if not TYPE_CHECKING:  # a type checker knows the attributes, and would accept any with this

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse what nothing would read, such as `trainer.steps = 5`.

            Raises:
                UsageError: The class has no such attribute, or a property; says what to write instead.
            """
            own = getattr(type(self), name, None)
            if not name.startswith("_") and (own is None or isinstance(own, property)):
                raise attribute_problem(self, name, value)
            super().__setattr__(name, value)

    # ------------------------------------------------------------------ what it is

    @property
    def chosen(self) -> Mapping[str, Any]:
        """The keys that nobody set and whose defaults would not suit these rows or this machine, with their values.

        Raises:
            ConfigError: What was set can't be run, so that there is nothing to choose for it.
        """
        given = self._given_arguments()
        if self._chosen is None or self._chosen[0] != given:
            kind = KINDS[self.kind]
            rows = None if self._train_rows is None else len(self._train_rows)
            self._chosen = given, chosen(kind, compose_kind(kind, given), rows)
        return self._chosen[1]

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command line that means the same.

        Raises:
            ConfigError: No command line means it; lists every problem at once.
        """
        return [*self._given_arguments(), *_overrides(self.chosen)]

    @property
    def command(self) -> str:
        """The command line that means the same. Objects are named as in `config.yaml`; a shell needs files instead.

        What no command line can say, such as `trainer_cls`, stands behind it as a comment of the shell.

        Raises:
            ConfigError: No command line means it; lists every problem at once.
        """
        return self._command(self.arguments)

    def _command(self, arguments: Sequence[str]) -> str:
        line = shlex.join([*KINDS[self.kind].program.split(), *arguments, *_overrides(self._objects())])
        unsaid = "; ".join(self._unsaid())
        return f"{line}  # {unsaid}" if unsaid else line

    def _unsaid(self) -> Iterator[str]:
        """Yield what the run has and no command line can say."""
        objects = [] if self._trainer_cls is None else [f"trainer_cls={self._trainer_cls.__name__}"]
        if self._callbacks:
            objects.append(f"callbacks=[{', '.join(type(callback).__name__ for callback in self._callbacks)}]")
        if objects:
            yield f"with {' and '.join(objects)}, which no command line can say"
        for key, value in self._values.items():
            leaf = self._keys.get(key)
            if leaf is not None and isinstance(value, str) and value in leaf.names_registered_here:
                way = f": a shell names its file, {key}=FILE.py:{value}" if leaf.in_files else ""
                yield f"{value} is registered in this session only{way}"

    def _objects(self) -> dict[str, Any]:
        """Return key → names of objects that stand in place of what a shell can say."""
        return {}

    @property
    def config(self) -> ConfigView:
        """The keys, to read and to set, such as `trainer.config.data.max_response_length = 64`."""
        return ConfigView(KINDS[self.kind].schema, self.resolved, self._set)

    def resolved(self) -> RunConfiguration:
        """Return the configuration with all defaults.

        Raises:
            ConfigError: Lists every problem at once.
        """
        return compose_kind(KINDS[self.kind], self.arguments)

    def _given_arguments(self) -> list[str]:
        file = [] if self._file is None else file_arguments(self._file)
        recipe = [] if self._recipe_name is None else [f"recipe={self._recipe_name}"]
        return [*file, *recipe, *_overrides(self._values)]

    def _set(self, key: str, value: Any) -> None:
        if self._loop is not None:
            raise UsageError(f"{key} can't be set while the processes of the run are there: set it before they start")
        values = dotted({key: value}, self._keys)
        if problems := value_problems(values, KINDS[self.kind]):
            raise ConfigError(problems)
        _require_once(values, self._train_rows, self._val_rows)
        self._values |= values

    def _given(self) -> Given:
        return Given(self._train_rows, self._val_rows)

    def __repr__(self) -> str:
        try:
            shown = self.command
        except ConfigError:  # a notebook shows it before anything is asked of it
            shown = f"{self._command(self._given_arguments())} (which can't be run: see `.resolved()`)"
        return f"<hrl.{type(self).__name__}: {shown}>"

    # ------------------------------------------------------------------ what it does

    def train(self) -> Run:
        """Train, and write the trained model, the report and the samples into the run folder.

        The same call continues after the newest checkpoint in the folder, if there is one.

        Raises:
            HrlError: The configuration can't be run (`ConfigError`), or the run failed. Nothing is left running.
        """
        try:
            with self._running() as loop:
                self._trained, self._failed = None, True  # from here on the folder may hold a part of a run
                loop.fit()
                folder = loop.reporter.folder.path
                loop.export(folder / MODEL)
                if self._session is not None:
                    loop.reporter.report_so_far()
        except BaseException as error:
            self._end("a trainer whose run was interrupted or failed", type(error), error, error.__traceback__)
            raise
        self._trained, self._failed = Run(folder, self.kind), False
        return self._trained

    def evaluate(self, data: Rows | None = None) -> dict[str, float]:
        """Return the `val/...` metrics of the present weights: before `train()` the model's, then the trained ones.

        Args:
            data: Rows to validate on, this time, in place of the run's own.
        """
        names, rows = as_sources_or_rows(data)
        if self.kind == "dpo" and self._loop is None and self._trained is not None:
            raise UsageError(
                "DPO compares with the model before its first step, which ended with train(): evaluate within a `with` "
                "block, or read run.metrics"
            )
        with self._running(asked=True) as loop:
            return loop.evaluate(names if rows is None else rows)

    def save_hf(self, folder: str | Path) -> Path:
        """Write the present weights as a folder that transformers and vLLM load, and return it."""
        with self._running(asked=True) as loop:
            return loop.export(expanded(folder).resolve())

    # ------------------------------------------------------------------ its processes

    def start(self) -> Self:
        """Start the processes, which then stay until `close()`."""
        refuse_while_reading()
        if self._loop is not None:
            raise UsageError("the processes of this trainer are there already")
        self._session = self._started(self.resolved(), self._given())
        return self

    def close(self) -> None:
        """End all processes; the trainer can't be used afterwards. Does nothing if it was closed before."""
        self._end("a trainer that is closed", None, None, None)
        self._closed_because = self._closed_because or "a trainer that is closed"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: Any) -> None:
        self._end("a trainer whose `with` block has ended", *failure)

    def _end(self, what: str, *failure: Any) -> None:
        session, self._session, self._loop = self._session, None, None
        if session is not None:
            self._closed_because = what
            session.__exit__(*failure)

    def _started(self, config: RunConfiguration, given: Given) -> ExitStack:
        if self._closed_because is not None:
            raise UsageError(
                f"this is {self._closed_because}: make a new one. With the same arguments and folder it continues "
                "after the newest checkpoint; with model=run.model_path it begins with the trained weights"
            )
        if config.trainer.max_restarts > 0:
            what = f"is {config.trainer.max_restarts}, and only a command starts its run again."
            hint = f"Leave it out, or run the command: {self.command}"
            raise ConfigError([Problem("trainer.max_restarts", what, hint)])
        from hrl.report.display import display_of

        display = display_of(config.trainer)
        with display.stage("importing PyTorch"), quick_imports(freezes=False):  # unless that has been done
            from hrl.trainer.run import running

        session = ExitStack()
        self._loop = session.enter_context(
            running(
                self.kind,
                config,
                given,
                trainer_cls=self._trainer_cls,
                display=display,
                callbacks=self._callbacks,
                facts=self._facts(),
            )
        )
        return session

    def _facts(self) -> list[Fact]:
        facts = [Fact("command", self.command)]
        if self.chosen:
            facts.insert(0, Fact("chosen", ", ".join(_overrides(self.chosen))))
        return facts

    @contextmanager
    def _running(self, *, asked: bool = False) -> Iterator[TrainingLoop]:
        """Yield the trainer of the started processes, or of processes that end with the block.

        Args:
            asked: Whether the weights are only asked, and so must be those that were trained, if any were.
        """
        if self._loop is not None:
            yield self._loop
            return
        refuse_while_reading()
        if asked and self._failed and self._closed_because is None:
            raise UsageError(
                "the run was interrupted or failed: train() again continues after its newest checkpoint, or begins "
                "again if there is none"
            )
        with ExitStack() as stack:
            config, given = self.resolved(), self._given()
            if asked and self._trained is not None:
                config = self._after_training(stack, self._trained)
            stack.push(self._started(config, given))
            stack.callback(setattr, self, "_loop", None)
            assert self._loop is not None
            yield self._loop

    def _after_training(self, stack: ExitStack, run: Run) -> RunConfiguration:
        """Return the configuration of processes that hold the trained model, and are no part of the run.

        They leave its folder, its remote store and its trackers alone.
        """
        logger = [each for each in self.resolved().trainer.logger if each in WITHOUT_TRACKER]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hrl-"))
        section = self._model_key.removesuffix(".path")
        learners = [model.learner for model in outline_of(self.resolved()).models.values()]
        is_adapter = learners[0] is not None and learners[0].trains_adapter  # the policy's, or the only one
        changed = {
            **({f"{section}.lora_adapter_path": str(run.model_path)} if is_adapter else {}),
            **({} if is_adapter else {self._model_key: str(run.model_path)}),
            "trainer.default_local_dir": folder,
            "trainer.resume_mode": "disable",
            "trainer.resume_from_path": None,
            "trainer.default_remote_dir": None,
            "trainer.logger": logger or ["console"],
            "trainer.dashboard": False,
            "trainer.save_freq": -1,  # else the folder is to be on a disk that all nodes share, with room for a save
        }
        return compose_kind(KINDS[self.kind], [*self.arguments, *_overrides(changed)])


def _require_once(values: Mapping[str, Any], data: Rows | None, val_data: Rows | None) -> None:
    """Refuse rows that are given twice, as an argument and by a key.

    Raises:
        UsageError: They are.
    """
    for argument, given, key, name in (
        ("data", data, "data.train_files", TRAIN_ROWS),
        ("val_data", val_data, "data.val_files", VAL_ROWS),
    ):
        if given is not None and values.get(key) not in (None, name, [name]):
            raise UsageError(
                f"{key} is {values[key]!r}, and the rows are given as {argument} too: leave one of them out"
            )


class PPO(Trainer):
    """Proximal policy optimisation (arXiv:1707.06347), with a critic unless `algorithm.adv_estimator` needs none."""

    kind = "ppo"
    _recipe = "ppo"
    _model_key = "actor_rollout_ref.model.path"

    @explains_its_arguments
    def __init__(
        self,
        model: str | Path | None = None,
        reward: Rewards | str | Path | None = None,
        data: Rows | None = None,
        *,
        val_data: Rows | None = None,
        environment: Any = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        n: int | None = None,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        lr: float | None = None,
        lora_rank: int | None = None,
        test_freq: int | None = None,
        save_freq: int | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        name: str | None = None,
        recipe: str | None = None,
        config: Mapping[str, Any] | Section | str | Path | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        trainer_cls: type[TrainingLoop] | None = None,
    ) -> None:
        """Describe a run; nothing is read or started yet.

        What is not given has the default of `docs/configuration.md`, apart from what `chosen` names: batches are never
        larger than rows given as objects, and small models get a learning rate that moves them.

        Args:
            model: Folder or hub id of the model; the bundled one by default.
            reward: What a response is worth: a function, the name of one of the library (`"numeric"`), a Python file
                (`"my_reward.py:name"`), an entry of `reward.functions` as a dict, or a list of such, alone or in pairs
                with their weights. A function takes `response`, `answer` and any column of the rows by name, may be
                async or an object with `__call__`, and returns a number, a dict with `score` and parts, or None for no
                score. By default the built-in function of each row's `data_source`.
            data: Rows to train on: a list of dicts, a dict of columns, a `datasets.Dataset`, a pandas `DataFrame`, or
                names of files or hub data sets. A row has a `prompt` (a text or a chat) and what its reward needs.
            val_data: Rows to validate on.
            environment: What the policy acts in, over several turns: a class such as those of `hrl.Environment`, a
                function that makes one, a list of functions that the policy may call as tools, a Python file
                (`"my_env.py:Class"`) or a name that `hrl env-test --list` shows. Without one a prompt has one answer.
            steps: Steps to train for; by default `epochs` passes over the rows.
            epochs: Passes over the rows (`trainer.total_epochs`).
            batch_size: Prompts per step (`data.train_batch_size`).
            n: Responses to each prompt (`actor_rollout_ref.rollout.n`).
            max_prompt_length: Longest prompt in tokens.
            max_response_length: Longest response in tokens.
            lr: Learning rate of the policy (`actor_rollout_ref.actor.optim.lr`).
            lora_rank: Train a LoRA adapter of this rank instead of the model (`actor_rollout_ref.model.lora_rank`).
            test_freq: Validate every so many steps, besides before the first and after the last.
            save_freq: Write a checkpoint every so many steps, from which the same call continues.
            seed: Of the run: order of the rows, samples, new heads.
            folder: Run folder; `outputs/<project>/<experiment>` by default.
            name: Name of the run (`trainer.experiment_name`).
            recipe: A file of `configs/recipe`, whose values apply where nothing else is given.
            config: Any other keys: nested or dotted, a configuration such as `run.config`, or a YAML file's path.
            callbacks: Objects of `hrl.Callback`, or one, called at named moments of the run.
            trainer_cls: A subclass of `RayPPOTrainer` with hooks of your own.
        """
        self._reward: Any = None
        named_environment = isinstance(environment, str | Path)
        self._environment = None if named_environment else environment
        values: dict[str, Any] = {"environment.path": str(environment) if named_environment else None}
        if callable(reward):
            self._reward = reward
        elif reward is not None:
            rewards = str(reward) if isinstance(reward, Path) else reward
            entries = entries_of(rewards)
            named = [entry.model_dump(exclude_defaults=True) for entry in entries if not isinstance(entry, tuple)]
            if len(named) == len(entries):  # no object among them, so that a command line can say the same
                values["reward.functions"] = named
            else:
                self._reward = rewards
        super().__init__(
            {
                self._model_key: model,
                "data.train_batch_size": batch_size,
                "data.max_prompt_length": max_prompt_length,
                "data.max_response_length": max_response_length,
                "actor_rollout_ref.rollout.n": n,
                "actor_rollout_ref.actor.optim.lr": lr,
                "actor_rollout_ref.model.lora_rank": lora_rank,
                **values,
                **_of_the_run(steps, epochs, test_freq, save_freq, seed, folder, name),
            },
            data=data,
            val_data=val_data,
            recipe=recipe,
            config=config,
            callbacks=callbacks,
            trainer_cls=trainer_cls,
        )

    def _given(self) -> Given:
        return Given(self._train_rows, self._val_rows, self._reward, self._environment)

    def _objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = {}
        if self._environment is not None:
            objects["environment.path"] = name_of_environment(self._environment)
        if self._reward is not None:
            named = [entry.model_dump(exclude_defaults=True) for entry in functions_named(self._reward)]
            objects["reward.functions"] = named
        return objects

    def generate(
        self,
        prompts: Any,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int | None = None,
        logprobs: bool = False,
    ) -> list[dict[str, Any]]:
        """Return responses of the present weights; they are neither scored nor trained on.

        Args:
            prompts: A text, a chat (a list of messages), or several of them; or rows, as `data` takes them.
            n: Responses to each prompt, which follow each other.
            temperature: 0 takes the most likely token.
            top_p: Nucleus size; 1 is off.
            max_tokens: Longest response, at most `data.max_response_length`, which is the default.
            logprobs: Whether each response has the log-probability of each of its tokens, as `logprobs`.

        Returns:
            A dict per response, with `prompt` as the model sees it, `question`, `response`, `response_length`,
            `finish_reason`, ...
        """
        from hrl.workers.requests import SamplingParams

        for what, is_right in {
            f"n={n!r} is no whole number of at least 1": _is_whole(n) and n >= 1,
            f"temperature={temperature!r} is no number of at least 0": _is_number(temperature) and temperature >= 0,
            f"top_p={top_p!r} is no number above 0 and at most 1": _is_number(top_p) and 0 < top_p <= 1,
            f"max_tokens={max_tokens!r} is no whole number": max_tokens is None or _is_whole(max_tokens),
        }.items():
            if not is_right:
                raise UsageError(f"generate: {what}")
        with self._running(asked=True) as loop:
            data: Any = loop.config.data
            policy: Any = loop
            longest: int = data.max_response_length
            if max_tokens is not None and not 0 < max_tokens <= longest:
                raise UsageError(
                    f"generate: max_tokens={max_tokens} is not between 1 and data.max_response_length={longest}, for "
                    "which the engine was started"
                )
            sampling = SamplingParams(float(temperature), float(top_p), max_tokens=int(max_tokens or longest))
            return list(policy.answer(_as_rows(prompts, data.prompt_key), sampling, int(n), with_log_probs=logprobs))


class GRPO(PPO):
    """Group relative policy optimisation (arXiv:2402.03300): the baseline is the mean reward of a prompt's samples."""

    _recipe = "grpo"


class OfflineTrainer(Trainer):
    """What the trainers that learn from given answers have in common."""

    @explains_its_arguments
    def __init__(
        self,
        model: str | Path | None = None,
        data: Rows | None = None,
        *,
        val_data: Rows | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        lr: float | None = None,
        lora_rank: int | None = None,
        test_freq: int | None = None,
        save_freq: int | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | Section | str | Path | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        trainer_cls: type[TrainingLoop] | None = None,
    ) -> None:
        """Describe a run; nothing is read or started yet.

        What is not given has the default of `docs/configuration-offline.md`, apart from what `chosen` names: batches
        are never larger than rows given as objects, and small models get a learning rate that moves them.

        Args:
            model: Folder or hub id of the model; the bundled one by default.
            data: Rows to train on, as for `hrl.GRPO`. A row has what its class says.
            val_data: Rows to validate on.
            steps: Steps to train for; by default `epochs` passes over the rows.
            epochs: Passes over the rows (`trainer.total_epochs`).
            batch_size: Rows per step (`data.train_batch_size`).
            max_length: Longest row in tokens, prompt and answer together (`data.max_length`).
            lr: Learning rate (`optim.lr`).
            lora_rank: Train a LoRA adapter of this rank instead of the model (`model.lora_rank`).
            test_freq: Validate every so many steps, besides before the first and after the last.
            save_freq: Write a checkpoint every so many steps, from which the same call continues.
            seed: Of the run.
            folder: Run folder; `outputs/<project>/<experiment>` by default.
            name: Name of the run (`trainer.experiment_name`).
            config: Any other keys: nested or dotted, a configuration such as `run.config`, or a YAML file's path.
            callbacks: Objects of `hrl.Callback`, or one, called at named moments of the run.
            trainer_cls: A subclass of the kind's trainer with hooks of your own.
        """
        super().__init__(
            {
                self._model_key: model,
                "data.train_batch_size": batch_size,
                "data.max_length": max_length,
                "optim.lr": lr,
                "model.lora_rank": lora_rank,
                **_of_the_run(steps, epochs, test_freq, save_freq, seed, folder, name),
            },
            data=data,
            val_data=val_data,
            recipe=None,
            config=config,
            callbacks=callbacks,
            trainer_cls=trainer_cls,
        )


class SFT(OfflineTrainer):
    """Supervised fine-tuning on answers; a row has `messages` (a chat), or a `prompt` and a `completion`."""

    kind = "sft"


class DPO(OfflineTrainer):
    """Direct preference optimisation (arXiv:2305.18290); a row has `prompt`, `chosen` and `rejected`."""

    kind = "dpo"


class KTO(DPO):
    """Kahneman–Tversky optimisation (arXiv:2402.01306); a row has `prompt`, `completion` and `label`, true or false."""

    _begins_with: ClassVar[Mapping[str, Any]] = KTO_VALUES


class RewardModel(OfflineTrainer):
    """A reward model from pairs of answers; a row has `prompt`, `chosen` and `rejected`."""

    kind = "rm"


def _of_the_run(
    steps: int | None,
    epochs: int | None,
    test_freq: int | None,
    save_freq: int | None,
    seed: int | None,
    folder: str | Path | None,
    name: str | None,
) -> dict[str, Any]:
    return {
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": epochs,
        "trainer.test_freq": test_freq,
        "trainer.save_freq": save_freq,
        "trainer.seed": seed,
        "trainer.default_local_dir": folder,
        "trainer.experiment_name": name,
    }


def _overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={as_override(value)}" for key, value in values.items()]


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _as_rows(prompts: Any, prompt_key: str) -> list[Mapping[str, Any]]:
    """Return prompts as rows: texts, chats, or rows already.

    Raises:
        UsageError: A row lacks its prompt.
    """
    if isinstance(prompts, str) or _is_chat(prompts):
        return [{prompt_key: prompts}]
    if isinstance(prompts, list | tuple) and not any(isinstance(one, Mapping) for one in prompts):
        return [{prompt_key: one} for one in prompts]
    sources, rows = as_sources_or_rows(prompts)
    if rows is None:
        raise UsageError(f"generate takes texts, chats or rows, not the file {sources}")
    for index, row in enumerate(rows):
        if prompt_key not in row:
            raise DatasetError(f"row {index} has no {prompt_key!r}; it has: {', '.join(map(str, row))}")
    return rows


def _is_chat(prompts: Any) -> bool:
    return (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and all(isinstance(one, Mapping) and "role" in one and "content" in one for one in prompts)
    )
