"""What of the quickstart's values a run on another model or other rows would take over without having asked for it.

hrl's primary YAML files hold the values of a quickstart: a small model, short sequences. They stay in force when only
the model or the rows are exchanged, which is said aloud.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hrl.trainer.config.base import Section
from hrl.trainer.config.folder import config_folder
from hrl.trainer.config.keys import flatten, leaves
from hrl.trainer.config.kinds import RunKind

_TASK = ("actor_rollout_ref.model.path", "model.path", "data.train_files")
_TEST_FREQ = "trainer.test_freq"


def borrowed(
    kind: RunKind[Section], values: Mapping[str, Any], overridden: Iterable[str], own_file: Path
) -> dict[str, Any]:
    """The quickstart's values that are in force for a task that is not the quickstart's.

    Args:
        kind: of the run.
        values: dotted key → value, as composed.
        overridden: keys of the command line.
        own_file: the primary YAML file; where it is not hrl's, what stands in it was given too.

    Returns:
        Key → value, in the order of the quickstart's file; empty for the quickstart's own task.
    """
    known = leaves(kind.schema)
    defaults = {key: known[key].default for key in _TASK if key in known}
    if all(_as_list(values.get(key, default)) == _as_list(default) for key, default in defaults.items()):
        return {}
    quickstart = config_folder() / f"{kind.config_name}.yaml"
    given = set(overridden)
    if own_file != quickstart and own_file.is_file():
        given |= _values_in(own_file, kind).keys()
    return {
        key: value
        for key, value in _values_in(quickstart, kind).items()
        if key not in given and key in values and values[key] == value
    }


def without_its_validation(kind: RunKind[Section], values: Mapping[str, Any], taken: Mapping[str, Any]) -> set[str]:
    """Keys of `taken` that make no sense without the quickstart's validation rows, where these are not used."""
    default = leaves(kind.schema)["data.train_files"].default
    own_rows = _as_list(values.get("data.train_files", default)) != default
    return {_TEST_FREQ} & taken.keys() if own_rows and "data.val_files" not in values else set()


def in_words(taken: Mapping[str, Any]) -> str:
    """One line for `hrl check` and the banner."""
    listed = ", ".join(f"{key}={_as_yaml(value)}" for key, value in taken.items())
    return f"from the quickstart: {listed}; set them, or start from your own YAML."


def _values_in(file: Path, kind: RunKind[Section]) -> dict[str, Any]:
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    tree = {name: value for name, value in tree.items() if name != "defaults"} if isinstance(tree, dict) else {}
    return dict(flatten(tree, kind.schema))


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
