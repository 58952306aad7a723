import io
import re
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

from hrl import cli
from hrl.protocol import DataProto
from hrl.report.rollouts import SORT_KEYS, NoSamplesError, show_rollouts
from hrl.report.samples import best_median_worst, question, readable, rollout_records, sample_facts
from tests.report.runs import finished_run


class Words:
    """A tokenizer whose token `7` is the word `w7`."""

    def batch_decode(self, rows):
        return [" ".join(f"w{token}" for token in row) for row in rows]


@pytest.fixture
def batch():
    """Two rows, P=2, R=3; the middle token of row 0 is a tool token, row 1 is empty."""
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[3, 4], [0, 5]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]),
            "responses": torch.tensor([[7, 8, 9], [0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1], [0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]),
            "advantages": torch.tensor([[1.0, 99.0, 3.0], [99.0, 99.0, 99.0]]),
        },
        non_tensors={
            "uid": np.array(["a", "b"], dtype=object),
            "finish_reason": np.array(["stop", "abort"], dtype=object),
            "reward_parts": np.array([{"exact": 0.5}, {}], dtype=object),
            "reward_model": np.array([{"ground_truth": "7"}, {"style": "rule"}], dtype=object),
        },
    )


def test_a_record_says_what_happened_to_its_row(batch):
    first, second = rollout_records(batch, Words())
    assert first == {
        "prompt": "w3 w4",
        "response": "w7 w8 w9",
        "response_length": 3,
        "score": 0.5,
        "advantage": 2.0,
        "reward_parts": {"exact": 0.5},
        "uid": "a",
        "finish_reason": "stop",
        "ground_truth": "7",
    }
    assert (second["prompt"], second["response"]) == ("w5", ""), "padding is no text"
    assert (second["response_length"], second["advantage"], second["ground_truth"]) == (0, 0.0, None)
    assert second["score"] == 0.0, "an empty response has its score"


def test_the_score_is_what_the_function_gave_and_what_shaping_made_of_it_stands_beside_it(batch):
    batch.batch["plain_scores"] = torch.tensor([0.5, 1.0])
    assert "shaped_score" not in rollout_records(batch, Words())[0], "an empty response has no score to compare"
    batch.batch["plain_scores"] = torch.tensor([1.0, 1.0])
    first, second = rollout_records(batch, Words())
    assert (first["score"], first["shaped_score"]) == (1.0, 0.5)
    assert (second["score"], second["shaped_score"]) == (0.0, 0.0)
    assert ("shaped score", "0.500") in sample_facts(first)


def test_a_response_that_the_reward_function_left_out_has_no_score(batch):
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    records = rollout_records(batch, Words())
    assert [record["score"] for record in records] == [None, 0.0]
    assert [label for label, _ in best_median_worst(records)] == ["best"], "it is not shown as the worst"


def test_best_median_and_worst_are_by_score():
    records = [{"score": score} for score in (0.1, 0.9, 0.5, 0.7, 0.3)]
    assert [(label, r["score"]) for label, r in best_median_worst(records)] == [
        ("best", 0.9),
        ("median", 0.5),
        ("worst", 0.1),
    ]
    assert [label for label, _ in best_median_worst(records[:1])] == ["best"]
    assert best_median_worst([]) == []
    assert best_median_worst([{"score": None}]) == []


def test_the_question_is_the_last_message_of_the_chat(batch):
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}]] * 2
    batch.non_tensor_batch["raw_prompt"] = np.fromiter(chats, dtype=object, count=2)
    record = rollout_records(batch, Words())[0]
    assert question(record) == "3+4?"
    assert question({"prompt": "without a chat"}) == "without a chat"


def test_best_median_and_worst_are_three_texts_where_there_are_three():
    twins = [{"prompt": "p", "response": text, "score": 1.0} for text in ("a", "a", "a", "b", "a", "c", "a")]
    assert [(label, r["response"]) for label, r in best_median_worst(twins)] == [
        ("best", "a"),
        ("median", "b"),
        ("worst", "c"),
    ]
    assert [label for label, _ in best_median_worst(twins[:3])] == ["best"], "one text is shown once"


def test_a_text_that_scores_differently_is_shown_for_each_score():
    records = [{"prompt": "p", "response": "a", "score": score} for score in (1.0, 0.0, 0.0)]
    assert [(label, r["score"]) for label, r in best_median_worst(records)] == [("best", 1.0), ("median", 0.0)]


def test_an_answer_of_line_breaks_is_no_empty_box():
    assert readable("\n\n \n") == r"\n\n \n" and readable("") == ""


def test_readable_text_spells_out_what_would_move_or_hide_it():
    assert readable("a\x1b[2J\u202eb\r\n\ttab é 世界") == "a\\x1b[2J\\u202eb\\r\n\\ttab é 世界"


def test_facts_of_a_sample_leave_out_what_it_does_not_have():
    assert sample_facts({"score": 0.5, "response_length": 3, "reward_parts": {"exact": 1 / 3, "why": "digits"}}) == [
        ("score", "0.500"),
        ("tokens", "3"),
        ("exact", "0.3333"),
        ("why", "digits"),
    ]


# ---------------------------------------------------------------------------------------------- hrl rollouts


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path)


def shown(run, width=100, **options):
    file = io.StringIO()
    show_rollouts(run, Console(file=file, width=width, color_system=None), **options)
    return file.getvalue()


def order(text):
    """The numbers of the sums asked, from top to bottom."""
    return [int(number) for number in re.findall(r"What is (\d) \+ 2\?", text)]


def test_the_last_step_is_shown_in_the_order_of_its_batch(run):
    text = shown(run)
    assert text.startswith("step 3: 3 of 3 samples ")
    assert order(text) == [0, 1, 2]


@pytest.mark.parametrize(("sort", "expected"), [("score", [2, 1, 0]), ("length", [2, 1, 0]), ("advantage", [0, 2, 1])])
def test_samples_are_sorted_largest_first(run, sort, expected):
    assert order(shown(run, step=1, sort=sort)) == expected


def test_a_limit_says_how_many_there_are(run):
    text = shown(run, sort="score", limit=1)
    assert text.startswith("step 3: 1 of 3 samples, by score")
    assert order(text) == [2]


def test_validation_samples_are_apart(run):
    text = shown(run, validation=True, step=0)
    assert text.startswith("validation after step 0: 2 of 2 samples")
    assert text.count("who knows") == 2


@pytest.mark.parametrize("width", [80, 120])
def test_text_of_a_model_is_shown_and_not_followed(run, width):
    text = shown(run, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert not any(control in text for control in "\x1b\x00\u202e")
    assert "[bold]" in text.replace(" ", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 9}, r"no samples of step 9; it has those of 1-3$"),
        ({"step": 1, "validation": True}, r"no validation samples of step 1; it has those of 0, 3$"),
        ({"validation": True, "sort": "advantage"}, r"have no advantage; sort by score or length$"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(run, options, message):
    with pytest.raises(NoSamplesError, match=message):
        shown(run, **options)


def test_the_command(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["rollouts", str(run), "--step", "1", "--sort", "score", "--limit", "2"]) == 0
    assert order(capsys.readouterr().out) == [2, 1]
    assert cli.main(["rollouts", str(run), "--val"]) == 0
    assert "still not" in capsys.readouterr().out


def test_what_an_evaluation_has_written_is_shown_by_its_folder_and_by_its_file(run, tmp_path):
    rollouts = run / "rollouts"
    (val, *_) = sorted(rollouts.glob("val_step_*.jsonl"))
    evaluated = tmp_path / "evaluated"
    (evaluated / "rollouts").mkdir(parents=True)
    shutil.copy(val, evaluated / "rollouts")
    shutil.copy(val, evaluated / "samples.jsonl")
    step = int(val.stem.rpartition("_")[2])
    of_folder, of_file = shown(evaluated), shown(evaluated / "samples.jsonl", width=400)
    assert f"validation after step {step}: " in of_folder and order(of_folder) == order(of_file)
    assert str(evaluated / "samples.jsonl") in of_file


def test_a_folder_without_samples_is_status_2(tmp_path, capsys):
    assert cli.main(["rollouts", str(tmp_path)]) == 2
    assert "holds no samples: a run of a policy writes them there" in capsys.readouterr().err
    assert cli.main(["rollouts", str(tmp_path / "typo")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("model: {path: some/model}\ndata: {train_files: [a.jsonl]}\n")
    assert cli.main(["rollouts", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "learns from given answers and draws none" in told and f"`hrl report {tmp_path}`" in told


@pytest.mark.parametrize("arguments", [["--sort", "colour"], ["--limit", "0"], ["--limit", "x"], ["extra"]])
def test_arguments_that_make_no_sense_are_refused(run, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["rollouts", str(run), *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_every_sort_key_is_offered(run):
    for sort in SORT_KEYS:
        assert cli.main(["rollouts", str(run), "--sort", sort, "--step", "1"]) == 0
