"""Rows for environments that bring their own tasks."""

import re

import pytest

from hrl.data.tasks import bundled_rows
from hrl.errors import DatasetError


def test_rows_of_games_repeat_and_those_held_out_are_others():
    train, val = ([row["extra_info"]["game_seed"] for row in bundled_rows(f"games/{one}")] for one in ("train", "val"))
    assert train == [row["extra_info"]["game_seed"] for row in bundled_rows("games/train")]
    assert (len(set(train)), len(set(val)), set(train) & set(val)) == (1000, 50, set())
    other = [row["extra_info"]["game_seed"] for row in bundled_rows("games/train?seed=2&size=10")]
    assert len(other) == 10 and not set(other) & set(train)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("games/test", "has no split 'test'; it has train and val"),
        ("games/train?size=0", "size of bundled:games/train is 0"),
        ("games/train?seed=a", "seed of bundled:games/train is 'a'"),
        ("games/train?length=3", "no option 'length'; it has size and seed"),
    ],
)
def test_an_address_of_games_that_makes_no_sense_is_refused(address, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        bundled_rows(address)
