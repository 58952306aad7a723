"""Values of Python read back from a command line as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hrl.config.compose import compose_cli, to_yaml
from hrl.config.override import NotPlainError, as_override

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.from_regex(r"[a-z0-9_.:= -]{1,8}"), inner),
    max_leaves=8,
)


def composed(text: str) -> dict[str, Any]:
    """Return what a configuration holds under a key that is set so."""
    read = OverridesParser.create().parse_override(f"key={text}").value()
    whole = OmegaConf.to_container(OmegaConf.create({"key": read}), resolve=True)
    assert isinstance(whole, dict)
    return whole


@given(plain)
@example("${")
def test_any_value_reads_back_from_the_command_line_or_is_refused(value: Any) -> None:
    try:
        text = as_override(value)
    except NotPlainError:
        return
    (read,) = composed(text).values()
    assert read == value


TEXTS = ["^${a}$", "${oc.env:HOME}", "${", "$${a}", "${a}\\\\", "x\\y \\${b} \\d\\\\ it's"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_looks_like_an_interpolation_stays_itself_in_a_saved_configuration_too(
    text: str, tmp_path: Path
) -> None:
    key = "reward.custom_reward_function.reward_kwargs"
    given = ["reward.custom_reward_function.path=my.py", f"{key}={as_override({'pattern': text})}"]
    config = compose_cli(given)
    assert config.reward.custom_reward_function.reward_kwargs == {"pattern": text}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose_cli(["--config-path", str(tmp_path), "--config-name", "config"]) == config


@pytest.mark.parametrize("key", ["a", "a b", "a:b=c", "x.y", "1a", "a,b", "ab\\c", "{a}", 1, 2.5, True])
def test_a_key_of_a_mapping_reads_back_with_its_type(key: Any) -> None:
    (read,) = OverridesParser.create().parse_override(f"key={as_override({key: 1})}").value()
    assert (read, type(read)) == (key, type(key))


@pytest.mark.parametrize("key", ["1", "2.5", "1e3", "1_000", "true", "NULL", "nan", "", "é", "a'b", 'a"b', "a\n"])
def test_a_key_that_would_read_back_as_another_is_refused(key: str) -> None:
    with pytest.raises(NotPlainError, match="can't be written on a command line"):
        as_override({key: 1})


@pytest.mark.parametrize(("value", "text"), [(np.float64(0.5), "0.5"), (np.int64(3), "3"), (np.bool_(True), "true")])
def test_numbers_of_numpy_are_numbers(value: Any, text: str) -> None:
    assert as_override(value) == text


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(NotPlainError, match="plain values, not a object"):
        as_override(object())
