"""What reads no pictures is refused before a run whose rows have some."""

from types import SimpleNamespace

from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.pictures import PictureSource, VideoSource
from hrl.preflight.findings import Findings
from hrl.preflight.pictures_look import look_at_pictures


def test_a_teacher_reads_text_alone():
    row = SimpleNamespace(images=[PictureSource(8, 4), VideoSource(8, 4, 3)])
    shown = SimpleNamespace(has_pictures=True, rows=[row], known=[0], picture_tokens=lambda shown: 2)
    config = compose_kind(PPO, ["recipe=distillation", "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"])
    findings = Findings()
    look_at_pictures(findings, config, shown, None)
    (problem,) = findings.problems
    assert dict(findings.facts)["videos"].endswith("3 frames of 8 × 4 pixels, takes 2 tokens")
    assert problem.key.startswith("distillation.") and "is a teacher, which reads text alone" in problem.what


def test_a_frozen_tower_without_pictures_is_told():
    config = compose_kind(PPO, ["actor_rollout_ref.actor.freeze_vision_tower=true", "trainer.device=cpu"])
    findings = Findings()
    look_at_pictures(findings, config, SimpleNamespace(has_pictures=False), None)
    assert not findings.problems and "freeze_vision_tower has no effect" in findings.notes[0]


def test_functions_that_are_sent_words_alone_are_told():
    row = SimpleNamespace(images=[PictureSource(8, 4)])
    shown = SimpleNamespace(has_pictures=True, has_videos=False, rows=[row], known=[0], picture_tokens=lambda shown: 2)
    remote = "reward.functions=[{name: remote, url: http://127.0.0.1:9}, numeric]"
    config = compose_kind(PPO, [remote, "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"])
    findings = Findings()
    look_at_pictures(findings, config, shown, None)
    assert not findings.problems
    assert [note for note in findings.notes if note.startswith("remote of reward.functions: what is sent of a prompt")]
