"""Errors that explain themselves have one base, which is all that a command has to know of them."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import hrl
from hrl.environments.registry import ENVIRONMENTS
from hrl.errors import HrlError

#: Raised and caught inside hrl: signals between two of its functions, which no user sees.
SIGNALS = {
    "AnswerTooComplexError",
    "ArgumentsMisfitError",
    "MaskMeaningError",
    "MemberError",
    "NonFiniteScoreError",
    "RowError",
    "GarbledError",
    "GoneError",
    "AbandonedError",
    "WrongPictureError",
    "LeftOutError",
    "StepEnd",
    "NotBegunError",
    "RequestRefusedError",
    "RunStoppedError",
    "UnsafeError",
    "NoColumnError",
    "NotPickledError",
    "RoundOverError",
}


def errors_of_hrl() -> list[type[BaseException]]:
    found = set()
    # What they import is installed to a folder of its own, and they raise errors of others.
    of_others = {str(one.target).partition(":")[0] for one in ENVIRONMENTS.values() if one.extra is not None}
    for module in pkgutil.walk_packages(hrl.__path__, "hrl."):
        if module.name in of_others:
            continue
        if ".vllm" in module.name or module.name.startswith("hrl.trainer.main"):
            continue
        if module.name.endswith(("_kernel", "_kernels")):  # need Triton, and raise nothing
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(value, type)
                and issubclass(value, BaseException)
                and value.__module__.startswith("hrl.")
                and value.__name__[0] != "_"
            ):
                found.add(value)
    return sorted(found, key=lambda error: error.__name__)


@pytest.mark.parametrize("error", errors_of_hrl(), ids=lambda error: error.__name__)
def test_every_error_that_a_user_may_see_explains_itself(error):
    assert issubclass(error, HrlError) or error.__name__ in SIGNALS
