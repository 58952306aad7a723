import io
import json
import re
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console, Group

from hrl.config import compose_cli, load_config
from hrl.config.compose import compose_kind
from hrl.config.environment import EnvironmentConfig
from hrl.config.run_kind import SFT
from hrl.report.answers import Answer, Series
from hrl.report.console import JsonConsole, RunConsole, validation_table
from hrl.report.display import display_of
from hrl.report.health import Raised
from hrl.report.live import PhaseBar
from hrl.report.phases import PHASES
from hrl.report.samples import best_median_worst, printable, samples_table
from hrl.report.step_line import Layout
from hrl.trainer.kinds import KINDS
from tests.report.runs import HOSTILE, sample

SNAPSHOTS = Path(__file__).parent / "snapshots"
CONFIG = compose_cli([])
SFT_LINE = KINDS["sft"].line(compose_kind(SFT, ["data.train_files=a.jsonl", "data.val_files=b.jsonl"]))
PPO_LINE = KINDS["ppo"].line(CONFIG)

METRICS = {
    "reward/mean": 0.641,
    "val/addition/mean@1": 0.875,
    "val/addition/n": 16.0,
    "response_length/mean": 5.1,
    "actor/ppo_kl": 0.0021,
    "actor/entropy": 0.31,
    "actor/grad_norm": 1.234,
    "actor/lr": 2e-5,
    "timing_s/step": 5.2,
    "timing_s/gen": 2.1,
    "timing_s/update_actor": 2.5,
    "timing_s/update_critic": 0.3,
    "perf/throughput": 812.4,
}


PARTS = {"reward/correct/mean": 0.625, "reward/format/mean": 0.875}


def make_console(*, terminal, width=80):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, highlight=False, color_system=None)
    return RunConsole(console, clock=lambda: 0.0).expect(
        30, PPO_LINE, ["gen", "reward", "update_actor", "weight_sync"]
    ), file


def test_a_run_with_an_environment_shows_turns_and_what_goes_wrong_from_the_step_on_in_which_it_does():
    line = KINDS["ppo"].line(CONFIG.model_copy(update={"environment": EnvironmentConfig(path="my_env.py:Game")}))
    episodes = {"episode/turns/mean": 3.25, "episode/tool_calls/mean": 0.0, "episode/failed_ratio": 0.0}
    layout = Layout(line, 30)
    assert "len    5  turns  3.2  kl" in layout.text(1, METRICS | episodes, 120)
    troubled = METRICS | episodes | {"episode/tool_calls/mean": 1.5, "episode/failed_ratio": 0.03}
    assert "turns  3.2  tools  1.5  fail 0.03" in layout.text(2, troubled, 140)


def test_step_line_at_80_columns():
    assert PPO_LINE.text(12, 30, METRICS, 80) == (
        "step 12/30  reward  0.641  val 0.875  len    5   5.2s  gen  2.1 upd  2.8"
    )


def test_step_line_at_120_columns():
    assert PPO_LINE.text(12, 30, METRICS, 120) == (
        "step 12/30  reward  0.641  val 0.875  len    5  kl  0.0021  ent  0.31  grad  1.23"
        "   5.2s  gen  2.1 upd  2.8    812 tok/s"
    )


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_lines_are_aligned_whatever_the_numbers(width):
    other = METRICS | {"reward/mean": -1.5, "actor/ppo_kl": -0.003, "response_length/mean": 4096.0, "actor/lr": 1.5e-6}
    unvalidated = {name: value for name, value in METRICS.items() if not name.startswith("val/")}
    warmup = {name: value for name, value in unvalidated.items() if name != "actor/grad_norm"}
    lines = [
        PPO_LINE.text(step, 30, m, width) for step, m in ((1, METRICS), (12, other), (13, unvalidated), (30, warmup))
    ]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= width
    starts = [[match.start() for match in re.finditer(r"(?<=  )[a-z]+(?= )", line)] for line in lines]
    assert all(columns == starts[0] for columns in starts)


def test_a_step_that_learns_from_data_shows_its_loss_and_samples_nothing():
    metrics = {
        "train/loss": 0.6123,
        "rewards/accuracies": 0.75,
        "rewards/margins": 0.25,
        "val/a/loss": 0.5,
        "val/b/loss": 0.7,
        "val/a/n": 4.0,
        "val/b/n": 4.0,
        "val/a/rewards_accuracies": 1.0,
        "response_length/mean": 12.0,
        "train/grad_norm": 1.5,
        "train/lr": 1e-5,
        "timing_s/update": 2.0,
        "timing_s/step": 2.1,
        "perf/throughput": 300.0,
    }
    assert SFT_LINE.text(3, 16, metrics, 120) == (
        "step  3/16  loss 0.6123  acc 0.750  margin  0.250  val 0.6000  val acc 1.000  "
        "len   12  grad  1.50   2.1s  upd  2.0"
    )
    narrow = SFT_LINE.text(3, 16, metrics | {"val/a/loss": 0.7}, 80)
    assert len(narrow) <= 80 and "loss 0.6123" in narrow and "gen" not in narrow


def test_a_number_that_is_lost_is_shown_as_lost():
    line = PPO_LINE.text(1, 30, METRICS | {"actor/grad_norm": float("nan")}, 120)
    assert "grad   nan" in line


def test_validation_of_several_sources_is_their_mean():
    other = {"val/other/mean@1": 0.125, "val/other/best@4": 1.0, "val/other/n": 4.0}
    both = METRICS | other | {"val/other/format/mean@1": 0.9}  # a part of the reward
    assert "val 0.500" in PPO_LINE.text(1, 30, both, 80)


def test_phase_bar_shows_done_running_and_to_come():
    now = [0.0]
    bar = PhaseBar(["gen", "update", "sync"], clock=lambda: now[0])
    bar.begin_step("step 3/30")
    bar.begin("gen")
    now[0] = 2.0
    bar.end("gen")
    bar.begin("update")
    now[0] = 3.5
    assert bar.__rich__().plain == "step 3/30  ✓ gen 2.0s  ▸ update 1.5s  · sync"
    bar.begin("sync")
    now[0] = 4.0
    assert bar.__rich__().plain == "step 3/30  ✓ gen 2.0s  ▸ update 2.0s  ▸ sync 0.5s", "both at once"
    bar.end("update")
    assert bar.__rich__().plain == "step 3/30  ✓ gen 2.0s  ✓ update 2.0s  ▸ sync 0.5s"
    bar.begin_step("step 4/30")
    assert bar.__rich__().plain == "step 4/30  · gen  · update  · sync"


def test_a_file_gets_plain_lines_of_full_width_and_no_bar():
    console, file = make_console(terminal=False)
    with console.step_phases(1), console.phase("gen"):
        pass
    console.step(1, METRICS)
    console.note("[bold]model[/bold] text")
    assert file.getvalue() == PPO_LINE.text(1, 30, METRICS, 120) + "\n[bold]model[/bold] text\n"


def test_a_terminal_gets_the_bar_and_its_cursor_back_when_a_phase_fails():
    console, file = make_console(terminal=True)
    with pytest.raises(RuntimeError, match="engine died"), console.step_phases(1), console.phase("gen"):
        raise RuntimeError("engine died")
    shown = file.getvalue()
    assert "▸ gen" in shown or "✓ gen" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is shown again"
    with console.step_phases(2):
        pass  # and the next step can draw again


RECORDS = [
    {
        "prompt": f"What is {i}+1?",
        "response": f"{i + 1}",
        "score": score,
        "advantage": score - 0.5,
        "response_length": 3,
        "finish_reason": "stop",
        "reward_parts": {"exact": score},
        "ground_truth": str(i + 1),
    }
    for i, score in enumerate([0.2, 1.0, 0.0, 0.5, 0.3])
]


ALARM = Raised("truncation", 30, 0.5, "response_length/clip_ratio 0.61, 0.63, 0.70")


def show_a_run(console):
    """Everything that a run shows."""
    with console.stage("importing PyTorch"):
        pass
    rows = "65 rows of bundled:addition/train (70 read, 0 bad, 5 too long, 0 truncated, 65 kept); prompts of 45 tokens"
    console.banner("hrl 1.0 · grpo · sums", {"model": "small, 135 million parameters", "rows": rows})
    console.note("warning: trainer.save_freq is off: a run that is interrupted starts again from the first step")
    console.validation(0, {"val/addition/mean@1": 0.688, "val/addition/n": 16.0})
    for step, alarms in ((1, ()), (30, ("truncation",))):
        with console.step_phases(step), console.phase("gen"):
            pass
        console.step(step, METRICS | PARTS, alarms)
    console.alarm(ALARM)
    console.rollouts(30, RECORDS)
    console.validation(30, METRICS)


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_as_it_is_shown(width, monkeypatch):
    monkeypatch.setattr("hrl.report.console.Live", lambda *_, **__: nullcontext())  # the bar comes and goes
    console, file = make_console(terminal=True, width=width)
    show_a_run(console)
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert shown == (SNAPSHOTS / f"run_{width}.txt").read_text()


@pytest.mark.parametrize("width", [80, 120])
def test_the_phase_bar_keeps_to_one_line(width):
    bar = PhaseBar([phase.label for phase in PHASES], clock=lambda: 1.0)
    bar.begin_step("step 12/30")
    bar.begin("gen")
    (line,) = render(Group(bar), width).splitlines()  # as Live draws it
    assert line.startswith("step 12/30  ▸ gen 0.0s  · rm  · reward") and len(line) <= width


@pytest.mark.parametrize("no_color", [None, "1"])
def test_no_color_is_obeyed(monkeypatch, no_color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system="truecolor", highlight=False)
    show_a_run(RunConsole(console).expect(30, PPO_LINE, ["gen"]))
    styles = re.findall(r"\x1b\[([0-9;]*)m", file.getvalue())
    coloured = [style for style in styles if re.search(r"(^|;)([349][0-7]|10[0-7]|[34]8;)", style)]
    assert bool(coloured) == (no_color is None)


def render(renderable, width=80):
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return file.getvalue()


def test_samples_show_best_median_and_worst():
    shown = render(samples_table(best_median_worst(RECORDS), "samples"), width=120)
    assert re.search(r"best.*What is 1\+1\?", shown)
    assert re.search(r"median.*What is 4\+1\?", shown)
    assert re.search(r"worst.*What is 2\+1\?", shown)
    for fact in ("score: 1.000", "advantage: +0.500", "tokens: 3", "ended by: stop", "exact: 1", "truth: 2"):
        assert fact in shown


@pytest.mark.parametrize(
    "text", ["[red]x[/red]", "[link=file:///]", "[/]", "\x1b[2J\x1b]0;title\x07", "a\rb", "\x9b31m"]
)
def test_text_of_a_model_is_shown_and_not_followed(text):
    shown = render(samples_table([("best", RECORDS[0] | {"response": text, "prompt": text})], "samples"), width=200)
    assert not any(control in shown for control in "\x1b\x07\r\x9b")
    if "\x1b" not in text and text.isprintable():
        assert text in shown


def validations():
    """Two validations of six prompts: the third is learnt, the fourth forgotten."""
    scores = [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 0.5), (0.0, 0.0), (1.0, 1.0)]
    return tuple(
        [
            {
                "prompt": f"<|user|>What is {i} + 2?<|assistant|>",
                "question": f"What is {i} + 2?",
                "response": f"{i + 2}" if pair[when] else "I cannot [bold]say[/bold]",
                "score": pair[when],
            }
            for i, pair in enumerate(scores)
        ]
        for when in (0, 1)
    )


def series_of(first, last):
    """Series of samples of the same prompts, as they are read from a run folder; the largest change first."""
    pairs = zip(first, last, strict=True)
    found = [Series(tuple(Answer(step, s, s["score"], 1) for step, s in enumerate(pair))) for pair in pairs]
    return sorted(found, key=lambda series: -abs(series.change))


def shown_before_and_after(width, limit):
    console, file = make_console(terminal=True, width=width)
    console.before_and_after(series_of(*validations()), limit=limit)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_before_and_after_as_it_is_shown(width):
    assert shown_before_and_after(width, limit=3) == (SNAPSHOTS / f"before_and_after_{width}.txt").read_text()


def test_before_and_after_fits_and_follows_no_markup():
    shown = shown_before_and_after(80, limit=5)
    assert max(map(len, shown.splitlines())) <= 80
    assert "[bold]say" in shown


def test_long_text_is_cut_in_the_middle_and_says_so():
    shown = printable("a" * 500 + "b" * 500, limit=100).plain
    assert shown == "a" * 50 + " [… 900 characters …] " + "b" * 50


def test_validation_table_compares_with_the_start():
    shown = render(validation_table({"val/add/mean@1": 0.9, "val/add/n": 16}, {"val/add/mean@1": 0.6}, "validation"))
    assert re.search(r"add\s+│ mean@1 │ 0.900 │\s+\+0.300", shown)
    assert "val/" not in shown


def test_the_judgement_has_no_row_where_it_was_always_what_another_row_says():
    def rows(now, first):
        names = ("mean@2", "numeric/mean@2", "acc/mean@2", "acc/best@2")
        metrics, then = (
            {"val/add/n": 4.0} | {f"val/add/{name}": value for name, value in zip(names, values, strict=False)}
            for values in (now, first)
        )
        return re.findall(r"add +│ (\S+)", render(validation_table(metrics, then, "validation")))

    assert rows((0.3, 0.2, 0.2, 0.5), ()) == ["acc/best@2", "mean@2", "numeric/mean@2"], "no other row is of best@2"
    assert "acc/mean@2" in rows((0.3, 0.2, 0.1, 0.2), ())
    assert "acc/mean@2" not in rows((0.3, 0.2, 0.2), (0.1, 0.0, 0.0))
    assert "acc/mean@2" in rows((0.3, 0.2, 0.2), (0.1, 0.1, 0.0)), "the change differs"
    assert "acc/mean@2" not in rows((0.2, 0.4, 0.2), (0.1, 0.4, 0.1)), "it is the whole score"


def test_names_of_sources_and_parts_steer_no_terminal_and_counters_of_all_have_no_source():
    metrics = {"val/a\x1b[31m[b]/n": 1.0, "val/a\x1b[31m[b]/x\u202e/mean@1": 0.5, "val/reward/num_errors": 3.0}
    shown = render(validation_table(metrics, {}, "validation"), width=120)
    assert r"a\x1b[31m[b]" in shown and r"x\u202e/mean@1" in shown and not set("\x1b\u202e") & set(shown)
    assert re.search(r"\(all\) +│ reward/num_errors │ 3.000", shown)


def test_every_validation_is_compared_with_the_first():
    console, file = make_console(terminal=False)
    for step, score in enumerate((0.5, 0.6, 0.9)):
        console.validation(step, {"val/add/mean@1": score})
    assert re.findall(r"[+-]0\.\d{3}", file.getvalue()) == ["+0.100", "+0.400"]


# ---------------------------------------------------------------------------------------------- lines for programs


@pytest.fixture
def file():
    return io.StringIO()


@pytest.fixture
def console(file):
    return JsonConsole(file).expect(30, PPO_LINE)


def told(file):
    """What a program reads: an object a line. Its time is looked at and left out."""
    objects = [json.loads(line, parse_constant=pytest.fail) for line in file.getvalue().splitlines()]
    for number in objects:
        age = datetime.now(UTC) - datetime.fromisoformat(number.pop("time"))
        assert 0 <= age.total_seconds() < 60
    return objects


def test_a_step_is_one_object_with_the_metrics_under_their_own_names(console, file):
    with console.step_phases(3), console.phase("gen"):
        pass
    console.step(3, {"reward/mean": 0.5, "actor/grad_norm": float("nan"), "val/sums/mean@1": 1.0})
    assert told(file) == [
        {
            "event": "step",
            "step": 3,
            "total_steps": 30,
            "reward/mean": 0.5,
            "actor/grad_norm": None,
            "val/sums/mean@1": 1.0,
        }
    ]


def test_banner_notes_and_validation_are_objects_too(console, file):
    console.banner("hrl 1.0", {"batch": "8 prompts × 8 samples"})
    console.note("saved\nhere")
    console.validation(5, {"val/sums/mean@1": 0.5, "reward/mean": 0.25})
    console.validation(6, {"reward/mean": 0.25})
    assert told(file) == [
        {"event": "banner", "title": "hrl 1.0", "facts": {"batch": "8 prompts × 8 samples"}},
        {"event": "note", "text": "saved\nhere"},
        {"event": "validation", "step": 5, "val/sums/mean@1": 0.5},
    ]


def test_samples_carry_all_that_is_known_of_them(console, file):
    records = [sample(number, score, advantage=score - 0.5) for number, score in enumerate([0.25, 1.0, 0.0])]
    console.rollouts(5, records)
    console.rollouts(5, records[:1], kind="val")
    training, validation = told(file)
    assert [(picked["label"], picked["score"]) for picked in training["samples"]] == [
        ("best", 1.0),
        ("median", 0.25),
        ("worst", 0.0),
    ]
    assert training["samples"][0] == {"label": "best", **records[1]}
    assert (training["kind"], validation["kind"], len(validation["samples"])) == ("train", "val", 1)


def test_before_and_after_has_the_largest_changes_first(console, file):
    first = [sample(0, 0.0), sample(1, 0.0), sample(2, 0.5)]
    last = [sample(0, 0.0), sample(1, 1.0), sample(2, 1.0)]
    console.before_and_after(series_of(first, last), limit=1)
    (event,) = told(file)
    assert event["pairs"] == [{"before": first[1] | {"mean_score": 0.0}, "after": last[1] | {"mean_score": 1.0}}]
    assert event["changes"] == "2 better, 0 worse, 1 as before; the 1 of 2 that changed most"


def test_text_of_a_model_breaks_no_line_and_steers_no_terminal(console, file):
    hostile = HOSTILE + "\u2028\x85\x9b31m\r\n"
    console.note(hostile)
    assert file.getvalue().count("\n") == 1 and file.getvalue().isascii()
    assert file.getvalue().rstrip("\n").isprintable()
    assert told(file)[0]["text"] == hostile


def test_the_configuration_chooses_who_is_told():
    for logger, console in (("console-json", JsonConsole), ("console", RunConsole), (None, RunConsole)):
        assert isinstance(display_of(load_config({"trainer": {"logger": logger}}).trainer), console)
