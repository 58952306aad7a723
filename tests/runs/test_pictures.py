"""Whole runs on pictures and videos: GRPO, PPO with a critic, SFT, DPO, a reward model; and what a run refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hrl.config.offline import DPOTrainerConfig, RMTrainerConfig, SFTTrainerConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.data.tasks import bundled_rows
from hrl.errors import HrlError
from hrl.preflight.given import Given
from hrl.report.html_report import _last_samples
from hrl.report.run_folder import read_jsonl
from hrl.report.samples import read_samples, sample_facts
from tests.models.tiny_pictures import SPECIAL, frames, png, save_vl
from tests.runs.in_process import run_configured, spread, two_steps

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("this_process")]
TOWER, TEXT = "visual.blocks.0.attn.qkv.weight", "layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that often samples the token of a picture, which shows none in a response."""
    folder = save_vl(tmp_path_factory.mktemp("model"))
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"][SPECIAL.index("<|image_pad|>")] *= 4
    save_file(weights, file, {"format": "pt"})
    return folder


def looks() -> Any:
    """A reward function that looks at the picture: at its width, which a PNG has in its head."""

    def width(pictures: list[bytes], response: str) -> float:
        return float(int.from_bytes(pictures[0][16:20], "big"))

    return width


def configuration(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    actor = {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}, "use_kl_loss": True, "fsdp_config": {"dtype": "float32"}}
    return {
        "data": {
            "train_files": ["bundled:shapes/train?size=4&side=64"],
            "val_files": ["bundled:shapes/val?size=2&side=64"],
            "train_batch_size": 2,
            "max_prompt_length": 160,
            "max_response_length": 6,
        },
        "actor_rollout_ref": {
            "model": {"path": str(model), "probe": False},
            "actor": actor | changes.pop("actor", {}),
            "ref": {"fsdp_config": {"dtype": "float32"}},
            "rollout": {"name": "hf", "n": 3, "dtype": "float32"},
        },
        "trainer": two_steps(folder),
    } | changes


def change_of(model: Path, folder: Path, name: str) -> float:
    """By how much a run has moved a weight, at most."""
    before, after = (load_file(next(each.glob("*.safetensors"))) for each in (model, folder / "model"))
    (key,) = (key for key in after if key.endswith(name))
    return float((after[key] - before[key]).abs().max())


@pytest.mark.parametrize("frozen", [False, True])
def test_grpo_on_pictures_trains_what_it_is_to_train(model: Path, tmp_path: Path, frozen: bool) -> None:
    values = configuration(model, tmp_path, actor={"freeze_vision_tower": frozen})
    rewards = [(spread(), 1.0), (looks(), 0.0)]
    run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(reward=rewards))
    steps = [record for record in read_jsonl(tmp_path / "metrics.jsonl") if "actor/grad_norm" in record]
    assert [step["reward/width/mean"] for step in steps] == [64.0, 64.0]
    # The engine's own forward, in padded rows with a cache, has the log-probs of the packed one, before and after.
    assert [step["rollout/logprob_diff_max"] < 1e-4 for step in steps] == [True, True]
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and steps[1]["actor/kl_loss"] > 1e-3
    whole = len(load_file(next(model.glob("*.safetensors"))))
    of_tower = sum("visual" in name for name in load_file(next(model.glob("*.safetensors"))))
    assert steps[1]["weight_sync/tensors"] == whole - (of_tower if frozen else 0)
    assert (change_of(model, tmp_path, TOWER) == 0.0) == frozen and change_of(model, tmp_path, TEXT) > 0
    _samples_name_their_pictures(tmp_path / "rollouts")


def with_videos(**changes: Any) -> list[dict[str, Any]]:
    """Rows of which two show a picture, and two a video; each with what is given for its number."""
    rows = [{"prompt": row["prompt"], "images": row["images"]} for row in bundled_rows("shapes/train?size=2&side=64")]
    films = [[png(frame) for frame in frames(6, seed=seed)] for seed in (1, 2)]
    rows += [{"prompt": "<video>What moves?", "videos": [{"video": film, "fps": 2}]} for film in films]
    return [row | {name: each(number) for name, each in changes.items()} for number, row in enumerate(rows)]


def test_ppo_on_pictures_and_videos_with_a_critic_that_sees(tmp_path: Path) -> None:
    model = save_vl(tmp_path / "a model", "qwen3_vl")
    values = configuration(model, tmp_path / "run")
    values["data"] |= {"train_files": ["given"], "val_files": [], "train_batch_size": 4, "max_prompt_length": 220}
    values["algorithm"] = {"adv_estimator": "gae"}
    values["critic"] = {"optim": {"lr": 1e-2}, "model": {"fsdp_config": {"dtype": "float32"}}}
    values["actor_rollout_ref"]["actor"] |= {"ppo_mini_batch_size": 4}
    values["actor_rollout_ref"]["rollout"]["n"] = 1
    config = PPOTrainerConfig.model_validate(values)
    run_configured("ppo", config, Given(reward=spread(), train_rows=with_videos()))
    steps = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in record]
    assert [step["rollout/logprob_diff_max"] < 1e-4 for step in steps] == [True, True]
    assert [step["critic/grad_norm"] > 0 for step in steps] == [True, True]
    # Its head begins at zero, and has learnt something of the returns by then.
    assert steps[0]["critic/values/mean"] == 0.0 != steps[1]["critic/values/mean"]
    films = [record for record in read_samples(tmp_path / "run" / "rollouts", 2) if len(record["images"]) == 4]
    assert len(films) == 2 and all(record["question"].startswith("<video>What") for record in films)
    given = {file for row in with_videos()[2:] for file in row["videos"][0]["video"]}
    assert all((tmp_path / "run" / "rollouts" / name).read_bytes() in given for name in films[0]["images"])
    assert films[0]["prompt"].count("<|video_pad|>") == 3 and "<0.2 seconds>" in films[0]["prompt"]


def test_a_model_whose_layers_carry_states_trains_on_pictures_and_videos_in_padded_rows(tmp_path: Path) -> None:
    model = save_vl(tmp_path / "model", "qwen3_5")
    values = configuration(model, tmp_path / "run", actor={"ppo_mini_batch_size": 4, "use_kl_loss": False})
    values["actor_rollout_ref"]["model"]["probe"] = True  # which finds that rows are padded, and compares them
    values["data"] |= {"train_files": ["given"], "val_files": [], "train_batch_size": 4, "max_prompt_length": 220}
    run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(reward=spread(), train_rows=with_videos()))
    steps = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in record]
    assert [step["rollout/logprob_diff_max"] < 1e-4 for step in steps] == [True, True]
    before, after = (load_file(next(folder.glob("*.safetensors"))) for folder in (model, tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    for name in (TOWER, TEXT, "layers.0.linear_attn.in_proj_qkv.weight"):
        assert change_of(model, tmp_path / "run", name) > 0


@pytest.mark.parametrize(("mode", "changed"), [("reverse_kl_topk", ""), ("reverse_kl", ""), ("reverse_kl_topk", TOWER)])
def test_a_teacher_sees_what_the_policy_sees_by_its_own_tower(
    model: Path, tmp_path: Path, mode: str, changed: str
) -> None:
    teacher = Path(shutil.copytree(model, tmp_path / "teacher"))
    (file,) = teacher.glob("*.safetensors")
    weights = load_file(file)
    for name in weights:
        weights[name] = -weights[name] if changed and name.endswith(changed) else weights[name]
    save_file(weights, file, {"format": "pt"})
    values = configuration(model, tmp_path / "run", actor={"use_kl_loss": False})
    values["distillation"] = {
        "enabled": True,
        "teacher_models": {"teacher_model": {"model_path": str(teacher)}},
        "distillation_loss": {"loss_mode": mode, "topk": 8, "use_task_rewards": False},
    }
    run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(reward=spread()))
    losses = [
        step["distillation/loss"]
        for step in read_jsonl(tmp_path / "run" / "metrics.jsonl")
        if "actor/grad_norm" in step
    ]
    # A teacher that were shown nothing would be far from a policy of the same weights.
    assert losses[0] > 1e-4 if changed else losses[0] == pytest.approx(0.0, abs=1e-6)


LOOKS_AGAIN = """
import hrl

class Again(hrl.Environment):
    def reset(self, row):
        self.turns = 0
        words = [{"role": "user", "content": "Is there a shape?"}]
        return words if row["extra_info"]["blind"] else [{"role": "system", "content": "See."}, *row["prompt"]]

    def step(self, action):
        self.turns += 1
        reward = len(set(action.text)) / 10
        return hrl.StepResult(observation="Look again: <|image_pad|>", reward=reward, done=self.turns == 3)
"""


def test_an_environment_sees_the_pictures_of_its_row(model: Path, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(LOOKS_AGAIN)
    rows = [
        {"prompt": row["prompt"], "images": row["images"], "extra_info": {"blind": blind}}
        for row, blind in zip(bundled_rows("shapes/train?size=2&side=64"), (False, True), strict=True)
    ]
    values = configuration(model, tmp_path / "run", environment={"path": f"{tmp_path}/again.py:Again", "max_turns": 3})
    values["environment"] |= {"num_workers": 1, "max_turn_tokens": 4, "on_error": "raise"}
    values["data"] |= {"train_files": ["given"], "val_files": [], "max_response_length": 240}
    run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(train_rows=rows))
    steps = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in record]
    assert [step["rollout/logprob_diff_max"] < 1e-4 for step in steps] == [True, True]
    assert [step["episode/turns/mean"] for step in steps] == [3.0, 3.0]
    assert change_of(model, tmp_path / "run", TOWER) > 0
    records = read_samples(tmp_path / "run" / "rollouts", 2)
    assert len(records) == 6 and [len(record["images"]) for record in records].count(1) == 3
    for record in records:
        assert record["prompt"].count("<|image_pad|>") == len(record["images"])
        assert record["branches"][0][0]["text"] == record["prompt"]
        assert record["question"].startswith("<image>How many" if record["images"] else "Is there")
        assert record["response"].count("Look again: <|image_pad|>") == 2


def _samples_name_their_pictures(rollouts: Path) -> None:
    given = {row["images"][0]["bytes"] for row in bundled_rows("shapes/train?size=4&side=64")}
    records = read_samples(rollouts, 2)
    for record in records:
        (name,) = record["images"]
        assert (rollouts / name).read_bytes() in given
        assert record["prompt"].count("<|image_pad|>") == 1 and record["question"].startswith("<image>How many")
        assert ("pictures", f"rollouts/{name}") in sample_facts(record)
    # A special token is no text: some of what was sampled is.
    assert any(len(record["response"]) < record["response_length"] for record in records)
    page = _last_samples(rollouts)
    assert 'alt="picture 1 of the prompt" src="data:image/png;base64,' in page


@pytest.mark.parametrize(
    ("kind", "schema", "frozen"),
    [
        ("sft", SFTTrainerConfig, True),
        ("dpo", DPOTrainerConfig, False),
        ("dpo", DPOTrainerConfig, True),
        ("rm", RMTrainerConfig, False),
    ],
)
def test_given_answers_about_pictures_train_the_tower_too(
    model: Path, tmp_path: Path, kind: str, schema: Any, frozen: bool
) -> None:
    if kind == "sft":
        rows = with_videos(completion=str)
    else:
        rows = with_videos(chosen=str, rejected=lambda number: str(number + 1))
    values = configuration(model, tmp_path)
    values["data"] = {"train_files": ["given"], "train_batch_size": 4, "max_length": 160}
    values["model"] = {"path": str(model), "probe": False, "fsdp_config": {"dtype": "float32"}}
    values["model"]["freeze_vision_tower"] = frozen
    values["optim"] = {"lr": 1e-3}
    del values["actor_rollout_ref"]
    run_configured(kind, schema.model_validate(values), Given(train_rows=rows))
    losses = [record["train/loss"] for record in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert (change_of(model, tmp_path, TOWER) == 0.0) == frozen and change_of(model, tmp_path, TEXT) > 0


def test_what_reads_no_pictures_is_refused_before_the_run(model: Path, tmp_path: Path) -> None:
    values = configuration(model, tmp_path)
    values["actor_rollout_ref"]["actor"]["fsdp_config"] |= {"tensor_parallel_size": 2}
    values["trainer"]["n_gpus_per_node"] = 2
    with pytest.raises(HrlError) as caught:
        run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(reward=spread()))
    text = str(caught.value)
    assert "fsdp_config.tensor_parallel_size is 2, and the rows have pictures" in text
