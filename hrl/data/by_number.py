"""Sequences whose items are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class ByNumber(Sequence[T_co]):
    """A sequence that makes one item at a time; a slice of it is a list."""

    @abstractmethod
    def item(self, index: int) -> T_co:
        """Return an item, counted from 0."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        numbers = range(len(self))
        if isinstance(index, slice):
            return [self.item(number) for number in numbers[index]]
        return self.item(numbers[index])

    def __iter__(self) -> Iterator[T_co]:
        # By the length: `Sequence` would take an `IndexError` of an item for the end, and leave out the rest.
        return (self.item(number) for number in range(len(self)))
