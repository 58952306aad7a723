"""Imports without garbage collection."""

import gc

import pytest

from hrl.processes.imports import quick_imports


@pytest.mark.parametrize("freezes", [True, False])
def test_nothing_is_collected_meanwhile_and_what_is_there_at_the_end_is_frozen_unless_it_may_be_garbage(freezes):
    assert gc.isenabled()
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), quick_imports(freezes=freezes):
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        raise ImportError("as a missing module does")
    assert gc.isenabled() and len(made) == 1000
    assert (gc.get_freeze_count() >= before + 1000) is freezes


def test_where_nothing_was_collected_before_nothing_is_after():
    gc.disable()
    try:
        with quick_imports(freezes=False):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
