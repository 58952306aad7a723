"""Whether a command line asks for the quickstart, or brings a task of its own.

The quickstart's values suit a small model and short answers. They stand in `configs/quickstart/`, apart from the
primary files, and are in force for hrl's own model and rows alone: a run on anything else starts from the schema's
defaults.
"""

from collections.abc import Mapping
from typing import Any

from hrl.algos.registry import estimator_traits
from hrl.config.keys import leaves
from hrl.config.problems import Problem
from hrl.config.run_kind import RunKind
from hrl.config.section import Section

GROUP = "quickstart"
"""The group of YAML files; a kind's file has the kind's name."""

TRAIN_FILES = "data.train_files"
_VAL_FILES, _TEST_FREQ = "data.val_files", "trainer.test_freq"
_MODELS = ("actor_rollout_ref.model.path", "model.path")
_BUNDLED = "bundled:"


def is_the_quickstarts_task(kind: RunKind[Section], values: Mapping[str, Any]) -> bool:
    """Return whether neither another model nor other rows are named.

    Args:
        kind: Of the run.
        values: Dotted key → value, without the quickstart's own.
    """
    known = leaves(kind.schema)
    for key in (*_MODELS, TRAIN_FILES):
        if key in known and _as_list(values.get(key, known[key].default)) != _as_list(known[key].default):
            return False
    held_out = _as_list(values.get(_VAL_FILES) or [])
    return not isinstance(held_out, list) or all(str(source).startswith(_BUNDLED) for source in held_out)


def without_its_validation(kind: RunKind[Section], values: Mapping[str, Any], origins: Mapping[str, str]) -> set[str]:
    """Keys of the quickstart that make no sense without its validation rows, where other rows are trained on."""
    default = leaves(kind.schema)[TRAIN_FILES].default
    own_rows = _as_list(values.get(TRAIN_FILES, default)) != default
    lonely = own_rows and _VAL_FILES not in values and origins.get(_TEST_FREQ) == _origin(kind)
    return {_TEST_FREQ} if lonely else set()


def without_its_critic(kind: RunKind[Section], values: Mapping[str, Any], origins: Mapping[str, str]) -> set[str]:
    """Keys of the quickstart's critic where nothing else asks for one; left in, they would choose its estimator."""
    settings = {key: value for key, value in values.items() if key.startswith("critic.")}
    its_own = {key for key in settings if origins.get(key) == _origin(kind)}
    estimator = values.get("algorithm.adv_estimator")
    is_estimators = isinstance(estimator, str) and estimator_traits(estimator).needs_critic
    is_asked_for = any(settings[key] not in (None, False) for key in settings.keys() - its_own)
    return set() if is_estimators or is_asked_for else its_own


def rows_are_missing(kind: RunKind[Section], values: Mapping[str, Any]) -> Problem | None:
    """Return a task of one's own has rows of its own."""
    if TRAIN_FILES in values:
        return None
    hint = (
        f"Name yours, e.g. {TRAIN_FILES}=train.parquet; or add {_origin(kind)}, which brings bundled rows and settings "
        "for a small model."
    )
    return Problem(TRAIN_FILES, "is not set.", hint)


def _origin(kind: RunKind[Section]) -> str:
    return f"{GROUP}={kind.name}"


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value
