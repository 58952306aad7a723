import pytest

from hrl.data.files import BadRow
from hrl.data.sources import sources_of
from hrl.data.tokenised_dataset import DatasetCounts, Intake
from hrl.errors import DatasetError

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
BAD = BadRow("f line 2", "is torn")


def test_a_list_holds_names_or_rows():
    assert [source.title for source in sources_of("a.jsonl")] == ["a.jsonl"]
    named = sources_of(["a.jsonl", {"path": "b.jsonl", "weight": 2.0}])
    assert [(source.title, source.options.weight) for source in named] == [("a.jsonl", None), ("b.jsonl", 2.0)]
    assert [source.rows for source in sources_of(ROWS)] == [ROWS]
    with pytest.raises(DatasetError, match="names of sources or the rows themselves, not both"):
        sources_of(["a.jsonl", *ROWS])


@pytest.mark.parametrize(("most", "used", "bad"), [(-1, [1, 3, 4], 2), (2, [1, 3], 1), (0, [], 0)])
def test_only_usable_rows_count_towards_the_samples_that_are_read(most, used, bad):
    intake = Intake(["f"])
    found = [row for block in intake.blocks([1, BAD, 3, BAD, 4], most) for row in block]
    assert (found, intake.num_bad) == (used, bad)


def close(kept, *, bad=0, over=0, skip_bad=False, too_long=("rows are longer than 5", "cut them")):
    intake = Intake(["f", "g"])
    for _ in range(bad):
        intake.leave_out(BAD)
    for _ in range(over):
        intake.leave_out_overlong("f line 3 (9 tokens)")
    intake.truncated = 1
    return intake.close(kept, skip_bad=skip_bad, too_long=too_long)


def test_every_row_is_in_the_counts_once(caplog):
    caplog.set_level("INFO")
    assert close(4, bad=2, over=3, skip_bad=True, too_long=None) == DatasetCounts(9, 2, 3, 1, 4)
    assert "f, g: skipped 2 bad rows: f line 2, f line 2: is torn" in caplog.text
    assert "f, g: 9 rows read, 2 bad, 3 too long, 1 truncated, 4 kept" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kept": 1, "bad": 2}, r"^2 bad rows \(data.bad_rows=skip leaves them out\): f line 2, f line 2: is torn"),
        ({"kept": 1, "over": 2}, r"^2 rows are longer than 5, the first f line 3 \(9 tokens\): cut them$"),
        (
            {"kept": 0, "bad": 1, "skip_bad": True},
            r"^no row to use in f, g: 1 rows read, 1 bad.*\(f line 2: is torn\)$",
        ),
        ({"kept": 0, "over": 1, "too_long": None}, r"^no row to use in f, g: 1 rows read, 0 bad, 1 too long.*0 kept$"),
    ],
)
def test_what_must_not_be_left_out_stops_with_the_way_out(given, message):
    with pytest.raises(DatasetError, match=message):
        close(**given)
