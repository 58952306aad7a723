"""Which numbers the line of a step shows, and which go first."""

import re

import pytest
from rich.cells import cell_len

from hrl.report.step_line import Field, Layout, StepLine

LINE = StepLine(
    (
        Field("reward", ("reward/mean",), "6.3f"),
        Field("len", ("response_length/mean",), "4.0f"),
        Field("kl", ("actor/ppo_kl",), "7.4f", drop=4, optional=True, waits=True),
        Field("grad", ("actor/grad_norm",), "5.2f", drop=3),
    ),
    {"gen": ("gen",), "upd": ("update_actor",)},
    parts="reward/*/mean",
)
STEP = {
    "reward/mean": 0.5,
    "response_length/mean": 12.0,
    "actor/ppo_kl": 0.0,
    "actor/grad_norm": 1.5,
    "timing_s/step": 5.0,
    "timing_s/gen": 2.0,
    "timing_s/update_actor": 2.5,
}
PARTS = {"reward/correct/mean": 0.4, "reward/format/mean": 0.9, "reward/call_s_mean": 0.1}


def test_parts_stand_behind_the_reward() -> None:
    assert LINE.text(1, 30, STEP | PARTS, 120) == (
        "step  1/30  reward  0.500  correct  0.40  format  0.90  len   12  grad  1.50   5.0s  gen  2.0 upd  2.5"
    )


def test_a_part_that_is_the_whole_reward_is_not_shown_until_it_differs() -> None:
    layout = Layout(LINE, 30)
    assert "score" not in layout.text(1, STEP | {"reward/score/mean": 0.5}, 120)
    assert "score  0.25" in layout.text(2, STEP | {"reward/score/mean": 0.25}, 120)
    assert "score  0.50" in layout.text(3, STEP | {"reward/score/mean": 0.5}, 120), "a column stays"


def test_the_judgement_is_not_shown_beside_the_part_that_it_repeats_until_they_differ() -> None:
    layout, both = Layout(LINE, 30), {"reward/numeric/mean": 0.12, "reward/brief/mean": 0.13}
    first = layout.text(1, STEP | both | {"reward/acc/mean": 0.12}, 120)
    assert "numeric  0.12  brief  0.13" in first and "acc" not in first
    assert "acc  0.10" in layout.text(2, STEP | both | {"reward/acc/mean": 0.1}, 120)
    assert "acc  0.12" in layout.text(3, STEP | both | {"reward/acc/mean": 0.12}, 120), "a column stays"
    alike = Layout(LINE, 30).text(1, STEP | {"reward/form/mean": 0.2, "reward/brief/mean": 0.2}, 120)
    assert "form  0.20  brief  0.20" in alike, "only the judgement repeats another"


def test_at_80_columns_parts_come_before_the_seconds_of_phases() -> None:
    assert LINE.text(1, 30, STEP | PARTS, 80) == (
        "step  1/30  reward  0.500  correct  0.40  format  0.90  len   12   5.0s"
    )
    assert LINE.text(1, 30, STEP | PARTS, 60) == "step  1/30  reward  0.500  correct  0.40  len   12   5.0s"


@pytest.mark.parametrize("width", range(45, 130, 7))
def test_a_line_is_never_wider_than_the_terminal(width: int) -> None:
    assert len(LINE.text(1, 30, STEP | PARTS | {"actor/ppo_kl": 0.1}, width)) <= width


def test_a_number_that_is_always_zero_has_no_column() -> None:
    layout = Layout(LINE, 30)
    assert "kl" not in layout.text(1, STEP, 120)
    assert "kl  0.0020" in layout.text(2, STEP | {"actor/ppo_kl": 0.002}, 120)
    assert "kl  0.0000" in layout.text(3, STEP, 120), "it is a column now"


def test_a_step_without_a_part_that_others_have_keeps_the_columns() -> None:
    layout = Layout(LINE, 30)
    lines = [layout.text(1, STEP | PARTS, 120), layout.text(2, STEP | {"reward/format/mean": 0.25}, 120)]
    starts = [[match.start() for match in re.finditer(r"(?<=  )[a-z]+(?= )", line)] for line in lines]
    assert starts[0] == starts[1]


def test_a_long_name_is_cut() -> None:
    assert "a_very_long… " in LINE.text(1, 30, STEP | {"reward/a_very_long_name/mean": 0.25}, 120)


def test_thirty_parts_leave_room_for_everything_else() -> None:
    many = {f"reward/part{number:02}/mean": 0.1 for number in range(30)}
    line = LINE.text(1, 30, STEP | many, 120)
    assert len(line) <= 120
    assert "part00  0.10  part01  0.10  part02  0.10  part03  0.10  len   12   5.0s  gen  2.0 upd  2.5" in line


@pytest.mark.parametrize("width", range(45, 130, 7))
@pytest.mark.parametrize("name", ["正しい答えの割合と形式", "👍🏽👍🏽👍🏽👍🏽👍🏽", "a\x1b[31m\u202e\nb"])
def test_a_name_of_the_users_neither_steers_the_terminal_nor_makes_the_line_wider(name: str, width: int) -> None:
    line = LINE.text(1, 30, STEP | {f"reward/{name}/mean": 0.25}, width)
    assert not set("\x1b\u202e\n") & set(line)
    assert cell_len(line) <= width


def test_an_alarm_marks_the_line_without_moving_columns_and_is_named_where_there_is_room() -> None:
    plain = LINE.text(12, 30, STEP, 120)
    layout = Layout(LINE, 30)
    assert layout.text(12, STEP, 120, ["kl", "truncation"]) == f"{plain.replace('  ', '! ', 1)}  ! kl, truncation"
    tight = layout.text(12, STEP, len(plain), ["kl", "truncation"])
    assert tight == plain.replace("  ", "! ", 1)
