"""A model folder without whole safetensors weights is refused with the way out, and nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hrl.models.folder import check_scores, check_weights, model_facts
from hrl.models.source import ModelSourceError, find_model, resolve_model


def refusal(folder: Path) -> str:
    with pytest.raises(ModelSourceError) as caught:
        check_weights(folder)
    return str(caught.value)


def save(file: Path) -> None:
    save_file({"weight": np.arange(100, dtype=np.float32)}, file)


def test_whole_weights_pass_in_one_file_or_in_several(tmp_path):
    save(tmp_path / "model.safetensors")
    check_weights(tmp_path)
    save(tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors, one of 1 files that model.safetensors.index.json" in refusal(
        tmp_path
    )
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is no index of weights" in refusal(tmp_path)


def test_weights_that_are_missing_or_of_another_kind_say_what_to_do(tmp_path):
    assert refusal(tmp_path).endswith("has no weights: there is no *.safetensors file in it")
    (tmp_path / "model.gguf").touch()
    assert "GGUF weights, which can't be trained" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "only pytorch_model.bin, and hrl loads no pickled ones. Convert it: transformers." in refusal(tmp_path)


def test_a_file_that_was_cut_off_and_a_pointer_are_told_apart(tmp_path):
    file = tmp_path / "model.safetensors"
    save(file)
    file.write_bytes(file.read_bytes()[:-4])
    assert "model.safetensors is not whole" in refusal(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    assert "is a pointer of Git LFS; fetch it with `git lfs pull`" in refusal(tmp_path)


def test_a_reward_model_has_a_head(tmp_path):
    save(tmp_path / "model.safetensors")
    with pytest.raises(ModelSourceError, match=r"has no scalar head \(score.weight\)"):
        check_scores(tmp_path)
    save_file({"score.weight": np.zeros((1, 4), np.float32)}, tmp_path / "second.safetensors")
    check_scores(tmp_path)


@pytest.mark.parametrize("find", [find_model, resolve_model])
def test_a_model_path_that_leads_nowhere_is_answered_with_the_nearest_model(tmp_path, monkeypatch, find):
    model = tmp_path / "models" / "qwen"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "weights.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for written, meant in (("./models/qwn", "models/qwen"), ("models/qwn", "models/qwen"), (f"{model}2", str(model))):
        with pytest.raises(ModelSourceError, match=f"does not exist. Did you mean {meant}\\?"):
            find(written)
    for written, message in (
        ("models", "no config.json, but folders in it have: qwen. Name one of them"),
        ("gguf", "holds GGUF files, which can't be trained"),
        ("weights.gguf", "is a file; name a folder"),
        ("~/no/such/model", "does not exist. The folder .* does not exist either"),
    ):
        with pytest.raises(ModelSourceError, match=message):
            find(written)
    assert model_facts(model) == {}


def test_a_hub_id_is_looked_up_in_the_cache_and_not_fetched(tmp_path, monkeypatch):
    asked = []

    def snapshot(repo_id, *, allow_patterns, local_files_only):
        asked.append((repo_id, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_model("org/model") is None  # a snapshot without weights is a download that was broken off
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path / "model.safetensors")
    assert find_model("org/model") == tmp_path
    assert asked == [("org/model", True)] * 2


@pytest.mark.parametrize(("text", "complaint"), [("{", "config.json is no JSON"), ("[]", "holds a list")])
def test_a_broken_config_file_is_named(tmp_path, text, complaint):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelSourceError, match=complaint):
        model_facts(tmp_path)
