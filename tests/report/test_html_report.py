import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import pytest

from hrl.report.charts import MAX_POINTS, REWARD, write_picture
from hrl.report.compare import compare_page
from hrl.report.first_look import Finding, FirstLook
from hrl.report.health import Raised
from hrl.report.html_report import run_page, run_summary, timing_summary, validation_summary, write_html_report
from hrl.report.outcome import Outcome
from hrl.report.run_folder import DamagedFileError, json_line, read_metrics
from tests.report.runs import CONFIG, HOSTILE, finished_run, sample, started_run, step_record

VOID = {"meta", "input"}


def report_of(folder, outcome, total_steps=3):
    Outcome(outcome.status, outcome.reason, total_steps).write(folder)
    return write_html_report(folder)


class Page(HTMLParser):
    """The tags, attributes and texts of a page; fails where tags don't nest."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(path.read_text())
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def page(tmp_path):
    run = finished_run(tmp_path)
    Outcome("finished", "", 3).write(run)
    return Page(write_html_report(run))


def test_the_report_tells_what_ran_and_what_came_of_it(page):
    for fact in (
        "sums <1> finished",
        "model some/model",
        "8 prompts × 4 samples = 32 sequences",
        "steps 3 of 3",
        "training 0.25 → 0.75 validation: a/sums 0.25 → 0.75",
        "a/sums mean@1 4 0.250 0.750 +0.500",
        "From the first to the last time that a prompt was answered: 1 better, 0 worse, 1 as before.",
        "better: +1.00 What is 1 + 2?",
        "truth: 3 step 0: score 0.00 who knows tokens: 4 · ended by: stop · exact: 0 step 3: score 1.00",
        "training step 1: score 0.50",
        "best of 3",
        "median of 3",
        "worst of 3",
        "exact 0.5",
        "ended by stop",
        "generation 2.00 3",
        "temperature: 1.0",
    ):
        assert fact in page.text


def test_text_of_a_model_stays_text(page):
    assert page.tags.count("script") == 3, "the numbers, Vega, and the page's own"
    assert not {"img", "bold"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    shown = HOSTILE.replace("\u202e", r"\u202e").replace("\x1b", r"\x1b").replace("\x00", r"\x00")
    assert page.text.count(shown) == 3  # after training, at the last time of its training prompt, as the best sample


def test_the_page_needs_nothing_but_itself(page):
    assert not [name for name, _ in page.attributes if name in ("src", "href", "action", "data")]
    assert "url(" not in page.text and "@import" not in page.text


def test_only_the_pages_own_scripts_may_run_and_nothing_is_loaded(page):
    (allowed,) = [value for name, value in page.attributes if name == "content" and "script-src" in value]
    assert allowed.startswith("default-src 'none'; ")
    assert allowed.count("'sha256-") == 2 and "eval" not in allowed and "connect-src" not in allowed


def test_numbers_of_a_run_can_not_end_the_script_that_holds_them(tmp_path):
    folder = started_run(tmp_path)
    folder.metrics_file.write_text('{"step": 1, "val/</script><script>alert(1)/mean@1": 0.5}\n')
    report = report_of(folder.path, Outcome("finished"))
    assert Page(report).tags.count("script") == 3


def test_alarms_stand_in_the_report_with_what_helps(tmp_path):
    folder = started_run(tmp_path)
    folder.metrics_file.write_text('{"step": 1, "health/entropy_low": 1.0}\n{"step": 2, "health/entropy_low": 0.0}\n')
    folder.write_alarm(Raised("entropy_low", 1, 0.1, "0.01").record())
    text = Page(report_of(folder.path, Outcome("finished"))).text
    assert "Alarms entropy_low, raised in step 1, over now" in text and "What helps: " in text


def test_the_first_look_stands_in_the_report(tmp_path):
    folder = started_run(tmp_path)
    folder.write_first_look(FirstLook(Finding.NOTHING_RIGHT, "0 of 3", sample(0, 0.0), ("an easier task",)).as_dict())
    text = Page(report_of(folder.path, Outcome("finished"))).text
    assert "First look 0 of 3. To try: an easier task one of the samples" in text and "it is 2" in text


def test_a_very_long_answer_is_cut_in_the_page(tmp_path):
    folder = started_run(tmp_path)
    folder.write_rollouts(1, [{"prompt": "p", "response": "x" * 1_000_000, "score": 1.0, "response_length": 9}])
    text = Page(report_of(folder.path, Outcome("finished"))).text
    assert "[… 994000 characters; rollouts/ has them …]" in text and len(text) < 10_000


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path):
    folder = started_run(tmp_path)
    page = Page(report_of(folder.path, Outcome.of(RuntimeError("rank 1: <no memory>"))))
    assert "failed RuntimeError: rank 1: <no memory>" in page.text
    assert "No validation was run." in page.text
    assert "steps 0 of 3" in page.text
    assert [value for name, value in page.attributes if name == "data-chart"] == ["any"]
    assert not any(f"{missing} " in page.text for missing in ("Samples of step", "over time", "Where the time went"))


def test_a_run_with_one_validation_shows_it_and_compares_nothing(tmp_path):
    folder = started_run(tmp_path)
    folder.metrics_file.write_text('{"step": 0, "val/sums/mean@1": 0.5, "val/sums/n": 4}\n')
    folder.write_rollouts(0, [{"prompt": "p", "response": "r", "score": 0.5, "response_length": 1}], kind="val")
    page = Page(report_of(folder.path, Outcome.of(KeyboardInterrupt())))
    assert "interrupted" in page.text
    assert "prompts step 0 sums mean@1 4 0.500" in page.text
    assert "change" not in page.text.split(" Validation ", 1)[1].split("To run it again")[0]


def test_numbers_that_were_not_finite_are_shown_as_missing(tmp_path):
    folder = started_run(tmp_path)
    folder.metrics_file.write_text(
        '{"step": 1, "val/sums/mean@1": null, "timing_s/gen": null, "timing_s/step": null}\n'
    )
    folder.write_rollouts(1, [{"prompt": "p", "response": "r", "score": float("nan"), "response_length": 1}])
    assert "sums mean@1 – –" in Page(report_of(folder.path, Outcome("finished"))).text


def test_a_cut_line_of_a_killed_run_is_left_out(tmp_path):
    run = finished_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert "steps 3 of 3" in Page(report_of(run, Outcome("interrupted"))).text


def test_first_and_last_validation_are_compared_per_source_and_metric():
    summary = validation_summary(
        [
            {"step": 0, "val/a/b/mean@1": 0.5, "val/a/b/n": 7.0},
            {"step": 1, "reward/mean": 1.0},
            {"step": 2, "val/a/b/mean@1": 0.9, "val/a/b/n": 7.0},
            {"step": 3, "val/a/b/mean@1": 0.75, "val/a/b/n": 7.0, "val/c/best@4": 1.0, "val/c/n": 2.0},
        ]
    )
    assert (summary["first_step"], summary["last_step"], summary["several"]) == (0, 3, True)
    assert summary["rows"] == [
        {"source": "a/b", "metric": "mean@1", "n": 7.0, "first": 0.5, "last": 0.75, "change": 0.25},
        {"source": "c", "metric": "best@4", "n": 2.0, "first": None, "last": 1.0, "change": None},
    ]
    assert validation_summary([{"step": 1, "reward/mean": 1.0}]) is None


def test_timing_is_the_median_over_the_steps_that_had_the_phase():
    records = [{"timing_s/gen": s, "timing_s/step": 9.0, "timing_s/adv": 1.0} for s in (1.0, 2.0, 6.0)]
    records[2]["timing_s/my_phase"] = 4.0
    rows = timing_summary(records)
    assert [(row["phase"], row["median_s"], row["times"]) for row in rows] == [
        ("generation", 2.0, 3),
        ("advantages", 1.0, 3),
        ("my_phase", 4.0, 1),
    ]
    assert [row["share"] for row in rows] == pytest.approx([9 / 16, 3 / 16, 4 / 16])


def test_the_summary_leaves_out_what_the_configuration_does_not_say():
    assert dict(run_summary({}, [], total_steps=4)) == {"steps": "0 of 4", "time in steps": "0 s"}
    summary = dict(run_summary(CONFIG, [{"step": 2, "timing_s/step": 660.0}], total_steps=30))
    assert (summary["steps"], summary["time in steps"]) == ("2 of 30", "11 min")


def test_the_same_folder_gives_the_same_report(tmp_path):
    run = finished_run(tmp_path)
    first = report_of(run, Outcome("finished")).read_bytes()
    assert report_of(run, Outcome("finished")).read_bytes() == first
    assert not re.search(rb"\b(NaN|None|Undefined)\b", first.split(b"To run it again")[0])


# ---------------------------------------------------------------------------------------------- folders of every kind

PARTS = {f"reward/part{number:02}/mean": number / 30 for number in range(30)}
SOURCES = {f"val/source{number}/{name}": value for number in range(10) for name, value in (("mean@1", 0.5), ("n", 4.0))}
METRICS = {
    "none": [],
    "a validation alone": [{"step": 0, **SOURCES}],
    "one step": [step_record(1)],
    "nothing finite": [{"step": step, "reward/mean": None, "actor/entropy": None} for step in (1, 2)],
    "not finite now and then": [step_record(1), {"step": 2, "reward/mean": None, "timing_s/step": 1.0}, step_record(3)],
    "thirty parts": [step_record(step, **PARTS) for step in (1, 2)],
    "ten sources": [step_record(step, **SOURCES) for step in (1, 2)],
    "10,000 steps": [step_record(step, **{"actor/entropy": 1.0}) for step in range(1, 10_001)],
    "a name that is markup": [step_record(1, **{f"reward/{HOSTILE}</script>/mean": 1.0, f"val/{HOSTILE}/mean@1": 1.0})],
    "large and small": [step_record(1, **{"actor/grad_norm": 1e300, "actor/ppo_kl": 1e-300})] * 2,
}


def run_with(path, records):
    folder = started_run(path)
    folder.metrics_file.write_text("".join(map(json_line, records)))
    folder.close()
    return path


@pytest.mark.parametrize("name", METRICS)
def test_any_run_has_a_page_a_picture_and_a_comparison(tmp_path, name):
    run, other = run_with(tmp_path / "run", METRICS[name]), run_with(tmp_path / "other", METRICS["one step"])
    page = run_page(run)
    numbers = json.loads(json.dumps(page.numbers(), allow_nan=False))
    assert len(numbers["runs"][0]["steps"]) == min(len(METRICS[name]), MAX_POINTS)
    assert HOSTILE not in "".join(page.sections.values()) and "</script>" not in page.sections["curves"]
    assert len(compare_page([run, other]).runs) == 2
    if len(METRICS[name]) < 100:  # the picture of a long run takes a second and shows nothing new
        picture = write_picture(read_metrics(run), run, REWARD)
        assert (picture is None) == (not any("reward/mean" in r or "val/source0/n" in r for r in METRICS[name]))


def test_what_charts_leave_out_is_named(tmp_path):
    curves = run_page(run_with(tmp_path, METRICS["thirty parts"])).sections["curves"]
    assert "20 more not drawn" in curves and all(f"part{number:02}" in curves for number in range(30))


def test_a_single_value_is_told_once(tmp_path):
    curves = run_page(run_with(tmp_path, [step_record(1)])).sections["curves"]
    assert "training <b>0.25</b>" in curves and "→" not in curves


def test_counters_of_a_whole_validation_are_of_no_source_and_absent_where_they_are_zero():
    scores = {"val/a/b/mean@1": 1.0, "val/a/b/n": 4.0}
    found = validation_summary([{"step": 0, **scores, "val/rollout/empty_responses": 2.0}, {"step": 4, **scores}])
    assert [(row["source"], row["metric"], row["first"], row["last"], row["change"]) for row in found["rows"]] == [
        ("a/b", "mean@1", 1.0, 1.0, 0.0),
        ("(all)", "rollout/empty_responses", 2.0, 0.0, -2.0),
    ]


@pytest.mark.parametrize("line", ["no json", "7", '{"reward/mean": 1.0}', "\udcff"])
def test_a_damaged_line_is_named_with_file_and_number(tmp_path, line):
    run = run_with(tmp_path, [step_record(1)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl.* is damaged: "):
        run_page(run)


def test_half_a_character_of_utf_16_can_be_written_and_shown(tmp_path):
    folder = started_run(tmp_path)
    folder.write_metrics(1, {"reward/mean": 1.0, "reward/\ud800/mean": 0.5})
    folder.write_rollouts(1, [sample(0, 1.0, response="a\ud800b", ground_truth="\udfff", data_source="\ud801")])
    folder.close()
    page = write_html_report(tmp_path).read_text()
    assert r"a\ud800b" in page and r"\udfff" in page


def test_a_report_can_be_made_at_any_moment_of_a_run(tmp_path):
    folder, over = started_run(tmp_path), threading.Event()

    def watch():
        pages = 0
        while not over.is_set():
            run_page(tmp_path)
            pages += 1
        return pages

    with ThreadPoolExecutor(1) as watcher:
        watched = watcher.submit(watch)
        for step in range(1, 31):
            Outcome("running", "", 30).write(tmp_path)
            folder.write_rollouts(step, [sample(number, number / 4) for number in range(4)])
            folder.write_metrics(step, step_record(step))
            folder.write_rollouts(step, [sample(0, 1.0)], kind="val")
            folder.write_metrics(step, {"val/sums/mean@1": 1.0, "val/sums/n": 1.0})
        over.set()
        assert watched.result() >= 1
    folder.close()
