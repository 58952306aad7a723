"""The pages in a browser: what a person sees at the width of a desk and of a phone, in light and dark."""

import shutil
from contextlib import contextmanager

import pytest

from hrl.report.charts import COLOURS
from hrl.report.compare import compare_page
from hrl.report.html_report import render, write_html_report
from hrl.report.outcome import Outcome
from hrl.report.page_server import LiveView
from hrl.report.run_folder import json_line
from hrl.report.samples import rollout_records
from tests.report.episodes import Words, conversation_with_a_tool, episode_batch
from tests.report.runs import HOSTILE, finished_run, sample, started_run, step_record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path"),
    pytest.mark.cluster,  # a browser is several processes
]
WIDE, PHONE = (1280, 900), (375, 700)
LONG = {"response": "x" * 30_000, "question": "w" * 3000, "ground_truth": "t" * 2000}
METRICS = {
    "reward/exact/mean": 0.5,
    "actor/entropy": 1.0,
    "actor/ppo_kl": 0.0,
    "actor/grad_norm": 1.0,
    "actor/pg_clipfrac": 0.0,
    "response_length/mean": 20.0,
    "response_length/clip_ratio": 0.1,
    "rollout/logprob_diff_mean": 0.01,
    "perf/throughput": 400.0,
    "perf/max_memory_gib": 4.0,
    f"val/{HOSTILE}/mean@1": 0.5,
}


@pytest.fixture(scope="module")
def browser():
    # No longer than this module: while it is open, its event loop runs here, and asyncio allows no other.
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def look(browser):
    """Opens a page and fails if it complains, opens a dialog or asks anybody but its own server."""

    @contextmanager
    def at(address, size=WIDE, scheme="light", expected="nothing"):
        context = browser.new_context(viewport=dict(zip(("width", "height"), size, strict=True)), color_scheme=scheme)
        page, complaints = context.new_page(), []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(address) or complaints.append(request.url))
        page.goto(address)
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        yield page
        assert [complaint for complaint in complaints if expected not in complaint] == []
        context.close()

    return at


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    run = finished_run(tmp_path_factory.mktemp("hostile"))
    records = [step_record(step, **METRICS) for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(map(json_line, records)))
    rows = [
        sample(0, 0.0, **LONG),
        sample(1, 0.5, response=HOSTILE),
        sample(2, 1.0, question="# *markdown* [a](b)\n" * 9),
    ]
    (run / "rollouts" / "step_3.jsonl").write_text("".join(map(json_line, rows)))
    (run / "rollouts" / "val_step_3.jsonl").write_text("".join(map(json_line, rows)))
    Outcome("failed", HOSTILE * 20, 3).write(run)
    return run


@pytest.fixture(scope="module")
def report(hostile_run):
    return f"file://{write_html_report(hostile_run)}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desk", "phone"])
def test_every_chart_is_drawn_and_the_page_never_scrolls_sideways(look, report, size, scheme):
    with look(report, size, scheme) as page:
        charts = page.locator("[data-chart]")
        names = charts.evaluate_all("all => all.map(each => each.dataset.chart)")
        assert {"reward", "reward-parts", "length", "entropy", "kl", "gradient", "clip", "truncation"} < set(names)
        assert {"sampler", "seconds", "throughput", "memory", "any"} < set(names)
        assert page.locator(".plot > svg, .plot svg.marks").count() == len(names)
        for details in page.locator("details").all():
            details.evaluate("each => { each.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        asked = COLOURS["paper"][scheme == "dark"].lstrip("#")
        assert paper == f"rgb({', '.join(str(int(asked[at : at + 2], 16)) for at in (0, 2, 4))})"


def test_text_of_a_model_does_nothing(look, report):
    with look(report) as page:
        assert page.locator("main img, main script, main b:has-text('alert')").count() == 0
        shown = page.locator("main").inner_text()
        assert "<script>alert(1)</script></pre><img src=x onerror=alert(2)>[bold]{{ 7 * 7 }}" in shown
        assert r"\u202e\x1b[31m\x00" in shown
        page.locator("[data-chart=reward] .plot").hover()
        assert HOSTILE.split("<img")[0] in page.locator("#tooltip").inner_text()


def test_charts_follow_the_chosen_colours(look, report):
    def stroke(page):
        line = page.locator("[data-chart=entropy] svg .mark-line path").last
        return line.evaluate("each => getComputedStyle(each).stroke")

    with look(report, scheme="light") as page:
        light = stroke(page)
        page.select_option("#theme", "dark")
        assert stroke(page) != light
        page.select_option("#theme", "auto")
        assert stroke(page) == light
        page.select_option("#theme", "dark")
        page.emulate_media(media="print")
        assert stroke(page) == light, "paper is white"


def test_all_charts_mark_the_same_step_and_keys_do_what_a_mouse_does(look, report):
    with look(report) as page:
        page.locator("[data-chart=entropy] .plot").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "step 2" in page.locator("#tooltip").inner_text()
        assert "policy\n1" in page.locator("#tooltip").inner_text()
        assert page.locator("[data-chart=gradient] svg .mark-rule.role-mark line").count() == 1
        page.keyboard.press("Escape")
        assert page.locator("#tooltip").is_hidden()


def path_of(page, chart):
    return page.locator(f"[data-chart={chart}] svg .mark-line path").last.get_attribute("d")


def changes(page, chart, before):
    for _ in range(100):
        if path_of(page, chart) != before:
            return True
        page.wait_for_timeout(50)
    return False


def test_smoothing_and_the_span_of_steps_change_the_curves(look, report):
    with look(report) as page:
        raw = path_of(page, "reward")
        before = path_of(page, "gradient")
        page.locator("#from").fill("2")
        assert changes(page, "gradient", before)
        page.locator("#from").fill("")
        page.locator("[data-chart=any] select").select_option("reward/mean")
        page.locator("#smoothing").fill("0.9")
        assert page.locator("#smoothing-value").inner_text() == "0.90"
        assert changes(page, "any", raw)


def test_a_comparison_draws_both_runs(look, tmp_path):
    runs = [finished_run(tmp_path / name) for name in ("one", "two")]
    file = tmp_path / "comparison.html"
    file.write_text(render(compare_page(runs)))
    for size in (WIDE, PHONE):
        with look(f"file://{file}", size) as page:
            assert page.locator("[data-chart=reward] svg .mark-line.role-mark path").count() >= 4
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_a_run_without_a_step_has_a_page(look, tmp_path):
    started_run(tmp_path).close()
    Outcome("ended without a word").write(tmp_path)
    with look(f"file://{write_html_report(tmp_path)}", PHONE) as page:
        assert "ended without a word" in page.locator("h1").inner_text()


def test_a_live_page_gets_what_is_new_without_being_loaded_again(look, tmp_path):
    folder = started_run(tmp_path)
    Outcome("running", "", 3).write(tmp_path)
    folder.write_metrics(1, step_record(1))
    with LiveView(tmp_path) as view, look(view.address) as page:
        assert page.locator("h1 .status").inner_text() == "running"
        page.evaluate("document.body.dataset.kept = 'yes'")
        page.locator("#environment summary").click()
        folder.write_metrics(2, step_record(2, **{"actor/entropy": 1.0, f"val/{HOSTILE}/mean@1": 0.5}))
        folder.write_rollouts(2, [sample(0, 1.0, response=HOSTILE)])
        page.wait_for_selector("[data-chart=entropy] .plot[data-drawn]", timeout=20_000)
        assert "0.25 → 0.5" in page.locator("[data-chart=reward] .legend").inner_text()
        assert "[bold]" in page.locator("#samples").inner_text()
        Outcome("finished", "", 3).write(tmp_path)
        page.wait_for_selector("h1 .status.finished", timeout=20_000)
        assert "The run has ended" in page.locator("#live").inner_text()
        assert page.locator("body[data-kept]").count() == 1
        assert page.locator("#environment[open]").count() == 1
    folder.close()


def test_a_phone_shows_every_number_of_the_validation_and_whole_steps_on_the_axis(look, tmp_path):
    run = finished_run(tmp_path)
    source = {f"val/bundled/addition_pairs/{name}": 0.693 for name in ("loss", "rewards_accuracies", "n")}
    (run / "metrics.jsonl").write_text("".join(json_line({"step": step, **source}) for step in (0, 6)))
    with look(f"file://{write_html_report(run)}", PHONE) as page:
        table = page.locator("#validation .wide")
        assert table.evaluate("each => each.scrollWidth <= each.clientWidth"), "nothing is cut off"
        assert table.locator("td.number:visible").count() == 2 * 3
    (run / "metrics.jsonl").write_text(json_line({"step": 1, "train/loss": 2.411}))
    with look(f"file://{write_html_report(run)}") as page:
        labels = page.locator("[data-chart=loss] svg .role-axis-label text").all_text_contents()
        assert sorted(filter(None, labels)) == ["1", "2.411"]


def test_a_live_page_says_that_its_folder_cannot_be_read_and_brings_what_came_meanwhile(look, tmp_path):
    folder = started_run(tmp_path)
    Outcome("running", "", 3).write(tmp_path)
    folder.write_metrics(1, step_record(1))
    with LiveView(tmp_path) as view, look(view.address, expected="503") as page:
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#timing'))")
        folder.write_metrics(2, step_record(2, **{"timing_s/my_phase": 1.0}))
        page.wait_for_selector("[data-chart=reward] .legend:has-text('0.5')")
        assert "my_phase" not in page.locator("#timing").inner_text(), "its reader is at it"
        page.evaluate("getSelection().removeAllRanges()")
        page.wait_for_selector("#timing :text('my_phase')", timeout=20_000)
        folder.metrics_file.write_text("no json\n" * 3)
        page.wait_for_selector("#live:has-text('can\\'t be read')", timeout=20_000)
        folder.metrics_file.write_text(json_line(step_record(3)))
        page.wait_for_selector("#live:has-text('Follows the run')", timeout=20_000)
    folder.close()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desk", "phone"])
def test_a_conversation_fits_and_does_nothing(look, tmp_path, size):
    messages = conversation_with_a_tool(HOSTILE + "y" * 3000)
    messages[1]["content"] = "z" * 500
    folder = started_run(tmp_path)
    folder.write_rollouts(1, rollout_records(episode_batch(messages), Words()))
    folder.close()
    Outcome("finished", "", 1).write(tmp_path)
    with look(f"file://{write_html_report(tmp_path)}", size) as page:
        for details in page.locator("details").all():
            details.evaluate("each => { each.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        own, others = (page.locator(f".bubble{kind}").first.bounding_box() for kind in (".own", ":not(.own)"))
        assert others["x"] < own["x"] + own["width"] and own["x"] + own["width"] > others["x"] + others["width"]
        marked = page.locator(".tokens .trained").all_inner_texts()
        assert [text.strip() for text in marked] == ["w10 w11", "w30 w31"]
        weights = page.locator(".tokens span").evaluate_all("all => all.map(e => getComputedStyle(e).fontWeight)")
        assert set(weights) == {"400", "600"}
