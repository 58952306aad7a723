"""How long a run still takes."""

import pytest

from hrl.report.pace import Pace, duration


def step(seconds: float, testing: float | None = None) -> dict[str, float]:
    return {"timing_s/step": seconds} | ({} if testing is None else {"timing_s/testing": testing})


def test_nothing_is_known_before_the_first_step() -> None:
    assert Pace(10).left_s() is None


def test_the_first_step_counts_only_until_there_is_another() -> None:
    pace = Pace(10)
    pace.step_done(1, step(60.0))
    assert pace.left_s() == 9 * 60.0
    pace.step_done(2, step(4.0))
    assert pace.left_s() == 8 * 4.0
    pace.step_done(3, step(6.0))
    assert pace.left_s() == 7 * 5.0


def test_validations_that_are_still_to_come_count() -> None:
    pace = Pace(10, test_freq=4, val_after_train=True)
    pace.validated({"timing_s/testing": 30.0})
    pace.step_done(1, step(9.0))
    pace.step_done(2, step(2.0))
    assert pace.left_s() == 8 * 2.0 + 3 * 30.0  # after steps 4, 8 and 10
    pace.step_done(3, step(2.0))
    pace.step_done(4, step(2.0, testing=10.0))
    assert pace.left_s() == 6 * 2.0 + 2 * 20.0
    for number in range(5, 11):
        pace.step_done(number, step(2.0, testing=10.0 if number in (8, 10) else None))
    assert pace.left_s() == 0.0


def test_what_is_saved_between_steps_counts_and_a_validation_does_not_count_twice() -> None:
    pace = Pace(4)
    pace.step_done(1, step(2.0), None)
    pace.step_done(2, step(2.0, testing=5.0), 10.0)
    assert pace.left_s() == 2 * 5.0


def test_a_run_that_continues_counts_what_is_left() -> None:
    pace = Pace(100)
    pace.step_done(91, step(3.0))
    assert pace.left_s() == 9 * 3.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00"), (-3.0, "0:00"), (42.4, "0:42"), (725.0, "12:05"), (11229.0, "3:07:09")]
)
def test_durations_are_written_as_on_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text
