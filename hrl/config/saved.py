"""The configuration as it is written down: without its secrets, and never taken for a whole one again."""

from collections.abc import Iterator
from typing import Any

from hrl.config.outline import RunConfiguration
from hrl.config.section import flatten
from hrl.errors import Problem
from hrl.masking import is_masked, masked


def saved_config(config: RunConfiguration) -> dict[str, Any]:
    """Return the configuration as plain data, with every secret masked that `trainer.secrets` or its name tells."""
    return masked(config.model_dump(mode="json"), config.trainer.secrets)


def nothing_is_masked(config: RunConfiguration) -> Iterator[Problem]:
    """A configuration that was saved with a run lacks that run's secrets."""
    for key in masked_keys(config.model_dump(mode="json"), type(config)):
        what = "was masked when its run was saved, so this is not what the run had."
        yield Problem(key, what, "Give it again; env:NAME for an argument of a function is never masked.")


def masked_keys(tree: Any, schema: Any) -> list[str]:
    """Return the keys of a nested configuration whose values are masked, or hold something that is."""
    return [key for key, value in flatten(tree, schema) if _holds_a_mask(value)]


def _holds_a_mask(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_a_mask, value.values()))
    return any(map(_holds_a_mask, value)) if isinstance(value, list) else is_masked(value)
