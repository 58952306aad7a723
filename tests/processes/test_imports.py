"""Imports without garbage collection."""

import gc
import sys
from types import ModuleType

import pytest

from hrl.processes.imports import quick_imports


@pytest.mark.parametrize(
    ("freezes", "is_new", "is_frozen"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_nothing_is_collected_meanwhile_and_only_what_new_modules_made_is_frozen(
    monkeypatch, freezes, is_new, is_frozen
):
    assert gc.isenabled()
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), quick_imports(freezes=freezes):
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        if is_new:
            monkeypatch.setitem(sys.modules, "hrl_test_of_imports", ModuleType("hrl_test_of_imports"))
        raise ImportError("as one that is missing does")
    assert gc.isenabled() and len(made) == 1000
    assert (gc.get_freeze_count() >= before + 1000) is is_frozen


def test_where_nothing_was_collected_before_nothing_is_after():
    gc.disable()
    try:
        with quick_imports(freezes=False):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
