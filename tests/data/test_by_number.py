"""A sequence whose items are made on demand is read as a list is."""

from __future__ import annotations

import numpy as np
import pytest

from hrl.data.by_number import ByNumber


class Squares(ByNumber[int]):
    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return 5

    def item(self, index: int) -> int:
        self.made.append(index)
        return index**2


def test_it_is_read_as_a_list_is_and_makes_only_what_is_asked_for() -> None:
    squares, as_list = Squares(), [0, 1, 4, 9, 16]
    assert squares[-1] == 16 and squares[np.int64(2)] == 4 and squares.made == [4, 2]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(None, None, -2), slice(9), slice(3, 1)):
        assert squares[part] == as_list[part]
    assert list(squares) == as_list and list(reversed(squares)) == as_list[::-1] and 9 in squares
    for index in (5, -6):
        with pytest.raises(IndexError):
            squares[index]


def test_an_index_error_of_an_item_is_not_taken_for_the_end() -> None:
    class Broken(Squares):
        def item(self, index: int) -> int:
            return [0, 1][index]

    with pytest.raises(IndexError):
        list(Broken())
