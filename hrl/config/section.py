"""What every section of the schema has in common, and a schema as a flat table of dotted keys.

A default stands once, at its field: as a plain value, as `follows(...)` where it comes from other keys, or in `section`
where one place of a section wants another than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

S = TypeVar("S", bound="Section")

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
MinusOneOrMore = Annotated[int, Field(ge=-1)]


class Unit(NamedTuple):
    """What a key counts, where its name does not say so; an annotation of its field."""

    name: str


@dataclass(frozen=True, eq=False)
class NameOf:
    """A name out of a table of `hrl.algos.registry`; what a user registers is known to it from then on.

    Attributes:
        table: The known names.
        suffix: What may stand behind a name.
    """

    table: Collection[str]
    suffix: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Look a valid text up."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str | None) -> str | None:
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
        # `model` is a section name here, so pydantic's protection of the prefix `model_` only gets in the way.
        protected_namespaces=(),
    )

    _remarks: tuple[str, ...] = PrivateAttr(())
    _origins: Mapping[str, str] | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Equal values; what is known about them beside does not count."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was noticed while this was composed and can't be seen from the values; a warning each."""
        return self._remarks

    @property
    def origins(self) -> Mapping[str, str] | None:
        """Dotted key → who set it (`yours`, `recipe=ppo`, …), of keys that are not at their default.

        None where this was not composed from a command line.
        """
        return self._origins

    def with_remarks(self, *remarks: str) -> Self:
        """Return the same values with remarks."""
        copy = self.model_copy()
        copy._remarks = remarks
        return copy

    def with_origins(self, origins: Mapping[str, str]) -> Self:
        """Return the same values, knowing where they come from."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy


class Get:
    """The values of a whole configuration before validation: given, or by default.

    Attributes:
        given: Dotted key → value, as the user wrote it; may hold wrong types, which validation reports later.
    """

    def __init__(self, given: Mapping[str, Any], root: type[Section], parent: str = "") -> None:
        self.given = given
        self._root = root
        self._parent = parent

    def __call__(self, key: str) -> Any:
        """Return the value of a key; `.name` is one of the same section."""
        key = self.full(key)
        if key in self.given:
            return self.given[key]
        leaf = leaves(self._root)[key]
        return leaf.plain if leaf.derive is None else leaf.derive(Get(self.given, self._root, key.rpartition(".")[0]))

    def full(self, key: str) -> str:
        """Return the whole dotted key of `.name`."""
        return f"{self._parent}{key}" if key.startswith(".") else key

    def plain(self, key: str) -> Any:
        """Return the plain default of a key, whatever is given."""
        return leaves(self._root)[self.full(key)].plain


Derive = Callable[[Get], Any]
_FOLLOWS = "follows"


def follows(source: str | Derive) -> Any:
    """Declare a field whose default comes from other keys.

    The whole configuration fills it in; a section that is built alone has to be given a value for it.

    Args:
        source: The key that it equals by default, `.name` for one of the same section; or a function of the values of
            the whole configuration, which is called before validation, with values that may have wrong types.
    """
    return Field(json_schema_extra={_FOLLOWS: (lambda get: get(source)) if isinstance(source, str) else source})  # type: ignore[dict-item]


def section(kind: type[S], **defaults: Any) -> S:
    """Declare a section, with the defaults that are other ones in this place."""
    return Field(default_factory=partial(kind, **defaults))  # type: ignore[no-any-return]


class Leaf(NamedTuple):
    """A key that holds a value (not a section).

    Attributes:
        key: The dotted key.
        field: Its field.
        plain: Its default where that is a plain value.
        derive: Its default as a function of other keys; None where it is a plain value.
        root: The schema.
    """

    key: str
    field: FieldInfo
    plain: Any
    derive: Derive | None
    root: type[Section]

    @property
    def default(self) -> Any:
        """Its value in the configuration that is at its defaults throughout."""
        return defaults(self.root)[self.key]

    @property
    def help(self) -> str:
        """The sentence under the field, on one line."""
        return " ".join((self.field.description or "").split())

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it may be, where it is one of a table."""
        return next((tuple(mark.table) for mark in self.field.metadata if isinstance(mark, NameOf)), ())

    @property
    def unit(self) -> str | None:
        """What it counts, where its name does not say so."""
        return next((mark.name for mark in self.field.metadata if isinstance(mark, Unit)), None)


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the class of a field that is a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _walk(kind: type[Section], prefix: str, here: Mapping[str, Any], root: type[Section]) -> Iterator[Leaf]:
    for name, field in kind.model_fields.items():
        below = section_of(field)
        if below is not None:
            declared = field.default_factory
            yield from _walk(
                below, f"{prefix}{name}.", declared.keywords if isinstance(declared, partial) else {}, root
            )
        elif name in here:
            yield Leaf(f"{prefix}{name}", field, here[name], None, root)
        else:
            marks = field.json_schema_extra
            derive = marks.get(_FOLLOWS) if isinstance(marks, dict) else None
            plain = field.get_default(call_default_factory=True)
            yield Leaf(f"{prefix}{name}", field, plain, derive, root)  # type: ignore[arg-type]


@cache
def leaves(root: type[Section]) -> dict[str, Leaf]:
    """Every key of the schema with its field, in the order of the schema."""
    return {leaf.key: leaf for leaf in _walk(root, "", {}, root)}


@cache
def defaults(root: type[Section]) -> dict[str, Any]:
    """Every key of the schema with its value where nothing is given."""
    return dict(flatten(root().model_dump(), root))


@cache
def sections(root: type[Section]) -> frozenset[str]:
    """Every dotted prefix of a key, such as `actor_rollout_ref` and `actor_rollout_ref.actor`."""
    parts = (key.split(".") for key in leaves(root))
    return frozenset(".".join(names[:depth]) for names in parts for depth in range(1, len(names)))


def flatten(tree: Mapping[str, Any] | Section, root: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for the values of nested dicts and sections.

    A schema key that holds a dict stays whole; of a section that was built in Python, what it was given is yielded.
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
    """Return the nested dict of dotted keys.

    A value where a section belongs is kept, so that validation can name it.
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
            node.setdefault(name, value)
    return tree


class WholeConfig(Section):
    """The configuration of a whole run: what is not given is filled in before validation, in every section."""

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
"""A free name. YAML reads `experiment_name=42` as a number; here it is a name all the same."""

ONE_OR_MANY = BeforeValidator(_one_or_many)
StrList = Annotated[list[str], ONE_OR_MANY]
"""A list of strings that may be written as one string."""
