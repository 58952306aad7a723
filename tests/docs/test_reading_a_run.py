"""The page on reading a run has every alarm as it is raised."""

from pathlib import Path

from hrl.config.alarms import ALARMS

PAGE = Path(__file__).parents[2] / "docs" / "reading-a-run.md"


def test_the_table_has_every_alarm_with_threshold_meaning_and_remedy() -> None:
    wanted = [
        f"| `{name}` | {alarm.threshold:g} | {alarm.when()} | {alarm.meaning} | {alarm.remedy} |"
        for name, alarm in ALARMS.items()
    ]
    head = "| alarm | threshold | raised when | meaning | remedy |"
    lines = PAGE.read_text().split("\n")
    first = lines.index(head) + 2
    assert lines[first : first + len(wanted) + 1] == [*wanted, ""]
