"""Records of episodes, and how people see them."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from hrl import cli
from hrl.report.answers import validation_series
from hrl.report.chat import samples_shown, tokens_shown
from hrl.report.console import JsonConsole, RunConsole
from hrl.report.conversation import Run, call_text, content_text, conversation, first_turn, runs_of, transcript
from hrl.report.episode_records import turns_of
from hrl.report.html_report import write_html_report
from hrl.report.outcome import Outcome
from hrl.report.run_folder import DamagedFileError, json_line
from hrl.report.samples import best_median_worst, read_samples, rollout_records, sample_facts
from hrl.report.tracking import sample_table
from tests.report.episodes import CALL, Words, conversation_with_a_tool, episode_batch
from tests.report.runs import HOSTILE, sample, started_run
from tests.report.test_html_report import Page

SECRET = "sk-Zq81LmTa93KdWv07RbXy52"


@pytest.fixture
def records():
    return rollout_records(episode_batch(), Words())


def shown(show, records, width=100):
    file = io.StringIO()
    labelled = [(str(number), record) for number, record in enumerate(records, start=1)]
    Console(file=file, width=width, color_system=None).print(show(labelled, "step 1"))
    return file.getvalue()


# ---------------------------------------------------------------------------------------------- records


def test_an_episode_is_one_record_with_the_sums_and_means_of_its_rows(records):
    first, second = records
    assert (first["episode_id"], first["num_turns"], first["tool_calls"], first["end"]) == ("a/0", 2, 1, "done")
    assert (first["score"], first["advantage"]) == (1.25, (2 * 1.0 + 2 * 4.0) / 4)
    assert (first["prompt"], first["question"]) == ("w3 w4 ", "What is 12 * 34?")
    assert first["response"] == "w11 w20 w21 w30 w31 ", "that of the last branch"
    assert first["reward_parts"] == {"exact": 1.0} and first["env_metrics"] == {"solved": 1.0}
    assert (first["policy_tokens"], first["environment_tokens"]) == (4, 5)
    assert (second["score"], second["end"], second["num_turns"]) == (None, "failed", 1)
    assert json.loads(json_line(first)) == first, "a record is plain data"


def test_a_turn_has_what_was_sampled_in_it_what_it_called_and_what_answered_it(records):
    one, two = records[0]["turns"]
    assert one == {
        "text": "w10 w11 ",
        "message": 1,
        "content": "Let me see.",
        "tool_calls": [CALL],
        "observation": [{"role": "tool", "content": "408", "tool_call_id": "c1"}],
        "reward": 0.25,
        "tokens": 2,
        "version": 6,
    }
    assert (two["text"], two["observation"], two["reward"], two["version"]) == ("w30 w31 ", [], 1.0, 7)
    assert records[1]["turns"][0]["text"] == "w40 ", "what a failed episode sampled is still told"


def test_tokens_of_policy_and_environment_are_told_apart_in_every_branch(records):
    kinds = [[(run.origin, run.tokens, run.turn, run.trained) for run in branch] for branch in runs_of(records[0])]
    assert kinds == [
        [("prompt", 2, None, False), ("policy", 2, 0, True), ("environment", 2, 0, False)],
        [("prompt", 2, None, False), ("environment", 3, 0, False), ("policy", 2, 1, True)],
    ]
    assert [run.trained for run in runs_of(records[1])[0]] == [False, False], "a failed episode trains nothing"


def test_the_score_of_an_episode_is_counted_once_and_what_shaping_made_of_it_stands_beside_it():
    batch = episode_batch()
    batch.batch["plain_scores"] = torch.tensor([1.25, 1.25, 9.0])  # each row has its episode's
    first, second = rollout_records(batch, Words())
    assert first["score"] == 1.25 and "shaped_score" not in first and second["score"] is None
    batch.batch["plain_scores"] = torch.tensor([2.0, 2.0, 9.0])
    first, second = rollout_records(batch, Words())
    assert (first["score"], first["shaped_score"]) == (2.0, 1.25) and "shaped_score" not in second


def test_rows_of_an_episode_need_not_be_neighbours_or_in_order():
    batch = episode_batch()
    moved = batch.select_idxs(np.array([1, 2, 0]))
    there = {record["episode_id"]: record for record in rollout_records(moved, Words())}
    assert there == {record["episode_id"]: record for record in rollout_records(batch, Words())}


def test_turns_stand_where_they_were_said_and_those_of_other_conversations_have_their_own_text():
    roles = ("user", "assistant", "user", "assistant", "user", "assistant")
    shown = [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles)]
    sampled = [Run("policy", f"sampled {turn}", 2, turn=turn, trained=True, version=1) for turn in range(3)]
    record = {"prompt": "?", "messages": shown, "turns": turns_of(shown, [3, None, 5], [None] * 3, sampled)}
    assert first_turn(record) == 3, "the first answer was shown to the policy"
    assert [(line.turn, line.role, line.text) for line in conversation(record)] == [
        *((None, role, f"{role} {place}") for place, role in enumerate(roles[:3])),
        (0, "assistant", "assistant 3"),
        (None, "user", "user 4"),
        (1, "assistant", "sampled 1"),
        (2, "assistant", "assistant 5"),
    ]
    assert first_turn({"messages": shown, "turns": [{"message": None}]}) == len(shown)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (CALL, "multiply(a=12, b=34)"),
        ({"name": "add", "arguments": '{"a": "x"}'}, 'add(a="x")'),
        ({"name": "add", "arguments": "no json"}, "add(no json)"),
        ({"name": "add", "arguments": None, "text": "{a"}, 'add("{a")'),
        ("what", '"what"'),
    ],
)
def test_a_tool_call_reads_as_a_call(call, text):
    assert call_text(call) == text


def test_content_in_parts_is_read_as_text():
    assert content_text({"content": [{"type": "text", "text": "a"}, "b", {"type": "image"}]}) == "ab<image>"
    assert (content_text({}), content_text({"content": 7})) == ("", "7")


# ---------------------------------------------------------------------------------------------- on a terminal


def test_an_episode_reads_as_a_chat_with_the_reward_of_each_turn_at_its_right(records):
    lines = [line.rstrip() for line in shown(samples_shown, records).splitlines()]
    assert "  user       What is 12 * 34?" in lines
    (turn,) = [line for line in lines if line.startswith("  assistant  Let me see.")]
    assert turn.endswith("+0.25")
    assert lines[lines.index(turn) + 1].strip() == "→ multiply(a=12, b=34)"
    assert "  tool       408" in lines and "ended by: done" in " ".join(lines)


def test_tokens_are_told_apart_without_colour(records):
    lines = [line.split() for line in shown(tokens_shown, records).splitlines()]
    assert ["policy", "2", "tokens", "w10", "w11"] in lines
    assert ["environment", "2", "tokens", "w20", "w21"] in lines
    assert ["policy,", "not", "trained", "1", "token", "w40"] in lines
    assert ["branch", "1"] in lines


def test_tool_calls_are_counted_once_with_those_that_failed_and_by_tool_where_there_are_several(records):
    one = {
        "tool_calls": 3.0,
        "tool_errors": 1.0,
        "tool_calls/multiply": 3.0,
        "tool_errors/multiply": 1.0,
        "solved": 1.0,
    }
    two = {**one, "tool_calls/multiply": 2.0, "tool_calls/add": 1.0}
    facts = [dict(sample_facts({**records[0], "tool_calls": 3, "env_metrics": told})) for told in ({}, one, two)]
    assert [fact["tool calls"] for fact in facts] == ["3", "3, 1 failed", "3, 1 failed (multiply 2, 1 failed, add 1)"]
    assert all(not any(name.startswith("env/tool_") for name in fact) for fact in facts)
    assert facts[1]["env/solved"] == "1"


@pytest.mark.parametrize("show", [samples_shown, tokens_shown])
def test_an_episode_fits_eighty_columns_and_its_error_stands_below_it(show, records):
    failed = {**records[1], "error": "ValueError: the secret is " + SECRET + ", in line 3 of reset" * 5}
    lines = shown(show, [records[0], failed], 80).splitlines()
    assert max(map(len, lines)) <= 80
    (below,) = [number for number, line in enumerate(lines) if line.startswith("  error ")]
    head = next(number for number, line in enumerate(lines) if line.startswith("2  "))
    assert head < below and "ValueError" not in lines[head] and SECRET not in "".join(lines)


def test_tokens_are_told_apart_by_colour(records):
    file = io.StringIO()
    Console(file=file, width=100, force_terminal=True, color_system="standard").print(
        tokens_shown([("1", records[0])], "")
    )
    assert "\x1b[1;32mw10 w11" in file.getvalue() and "\x1b[36mw20 w21" in file.getvalue()


def test_a_long_observation_is_folded_and_a_turn_is_not():
    long = "\n".join(f"row {number}" for number in range(500))
    record = rollout_records(episode_batch(conversation_with_a_tool(long)), Words())[0]
    text = shown(samples_shown, [record])
    assert "[… 488 lines …]" in text and "row 499" in text and "row 250" not in text


@pytest.mark.parametrize("show", [samples_shown, tokens_shown])
@pytest.mark.parametrize("width", [80, 120])
def test_hostile_text_of_environment_policy_and_tools_is_shown_and_not_followed(show, width):
    call = {"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}
    messages = [{"role": role, "content": HOSTILE} for role in ("user", "assistant", HOSTILE, "assistant")]
    messages[1]["tool_calls"] = [call]
    record = rollout_records(episode_batch(messages), Words())[0] | {"end": HOSTILE, "env_metrics": {HOSTILE: 1.0}}
    record["branches"][0][0]["text"] = HOSTILE
    text = shown(show, [record], width)
    assert not any(control in text for control in "\x1b\x00\u202e")
    assert max(map(len, text.splitlines())) <= width


def test_a_secret_that_an_environment_tells_is_masked_where_it_is_shown():
    record = rollout_records(episode_batch(conversation_with_a_tool(f"the key is {SECRET}")), Words())[0]
    for text in (shown(samples_shown, [record]), transcript(record), str(conversation(record))):
        assert SECRET not in text and "<masked>" in text


def test_answers_tables_and_trackers_have_the_conversation_as_text(records):
    text = "assistant: Let me see.\n→ multiply(a=12, b=34)  [reward 0.25]\ntool: 408\nassistant: It is 408.  [reward 1]"
    assert transcript(records[0]) == text
    columns, rows = sample_table(records)
    assert rows[0][columns.index("response")] == text and rows[0][columns.index("prompt")] == "What is 12 * 34?"
    facts = dict(sample_facts(records[0]))
    assert facts["turns"] == "2" and facts["tool calls"] == "1" and facts["branches"] == "2"
    assert facts["env/solved"] == "1" and facts["versions"] == "6, 7" and facts["ended by"] == "done"


def test_the_console_shows_conversations_and_programs_get_the_record(records):
    file = io.StringIO()
    RunConsole(Console(file=file, width=100, color_system=None)).rollouts(3, records)
    assert "samples of step 3" in file.getvalue() and "→ multiply(a=12, b=34)" in file.getvalue()
    file = io.StringIO()
    JsonConsole(file).rollouts(3, records)
    assert json.loads(file.getvalue())["samples"][0]["turns"][0]["reward"] == 0.25


# ---------------------------------------------------------------------------------------------- from the run folder


@pytest.fixture
def run(tmp_path, records):
    folder = started_run(tmp_path)
    folder.write_rollouts(1, records)
    folder.write_rollouts(0, records[:1], kind="val")
    again = {**records[0], "score": 0.0, "turns": [{"text": "no", "reward": 0.0}], "messages": []}
    folder.write_rollouts(1, [again], kind="val")
    folder.close()
    Outcome("finished", "", 1).write(tmp_path)
    return tmp_path


def test_the_command_shows_conversations_and_their_tokens(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["rollouts", str(run)]) == 0
    assert "→ multiply(a=12, b=34)" in capsys.readouterr().out
    assert cli.main(["rollouts", str(run), "--tokens", "--sort", "score"]) == 0
    assert "branch 1" in capsys.readouterr().out


def test_episodes_are_picked_by_how_they_ended(run, capsys):
    assert cli.main(["rollouts", str(run), "--end", "failed"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "step 1: 1 of 2 samples; they ended by done (1), failed (1)" in out
    assert "And 5 * 6?" in out and "multiply" not in out
    assert cli.main(["rollouts", str(run), "--end", "failed", "--end", "done"]) == 0
    assert "multiply" in capsys.readouterr().out
    assert cli.main(["rollouts", str(run), "--end", "max_turns"]) == 2
    assert "none of these samples ended by max_turns; they ended by done (1), failed (1)" in capsys.readouterr().err


def test_tokens_of_a_single_response_are_its_prompt_and_its_response(tmp_path, capsys):
    folder = started_run(tmp_path)
    folder.write_rollouts(1, [sample(0, 1.0)])
    folder.close()
    assert cli.main(["rollouts", str(tmp_path), "--tokens"]) == 0
    out = capsys.readouterr().out
    assert "prompt" in out and "policy" in out and "3 tokens" in out


def test_the_report_shows_bubbles_that_are_escaped_and_masked(tmp_path):
    messages = conversation_with_a_tool(f"{HOSTILE} {SECRET}" + "x" * 2000)
    messages[1]["reasoning_content"] = "I wonder."
    folder = started_run(tmp_path)
    folder.write_rollouts(1, rollout_records(episode_batch(messages), Words()))
    folder.close()
    Outcome("finished", "", 1).write(tmp_path)
    page = Page(write_html_report(tmp_path))
    assert page.tags.count("script") == 3 and not {"img", "bold"} & set(page.tags)
    classes = [value for name, value in page.attributes if name == "class"]
    assert classes.count("bubble own") == 2 and classes.count("bubble") == 2
    assert "assistant, turn 1, 2 tokens +0.25 I wonder. Let me see. → multiply(a=12, b=34)" in page.text
    assert SECRET not in page.text and "<masked>" in page.text
    assert "ended by done" in page.text and "env/solved 1" in page.text


def test_validations_are_compared_as_conversations(run):
    (series,) = validation_series(run / "rollouts")
    assert series.change == -1.25
    assert "assistant: Let me see." in Page(write_html_report(run)).text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("turns", [{"reward": 1.0}]),
        ("turns", [{"text": "a", "reward": "b"}]),
        ("turns", [{"text": "a", "observation": ["b"]}]),
        ("turns", "a"),
        ("turns", None),
        ("messages", ["a"]),
        ("branches", [7]),
        ("branches", [[{"origin": "policy"}]]),
        ("env_metrics", [1]),
        ("end", 7),
    ],
)
def test_a_record_that_is_no_episode_is_named_with_file_and_line(tmp_path, records, field, value):
    (tmp_path / "step_1.jsonl").write_text(json_line(records[0]) + json_line({**records[1], field: value}))
    with pytest.raises(DamagedFileError, match=r"step_1\.jsonl, line 2, .*is damaged: "):
        read_samples(tmp_path, 1)


def test_the_best_the_median_and_the_worst_are_of_episodes(records):
    assert [label for label, _ in best_median_worst(records)] == ["best"], "a failed episode has no score"
