"""What the tests of rules share: a configuration that is refused, with the sentence that says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from hrl.config import ConfigError
from hrl.config.load import validate_kind
from hrl.config.run_kind import PPO

validate = partial(validate_kind, PPO)


def names(cases: Sequence[tuple[Mapping[str, Any], str]]) -> list[str]:
    """Each case by the last key that it sets."""
    return [next(reversed(given)) for given, _ in cases]


def require_refused(given: Mapping[str, Any], sentence: str) -> None:
    """The configuration is refused, and what is said of it has the sentence."""
    with pytest.raises(ConfigError) as caught:
        validate(given)
    assert sentence in str(caught.value)
