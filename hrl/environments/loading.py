"""Where environments come from, as plain data for their processes: a file, a module, a name, an object of Python."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from hrl.environments.agent import AgentEnvironment
from hrl.environments.arguments import KEY, EnvironmentArgumentError, check_names, in_words, read_arguments
from hrl.environments.interface import Environment
from hrl.environments.registry import (
    ENVIRONMENTS,
    RowChoiceError,
    UnknownEnvironmentError,
    check_row_choice,
    check_row_kwargs,
    check_tool_name,
    load_named,
    load_named_tool,
    named_by_rows,
)
from hrl.environments.replies import GYMNASIUM
from hrl.environments.single_turn import SingleTurn
from hrl.environments.tool_functions import a_kind
from hrl.environments.tools import ToolEnvironment, ToolLimits, tool_of
from hrl.errors import RefusedError
from hrl.files import expanded
from hrl.nearest import did_you_mean
from hrl.processes.pickled import NotPickledError, PickledObject, extend_import_path, import_path, name_of
from hrl.processes.plain_data import from_plain, to_plain
from hrl.user_file import UserFileError, load_user_file, member_of, reading

_ENV = "env:"
_METHODS = {"reset": ("row", "seed"), "step": ("action",), "close": ()}
"""Method → what it is called with; seeds only where they are named."""
_SEEDS = ("seed", "sample_seed")
_KIND = "class or function"


class EnvironmentLoadError(RefusedError, ValueError):
    """An environment or a tool can't be loaded, or is none."""


@dataclass(frozen=True)
class InFile:
    """A class or function in a Python file of the user's.

    Attributes:
        path: The file.
        name: Of the class or function in it.
    """

    path: str
    name: str

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"{self.name} in {self.path}"

    def load(self, modules: dict[str, ModuleType]) -> Any:
        """Run the file, which is the user's own code, once, and return what has the name.

        Args:
            modules: Path → module, of the files that were run.

        Raises:
            EnvironmentLoadError: There is no such file or name. Exceptions of the user's code are passed on.
        """
        try:
            if self.path not in modules:
                modules[self.path] = load_user_file(self.path)
            return member_of(modules[self.path], self.name, _KIND)
        except UserFileError as error:
            raise EnvironmentLoadError(str(error)) from error
        except ImportError as error:
            if "relative import" not in str(error):
                raise
            raise EnvironmentLoadError(
                f"{self.path} imports from its package ({error}), and a file by itself has none: name the module, such "
                f"as package.{Path(self.path).stem}:{self.name}"
            ) from error


@dataclass(frozen=True)
class InModule:
    """A class or function of a module that can be imported, such as one of an installed package.

    Attributes:
        module: Its name, with dots.
        name: Of the class or function in it.
        import_path: Where the run's own process finds modules, its folder at the end.
    """

    module: str
    name: str
    import_path: tuple[str, ...]

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"{self.name} in {self.module}"

    def load(self, modules: dict[str, ModuleType]) -> Any:
        """Import the module, which is the user's own code, and return what has the name.

        Raises:
            EnvironmentLoadError: There is no such module or name. Exceptions of the user's code are passed on.
        """
        extend_import_path(self.import_path)
        try:
            with reading():
                module = import_module(self.module)
            return member_of(module, self.name, _KIND)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports another one that is not
            raise EnvironmentLoadError(
                f"there is no module {error.name} for {self.module}:{self.name}: install its package, put its folder "
                f"on PYTHONPATH, or name a file, such as {error.name.rpartition('.')[2]}.py:{self.name}"
            ) from error
        except UserFileError as error:
            raise EnvironmentLoadError(str(error)) from error


@dataclass(frozen=True)
class Named:
    """An environment of the registry.

    Attributes:
        name: Its name.
    """

    name: str

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return self.name

    def load(self, modules: dict[str, ModuleType]) -> Any:
        """Import the class.

        Raises:
            EnvironmentLoadError: No environment has the name, or a package is missing.
        """
        try:
            return load_named(self.name)
        except UnknownEnvironmentError as error:
            raise EnvironmentLoadError(str(error)) from error


@dataclass(frozen=True)
class NamedTool:
    """A tool that comes with hrl.

    Attributes:
        name: Its name.
    """

    name: str

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return self.name

    def load(self, modules: dict[str, ModuleType]) -> Any:
        """Return its function.

        Raises:
            HrlError: It can't be used on this machine.
        """
        return load_named_tool(self.name)


@dataclass(frozen=True)
class Given(PickledObject):
    """A class or object that the caller of a run gave, as its processes get it."""

    @classmethod
    def of(cls, value: object) -> Self:
        """Pickle a class, a function that makes environments, or an environment of which each episode gets a copy.

        Raises:
            EnvironmentLoadError: It can't be sent to another process.
        """
        try:
            return super().of(value)
        except NotPickledError as error:
            raise EnvironmentLoadError(
                f"{name_of(value)} can't be sent to the processes of environments: {error}. Open clients, locks and "
                "files in `reset`, or put it into a Python file and name that with environment.path"
            ) from error

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return self.name

    def load(self, modules: dict[str, ModuleType] | None = None) -> Any:
        """Unpickle it.

        Raises:
            EnvironmentLoadError: Its module can't be imported here.
        """
        try:
            with reading():  # its module is imported
                return super().load()
        except UserFileError as error:
            raise EnvironmentLoadError(str(error)) from error
        except ModuleNotFoundError as error:
            raise EnvironmentLoadError(
                f"{error} in the processes of environments. Put its folder on PYTHONPATH, or name the file of the "
                "environment with environment.path"
            ) from error


Source = InFile | InModule | Named | Given
Tools = InFile | InModule | NamedTool | Given
_SOURCES = {source.__name__: source for source in (InFile, InModule, Named, NamedTool, Given)}


def _source_of(written: str) -> Source:
    """Read `environment.path`: a class in a file or a module, or a name."""
    if ":" in written or written.endswith(".py"):
        return _in_file_or_module(written, "environment.path", "my_env.py:Class or package.module:Class")
    return Named(written)


def _in_file_or_module(written: str, key: str, example: str) -> InFile | InModule:
    """Read `file.py:name`, or `package.module:name`.

    Args:
        written: The text.
        key: Where it is written.
        example: Texts that would do.

    Raises:
        EnvironmentLoadError: It is nothing of the kind.
    """
    path, _, name = written.rpartition(":")
    if name.isidentifier() and path.endswith(".py"):
        # By its absolute path: the process that loads it need not run in this folder.
        return InFile(str(expanded(path).resolve()), name)
    if name.isidentifier() and all(part.isidentifier() for part in path.split(".")):
        return InModule(path, name, (*import_path(), os.getcwd()))
    raise EnvironmentLoadError(f"{key} is {written!r}, where a file or a module and a name are expected: {example}")


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a run as plain data that its processes can read.

    Attributes:
        source: Where its class comes from.
        kwargs: Of its constructor; a text `env:NAME` stands for the environment variable NAME.
        tools: Functions for a `ToolEnvironment`.
        tool_limits: What calls of tools may take.
        row_environments: Name → arguments, of environments that rows may name; variables as in `kwargs`.
    """

    source: Source
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tools, ...] = ()
    tool_limits: ToolLimits = ToolLimits()  # noqa: RUF009  (frozen)
    row_environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: str | None,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[str | Callable[..., Any]] = (),
        tool_limits: ToolLimits = ToolLimits(),  # noqa: B008  (frozen)
        given: object = None,
        row_environments: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Return the environment that a configuration names, or that the caller gives as an object.

        Args:
            path: `environment.path`; None where an object is given.
            kwargs: `environment.kwargs`.
            tools: `environment.tools`, or functions.
            tool_limits: What calls of tools may take.
            given: A class, a function that makes environments, an environment of which each episode gets a copy, or a
                list of functions, which are the tools of the environment `tools`.
            row_environments: `environment.row_environments`.

        Raises:
            EnvironmentLoadError: Both or neither are given, or one can't be used; what is in a file is looked at later.
        """
        if given is not None and path is not None:
            raise EnvironmentLoadError(
                f"the run was given an environment as an object, and {path} by environment.path; leave one of the two "
                "out"
            )
        if isinstance(given, Sequence) and not isinstance(given, str):
            tools, given, path = [*tools, *given], None, "tools"
        if given is not None:
            is_made = callable(given) or all(callable(getattr(given, name, None)) for name in _METHODS)
            if not is_made:
                raise EnvironmentLoadError(
                    f"the environment given as an object is {given!r:.80}: give a class with {', '.join(_METHODS)}, "
                    "an object of one, a function that makes one, or a list of functions as tools"
                )
            if kwargs and not callable(given):
                raise EnvironmentLoadError(
                    f"environment.kwargs has {', '.join(kwargs)}, and the environment given as an object is made "
                    "already: give its class"
                )
            if isinstance(given, type):
                check_class(given, kwargs or {}, given.__qualname__)
            source: Source = Given.of(given)
        elif path is None:
            raise EnvironmentLoadError("there is no environment: name one with environment.path")
        else:
            source = _source_of(path)
            if isinstance(source, Named) and source.name not in ENVIRONMENTS:
                source.load({})  # says so
        named = {name: dict(arguments) for name, arguments in (row_environments or {}).items()}
        return cls(source, dict(kwargs or {}), tuple(map(_tool_source, tools)), tool_limits, named)

    @property
    def title(self) -> str:
        """What the environment is called in messages."""
        return f"environment {self.source.title}"

    @property
    def env(self) -> dict[str, str]:
        """Argument → environment variable, for the arguments that stand for one."""
        found = _variables(self.kwargs)
        for one, kwargs in self.row_environments.items():
            found |= {f"{one}.{name}": variable for name, variable in _variables(kwargs).items()}
        return found

    def resolve(self, environ: Mapping[str, str]) -> Self:
        """Fill in the environment variables that arguments name; called only in the environment's own process."""
        named = {name: _filled(kwargs, environ) for name, kwargs in self.row_environments.items()}
        return replace(self, kwargs=_filled(self.kwargs, environ), row_environments=named)

    def to_plain(self) -> dict[str, Any]:
        """Return the specification as a dict for JSON.

        Raises:
            ValueError: An argument is something other than plain data.
        """
        return {
            "source": _source_to_plain(self.source),
            "kwargs": to_plain(self.kwargs, f"an argument of {self.title}"),
            "tools": [_source_to_plain(one) for one in self.tools],
            "tool_limits": asdict(self.tool_limits),
            "row_environments": to_plain(self.row_environments, "an argument in environment.row_environments"),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the specification from the dict of `to_plain`."""
        tools = tuple(_source_from_plain(one) for one in plain["tools"])
        source, kwargs = _source_from_plain(plain["source"]), from_plain(plain["kwargs"])
        return cls(source, kwargs, tools, ToolLimits(**plain["tool_limits"]), from_plain(plain["row_environments"]))


def _variables(kwargs: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: value for name, value in kwargs.items() if isinstance(value, str)}
    return {name: text.removeprefix(_ENV) for name, text in texts.items() if text.startswith(_ENV)}


def _filled(kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    return {**kwargs, **{name: environ[variable] for name, variable in _variables(kwargs).items()}}


def _tool_source(tool: str | Callable[..., Any]) -> Tools:
    if isinstance(tool, str):
        if ":" not in tool and not tool.endswith(".py"):
            try:
                check_tool_name(tool)
            except UnknownEnvironmentError as error:
                raise EnvironmentLoadError(f"an entry of environment.tools is {tool!r}: {error}") from error
            return NamedTool(tool)
        return _in_file_or_module(
            tool, "an entry of environment.tools", "my_tools.py:function or package.module:function"
        )
    tool_of(tool)  # says what is wrong with it before anything starts
    return Given.of(tool)


def _source_to_plain(source: Source | NamedTool) -> dict[str, Any]:
    return {"kind": type(source).__name__, "fields": to_plain(vars(source))}


def _source_from_plain(plain: Mapping[str, Any]) -> Any:
    return _SOURCES[plain["kind"]](**from_plain(plain["fields"]))


@dataclass(frozen=True)
class EnvironmentTraits:
    """What the class of an environment tells before an episode is played.

    Attributes:
        is_unpaid: Whether it gives no reward, for sure: nothing in it says what an answer is worth.
        has_tools: Whether the policy is given tools to call, as far as can be seen.
        lacks_tools: Whether it is an environment of tools, and has none.
        shown_tools: Schemas of the tools that the first prompt shows beside the row's own messages; None where `reset`
            decides what is shown.
        asks_itself: Whether it is a program that asks the policy itself.
    """

    is_unpaid: bool = False
    has_tools: bool = False
    lacks_tools: bool = False
    shown_tools: Sequence[Mapping[str, Any]] | None = None
    asks_itself: bool = False

    @classmethod
    def of(cls, made: type, functions: Sequence[object] = ()) -> Self:
        """Look at a class and at the functions of `environment.tools`."""
        if issubclass(made, ToolEnvironment):
            own = (made.answered is ToolEnvironment.answered, made.step is ToolEnvironment.step)
            has_tools = bool(functions) or made.brings_tools()
            lacks_tools = not has_tools and made.step is ToolEnvironment.step
            return cls(all(own), has_tools, lacks_tools, _shown_tools(made, functions))
        shown: list[Any] | None = [] if getattr(made, "reset", None) is Environment.reset else None
        is_unpaid = issubclass(made, SingleTurn) and made.step is SingleTurn.step
        return cls(is_unpaid, shown_tools=shown, asks_itself=issubclass(made, AgentEnvironment))


def _shown_tools(made: type[ToolEnvironment], functions: Sequence[Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the schemas of tools that a class adds to the row's prompt; None where it shows what it likes."""
    if any(getattr(made, name) is not getattr(ToolEnvironment, name) for name in ("reset", "tools", "with_tools")):
        return None
    return [one.schema for one in made.tools_with(functions).values()]


class EnvironmentMaker:
    """Makes the environments of episodes, in the process where they live.

    Args:
        spec: The environment of the run, with its variables filled in.

    Raises:
        EnvironmentLoadError: Its class or a tool can't be loaded. Exceptions of the user's code are passed on.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        modules: dict[str, ModuleType] = {}
        self._own = spec.source.load(modules)
        self._functions = [one.load(modules) for one in spec.tools]
        for function, one in zip(self._functions, spec.tools, strict=True):
            if not callable(function) or isinstance(function, type):
                raise EnvironmentLoadError(
                    f"environment.tools has {one.title}, which is {a_kind(function)}, where a function is expected"
                )
            tool_of(function)
        # Before the first episode: a tool that can be none is told at the start, and what describes them is imported.
        if isinstance(self._own, ToolEnvironment) or (
            isinstance(self._own, type) and issubclass(self._own, ToolEnvironment)
        ):
            self._own.check_tools()
        self._copied = not callable(self._own) or isinstance(self._own, Environment)
        if self._copied:
            check_class(type(self._own), None, spec.source.title)
        else:
            check_class(self._own, spec.kwargs, spec.source.title)
            arguments = _read(self._own, spec.kwargs, spec.source.title)
            if isinstance(spec.source, Named) and hasattr(self._own, "check_arguments"):
                self._own.check_arguments(**arguments)
        if spec.tools and isinstance(self._own, type) and not issubclass(self._own, ToolEnvironment):
            raise EnvironmentLoadError(
                f"environment.tools names functions, and {spec.source.title} is no hrl.ToolEnvironment, which could "
                "call them"
            )
        for name in spec.row_environments:
            if name not in ENVIRONMENTS:
                hint = did_you_mean(name, ENVIRONMENTS)
                raise EnvironmentLoadError(
                    f"environment.row_environments lists {name!r}, and no environment has that name; there are "
                    f"{', '.join(ENVIRONMENTS)}. {hint}".rstrip()
                )

    @property
    def traits(self) -> EnvironmentTraits:
        """What the run's own environment tells of itself; nothing where a function makes it."""
        made = type(self._own) if self._copied else self._own
        return EnvironmentTraits.of(made, self._functions) if isinstance(made, type) else EnvironmentTraits()

    @property
    def names(self) -> list[str]:
        """What a row's `env` may name."""
        own = [self._spec.source.name] if isinstance(self._spec.source, Named) else []
        return named_by_rows([*own, *self._spec.row_environments])

    def is_async(self, name: str | None = None) -> bool:
        """Return whether an environment's `reset` is async, so that its constructor may need a running event loop.

        Args:
            name: Of the registry, which is imported where it was not yet; None for the run's own.

        Raises:
            EnvironmentLoadError: There is none of this name, or its package is missing.
            RowChoiceError: A row may not name it.
        """
        return inspect.iscoroutinefunction(getattr(self._class_of(name), "reset", None))

    def _is_own(self, name: str | None) -> bool:
        return name is None or (isinstance(self._spec.source, Named) and name == self._spec.source.name)

    def _class_of(self, name: str | None) -> Any:
        """Return what makes the environment that a row names, or the run's own."""
        if self._is_own(name):
            return self._own
        if name not in ENVIRONMENTS:
            own = "A class of yours gets a name in the file of environment.path: hrl.environments.registry.register"
            hint = did_you_mean(str(name), self.names, f"{own}(name, Class); rows then have that as their env.")
            raise EnvironmentLoadError(
                f"the row has env {name!r:.80}, and no environment has that name; there are {', '.join(self.names)}. "
                f"{hint}".rstrip()
            )
        check_row_choice(str(name), self._spec.row_environments)
        return Named(str(name)).load({})

    def check_choice(self, name: object, kwargs: object) -> None:
        """Refuse what a row chooses as `make` would, and make nothing.

        Args:
            name: The row's `env`; None if it has none.
            kwargs: Its `env_kwargs`; None if it has none.

        Raises:
            EnvironmentLoadError: There is none of this name, or its package is missing, or it does not take the
                arguments.
            RowChoiceError: A row may not choose this, or it is no name and no dict.
        """
        if name is not None and not isinstance(name, str):
            raise RowChoiceError(f"the row has env {name!r:.80}, where the name of an environment is expected")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise RowChoiceError(f"the row has env_kwargs {kwargs!r:.80}, where a dict of arguments is expected")
        self._chosen(name, kwargs)

    def _chosen(self, name: str | None, kwargs: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Return what makes the environment that a row chooses, and with which arguments."""
        is_own, given = self._is_own(name), kwargs or {}
        made = self._class_of(name)
        title = self._spec.source.title if is_own else str(name)
        if is_own and self._copied:
            if given:
                raise RowChoiceError(
                    f"the row has env_kwargs ({', '.join(map(str, given))}), and {title} is made already: give its "
                    "class, or leave them out"
                )
            return made, {}
        configured = self._spec.kwargs if is_own else self._spec.row_environments.get(str(name), {})
        check_row_kwargs(made, title, given)
        arguments = {**configured, **given}
        key = KEY if is_own else f"environment.row_environments.{name}"
        if given or not is_own:
            key = "env_kwargs" if given else key
            check_class(made, arguments, title, key)
        return made, _read(made, arguments, title, key)

    def make(self, name: str | None = None, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return a new environment.

        Args:
            name: Of the registry; None for the run's own.
            kwargs: Of a row: arguments that replace those of the configuration.

        Raises:
            EnvironmentLoadError: There is none of this name, or its package is missing, or it does not take the
                arguments.
            RowChoiceError: A row may not choose this. Exceptions of the user's code are passed on.
        """
        made, arguments = self._chosen(name, kwargs)
        is_own = self._is_own(name)
        environment = self._spec.source.load({}) if is_own and self._copied else made(**arguments)
        missing = [method for method in _METHODS if not callable(getattr(environment, method, None))]
        if missing:
            raise EnvironmentLoadError(f"{type(environment).__name__} has no method {' and no '.join(missing)}")
        if isinstance(environment, ToolEnvironment):
            environment.set_up(self._functions if is_own else [], self._spec.tool_limits)
        return environment


def _read(made: Any, arguments: Mapping[str, Any], title: str, key: str = KEY) -> dict[str, Any]:
    """Return arguments as their types.

    Raises:
        EnvironmentLoadError: One does not fit.
    """
    try:
        return read_arguments(made, arguments, title, key)
    except EnvironmentArgumentError as error:
        raise EnvironmentLoadError(str(error)) from error


def check_class(made: Any, kwargs: Mapping[str, Any] | None, title: str, key: str = KEY) -> None:
    """Refuse what makes no environment, or does not take the arguments.

    Args:
        made: A class, or a function that makes environments.
        kwargs: Of the constructor; None if it is not called.
        title: What it is called in the message.
        key: Where the arguments were given.

    Raises:
        EnvironmentLoadError: What is wrong with it.
    """
    if not callable(made):
        raise EnvironmentLoadError(f"{title} is {a_kind(made)}, where a class with {', '.join(_METHODS)} is due")
    if isinstance(made, type):
        missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
        abstract = sorted(getattr(made, "__abstractmethods__", ()))
        if missing or abstract:
            lacks = " and no ".join(dict.fromkeys([*missing, *abstract]))
            inherits = not issubclass(made, Environment) and not {"reset", "step"} & {*missing}
            way_out = ": make it a subclass of hrl.Environment, which has one" if inherits else ""
            raise EnvironmentLoadError(
                f"{title} has no method {lacks}; an environment has {', '.join(_METHODS)}{way_out}"
            )
        _check_signatures(made, title)
    if kwargs is None:
        return
    try:
        check_names(made, kwargs, title, key)
    except EnvironmentArgumentError as error:
        raise EnvironmentLoadError(str(error)) from error


def _check_signatures(made: type, title: str) -> None:
    """Refuse a class with a method that can't be called as an environment's methods are."""
    for method, takes in _METHODS.items():
        function = inspect.getattr_static(made, method, None)
        if not inspect.isfunction(function):
            continue  # made by a decorator or written in C: seen when it is called
        signature = inspect.signature(function)
        seeds = [name for name in _SEEDS if name in signature.parameters and "seed" in takes]
        given = [name for name in takes if name != "seed"]
        try:
            signature.bind(None, *given, **dict.fromkeys(seeds))
        except TypeError as error:
            meant = f"; {GYMNASIUM}" if {"seed", "options"} <= signature.parameters.keys() else ""
            raise EnvironmentLoadError(
                f"{title} has {method}{in_words(signature)}, which can't be called as "
                f"{method}({', '.join(['self', *takes])}): "
                f"{error}{meant}"
            ) from error
