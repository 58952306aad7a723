import json
import re
import struct

import pytest

from hrl.config.alarms import ALARMS
from hrl.report import charts
from hrl.report.charts import (
    CHARTS,
    COLOURS,
    LOSS,
    MAX_POINTS,
    REWARD,
    any_metric,
    charts_of,
    ends_of,
    run_columns,
    specification,
    write_picture,
)


def record(step, **numbers):
    return {"step": step, "timing_s/step": 5.0, "timing_s/gen": 2.0, "timing_s/update_actor": 2.5} | numbers


def drawn(*records):
    return {each.chart.name: each for each in charts_of([run_columns(list(records))])}


# ---------------------------------------------------------------------------------------------- numbers


def test_columns_tell_a_missing_number_from_one_that_was_not_finite():
    columns = run_columns([record(1, a=0.5), record(2), record(3, a=None), record(4, a=1 / 3)])
    assert (columns["steps"], columns["every"]) == ([1, 2, 3, 4], 1)
    assert columns["values"]["a"] == [0.5, None, "NaN", 0.33333]
    assert ends_of(columns, "a") == (0.5, 0.33333)
    assert ends_of(columns, "b") is None


def test_seconds_that_no_phase_covers_are_other_and_all_add_up():
    values = run_columns([record(1), record(2, **{"timing_s/old_log_prob": 0.25, "timing_s/ref": 0.25})])["values"]
    seconds = {name.removeprefix("seconds of "): column for name, column in values.items() if "seconds of" in name}
    assert seconds == {
        "generation": [2.0, 2.0],
        "log-probs and values": [0.0, 0.5],
        "update": [2.5, 2.5],
        "other": [0.5, 0.0],
    }


def test_a_point_of_a_long_run_is_the_mean_of_several_steps():
    columns = run_columns([{"step": step, "a": float(step)} for step in range(1, 2 * MAX_POINTS + 2)])
    assert columns["every"] == 3
    assert columns["values"]["a"][:2] == [2.0, 5.0] and columns["steps"][:2] == [3, 6]
    assert columns["steps"][-1] == 2 * MAX_POINTS + 1
    assert len(columns["steps"]) == len(columns["values"]["a"]) <= MAX_POINTS


def test_words_and_truths_in_the_metrics_are_not_drawn():
    assert set(run_columns([{"step": 1, "a": 1, "b": "word", "c": True}])["values"]) == {"a"}


# ---------------------------------------------------------------------------------------------- which charts


def test_a_chart_without_its_metric_is_left_out():
    assert list(drawn({"step": 1, "actor/entropy": 1.0})) == ["entropy"]
    assert drawn() == {}


def test_rewards_are_drawn_with_validation_and_their_parts_apart():
    charts = drawn(
        {"step": 1, "reward/mean": 1.0, "reward/exact/mean": 0.5, "reward/format/mean": 0.5, "val/a/b/mean@4": 1.0}
    )
    assert [line.label for line in charts["reward"].lines] == ["training", "validation: a/b"]
    assert [line.label for line in charts["reward-parts"].lines] == ["exact", "format"]


def test_parts_of_a_validation_stand_with_the_parts_and_not_among_its_sources():
    validation = {"val/a/b/n": 4.0, "val/a/b/mean@1": 1.0, "val/a/b/exact/mean@1": 0.5}
    charts = drawn({"step": 1, "reward/mean": 1.0, "reward/exact/mean": 0.5, **validation})
    assert [line.label for line in charts["reward"].lines] == ["training", "validation: a/b"]
    assert [line.label for line in charts["reward-parts"].lines] == ["exact", "validation: a/b/exact"]


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (("train/loss", "val/chat/loss", "train/perplexity", "val/chat/perplexity"), ["loss", "perplexity"]),
        (
            ("train/loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "val/p/rewards_accuracies"),
            ["loss", "preferences", "margins"],
        ),
    ],
    ids=["sft", "dpo"],
)
def test_other_kinds_of_run_have_their_own_charts(metrics, names):
    assert list(drawn({"step": 1} | dict.fromkeys(metrics, 0.5))) == names


def test_more_lines_than_eyes_can_follow_are_left_out_and_named():
    parts = {f"reward/part{number:02}/mean": 1.0 for number in range(14)}
    chart = drawn({"step": 1, **parts})["reward-parts"]
    assert len(chart.lines) == 10
    assert chart.left_out == ("part10", "part11", "part12", "part13")
    assert len({(line.colour, tuple(line.dash)) for line in chart.lines}) == 10, "each looks different"


@pytest.mark.parametrize("runs", [2, 4, 5, 9, 12, 40])
def test_a_metric_is_drawn_for_all_runs_or_named_as_left_out(runs):
    columns = [run_columns([{"step": 1, **{f"reward/part{n}/mean": 1.0 for n in range(4)}}])] * runs
    (chart,) = charts_of(columns, [f"run {number}" for number in range(runs)])
    drawn_for = {metric: {line.run for line in chart.lines if line.metric == metric} for metric in columns[0]["values"]}
    shown = {metric for metric, of in drawn_for.items() if of}
    assert all(drawn_for[metric] == set(range(runs)) for metric in shown)
    assert {f"reward/{name}/mean" for name in chart.left_out} == columns[0]["values"].keys() - shown
    assert "reward/part0/mean" in shown
    assert len({(line.colour, tuple(line.dash)) for line in chart.lines}) == len(chart.lines), "each looks different"
    assert (
        len({(line.colour, tuple(line.dash)) for line in any_metric(runs, [str(n) for n in range(runs)]).lines}) == runs
    )


def test_charts_name_alarms_that_there_are_and_no_threshold_of_their_own():
    assert {name for chart in CHARTS for name in chart.alarms} <= ALARMS.keys()
    assert not [chart.name for chart in CHARTS if re.search(r"(above|below|over|under) \d", chart.about)]


def test_a_number_that_json_does_not_have_is_not_finite_either():
    values = run_columns([record(1, a=float("nan")), record(2, a=float("inf")), record(3, a=1.0)])["values"]
    assert values["a"] == ["NaN", "NaN", 1.0]


def test_control_and_direction_characters_of_a_name_are_spelled_out():
    (line,) = drawn({"step": 1, "reward/a\u202eb\x1b/mean": 1.0})["reward-parts"].lines
    assert line.label == r"a\u202eb\x1b"


def test_runs_that_are_compared_differ_in_colour_and_metrics_in_dashes():
    columns = run_columns([{"step": 1, "reward/mean": 1.0, "val/a/mean@1": 1.0}])
    (chart,) = charts_of([columns, columns], ["one", "two"])
    assert [(line.label, line.run, line.colour) for line in chart.lines] == [
        ("one: training", 0, "c0"),
        ("two: training", 1, "c1"),
        ("one: validation: a", 0, "c0"),
        ("two: validation: a", 1, "c1"),
    ]
    assert list(chart.lines[0].dash) != list(chart.lines[2].dash)


def test_the_drawing_library_comes_from_another_process_and_one_that_fails_is_told(monkeypatch):
    assert "vegaEmbed" in charts.vega()
    monkeypatch.setattr(charts, "_BUNDLE", "raise SystemExit('no such library')")
    with pytest.raises(OSError, match="can't be read: no such library"):
        charts.vega.__wrapped__()
    monkeypatch.setattr(charts, "_BUNDLE", "import time; time.sleep(60)")
    monkeypatch.setattr(charts, "_BUNDLE_S", 0.1)
    with pytest.raises(OSError, match="not there after"):
        charts.vega.__wrapped__()


def test_names_of_charts_are_unique_and_plain():
    names = [chart.name for chart in CHARTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z-]+", name) for name in names)


# ---------------------------------------------------------------------------------------------- how they look


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_measure_of_contrast_is_that_of_wcag():
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
def test_texts_and_lines_stand_out_on_both_pages(page):
    shades = {name: pair[page] for name, pair in COLOURS.items()}
    for ground in (shades["paper"], shades["panel"]):
        for text in ("ink", "faint", "good", "bad", "warn"):
            assert contrast(shades[text], ground) >= 4.5, text  # WCAG 2.2, 1.4.3
        for number in range(8):
            assert contrast(shades[f"c{number}"], ground) >= 3.0, number  # 1.4.11


def test_a_specification_names_no_colour_that_does_not_follow_the_page():
    text = json.dumps([specification(each) for each in drawn(record(1, **{"reward/mean": 1.0})).values()])
    assert not re.search(r"#[0-9a-f]{3,6}|\bblack\b|\bwhite\b", text)
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(COLOURS)


def test_the_chart_of_any_metric_has_a_line_for_each_run():
    assert [line.label for line in any_metric(1, ("x",)).lines] == ["value"]
    assert [line.label for line in any_metric(2, ("x", "y")).lines] == ["x", "y"]


# ---------------------------------------------------------------------------------------------- the picture


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


RUN = [record(step, **{"reward/mean": step / 30, "val/addition/mean@1": 0.6 + step / 75}) for step in range(1, 31)]


@pytest.mark.parametrize(
    "records",
    [
        RUN,
        [record(1, **{"reward/mean": 0.5})],
        [{"step": 0, "val/addition/mean@1": 0.5}],
        [record(1, **{"reward/mean": None})],
    ],
    ids=["whole run", "one step", "validation alone", "not finite"],
)
def test_a_run_leaves_a_picture(tmp_path, records):
    file = write_picture(records, tmp_path, REWARD, "GRPO")
    assert file == tmp_path / "reward_curve.png"
    width, height = png_size(file)
    assert width > 1000 and height > 300


def test_nothing_to_draw_leaves_no_picture(tmp_path):
    assert write_picture([], tmp_path, LOSS) is None
    assert list(tmp_path.iterdir()) == []
