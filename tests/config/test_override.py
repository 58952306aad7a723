"""Values of Python read back from a command line as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from hrl.config.override import NotPlainError, as_override

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner),
    max_leaves=8,
)


@given(plain)
def test_any_value_reads_back_from_the_command_line(value: Any) -> None:
    assert OverridesParser.create().parse_override(f"key={as_override(value)}").value() == value


@pytest.mark.parametrize(("value", "text"), [(np.float64(0.5), "0.5"), (np.int64(3), "3"), (np.bool_(True), "true")])
def test_numbers_of_numpy_are_numbers(value: Any, text: str) -> None:
    assert as_override(value) == text


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(NotPlainError, match="plain values, not a object"):
        as_override(object())
