"""Python functions as tools: the schema that the policy is shown, the arguments that come back."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints, overload

from hrl.errors import RefusedError

if TYPE_CHECKING:
    from pydantic import BaseModel

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(r"^(args|arguments|parameters|returns?|yields?|raises|examples?|notes?):\s*$", re.IGNORECASE)
_ARGUMENTS = ("args:", "arguments:", "parameters:")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*)$")
_MARK = "__hrl_tool__"
_MOST_MISFITS = 5

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class ToolSignatureError(RefusedError, TypeError):
    """A function can't be a tool; says which of its parameters is the reason."""


class ArgumentsMisfitError(ValueError):
    """The policy called a tool with arguments that it does not take; the policy is told the text."""


@dataclass(frozen=True)
class ToolMark:
    """What `@tool` says of a method or function.

    Attributes:
        name: That the policy calls it by; None for its own.
        timeout_s: Seconds that one call may take; None for `environment.tool_timeout_s`.
    """

    name: str | None = None
    timeout_s: float | None = None


@overload
def tool(function: AnyFunction) -> AnyFunction: ...


@overload
def tool(*, name: str | None = None, timeout_s: float | None = None) -> Callable[[AnyFunction], AnyFunction]: ...


def tool(function: Any = None, *, name: str | None = None, timeout_s: float | None = None) -> Any:
    """Offer a method of a `ToolEnvironment` to the policy; its other methods are its own.

    A function that `environment.tools` names needs no mark, unless it is to have another name or deadline.

    Args:
        function: The method, where the decorator is written without brackets.
        name: That the policy calls it by; its own by default.
        timeout_s: Seconds that one call may take; `environment.tool_timeout_s` by default.
    """

    def mark(marked: Any) -> Any:
        setattr(marked, _MARK, ToolMark(name, timeout_s))
        return marked

    return mark if function is None else mark(function)


def mark_of(function: object) -> ToolMark | None:
    """Return what `@tool` says of a function; None without it."""
    mark = getattr(function, _MARK, None)
    return mark if isinstance(mark, ToolMark) else None


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        name: That the policy calls it by.
        function: The function; that of a class, for a method.
        is_async: Whether a call is awaited.
        timeout_s: Seconds that one call may take; None for the environment's.
        schema: What the policy is shown, `{"type": "function", "function": {…}}`.
        model: Reads the arguments.
    """

    name: str
    function: Callable[..., Any]
    is_async: bool
    timeout_s: float | None
    schema: Mapping[str, Any]
    model: type[BaseModel]

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as the function takes them: of its types, with its defaults left to itself.

        Raises:
            ArgumentsMisfitError: They don't fit.
        """
        from pydantic import ValidationError

        try:
            read = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            misfits = error.errors(include_url=False, include_input=False, include_context=False)
            said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in misfits[:_MOST_MISFITS]]
            raise ArgumentsMisfitError("; ".join(said)) from error
        fields = type(read).model_fields
        return {str(fields[name].alias): getattr(read, name) for name in read.model_fields_set}


@functools.lru_cache(maxsize=1024)
def tool_of(function: Callable[..., Any], is_method: bool = False) -> Tool:
    """Return a function as a tool.

    Its parameters' types say what the policy may give; the first paragraph of its docstring describes it, and the
    section `Args:` its parameters.

    Args:
        function: Plain or async, with a type for each parameter.
        is_method: Whether its first parameter is `self`.

    Raises:
        ToolSignatureError: It can't be one.
    """
    from pydantic import ConfigDict, Field, PydanticUserError, create_model
    from pydantic.errors import PydanticUndefinedAnnotation

    written = function
    while isinstance(written, functools.partial):  # has neither name nor docstring of its own
        written = written.func
    mark = mark_of(function) or mark_of(written) or ToolMark()
    name = str(mark.name or getattr(written, "__name__", type(written).__name__))
    title = f"the tool {name}"
    if not _NAME.fullmatch(name):
        raise ToolSignatureError(f"{title} has a name that no policy can call: letters, digits, _ and -, at most 64")
    if not callable(function) or isinstance(function, type):
        raise ToolSignatureError(f"{title} is {a_kind(function)}, where a function is expected")
    try:
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
    except (TypeError, ValueError) as error:
        raise ToolSignatureError(f"{title} can't be described: {error}") from error
    types = _types_of(written, title)
    summary, described = read_docstring(inspect.getdoc(written) or "")
    fields: dict[str, Any] = {}
    for number, one in enumerate(parameters):
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise ToolSignatureError(f"{title} takes {one}, which no schema can name: give each parameter a name")
        if one.kind is one.POSITIONAL_ONLY:
            raise ToolSignatureError(f"{title} takes {one.name} by position only, and arguments come by name")
        if one.name not in types:
            raise ToolSignatureError(f"{title} has no type for {one.name}: write {one.name}: int, say")
        about = Field(alias=one.name, description=described.get(one.name))
        # Names of their own, since those of the user's may be such as pydantic's models have, `copy` or `_id`.
        default = ... if one.default is one.empty else one.default
        fields[f"argument_{number}"] = (Annotated[types[one.name], about], default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        parameters_schema = _without_titles(model.model_json_schema())
    except (PydanticUserError, PydanticUndefinedAnnotation, TypeError, ValueError) as error:
        which, why = _without_schema(fields) or ("a parameter", error)
        said = str(why).splitlines()[0].partition(". Set `")[0].rstrip(".")  # without what pydantic's models can do
        raise ToolSignatureError(
            f"{title} has {which}, whose type has no JSON schema: {said}. Numbers, texts, bool, list, "
            "dict, Optional, Literal, enums, dataclasses and pydantic models have one"
        ) from error
    parameters_schema.setdefault("properties", {})
    parameters_schema.pop("additionalProperties", None)
    described_as = {"name": name, "description": summary, "parameters": parameters_schema}
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return Tool(name, function, is_async, mark.timeout_s, {"type": "function", "function": described_as}, model)


def _without_schema(fields: Mapping[str, Any]) -> tuple[str, Exception] | None:
    """Return the first parameter whose type has no schema, and why."""
    from pydantic import PydanticUserError, create_model
    from pydantic.errors import PydanticUndefinedAnnotation

    for name, (annotation, default) in fields.items():
        try:
            alone: Any = {name: (annotation, default)}
            create_model("one", **alone).model_json_schema()
        except (PydanticUserError, PydanticUndefinedAnnotation, TypeError, ValueError) as error:
            typed, about = get_args(annotation)[0], annotation.__metadata__[-1]
            return f"{about.alias}: {inspect.formatannotation(typed)}", error
    return None


def a_kind(value: object) -> str:
    """Return what a value is, with an article; a class is one."""
    name = "class" if isinstance(value, type) else type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def type_of(annotation: str, names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation written as a text stands for.

    Args:
        annotation: The text.
        names: What is known where it stands.

    Raises:
        NameError, AttributeError: It names something that is not known there. Whatever else it raises is passed on.
    """
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return get_type_hints(holder, dict(names), include_extras=True)["it"]


def _types_of(function: Callable[..., Any], title: str) -> dict[str, Any]:
    """Return the types of parameters, those that are written as texts looked up in the function's module.

    Raises:
        ToolSignatureError: A name in one is not known there.
    """
    wrapped: Any = function
    while hasattr(wrapped, "__wrapped__"):
        wrapped = wrapped.__wrapped__
    if not inspect.isroutine(wrapped):
        wrapped = type(wrapped).__call__
    types = inspect.get_annotations(wrapped)
    types.pop("return", None)
    for name, annotation in types.items():
        if not isinstance(annotation, str):
            continue
        try:
            names = getattr(wrapped, "__globals__", {})
            types[name] = type_of(annotation, names)
        except (NameError, AttributeError) as error:
            file = Path(inspect.getsourcefile(wrapped) or wrapped.__module__).name
            raise ToolSignatureError(
                f"{title} has {name}: the type {annotation} is not known in {file} ({error})"
            ) from error
    return types


def _without_titles(schema: Any) -> Any:
    """Return a schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    return {
        key: {name: _without_titles(item) for name, item in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        if key not in ("default", "enum", "const", "examples")
        else value
        for key, value in kept.items()
    }


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function and those of its parameters, from a docstring in Google's style.

    The description is all that comes before the first section.
    """
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    described: dict[str, str] = {}
    name = ""
    indent: int | None = None
    inside = False
    for line in lines[first:]:
        if _SECTION.match(line):
            inside = line.strip().lower() in _ARGUMENTS
            continue
        if not inside or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        found = _ARGUMENT.match(line.strip()) if depth <= indent else None
        if found:
            name = found[1]
            described[name] = found[2].strip()
        elif name:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return "\n".join(lines[:first]).strip(), described
