"""What reads no pictures is refused before a run whose rows have some."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.data.dataset import RLHFDataset
from hrl.data.pictures import PictureTokens
from hrl.models.tokenizer import load_tokenizer
from hrl.pictures import PictureSource, VideoSource
from hrl.preflight.findings import Findings
from hrl.preflight.pictures_look import look_at_pictures
from tests.models.tiny_pictures import config_of, save_processors


def test_servers_of_a_teacher_are_sent_text_alone():
    row = SimpleNamespace(images=[PictureSource(8, 4), VideoSource(8, 4, 3)])
    shown = SimpleNamespace(has_pictures=True, rows=[row], known=[0], picture_tokens=lambda shown: 2)
    served = "distillation.teacher_models.teacher_model.server.urls=[http://127.0.0.1:9]"
    config = compose_kind(
        PPO, ["recipe=distillation", served, "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"]
    )
    findings = Findings()
    look_at_pictures(findings, config, shown, None)
    (problem,) = findings.problems
    assert dict(findings.facts)["videos"].endswith("3 frames of 8 × 4 pixels, takes 2 tokens")
    assert problem.key == served.partition("=")[0] and "are sent text alone" in problem.what


@pytest.mark.parametrize(
    ("file", "settings", "what"),
    [
        ("preprocessor_config.json", {}, None),
        ("preprocessor_config.json", {"longest_edge": 56 * 56}, "4 tokens would stand for 112 × 112 pixels, and"),
        ("video_preprocessor_config.json", {"longest_edge": 56 * 56}, "8 tokens would stand for 4 frames of 112 ×"),
        ("config.json", None, "is no model that hrl can show them to"),
    ],
)
def test_a_teacher_reads_as_many_tokens_of_a_picture_as_the_policy(
    tmp_path: Path, file: str, settings: dict[str, int] | None, what: str | None
) -> None:
    policy, teacher = tmp_path / "policy", tmp_path / "teacher"
    for folder in (policy, teacher):
        config_of().save_pretrained(folder)
        save_processors(folder, "qwen2_5_vl")
    if settings is None:
        LlamaConfig().save_pretrained(teacher)
    else:
        own = json.loads((teacher / file).read_text())
        (teacher / file).write_text(json.dumps(own | {"size": own["size"] | settings}))
    row = SimpleNamespace(images=[PictureSource(56, 56), PictureSource(112, 112), VideoSource(112, 112, 4)])
    counted = PictureTokens(load_tokenizer(policy)).num_tokens
    shown = SimpleNamespace(has_pictures=True, has_videos=True, rows=[row], known=[0], picture_tokens=counted)
    named = f"distillation.teacher_models.teacher_model.model_path={teacher}"
    hf = (f"actor_rollout_ref.model.path={policy}", "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu")
    config = compose_kind(
        PPO, ["recipe=distillation", named, *hf, "data.train_files=[given]", "data.val_files=[given]"]
    )
    findings = Findings()
    look_at_pictures(findings, config, shown, None, folders={"actor": policy, "ref": teacher})
    found = [(problem.key, what is not None and what in problem.what) for problem in findings.problems]
    assert found == ([] if what is None else [(named.partition("=")[0], True)])


def test_a_frozen_tower_without_pictures_is_told():
    config = compose_kind(PPO, ["actor_rollout_ref.actor.freeze_vision_tower=true", "trainer.device=cpu"])
    findings = Findings()
    look_at_pictures(findings, config, SimpleNamespace(has_pictures=False), None)
    assert not findings.problems and "freeze_vision_tower has no effect" in findings.notes[0]


def test_places_with_nothing_to_show_are_told(tmp_path: Path) -> None:
    config_of().save_pretrained(tmp_path)
    save_processors(tmp_path, "qwen2_5_vl")
    rows = [{"prompt": text} for text in ("How many?", "<image>How many?", "<video>What moves?")]
    own = (f"actor_rollout_ref.model.path={tmp_path}", "trainer.device=cpu", "data.train_files=[given]")
    notes = {}
    for key in ("images", "null"):
        findings, config = Findings(), compose_kind(PPO, [*own, f"data.image_key={key}", "data.val_files=[given]"])
        dataset = RLHFDataset(rows, load_tokenizer(tmp_path), config.data.model_copy(update={"answer_key": None}))
        look_at_pictures(findings, config, dataset, None)
        notes[key] = [note for note in findings.notes if "nothing to show" in note]
    assert notes["null"] == [] and "2 rows (row 1 of the list, …) with <image> or <video>" in notes["images"][0]


def test_functions_that_are_sent_words_alone_are_told():
    row = SimpleNamespace(images=[PictureSource(8, 4)])
    shown = SimpleNamespace(has_pictures=True, has_videos=False, rows=[row], known=[0], picture_tokens=lambda shown: 2)
    remote = "reward.functions=[{name: remote, url: http://127.0.0.1:9}, numeric]"
    config = compose_kind(PPO, [remote, "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"])
    findings = Findings()
    look_at_pictures(findings, config, shown, None)
    assert not findings.problems
    assert [note for note in findings.notes if note.startswith("remote of reward.functions: what is sent of a prompt")]
