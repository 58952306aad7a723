"""What a run leaves and shows, from its first step to its end, whatever the end is."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from hrl.config import compose_cli
from hrl.protocol import DataProto
from hrl.report.console import RunConsole
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import RunFolder, read_jsonl

TWO_SAMPLES = (
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1",
)
PROMPT_IDS = [[0, 5], [6, 7]]


class Words:
    """A tokenizer whose token ``7`` is the word ``w7``."""

    def batch_decode(self, rows):
        return [" ".join(f"w{token}" for token in row) for row in rows]


def scored_batch(scores, answers=((1, 2), (3, 4))):
    """Two prompts of two tokens, the first padded; two answers of two tokens."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    responses = torch.tensor(answers)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor(PROMPT_IDS),
            "responses": responses,
            "attention_mask": mask,
            "response_mask": mask[:, 2:],
            "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
            "token_level_rewards": torch.tensor([[0.0, score] for score in scores]),
            "advantages": torch.zeros(2, 2),
            "returns": torch.zeros(2, 2),
        },
        non_tensors={
            "uid": np.array(["a", "b"], dtype=object),
            "data_source": np.array(["sums", "sums"], dtype=object),
            "finish_reason": np.array(["stop", "length"], dtype=object),
            "reward_parts": np.array([{"exact": score} for score in scores], dtype=object),
        },
    )


class Run:
    """A reporter and what it writes to the terminal."""

    def __init__(self, path, *overrides, resume=False):
        self.path = path
        self.file = io.StringIO()
        console = RunConsole(2, ["gen"], Console(file=self.file, width=120, color_system=None))
        config = compose_cli([f"trainer.default_local_dir={path}", *overrides])
        self.reporter = RunReporter(config, RunFolder(path, resume=resume), console, Words(), num_devices=1)

    @property
    def shown(self):
        return self.file.getvalue()

    @property
    def page(self):
        return (self.path / "report.html").read_text()

    def step(self, step):
        with self.reporter.step(step), self.reporter.phase("step"), self.reporter.phase("gen"):
            pass
        self.reporter.step_done(step, scored_batch([0.0, 1.0]), {})


def test_a_run_leaves_picture_report_and_samples_and_names_them(tmp_path):
    run = Run(tmp_path)
    with run.reporter as reporter:
        reporter.validation(0, scored_batch([0.0, 1.0]))
        run.step(1)
        run.step(2)
        reporter.validation(2, scored_batch([1.0, 1.0], answers=((8, 2), (3, 4))))
    names = {file.name for file in (tmp_path / "rollouts").iterdir()}
    assert names == {"val_step_0.jsonl", "step_1.jsonl", "step_2.jsonl", "val_step_2.jsonl"}
    assert "before and after: 1 better, 0 worse, 1 as before" in run.shown
    assert "w8 w2" in run.shown
    assert f"reward curve: {tmp_path}/reward_curve.png\nreport: {tmp_path}/report.html\n" in run.shown
    assert ">finished</span>" in run.page and "data:image/png;base64," in run.page


def test_samples_are_decoded_without_padding(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        run.step(1)
    records = read_jsonl(tmp_path / "rollouts/step_1.jsonl")
    assert [(r["prompt"], r["response"], r["score"], r["reward_parts"]) for r in records] == [
        ("w5", "w1 w2", 0.0, {"exact": 0.0}),
        ("w6 w7", "w3 w4", 1.0, {"exact": 1.0}),
    ]


def test_a_run_without_validation_compares_nothing(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        run.step(1)
    assert "before and after" not in run.shown
    assert "This run has not validated." in run.page


def test_a_run_without_a_step_still_leaves_its_report(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        pass
    assert not (tmp_path / "reward_curve.png").exists()
    assert run.shown == f"report: {tmp_path}/report.html\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("rank 1: <lost>"), "failed"), (KeyboardInterrupt(), "interrupted")],
    ids=["failed", "interrupted"],
)
def test_the_error_of_a_run_goes_on_and_stands_in_the_report(tmp_path, error, told):
    run = Run(tmp_path)
    with pytest.raises(type(error)) as raised, run.reporter:
        run.step(1)
        raise error
    assert raised.value is error
    assert f">{told}</span>" in run.page
    assert ("RuntimeError: rank 1: &lt;lost&gt;" in run.page) == (told == "failed")


def test_a_report_that_cannot_be_written_hides_no_failure_and_frees_the_folder(tmp_path, caplog):
    run = Run(tmp_path)
    with pytest.raises(RuntimeError, match="the cause"), run.reporter:
        (tmp_path / "metrics.jsonl").write_text("no json\n")
        raise RuntimeError("the cause")
    assert "the report of the run could not be written" in caplog.text
    RunFolder(tmp_path).close()


def test_a_resumed_run_compares_with_the_validation_before_it_was_interrupted(tmp_path):
    first = Run(tmp_path)
    with first.reporter as reporter:
        reporter.validation_done(0, reporter.validation(0, scored_batch([0.0, 0.0])))
        first.step(1)
    resumed = Run(tmp_path, resume=True)
    with resumed.reporter as reporter:
        resumed.step(2)
        reporter.validation(2, scored_batch([1.0, 0.0]))
    assert "before and after: 1 better, 0 worse, 1 as before" in resumed.shown
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]


def records_of(path):
    return read_jsonl(path / "metrics.jsonl")


def test_samples_that_were_left_out_of_a_validation_are_counted_in_its_record_and_in_nothing_else(tmp_path):
    run = Run(tmp_path)
    with run.reporter as reporter:
        metrics = reporter.validation(0, scored_batch([1.0, 0.0]), kept=torch.tensor([True, False]))
        reporter.validation_done(0, metrics)
    (record,) = records_of(tmp_path)
    assert record == {"step": 0, "val/sums/mean@1": 1.0, "val/sums/n": 1.0, "val/sums/skipped": 1.0}
    assert "left out 1 of 2 samples" in run.shown
    assert len(read_jsonl(tmp_path / "rollouts/val_step_0.jsonl")) == 1


def test_a_validation_with_answers_has_a_majority_vote(tmp_path):
    batch = scored_batch([1.0, 1.0])
    batch.non_tensor_batch["uid"][:] = "a"
    batch.non_tensor_batch["reward_parts"] = np.array([{"pred": "3"}, {"pred": "3"}], dtype=object)
    with Run(tmp_path, *TWO_SAMPLES).reporter as reporter:
        assert reporter.validation(0, batch)["val/sums/maj@2"] == 1.0


@pytest.mark.parametrize(("parts", "passed"), [({"acc": 1.0}, 1.0), ({"acc": True}, 1.0), ({"acc": 0.5}, 0.0), ({}, 0)])
def test_what_the_reward_function_calls_acc_decides_what_passes(tmp_path, parts, passed):
    batch = scored_batch([0.5, 0.5])  # the most that this reward gives
    batch.non_tensor_batch["uid"][:] = "a"
    batch.non_tensor_batch["reward_parts"] = np.array([parts, parts], dtype=object)
    with Run(tmp_path, *TWO_SAMPLES).reporter as reporter:
        metrics = reporter.validation(0, batch)
    assert (metrics["val/sums/pass@2"], metrics["val/sums/mean@2"]) == (passed, 0.5)


def test_a_validation_with_a_sample_left_out_has_the_names_of_one_without(tmp_path):
    batch = scored_batch([1.0, 0.0])
    batch.non_tensor_batch["uid"][:] = "a"
    with Run(tmp_path, *TWO_SAMPLES).reporter as reporter:
        whole = reporter.validation(0, batch)
        part = reporter.validation(1, batch, kept=torch.tensor([True, False]))
    assert set(part) - set(whole) == {"val/sums/skipped"}
    assert set(whole) - set(part) == {"val/sums/pass@2"}
    assert (whole["val/sums/mean@2"], part["val/sums/mean@2"], part["val/sums/n"]) == (0.5, 1.0, 1.0)


def test_a_finished_run_that_validates_again_keeps_one_record_a_step(tmp_path):
    first = Run(tmp_path)
    with first.reporter:
        first.step(1)
        first.step(2)
    before = records_of(tmp_path)
    again = Run(tmp_path, resume=True)
    with again.reporter as reporter:
        with reporter.phase("testing"):
            metrics = reporter.validation(2, scored_batch([1.0, 0.0]))
        reporter.validation_done(2, metrics)
    after = records_of(tmp_path)
    assert [record["step"] for record in after] == [1, 2]
    assert after[0] == before[0]
    assert after[1] == before[1] | {
        "val/sums/mean@1": 0.5,
        "val/sums/n": 2.0,
        "timing_s/testing": pytest.approx(0, abs=1),
    }


def test_the_last_step_shows_the_table_of_its_validation_and_the_others_do_not(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        for step in (1, 2):
            with run.reporter.phase("step"):
                metrics = run.reporter.validation(step, scored_batch([1.0, 0.0]))
            run.reporter.step_done(step, scored_batch([0.0, 1.0]), metrics)
    assert "validation after step 1" not in run.shown and run.shown.count("validation after step 2") == 1


@pytest.mark.parametrize(("freq", "shown_at"), [(1, [1, 2]), (2, [2]), (10, []), (0, []), (-1, [])])
def test_samples_are_shown_every_so_many_steps(tmp_path, freq, shown_at):
    run = Run(tmp_path, f"trainer.log_rollouts_freq={freq}")
    with run.reporter:
        run.step(1)
        run.step(2)
    assert [step for step in (1, 2) if f"samples of step {step}" in run.shown] == shown_at
    assert ("ended by: length" in run.shown) == bool(shown_at)


@pytest.mark.parametrize(
    ("drift", "told"),
    [
        (0.05, None),
        (0.1, None),
        (0.2, "disagree by 0.200 per token"),
        (float("nan"), "disagree by nan per token"),
        (None, "nobody knows how far sampler and trainer are apart"),
    ],
)
def test_the_alarm_sounds_above_the_limit_and_where_nothing_was_compared(tmp_path, drift, told):
    run = Run(tmp_path, "actor_rollout_ref.rollout.logprob_diff_alarm=0.1")
    with run.reporter as reporter:
        reporter.warn({} if drift is None else {"rollout/logprob_diff_mean": drift})
    assert ("alarm:" in run.shown) == (told is not None)
    assert told is None or told in run.shown
