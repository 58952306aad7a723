import pytest
import yaml

from hrl import cli
from hrl.report.compare import compare_page, differences, equal_weights, final_numbers, short_names
from hrl.report.html_report import run_page
from hrl.report.run_folder import json_line, read_jsonl
from tests.report.runs import HOSTILE, finished_run


@pytest.fixture
def two(tmp_path):
    one, other = finished_run(tmp_path / "a"), finished_run(tmp_path / "b")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("temperature: 1.0", "temperature: 0.7"))
    validated = other / "rollouts" / "val_step_3.jsonl"
    validated.write_text(validated.read_text().replace('"score": 0.0', '"score": 1.0').replace("still not", "at last"))
    return [one, other]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    assert short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert short_names([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]
    assert len(set(short_names([tmp_path, tmp_path]))) == 2


def test_only_keys_that_differ_are_listed():
    one = {"a": {"b": 1, "c": [1]}, "trainer": {"experiment_name": "x"}}
    other = {"a": {"b": 2, "c": [1]}, "d": "new", "trainer": {"experiment_name": "y"}}
    assert differences([one, other]) == [("a.b", ["1", "2"]), ("d", ["–", '"new"'])]


def test_the_last_finite_number_of_each_run_is_compared():
    one = {"steps": [1, 2], "every": 1, "values": {"reward/mean": [0.5, "NaN"], "actor/entropy": [1.0, 0.5]}}
    other = {"steps": [1], "every": 1, "values": {"reward/mean": [0.75], "my/metric": [1.0]}}
    assert final_numbers([one, other]) == [("reward/mean", [0.5, 0.75]), ("actor/entropy", [0.5, None])]


def test_the_page_has_curves_of_all_runs_and_their_answers_side_by_side(two):
    page = compare_page(two)
    (reward,) = [chart for chart in page.charts if chart["name"] == "reward"]
    assert {line["run"] for line in reward["lines"]} == {0, 1}
    assert "temperature" in page.sections["differences"] and "0.7" in page.sections["differences"]
    answers = page.sections["answers"]
    assert "Scores differ on 1 of 2 validation prompts" in answers
    assert "at last" in answers
    assert "&lt;script&gt;" not in answers, "what does not differ is not shown"


def test_runs_that_score_alike_are_compared_by_their_words(two):
    validated = two[1] / "rollouts" / "val_step_3.jsonl"
    validated.write_text((two[0] / "rollouts" / "val_step_3.jsonl").read_text().replace("still not", "never"))
    answers = compare_page(two).sections["answers"]
    assert "Scores differ on 0 of 2 validation prompts that all runs answered; words do on 1." in answers
    assert "still not" in answers and "never" in answers and HOSTILE not in answers


def test_charts_name_the_thresholds_that_all_runs_have(two):
    configs = [{"trainer": {"alarms": {"clip_share": limit, "truncation": 0.625}}} for limit in (0.375, 0.125)]
    for folder, config in zip(two, configs, strict=True):
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        cut = {"response_length/clip_ratio": 0.0, "actor/pg_clipfrac": 0.0, "health/truncation": 0.0}
        cut |= {"health/clip_share": 0.0}
        (folder / "metrics.jsonl").write_text(json_line({"step": 1, **cut}))
    curves = compare_page(two).sections["curves"]
    assert "Alarm if more than 0.625 of the answers" in curves and "of the tokens are clipped" not in curves
    assert "more than 0.125 of the tokens are clipped" in run_page(two[1]).sections["curves"]
    (two[1] / "metrics.jsonl").write_text(json_line({"step": 1, "actor/pg_clipfrac": 0.0}))
    assert "Alarm if" not in run_page(two[1]).sections["curves"], "nobody could have raised it"


def test_the_command_writes_one_page_for_several_runs(two, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *map(str, two)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert "2 runs" in (tmp_path / "comparison.html").read_text()


def test_the_command_writes_the_page_of_a_run_anew(two, capsys):
    (two[0] / "report.html").unlink(missing_ok=True)
    before = read_jsonl(two[0] / "metrics.jsonl")
    assert cli.main(["report", str(two[0])]) == 0
    assert capsys.readouterr().out == f"{two[0]}/report.html\n"
    assert "sums &lt;1&gt;" in (two[0] / "report.html").read_text()
    assert read_jsonl(two[0] / "metrics.jsonl") == before


def test_a_folder_without_a_run_names_those_below_it(two, tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run; runs are in {two[0]}, {two[1]}" in capsys.readouterr().err
    assert cli.main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_step_up_to_which_weights_are_equal_is_told():
    name = "actor/weights_checksum"

    def run(*sums: float, first: int = 1) -> list[dict[str, float]]:
        return [{"step": step, name: each} for step, each in enumerate(sums, start=first)]

    row = f"{name}: equal up to step"
    assert equal_weights([run(5, 6, 7, 8), run(5, 6, 9, 8)]) == [(row, [2.0, 2.0])], "equal again is no longer equal"
    assert equal_weights([run(5, 6), run(4, 6)]) == [(row, [0.0, 0.0])]
    assert equal_weights([run(5, 6, 7), run(6, 7, 8, first=2)]) == [(row, [3.0, 3.0])], "resumed elsewhere"
    assert equal_weights([run(5), [{"step": 1, "reward/mean": 1.0}]]) == []
