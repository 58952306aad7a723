"""The rewards of a run as plain data: which functions, with which arguments and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hrl.files import expanded
from hrl.processes.plain_data import from_plain, to_plain
from hrl.reward.function import (
    BuiltIn,
    LibraryFunction,
    PickledFunction,
    RewardFunctionError,
    UserFile,
)
from hrl.reward.weighted import Rewards, entries_of, summed, weighted_sum

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig, RewardEntry

_ENV = "env:"
SERVED_ADDRESS = "HRL_REWARD_MODEL"
"""Environment variable of reward processes: where the run serves its reward model, if it does."""
SERVED_NAME = "reward_model"
"""What the model is called there."""
_FUNCTIONS = "reward.functions"
_KWARGS = "reward.custom_reward_function.reward_kwargs"


def with_served(reward: RewardConfig, address: str) -> RewardConfig:
    """Return the section `reward` with the address of the run's own reward model in its processes' environment."""
    return reward.model_copy(update={"env": [*reward.env, f"{SERVED_ADDRESS}={address}"]})


def _of_served(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function that asks the run's own server, unless they name another one."""
    address = "base_url" if name == "judge" else "url"
    if address in arguments:
        return dict(arguments)
    how = {} if name == "judge" else {"protocol": "vllm"}
    return {address: f"{_ENV}{SERVED_ADDRESS}", "model": SERVED_NAME, **how, **arguments}


@dataclass(frozen=True)
class Summand:
    """A function of a sum.

    Attributes:
        part: What its score is called.
        weight: What its score counts in the sum.
        spec: The function.
    """

    part: str
    weight: float
    spec: RewardSpec


@dataclass(frozen=True)
class SeveralFunctions:
    """Several functions, whose weighted scores are added up.

    Attributes:
        summands: The functions, in the order of their parts.
    """

    summands: tuple[Summand, ...]
    title: ClassVar[str] = "the sum of reward functions"

    @property
    def is_ours(self) -> bool:
        """Whether some of the functions say when a response is to blame."""
        return any(one.spec.source.is_ours for one in self.summands)

    def load(self, kwargs: Mapping[str, Any], columns: Sequence[str] = ()) -> Callable[..., Any]:
        """Load every function, and return their sum as one function.

        Raises:
            RewardFunctionError: One of them can't be loaded.
        """
        loaded = {}
        for one in self.summands:
            function = one.spec.source.load(one.spec.kwargs, columns)
            loaded[one.part] = (partial(function, **one.spec.kwargs) if one.spec.kwargs else function, one.weight)
        return weighted_sum(loaded)

    def wrong(self, data_source: str) -> Any:
        """Return the reward of a response that could not be scored: a wrong answer's, and nothing of a user's own."""
        returned = {one.part: one.spec.source.wrong(data_source) for one in self.summands}
        return summed(returned, {one.part: one.weight for one in self.summands})


Source = BuiltIn | LibraryFunction | UserFile | PickledFunction | SeveralFunctions
_SOURCES = {source.__name__: source for source in (BuiltIn, LibraryFunction, UserFile, PickledFunction)}


@dataclass(frozen=True)
class RewardSpec:
    """The reward function to run, as plain data that its processes can read.

    Attributes:
        source: Where the function comes from.
        kwargs: Passed to every call; a text `env:NAME` stands for the environment variable NAME, here and among the
            arguments of a library function.
        columns: Columns of the rows, which the function may take by name.
    """

    source: Source
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    @classmethod
    def of_config(
        cls,
        reward: RewardConfig,
        data_sources: tuple[str, ...],
        given: Rewards | None = None,
        columns: tuple[str, ...] = (),
        folder: str | Path | None = None,
    ) -> RewardSpec:
        """Return the rewards of the section `reward`, or those that the caller gives as objects.

        Args:
            reward: The section; a single function given as an object gets its `reward_kwargs`, which are refused beside
                a list.
            data_sources: Data sources of the rows.
            given: Used instead of what the section names; see `PickledFunction.of`.
            columns: Columns of the rows.
            folder: Of the run, for what a function keeps.

        Raises:
            RewardFunctionError: Both the section and the caller give functions, there are none, or one can't be used.
        """
        custom = reward.custom_reward_function
        if given is not None:
            named = "reward.custom_reward_function.path" if custom.path is not None else _FUNCTIONS
            listed = [entry.part for entry in reward.entries]
            what = custom.path if custom.path is not None else ", ".join(listed) or "none"
            names_others = not any(entry.is_object for entry in reward.functions or ())
            if custom.path is not None or (reward.functions is not None and names_others):
                raise RewardFunctionError(
                    f"the run was given a reward function as an object, and {what} by {named}; leave one of the two out"
                )
            if callable(given):
                return cls(PickledFunction.of(given, custom.reward_kwargs, columns), custom.reward_kwargs, columns)
            if custom.reward_kwargs:
                raise RewardFunctionError(
                    f"{_KWARGS} has {', '.join(custom.reward_kwargs)}, which is for a single function given as an "
                    "object, and the reward is a list or a name. Give each function its own: functools.partial(f, "
                    "key=value), or an entry such as {'name': 'length', 'most': 50}"
                )
        entries = reward.entries if given is None else entries_of(given)
        if not entries:
            raise RewardFunctionError("there is no reward function")
        summands: list[Summand] = []
        for entry in entries:
            if isinstance(entry, tuple):  # an object
                part, function, weight = entry
                summands.append(Summand(part, weight, cls(PickledFunction.of(function, {}, columns), {}, columns)))
            else:
                spec = cls._of_entry(entry, reward, data_sources, columns, folder)
                summands.append(Summand(entry.part, entry.weight, spec))
        alone = summands[0] if len(summands) == 1 and summands[0].weight == 1 else None
        return cls(SeveralFunctions(tuple(summands)), {}, columns) if alone is None else alone.spec

    @classmethod
    def _of_entry(
        cls,
        entry: RewardEntry,
        reward: RewardConfig,
        data_sources: tuple[str, ...],
        columns: tuple[str, ...],
        folder: str | Path | None,
    ) -> Self:
        if entry.path is not None:
            file, name = entry.file_and_function
            # By its absolute path: the process that loads it need not run in this folder.
            return cls(UserFile(str(expanded(file).resolve()), name), entry.kwargs, columns)
        if entry.name == "data_source":
            return cls(BuiltIn(data_sources, 0.9 * reward.timeout_s), entry.kwargs, columns)
        arguments = dict(entry.kwargs)
        if reward.reward_model.is_served and entry.name in ("judge", "remote"):
            arguments = _of_served(entry.name, arguments)
        if entry.name in ("judge", "code", "remote"):  # what they are not told themselves follows from the run
            arguments.setdefault("deadline_s", 0.9 * reward.timeout_s)
        if entry.name == "judge":
            arguments.setdefault("processes", reward.num_workers)
            if folder is not None:
                arguments.setdefault("cache", str(Path(folder) / "judge.sqlite"))
        return cls(LibraryFunction(str(entry.name), arguments), {}, columns)

    @property
    def env(self) -> dict[str, str]:
        """Argument → environment variable, for the arguments that stand for one."""
        if isinstance(self.source, SeveralFunctions):
            found: dict[str, str] = {}
            for one in self.source.summands:
                found |= {f"{one.part}.{name}": key for name, key in one.spec.env.items()}
            return found
        texts = {name: value for name, value in self._arguments.items() if isinstance(value, str)}
        return {name: text.removeprefix(_ENV) for name, text in texts.items() if text.startswith(_ENV)}

    @property
    def _arguments(self) -> Mapping[str, Any]:
        return self.source.arguments if isinstance(self.source, LibraryFunction) else self.kwargs

    def resolve(self, environ: Mapping[str, str]) -> Self:
        """Fill in the environment variables that arguments name; called only in the function's own process."""
        if isinstance(self.source, SeveralFunctions):
            summands = tuple(replace(one, spec=one.spec.resolve(environ)) for one in self.source.summands)
            return replace(self, source=SeveralFunctions(summands))
        arguments = {**self._arguments, **{name: environ[key] for name, key in self.env.items()}}
        if isinstance(self.source, LibraryFunction):
            return replace(self, source=replace(self.source, arguments=arguments))
        return replace(self, kwargs=arguments)

    def to_plain(self) -> dict[str, Any]:
        """Return the specification as a dict for JSON.

        Raises:
            ValueError: An argument is something other than plain data.
        """
        plain: dict[str, Any] = {"columns": list(self.columns)}
        if isinstance(self.source, SeveralFunctions):
            summands = [(one.part, one.weight, one.spec.to_plain()) for one in self.source.summands]
            return {"summands": summands, **plain}
        return {
            "kind": type(self.source).__name__,
            "source": to_plain(vars(self.source), f"an argument of {self.source.title}"),
            "kwargs": to_plain(self.kwargs, f"an argument of {self.source.title}"),
            **plain,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the specification from the dict of `to_plain`."""
        columns = tuple(plain["columns"])
        if "summands" in plain:
            summands = (Summand(part, weight, cls.from_plain(spec)) for part, weight, spec in plain["summands"])
            return cls(SeveralFunctions(tuple(summands)), {}, columns)
        source = _SOURCES[plain["kind"]](**from_plain(plain["source"]))
        return cls(source, from_plain(plain["kwargs"]), columns)
