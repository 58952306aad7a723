"""What every section of the schema has in common."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from hrl.algos.registry import AGGREGATION_NAMES

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
MinusOneOrMore = Annotated[int, Field(ge=-1)]


def _built_in_or_registered(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, str) and value in AGGREGATION_NAMES else built_in(value)


AggregationMode = Annotated[
    Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
    WrapValidator(_built_in_or_registered),
]


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


def _number_to_str(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _one_or_many(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Label = Annotated[str, BeforeValidator(_number_to_str)]
"""A free name. YAML reads `experiment_name=42` as a number; here it is a name all the same."""

StrList = Annotated[list[str], BeforeValidator(_one_or_many)]
"""A list of strings that may be written as one string."""
