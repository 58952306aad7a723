"""Which model a name means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrl.cluster.checkpoints import CheckpointError
from hrl.cluster.manifest import Manifest
from hrl.models.source import ModelSourceError
from hrl.report.run_folder import DamagedFileError
from hrl.trained.folders import NoModelError, find_trained, require_loadable


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    for step, score in ((1, 0.9), (2, 0.5), (3, None)):
        checkpoint = folder / "checkpoints" / f"step_{step}"
        (checkpoint / "hf").mkdir(parents=True)
        (checkpoint / "hf" / "config.json").write_text("{}")
        (checkpoint / "state.json").write_text(json.dumps({"step": step, "score": score}))
        Manifest.of(checkpoint, step, score=score).write(checkpoint)
    (folder / "config.yaml").write_text("data: {prompt_key: question}\n")
    return folder


def test_a_run_means_its_best_checkpoint(run: Path) -> None:
    found = find_trained(str(run))
    assert found.name == str(run / "checkpoints" / "step_1" / "hf")
    assert (found.label, found.run, found.config) == ("sums-step_1", run, {"data": {"prompt_key": "question"}})


@pytest.mark.parametrize("name", ["checkpoints/step_2", "checkpoints/step_2/hf"])
def test_a_checkpoint_and_the_model_in_it_are_the_same(run: Path, name: str) -> None:
    found = find_trained(str(run / name))
    assert found.name == str(run / "checkpoints" / "step_2" / "hf")
    assert (found.label, found.run, found.checkpoint) == ("sums-step_2", run, run / "checkpoints" / "step_2")


def test_a_run_without_validation_means_its_newest_checkpoint(run: Path) -> None:
    for step in (1, 2):
        checkpoint = run / "checkpoints" / f"step_{step}"
        Manifest.read(checkpoint).with_score(None).write(checkpoint)
    assert find_trained(str(run)).name == str(run / "checkpoints" / "step_3" / "hf")


def test_a_run_from_python_without_checkpoints_means_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("data: {}\n")
    found = find_trained(str(tmp_path))
    assert (found.name, found.run) == (str(tmp_path / "model"), tmp_path)


def test_shards_alone_are_exported_first(run: Path) -> None:
    (run / "checkpoints" / "step_3" / "hf" / "config.json").unlink()
    found = find_trained(str(run / "checkpoints" / "step_3"))
    assert found.is_sharded
    with pytest.raises(ModelSourceError, match=r"hrl export .*step_3 OUT"):
        require_loadable(found)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("bundled:smollm2-135m-instruct", "smollm2-135m-instruct"),
    ],
)
def test_a_hub_id_and_a_bundled_model_are_taken_as_they_are(name: str, label: str) -> None:
    found = find_trained(name)
    assert (found.name, found.label, found.run) == (name, label, None)


def test_a_path_that_is_not_there_is_told_and_no_hub_is_asked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for name in ("./sum", str(run.parent / "sum")):
        with pytest.raises(NoModelError, match=r"there is no folder \S+/sum\. Did you mean \S*sums\?"):
            find_trained(name)
    with pytest.raises(NoModelError, match="there is no folder outputs/hrl/nosuch"):
        find_trained("outputs/hrl/nosuch")


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(NoModelError, match="holds no model"):
        find_trained(str(tmp_path))
    (tmp_path / "config.yaml").write_text("data: {}\n")
    with pytest.raises(NoModelError, match="has saved no checkpoint"):
        find_trained(str(tmp_path))


def test_a_reward_model_is_not_sampled_from(run: Path) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"]}
    checkpoint = run / "checkpoints" / "step_1"
    (checkpoint / "hf" / "config.json").write_text(json.dumps(config))
    Manifest.of(checkpoint, 1, score=0.9).write(checkpoint)
    with pytest.raises(NoModelError, match="is a reward model: it scores answers"):
        require_loadable(find_trained(str(run)))
    (run / "config.yaml").write_text("data: [")
    with pytest.raises(DamagedFileError, match=r"config\.yaml is damaged"):
        find_trained(str(run))


def test_a_model_that_is_not_what_was_written_is_refused_with_its_file_and_another_part_does_not_matter(
    run: Path,
) -> None:
    checkpoint = run / "checkpoints" / "step_1"
    (checkpoint / "actor").mkdir()
    (checkpoint / "actor" / "shard").write_bytes(b"moments")
    (checkpoint / "hf" / "model.safetensors").write_bytes(b"weights")
    Manifest.of(checkpoint, 1, score=0.9).write(checkpoint)
    (checkpoint / "actor" / "shard").write_bytes(b"momentS")
    assert find_trained(str(checkpoint)).checkpoint == checkpoint
    for file in ("hf/model.safetensors", "state.json"):
        whole = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(whole[:-1] + b"!")
        for name in (run, checkpoint, checkpoint / "hf"):
            with pytest.raises(CheckpointError, match=rf"step_1 is damaged: {file} is not what was written"):
                find_trained(str(name))
        (checkpoint / file).write_bytes(whole)
    (checkpoint / "hf" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="actor/shard is not what was written"):
        find_trained(str(checkpoint))  # whose shards would be put together
