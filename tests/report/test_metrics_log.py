import json

import pytest

from hrl.report.metrics_log import MetricsLog
from hrl.report.run_folder import read_jsonl


def written(path, *records):
    log = MetricsLog(path)
    for step, metrics in records:
        log.write(step, metrics)
    log.close()
    return read_jsonl(path)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_record_is_there_as_soon_as_it_is_written(file):
    log = MetricsLog(file)
    log.write(1, {"a": 1.0})
    assert json.loads(file.read_text()) == {"step": 1, "a": 1.0}
    log.close()


def test_a_step_that_is_written_twice_has_one_record_with_the_newer_numbers(file):
    assert written(file, (0, {"a": 1.0}), (1, {"a": 2.0, "b": 3.0}), (1, {"b": 4.0, "c": float("nan")}), (2, {})) == [
        {"step": 0, "a": 1.0},
        {"step": 1, "a": 2.0, "b": 4.0, "c": None},
        {"step": 2},
    ]


def test_a_log_is_continued_where_it_ends(file):
    written(file, (1, {"a": 1.0}), (2, {"a": 2.0}))
    assert written(file, (2, {"b": 5.0}), (3, {"a": 3.0})) == [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0, "b": 5.0},
        {"step": 3, "a": 3.0},
    ]


def test_steps_only_grow(file):
    with pytest.raises(ValueError, match=r"metrics.jsonl is at step 3, so that step 2 can't be written any more"):
        written(file, (3, {}), (2, {}))
    assert read_jsonl(file) == [{"step": 3}]
