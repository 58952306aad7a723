"""What is looked at before an offline run starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hrl.config.load import validate_kind
from hrl.config.run_kind import DPO, OFFLINE_KINDS, SFT
from hrl.models.source import ModelSourceError
from hrl.models.tokenizer import TokenIds
from hrl.preflight.findings import PreflightError
from hrl.preflight.given import Given
from hrl.preflight.model_look import padding_of_classifier
from hrl.preflight.preflight import preflight
from tests.data.conftest import CHATML, make_tokenizer
from tests.preflight.small_run import CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as far as the preflight reads it."""
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 128}))
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def ready(model: Path, given: Given | None = None, **changes: object):
    rows = [{"prompt": "hi", "completion": "yo"}] * 3
    file = model.parent / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data.train_files": str(file), "data.val_files": str(file), "model.path": str(model)}
    base = {"data.train_batch_size": 2, "data.max_length": 64, "trainer.total_epochs": 3}
    return preflight(validate_kind(SFT, files | base | changes), given)


def test_steps_follow_from_rows_and_epochs(model: Path) -> None:
    found = ready(model)
    assert (len(found.train_dataset), found.total_training_steps, found.folders) == (3, 3, {"actor": model})
    without = {"data.val_files": [], "trainer.val_before_train": False}
    assert ready(model, **without).val_dataset is None


def test_what_does_not_fit_is_named(model: Path) -> None:
    with pytest.raises(PreflightError, match="data.max_length is 129 tokens, but model has 128 positions. Lower it."):
        ready(model, **{"data.max_length": 129})
    assert ready(model, **{"data.max_length": 129, "model.override_config": {"max_position_embeddings": 256}})
    with pytest.raises(PreflightError, match="one batch: .*3 kept, 4 needed. Set data.train_batch_size=2."):
        ready(model, **{"data.train_batch_size": 4})


@pytest.mark.parametrize(("labels", "said"), [([True] * 3, "true"), ([0, 0, 0], "false"), ([True, False, True], None)])
def test_labels_that_are_all_alike_get_one_warning_with_their_column(
    model: Path, labels: list[object], said: str | None
) -> None:
    file = model.parent / "labelled.jsonl"
    file.write_text("".join(json.dumps({"prompt": "hi", "completion": "yo", "good": label}) + "\n" for label in labels))
    values = {"data.train_files": str(file), "data.label_key": "good", "model.path": str(model)}
    base = {"data.train_batch_size": 2, "data.max_length": 64, "algorithm.loss_type": "kto"}
    notes = [note for note in preflight(validate_kind(DPO, base | values)).findings.notes if "'good'" in note]
    assert len(notes) == (said is not None) and all(
        f"'good' is {said} in every row of data.train_files" in note for note in notes
    )


def test_a_reward_is_refused_where_nothing_is_scored(model: Path) -> None:
    with pytest.raises(
        PreflightError, match=r"1\. reward was given, and this kind of run scores nothing. Leave it out."
    ):
        ready(model, Given(reward=lambda **_: 1.0))


def test_a_template_that_ends_answers_with_another_token_than_generation_is_refused(model: Path) -> None:
    make_tokenizer(CHATML, eos_token="<pad>").save_pretrained(model)
    with pytest.raises(PreflightError, match="data.train_files can't be used: .*closes an answer"):
        ready(model)


def test_a_reward_model_pads_with_a_token_that_ends_no_answer() -> None:
    tokenizer = make_tokenizer()
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<pad>"))
    assert padding_of_classifier(tokenizer, TokenIds(pad=pad, stop=(end,), vocab_size=300)) == pad

    same = make_tokenizer(pad_token="<|end|>", unk_token="<|start|>")
    start = same.convert_tokens_to_ids("<|start|>")
    assert padding_of_classifier(same, TokenIds(pad=end, stop=(end,), vocab_size=300)) == start == same.pad_token_id

    alone = make_tokenizer(pad_token="<|end|>")
    with pytest.raises(ModelSourceError, match="a padding token that ends no answer"):
        padding_of_classifier(alone, TokenIds(pad=end, stop=(end,), vocab_size=300))


def test_everything_that_is_wrong_comes_at_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"question": "hi", "answer": "yo"}\n')
    (model / "model.safetensors").unlink()
    with pytest.raises(PreflightError) as caught:
        ready(model, **{"data.val_files": [str(tmp_path / "rowz.jsonl"), str(tmp_path / "answers.jsonl")]})
    weights, missing, columns, answers = map(str, caught.value.problems)
    assert answers.startswith("data.completion_key is completion or response or messages, a column that")
    assert answers.endswith("Set data.completion_key=answer?")
    assert weights.startswith("model.path can't be used") and "has no weights" in weights
    assert missing.startswith("data.val_files can't be used") and "Did you mean" in missing
    assert columns.startswith("data.messages_key is messages or prompt, a column that")
    assert columns.endswith(
        "It has: question, answer. The first row: {question: 'hi', answer: 'yo'}. Add the column, or name yours with "
        "data.messages_key."
    )


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_pairs_have_their_columns(model: Path, kind: str) -> None:
    file = model.parent / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "preferred": "b", "rejected": "c"}) + "\n")
    given = {
        "data.train_files": str(file),
        "data.val_files": str(file),
        "model.path": str(model),
        "data.max_length": 64,
    }
    with pytest.raises(PreflightError) as caught:
        preflight(validate_kind(OFFLINE_KINDS[kind], given))
    assert [str(problem) for problem in caught.value.problems] == [
        f"data.chosen_key is chosen, a column that {file} does not have. It has: prompt, preferred, rejected. The "
        "first row: {prompt: 'a', preferred: 'b', rejected: 'c'}. Set data.chosen_key=preferred?"
    ]
