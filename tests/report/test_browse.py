import io
import re

import pytest
from rich.console import Console

from hrl import cli
from hrl.report.browse import SORT_KEYS, BrowseError, show_rollouts
from tests.report.runs import finished_run


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path)


def shown(run, width=100, **options):
    file = io.StringIO()
    show_rollouts(run, Console(file=file, width=width, color_system=None), **options)
    return file.getvalue()


def order(text):
    """The numbers of the sums asked, from top to bottom."""
    return [int(number) for number in re.findall(r"What is (\d) \+ 2\?", text)]


def test_the_last_step_is_shown_in_the_order_of_its_batch(run):
    text = shown(run)
    assert text.startswith("step 3: 3 of 3 samples ")
    assert order(text) == [0, 1, 2]


@pytest.mark.parametrize(("sort", "expected"), [("score", [2, 1, 0]), ("length", [2, 1, 0]), ("advantage", [0, 2, 1])])
def test_samples_are_sorted_largest_first(run, sort, expected):
    assert order(shown(run, step=1, sort=sort)) == expected


def test_a_limit_says_how_many_there_are(run):
    text = shown(run, sort="score", limit=1)
    assert text.startswith("step 3: 1 of 3 samples, by score")
    assert order(text) == [2]


def test_validation_samples_are_apart(run):
    text = shown(run, validation=True, step=0)
    assert text.startswith("validation after step 0: 2 of 2 samples")
    assert text.count("who knows") == 2


@pytest.mark.parametrize("width", [80, 120])
def test_text_of_a_model_is_shown_and_not_followed(run, width):
    text = shown(run, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert not any(control in text for control in "\x1b\x00\u202e")
    assert "[bold]" in text.replace(" ", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 9}, r"no samples of step 9; it holds those of 1-3$"),
        ({"step": 1, "validation": True}, r"no validation samples of step 1; it holds those of 0, 3$"),
        ({"validation": True, "sort": "advantage"}, r"have no advantage; sort them by score or length$"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(run, options, message):
    with pytest.raises(BrowseError, match=message):
        shown(run, **options)


def test_the_command(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["rollouts", str(run), "--step", "1", "--sort", "score", "--limit", "2"]) == 0
    assert order(capsys.readouterr().out) == [2, 1]
    assert cli.main(["rollouts", str(run), "--val"]) == 0
    assert "still not" in capsys.readouterr().out


def test_a_folder_without_samples_is_status_2(tmp_path, capsys):
    assert cli.main(["rollouts", str(tmp_path)]) == 2
    assert "holds no samples" in capsys.readouterr().err
    assert cli.main(["rollouts", str(tmp_path / "typo")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--sort", "colour"], ["--limit", "0"], ["--limit", "x"], ["extra"]])
def test_arguments_that_make_no_sense_are_refused(run, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["rollouts", str(run), *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_every_sort_key_is_offered(run):
    for sort in SORT_KEYS:
        assert cli.main(["rollouts", str(run), "--sort", sort, "--step", "1"]) == 0
