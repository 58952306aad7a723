"""`hrl reward`, as a user calls it."""

import json
import re

import pytest

from hrl import cli
from hrl.reward.library.catalogue import CATALOGUE

FUNCTION = """
def compute_score(response, answer, level=1):
    if "skip" in response:
        return None
    if "boom" in response:
        raise ValueError("cannot read this")
    return {"score": level * float(answer in response), "length": len(response)}


def generous(response):
    return 1.0
"""
ROWS = [{"prompt": f"What is {n} + 5?", "answer": str(n + 5), "level": n} for n in (1, 2)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(FUNCTION)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def write(folder, *records):
    (folder / "r.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def found(capsys, *arguments):
    status = cli.main(["reward", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_responses_are_scored_with_their_rows_and_columns_and_lazy_ones_beside_them(folder, capsys):
    write(folder, "1 + 5 = 6", "skip", {"response": "7"}, {"response": "8"})
    status, said = found(capsys, "my_reward.py", "--data", "rows.jsonl", "--responses", "r.jsonl")
    assert status == 0
    calls = {(call["kind"], call["row"]): call["score"] for call in said["calls"] if call["kind"] != "response"}
    assert calls == {
        **dict.fromkeys([("empty", 0), ("prompt", 0), ("empty", 1), ("prompt", 1)], 0.0),
        ("answer", 0): 1.0,
        ("answer", 1): 2.0,
    }
    responses = [(call["row"], call["score"]) for call in said["calls"] if call["kind"] == "response"]
    assert responses == [(0, 1.0), (0, None), (1, 2.0), (1, 0.0)]
    assert said["summary"] | {"call_s_mean": 0, "call_s_max": 0} == {
        "samples": 4, "scored": 3, "none": 1, "failed": 0, "unscorable": 0, "mean": 1.0, "min": 0.0, "max": 2.0,
        "std": pytest.approx((2 / 3) ** 0.5), "parts": {"length": pytest.approx(11 / 3)}, "call_s_mean": 0,
        "call_s_max": 0,
    }  # fmt: skip
    assert said["warnings"] == []


def test_failures_are_shown_with_their_row_and_end_in_status_1(folder, capsys):
    write(folder, "boom", "7")
    assert cli.main(["reward", "my_reward.py", "--data", "rows.jsonl", "--responses", "r.jsonl"]) == 1
    shown = capsys.readouterr().out
    assert "error in row 0, response 'boom'" in shown and "ValueError: cannot read this" in shown
    assert "1 failed" in shown and "[" not in shown.split("\n")[0]


def test_what_a_function_prints_stands_below_the_table(folder, capfd):
    (folder / "loud.py").write_text(
        "def loud(response):\n    print('saw \\x1b[31m', repr(response))\n    return 1.0 / (1 + len(response))\n"
    )
    write(folder, "6", "no")
    arguments = ["reward", "loud.py:loud", "--data", "rows.jsonl", "--responses", "r.jsonl"]
    assert cli.main(arguments) == 0
    shown, printed = capfd.readouterr()
    assert "saw" not in shown
    heading, first, *rest = printed.strip().splitlines()
    assert (heading, first) == ("printed by the reward:", r"saw \x1b[31m '6'") and len(rest) > 1
    assert cli.main([*arguments, "--json"]) == 0
    shown, printed = capfd.readouterr()
    assert json.loads(shown)["summary"]["samples"] == 2 and "saw" in printed


def test_what_a_function_prints_is_cut_and_shown_though_it_cannot_be_loaded(folder, capfd):
    (folder / "broken.py").write_text("print('long ' * 5000)\nprint('the last words')\nraise KeyError('x')\n")
    assert cli.main(["reward", "broken.py", "--data", "rows.jsonl"]) == 2
    printed = capfd.readouterr().err
    assert "printed by the reward:\nlong long" in printed and "KeyError: 'x'" in printed
    assert "the last words" not in printed and printed.count("long") == 800 and "long\n…\n" in printed


def test_the_title_is_one_line_however_narrow_the_table(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write(folder, "6", "no")
    deep = folder / ("a_long_name_of_a_folder_" * 3)
    deep.mkdir()
    (deep / "my_reward.py").write_text(FUNCTION)
    cli.main(["reward", f"{deep}/my_reward.py:generous", "--data", "rows.jsonl", "--responses", "r.jsonl"])
    title, border, *_ = capsys.readouterr().out.splitlines()
    assert title == f"reward function generous in {deep}/my_reward.py" and border.startswith("┏")


def test_what_pays_everything_is_told(folder, capsys):
    write(folder, "6", "no")
    _, said = found(capsys, "my_reward.py:generous", "--data", "rows.jsonl", "--responses", "r.jsonl")
    assert len(said["warnings"]) == 3
    alike, empty, prompt = said["warnings"]
    assert "all 2 responses got 1" in alike
    assert "an empty response is paid 1, which no response of yours beats" in empty and "the prompt itself" in prompt


def test_a_function_that_pays_for_answers_anywhere_is_told(folder, capsys):
    (folder / "anywhere.py").write_text(
        "def anywhere(response, answer):\n    return float(answer in response.split())\n"
    )
    rows = [{"prompt": f"What is {n} + 5?", "answer": str(n + 5)} for n in range(3)]
    (folder / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, said = found(capsys, "anywhere.py:anywhere", "--data", "three.jsonl")
    assert said["warnings"] == [
        "a list of answers with the right one in its middle is paid 1: a policy finds that out."
    ]
    lists = {call["row"]: call["response"] for call in said["calls"] if call["kind"] == "list"}
    assert lists == {0: "6 5 7", 1: "5 6 7", 2: "5 7 6"}
    assert found(capsys, "numeric", "--data", "three.jsonl")[1]["warnings"] == []


def test_an_answer_that_needs_a_form_is_told(folder, capsys):
    _, said = found(capsys, "gsm8k", "--data", "rows.jsonl")
    assert any("the answer alone is never paid" in warning for warning in said["warnings"])


def test_of_a_function_that_always_fails_nothing_is_said_but_its_errors(folder, capsys):
    (folder / "fails.py").write_text("def compute_score(response):\n    return 1 / 0\n")
    status, said = found(capsys, "fails.py", "--data", "rows.jsonl")
    assert status == 1 and said["summary"]["failed"] == said["summary"]["samples"] and said["warnings"] == []
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "What is 3 + 5?", "answer": 8}) + "\n")
    write(folder, "It is 8")
    for more in ([], ["--responses", "r.jsonl"]):
        _, said = found(capsys, "fails.py", "--data", "one.jsonl", *more)
        assert said["summary"]["failed"] and said["warnings"] == [], "the type of the answer is not to blame"


@pytest.mark.parametrize(("answer", "kind"), [(8, "int: 8"), (8.0, "float: 8.0"), ([8], "list: [8]"), ("8", None)])
def test_an_answer_that_is_no_text_is_told_with_its_type(folder, capsys, answer, kind):
    (folder / "last.py").write_text("def correct(response, answer):\n    return float(response[-1:] == answer)\n")
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "What is 3 + 5?", "answer": answer}) + "\n")
    write(folder, "It is 8")
    _, said = found(capsys, "last.py:correct", "--data", "one.jsonl", "--responses", "r.jsonl")
    told = [warning for warning in said["warnings"] if "str(answer)" in warning]
    assert len(told) == (kind is not None)
    assert kind is None or f"the answer of row 0 is no text but of type {kind}." in told[0]


def test_an_answer_that_is_no_text_is_fine_where_the_function_can_pay_it(folder, capsys):
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "What is 3 + 5?", "answer": 8}) + "\n")
    assert found(capsys, "numeric", "--data", "one.jsonl")[1]["warnings"] == []


def test_a_list_of_entries_is_tried_as_a_run_would_sum_it(folder, capsys):
    write(folder, "6", "no")
    length = "{name: length, most: 3, weight: 0.5, label: short}"
    status, said = found(capsys, "numeric", length, "--data", "rows.jsonl", "--responses", "r.jsonl")
    first = said["calls"][0]
    assert (status, first["score"], first["parts"]) == (
        *(0, 1.5, {"numeric": 1.0, "pred": "6", "short": 1.0, "acc": 1.0}),
    )


def test_a_name_alone_tries_its_example_row_and_keys_of_a_run_count(folder, capsys):
    status, said = found(capsys, "numeric")
    assert status == 0 and [call["kind"] for call in said["calls"]] == ["response", "empty", "prompt", "answer"]
    assert said["calls"][0]["score"] == 1.0
    (folder / "other.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    _, said = found(capsys, "numeric", "--data", "other.jsonl", "data.prompt_key=question")
    assert said["calls"][1]["response"] == "1 + 1?"


def test_without_anything_the_library_is_listed(capsys):
    status, listed = found(capsys)
    assert status == 0 and [one["name"] for one in listed] == list(CATALOGUE)
    arguments = next(one["arguments"] for one in listed if one["name"] == "regex")
    assert "default" not in arguments["pattern"] and arguments["most"]["default"] == 1
    assert cli.main(["reward"]) == 0 and "multiple_choice" in capsys.readouterr().out


def test_columns_are_mapped_as_in_a_run(folder, capsys):
    (folder / "other.jsonl").write_text('{"prompt": "1 + 1?", "solution": "2"}\n')
    _, said = found(capsys, "numeric", "--data", "other.jsonl", "data.answer_key=solution")
    assert [call["score"] for call in said["calls"] if call["kind"] == "answer"] == [1.0]


def test_the_rollouts_of_a_run_are_scored_again_without_its_rows(folder, capsys):
    record = {"prompt": "<user>7 + 5?", "question": "7 + 5?", "response": "12", "ground_truth": "12", "score": 0.0}
    write(folder, record, record | {"response": "13"})
    _, said = found(capsys, "numeric", "--responses", "r.jsonl")
    assert [call["score"] for call in said["calls"] if call["kind"] == "response"] == [1.0, 0.0]


def test_a_limit_leaves_every_response_with_its_own_row(folder, capsys):
    (folder / "rows.jsonl").write_text("".join(json.dumps({**ROWS[0], "answer": str(n)}) + "\n" for n in range(4)))
    line = ("my_reward.py", "--data", "rows.jsonl", "--responses", "r.jsonl", "--limit", "2")
    write(folder, "0", "1", "2", "3")
    calls = [call for call in found(capsys, *line)[1]["calls"] if call["kind"] == "response"]
    assert [(call["row"], call["response"], call["score"]) for call in calls] == [(0, "0", 1.0), (1, "1", 1.0)]
    write(folder, "0", "1")  # made for the first rows
    calls = [call for call in found(capsys, *line)[1]["calls"] if call["kind"] == "response"]
    assert [(call["row"], call["score"]) for call in calls] == [(0, 1.0), (1, 1.0)]
    write(folder, {"response": "3", "row": 3}, {"response": "1", "row": 1})
    calls = [call for call in found(capsys, *line)[1]["calls"] if call["kind"] == "response"]
    assert [(call["row"], call["score"]) for call in calls] == [(1, 1.0)]


@pytest.mark.parametrize(
    "arguments, records, message",
    [
        (["numerik"], ["6", "7"], "names 'numerik'.*Did you mean numeric"),
        (["none.py"], ["6", "7"], "none.py does not exist"),
        (
            ["numeric", "data.prompt_key", "=", "q"],
            ["6"],
            "^1 problem .*\n.*prompt_key = q has blanks around",
        ),
        (["numeric"], ["6", "7", "8"], "3 responses can't be shared out evenly among 2 rows"),
        (["numeric"], [{"answer": "6"}, "7"], "line 1 has none of response, completion.*it has answer"),
        (["numeric"], [{"response": "6", "row": 2}, "7"], "line 1 has the row 2; there are 2"),
        (["numeric"], [3, "7"], "line 1 is a int"),
        (["my_reward.py:lazy"], ["6", "7"], "no function 'lazy'; it has: compute_score, generous"),
    ],
)
def test_what_does_not_fit_is_said(folder, capsys, arguments, records, message):
    write(folder, *records)
    assert cli.main(["reward", *arguments, "--data", "rows.jsonl", "--responses", "r.jsonl"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_columns_have_the_names_that_the_keys_give(folder, capsys):
    (folder / "rows.csv").write_text("question,result\nWhat is 1 + 5?,6\n")
    assert cli.main(["reward", "my_reward.py", "--data", "rows.csv"]) == 2
    assert "It has: question, result. " in (said := capsys.readouterr().err) and "data.prompt_key=question?" in said
    keys = ("data.prompt_key=question", "data.answer_key=result")
    status, said = found(capsys, "my_reward.py", "--data", "rows.csv", *keys)
    assert status == 0 and [call["score"] for call in said["calls"] if call["kind"] == "answer"] == [1.0]


def test_every_cell_but_the_response_is_shown_whole_at_80_columns(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write(folder, "6 " * 50, "7")
    cli.main(["reward", "my_reward.py", "--data", "rows.jsonl", "--responses", "r.jsonl"])
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("┃"))
    assert [cell.strip() for cell in head.strip("┃").split("┃")][:4] == ["row", "kind", "response", "score"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"response": [{"role": "assistant"}]}', "line 1: 'content' of message 0 of 'response' is missing or null"),
        ('{"response": [{"weight": 1}]}', "line 1: 'role' of message 0 of 'response'"),
        ('{"response": ["hi"]}', "line 1: message 0 of 'response' is 'hi'"),
        ("[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_a_chat_among_responses_that_is_none_is_named_with_its_line(tmp_path, text, told):
    from hrl.reward.trial import TrialError, records_in, response_in

    (tmp_path / "some.jsonl").write_text(text + "\n")
    with pytest.raises(TrialError) as caught:
        for place, record in records_in(tmp_path / "some.jsonl"):
            response_in(place, record)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{name: regex, pattern: ", "an entry of reward.functions can't be read"),
        ("{a: " + "9" * 5000 + "}", "an entry of reward.functions can't be read"),
        ("{name: x, kwargs: &a [*a]}", "an entry of reward.functions is nested more than 50 levels deep"),
        ("{name: regex, kwargs: 1, pattern: x}", "kwargs"),
    ],
)
def test_an_entry_that_can_not_be_read_is_refused(entry, told, capsys):
    assert cli.main(["reward", entry]) == 2
    assert told in capsys.readouterr().err
