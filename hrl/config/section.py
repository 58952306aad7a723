"""The base class of schema sections, and a schema as a flat table of dotted keys.

A default is written once, at its field: as a plain value, as `follows(...)` if it comes from other keys, or in
`section` if a section has a different default in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hrl.algos.registry import IN_FILE, registered_here
from hrl.config.own_members import MemberError, load_member

S = TypeVar("S", bound="Section")

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
RM = "reward.reward_model"
TEACHER = "distillation.teacher_models.teacher_model.model_path"

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
MinusOneOrMore = Annotated[int, Field(ge=-1)]


class Unit(NamedTuple):
    """The unit of a key whose name does not tell it; an annotation of its field."""

    name: str


@dataclass(frozen=True, eq=False)
class NameOf:
    """A name from a table of `hrl.algos.registry`, including names that users register.

    Attributes:
        table: The known names.
        suffix: An optional suffix of a name.
        in_files: Whether `my.py:name` is taken too, a name that this Python file registers.
    """

    table: Collection[str]
    suffix: str = ""
    in_files: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate as a string, then look it up in the table."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, source: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Name the members for the documentation."""
        return handler(source) | {"enum": list(self.table), "suffix": self.suffix}

    def _known(self, name: str | None) -> str | None:
        if self.in_files and name is not None and IN_FILE in name:
            try:
                load_member(name, self.table)
            except MemberError as error:
                raise PydanticCustomError("source", "{what}", {"what": error.what, "hint": error.hint}) from error
            return name
        if name is None or name.removesuffix(self.suffix) in self.table:
            return name
        raise PydanticCustomError("not_registered", "no such name", {"known": sorted(self.table)})


class Section(BaseModel):
    """One block of the configuration: closed to unknown keys, strict about types, immutable once validated.

    The sentence under a field is its help text and its line in `docs/configuration.md`.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Sections have fields that begin with `model`, so pydantic's protection of the prefix `model_` is switched off.
        protected_namespaces=(),
    )

    _remarks: tuple[str, ...] = PrivateAttr(())
    _origins: Mapping[str, str] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _leave_open(self) -> Self:
        """Leave out what follows from other keys, in a section that is built alone."""
        for name in [name for name, value in self.__dict__.items() if isinstance(value, _Follows)]:
            del self.__dict__[name]
        return self

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Say why a field has no value yet."""
            if name not in type(self).model_fields:
                return super().__getattr__(name)
            owner = type(self).__name__
            raise AttributeError(
                f"{owner}.{name} follows from other keys: set it, or read it in the whole configuration"
            )

    def __eq__(self, other: object) -> bool:
        """Compare values; remarks and origins do not count."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings from composing that can't be derived from the values."""
        return self._remarks

    @property
    def origins(self) -> Mapping[str, str] | None:
        """Dotted key → who set it (`yours`, `recipe=ppo`, …) for keys that are not at their default.

        None if this was not composed from a command line.
        """
        return self._origins

    def with_remarks(self, *remarks: str) -> Self:
        """Return a copy with these remarks."""
        copy = self.model_copy()
        copy._remarks = remarks
        return copy

    def with_origins(self, origins: Mapping[str, str]) -> Self:
        """Return a copy with these origins."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy


class Get:
    """The values of a whole configuration before validation, given or default.

    Attributes:
        given: Dotted key → value, as the user wrote it; may hold wrong types, which validation reports later.
    """

    def __init__(self, given: Mapping[str, Any], root: type[Section], parent: str = "") -> None:
        self.given = given
        self._root = root
        self._parent = parent

    def __call__(self, key: str) -> Any:
        """Return the value of a key; `.name` refers to the same section."""
        key = self.full(key)
        if key in self.given:
            return self.given[key]
        return self.default(key)

    def full(self, key: str) -> str:
        """Return the full dotted key of `.name`."""
        return f"{self._parent}{key}" if key.startswith(".") else key

    def default(self, key: str) -> Any:
        """Return what a key is if nobody sets it."""
        key = self.full(key)
        leaf = leaves(self._root)[key]
        return leaf.plain if leaf.derive is None else leaf.derive(Get(self.given, self._root, key.rpartition(".")[0]))


Derive = Callable[[Get], Any]


@dataclass(frozen=True, eq=False)
class _Follows:
    """A default that comes from other keys; see `follows`."""

    derive: Derive


def follows(source: str | Derive) -> Any:
    """Declare a field whose default comes from other keys.

    The whole configuration fills it in; in a section that is built alone the field has no value before that.

    Args:
        source: The key whose value is the default, `.name` for one of the same section; or a function of the values of
            the whole configuration. The function is called before validation, so values may have wrong types.
    """
    return _Follows((lambda get: get(source)) if isinstance(source, str) else source)


def section(kind: type[S], **defaults: Any) -> S:
    """Declare a section, optionally with defaults that differ from its class's."""
    return Field(default_factory=partial(kind, **defaults))  # type: ignore[no-any-return]


class Leaf(NamedTuple):
    """A key that holds a value (not a section).

    Attributes:
        key: The dotted key.
        field: Field of the schema.
        plain: The default, if it is a plain value.
        derive: The default as a function of other keys; None if it is a plain value.
    """

    key: str
    field: FieldInfo
    plain: Any
    derive: Derive | None

    @property
    def help(self) -> str:
        """The sentence under the field, on one line."""
        return " ".join((self.field.description or "").split())

    @property
    def names(self) -> tuple[str, ...]:
        """The allowed names if the key takes names from a table, else empty."""
        return next((tuple(mark.table) for mark in self.field.metadata if isinstance(mark, NameOf)), ())

    @property
    def names_registered_here(self) -> frozenset[str]:
        """The allowed names that were registered in this process, which a new one does not know."""
        tables = [mark.table for mark in self.field.metadata if isinstance(mark, NameOf)]
        return frozenset().union(*map(registered_here, tables))

    @property
    def in_files(self) -> bool:
        """Whether the key takes `my.py:name`."""
        return any(mark.in_files for mark in self.field.metadata if isinstance(mark, NameOf))

    @property
    def unit(self) -> str | None:
        """Unit of the value if the key's name does not tell it."""
        return next((mark.name for mark in self.field.metadata if isinstance(mark, Unit)), None)


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field; None if the field is not a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _walk(kind: type[Section], prefix: str, here: Mapping[str, Any]) -> Iterator[Leaf]:
    for name, field in kind.model_fields.items():
        below = section_of(field)
        if below is not None:
            declared = field.default_factory
            yield from _walk(below, f"{prefix}{name}.", declared.keywords if isinstance(declared, partial) else {})
        else:
            plain = here[name] if name in here else field.get_default(call_default_factory=True)
            yield Leaf(f"{prefix}{name}", field, plain, plain.derive if isinstance(plain, _Follows) else None)


@cache
def leaves(root: type[Section]) -> dict[str, Leaf]:
    """Return every key of the schema with its field, in schema order."""
    return {leaf.key: leaf for leaf in _walk(root, "", {})}


@cache
def defaults(root: type[Section]) -> dict[str, Any]:
    """Return every key of the schema with its default value."""
    return dict(flatten(root().model_dump(), root))


@cache
def sections(root: type[Section]) -> frozenset[str]:
    """Return every dotted prefix of a key, such as `actor_rollout_ref` and `actor_rollout_ref.actor`."""
    parts = (key.split(".") for key in leaves(root))
    return frozenset(".".join(names[:depth]) for names in parts for depth in range(1, len(names)))


def flatten(tree: Mapping[str, Any] | Section, root: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for the values of nested dicts and sections.

    A schema key that holds a dict stays whole. A section built in Python yields only the values it was given.
    """
    if isinstance(tree, Section):
        tree = {name: getattr(tree, name) for name in type(tree).model_fields if name in tree.model_fields_set}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, dict | Section) and key not in leaves(root)
        if nested and (value or key not in sections(root)):
            yield from flatten(value, root, f"{key}.")
        elif not (value is None and key in sections(root)):
            yield key, value


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Build a nested dict from dotted keys; a value in place of a section is kept for validation to report.

    Mappings are copied: a key below one, such as `data.map.question` beside the default of `data.map`, is put into it.
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                break
            node = child
        else:
            node.setdefault(name, deepcopy(value) if isinstance(value, dict) else value)
    return tree


class WholeConfig(Section):
    """The configuration of a whole run; missing values of all sections are filled in before validation."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        given = dict(flatten(tree, cls))
        get = Get(given, cls)
        return unflatten(given | {key: get(key) for key in leaves(cls) if key not in given})


def _number_to_str(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _one_or_many(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Label = Annotated[str, BeforeValidator(_number_to_str)]
"""A free name. A value such as `experiment_name=42`, a number in YAML, is accepted too."""

ONE_OR_MANY = BeforeValidator(_one_or_many)
StrList = Annotated[list[str], ONE_OR_MANY]
"""A list of strings; a single string is accepted too."""
