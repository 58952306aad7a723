"""What becomes of a key that hrl does not have."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from hrl.config.problems import Reason


class Verdict(NamedTuple):
    """What becomes of a key that hrl does not have.

    Attributes:
        says: What hrl does in its place; a clause, for the note and for the hint of a refusal.
        instead: What to write; a clause, for the hint.
        same: Values that say what hrl does anyway: accepted in silence.
        noted: Values that are accepted with a note, because they say how a run computes and not what it learns; None
            are all values.
        reason: Why any other value is refused.
        beside: A key beside which every value is refused after all, because the two together mean something else.
    """

    says: str
    instead: str = "remove the key"
    same: tuple[Any, ...] = ()
    noted: tuple[Any, ...] | None = ()
    reason: Reason = Reason.ALTERNATIVE
    beside: str | None = None

    @property
    def hint(self) -> str:
        """The way out."""
        return f"{self.says}; {self.instead}." if self.instead else f"{self.says}."

    def is_same(self, value: object) -> bool:
        """Return whether the value says what hrl does anyway."""
        return any(_equal(value, other) for other in self.same)

    def is_noted(self, value: object) -> bool:
        """Return whether the value is accepted with a note."""
        return self.noted is None or any(_equal(value, other) for other in self.noted)


def _equal(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def how(says: str, *, same: Iterable[Any] = ()) -> Verdict:
    """Return a key that says how a run computes, whatever its value."""
    return Verdict(says, "", same=tuple(same), noted=None)
