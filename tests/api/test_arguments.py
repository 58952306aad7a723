"""Keys of Python as those of a command line."""

from __future__ import annotations

from hrl.api.arguments import dotted


def test_a_key_that_holds_a_dict_stays_one() -> None:
    tree = {"trainer": {"seed": 1, "ray_kwargs": {"address": "auto"}}, "data.seed": 2}
    assert dotted(tree, {"trainer.seed", "trainer.ray_kwargs", "data.seed"}) == {
        "trainer.seed": 1,
        "trainer.ray_kwargs": {"address": "auto"},
        "data.seed": 2,
    }
