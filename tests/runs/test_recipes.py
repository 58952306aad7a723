"""Every recipe makes two steps on a real model with a real engine, each in its own algorithm's way."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import APIError, OpenAI
from safetensors.torch import load_file
from torch import Tensor

from hrl.algos import advantages
from hrl.algos.advantages import AdvantageInput, AdvantageSettings
from hrl.config import PPOTrainerConfig
from hrl.report.run_folder import read_jsonl
from tests.config.key_reads import KeyReads
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import ROOT, Runner
from tests.runs.test_experts import save as save_mixture

pytestmark = [pytest.mark.engine]

ELSEWHERE = ("online_dpo", "distillation")  # the latter in test_teachers.py
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml") if path.stem not in ELSEWHERE)
# What a step of the recipe says that a plain step doesn't.
SIGNS = {
    "bypass": {"rollout_corr/recomputed", "rollout_corr/rollout_rs_masked_fraction"},
    "clip_cov": {"actor/selected_tokens", "timing_s/old_log_prob"},
    "dapo": {"rollout/filter_groups/gen_batches"},
    "grpo": {"actor/kl_loss", "timing_s/ref"},
    "kl_cov": {"actor/selected_tokens", "timing_s/old_log_prob"},
    "optimal_token_baseline": {"timing_s/old_log_prob"},
    "pf_ppo": {"pf_ppo/distinct_rows", "critic/vf_loss", "actor/reward_kl_penalty"},
    "ppo": {"critic/vf_loss", "actor/reward_kl_penalty"},
    "reinforce_plus_plus": {"actor/reward_kl_penalty"},
    "reinforce_plus_plus_baseline": {"actor/kl_loss"},
    "remax": {"reward/baseline_mean", "actor/reward_kl_penalty"},
    "rloo": {"actor/reward_kl_penalty"},
    "tis": {"rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size"},
}
EVERYWHERE = {
    "actor/pg_loss",
    "actor/entropy",
    "rollout/logprob_diff_mean",
    "rollout_corr/kl",
    "rollout_corr/ppl_ratio",
}


@pytest.fixture(scope="module", autouse=True)
def reads() -> Iterator[KeyReads]:
    """Of all runs here, which are in this process."""
    found = KeyReads()
    with in_process(), found.recording():
        yield found


@pytest.fixture(scope="module")
def coin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward that any text may get: groups with and without spread are common."""
    path = tmp_path_factory.mktemp("rewards") / "coin.py"
    signature = "data_source, solution_str, ground_truth, extra_info=None"
    path.write_text(f"def compute_score({signature}):\n    return float(sum(map(ord, solution_str)) % 2)\n")
    return path


def two_steps(runner: Runner, coin: Path, folder: Path, *overrides: str) -> list[dict[str, float]]:
    run_in_process(
        f"trainer.default_local_dir={folder}",
        f"actor_rollout_ref.model.path={runner.model}",
        f"reward.custom_reward_function.path={coin}",
        "data.train_batch_size=4",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=3",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        *overrides,
    )
    return read_jsonl(folder / "metrics.jsonl")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_makes_two_steps(runner: Runner, coin: Path, tmp_path: Path, recipe: str) -> None:
    records = two_steps(runner, coin, tmp_path, f"recipe={recipe}")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        missing = (EVERYWHERE | SIGNS.get(recipe, set())) - record.keys()
        assert not missing, missing
        assert all(math.isfinite(value) for value in record.values())
        assert record["actor/grad_norm"] > 0 and record["actor/skipped_steps"] == 0
        # Two mini-batches a step: the second one sees the weights moved.
        assert record["actor/ppo_kl"] != 0


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_of_policy_and_critic_learn_beside_a_reference_without_one(
    runner: Runner, coin: Path, tmp_path: Path, merge: bool
) -> None:
    options = (
        "recipe=ppo", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.use_rslora=true",
        f"actor_rollout_ref.model.lora.merge={merge}", "critic.model.lora_rank=2", "critic.model.lora_alpha=3",
        "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=1",
    )  # fmt: skip
    records = two_steps(runner, coin, tmp_path, *options)
    assert records[0]["actor/reward_kl_penalty"] == 0, "a new adapter changes nothing, and the reference has none"
    assert records[1]["actor/reward_kl_penalty"] != 0 and records[1]["timing_s/ref"] > 0
    assert all(record["rollout/logprob_diff_mean"] < (0.1 if merge else 0.02) for record in records)
    sent = load_file(tmp_path / "checkpoints" / "step_2" / "hf" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in sent.values())
    if not merge:  # in bfloat16 or float32, as the machine has it
        size = records[1]["weight_sync/bytes"] / sum(tensor.numel() for tensor in sent.values())
        assert size in (2, 4) and records[1]["weight_sync/tensors"] == len(sent)
        assert records[1]["weight_sync/read_back_tensors"] == len(sent)
    for role in ("actor", "critic"):
        (shard,) = (tmp_path / "checkpoints" / "step_2" / role).glob("shard-*.safetensors")
        assert all(".lora_" in name or ".score." in name for name in load_file(shard))
    if merge:
        return
    again = two_steps(
        runner, coin, tmp_path / "again", *options,
        f"actor_rollout_ref.model.lora_adapter_path={tmp_path}/checkpoints/step_2/hf",
    )  # fmt: skip
    assert again[0]["actor/reward_kl_penalty"] != 0, "the reference has none, whatever the policy goes on from"


def test_dapo_fills_its_batches_and_counts_what_it_dropped(runner: Runner, coin: Path, tmp_path: Path) -> None:
    records = two_steps(runner, coin, tmp_path, "recipe=dapo", "actor_rollout_ref.rollout.n=2")
    for record in records:
        assert record["rollout/zero_variance_groups"] == 0
        generated = 4 * record["rollout/filter_groups/gen_batches"]
        assert record["rollout/filter_groups/dropped"] + record["rollout/filter_groups/surplus"] + 4 == generated
    assert max(record["rollout/filter_groups/gen_batches"] for record in records) > 1
    samples = [read_jsonl(tmp_path / "rollouts" / f"step_{step}.jsonl") for step in (1, 2)]
    assert [len(step) for step in samples] == [8, 8]
    assert all({"overlong"} <= sample["reward_parts"].keys() for sample in samples[0])


def test_online_dpo_prefers_the_best_sample_of_each_prompt_to_the_worst(
    runner: Runner, coin: Path, tmp_path: Path
) -> None:
    records = two_steps(runner, coin, tmp_path, "recipe=online_dpo", "actor_rollout_ref.actor.optim.lr=1e-3")
    for step, record in enumerate(records, start=1):
        assert all(math.isfinite(value) for value in record.values())
        samples = read_jsonl(tmp_path / "rollouts" / f"step_{step}.jsonl")
        scores: dict[str, set[float]] = {}
        for sample in samples:
            scores.setdefault(sample["uid"], set()).add(sample["score"])
        assert len(samples) == 12 and record["rollout/pairs"] == sum(len(group) > 1 for group in scores.values())
        assert record["reward/mean"] == pytest.approx(sum(sample["score"] for sample in samples) / 12)  # of all samples
        assert {"timing_s/ref", "timing_s/update_actor", "rollout/logprob_diff_mean"} <= record.keys()
        assert record["rollout/logprob_diff_mean"] < 0.02
    # Before its first step the policy is its own reference. Two mini-batches: the second one sees the weights moved.
    assert records[0]["train/loss"] == pytest.approx(math.log(2), abs=0.05)
    assert records[0]["rewards/margins"] != 0.0


GAME = """
import random
import hrl

class Game(hrl.ToolEnvironment):
    def reset(self, row, seed):
        self.number = random.Random(seed).randrange(100)
        self.turns = 0
        return [{"role": "user", "content": f"Guess {self.number % 3}."}]

    @hrl.tool
    def peek(self) -> int:
        return self.number

    def answered(self, action):
        self.turns += 1
        lucky = float(sum(action.token_ids) % 2)
        if self.turns == 3:
            return hrl.StepResult(reward=lucky, done=True, metrics={"lucky": lucky})
        return hrl.StepResult("Go on.", reward=lucky, metrics={"lucky": lucky})
"""


def test_a_game_of_several_turns_trains_what_was_sampled_with_the_rewards_of_its_turns(
    runner: Runner, coin: Path, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    records = two_steps(
        runner,
        coin,
        tmp_path / "run",
        f"environment.path={tmp_path}/game.py:Game",
        "environment.tool_parser=hermes",
        "environment.max_turn_tokens=3",
        "reward.custom_reward_function.path=null",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "algorithm.adv_estimator=grpo_turns",
    )
    for step, record in enumerate(records, start=1):
        assert record["episode/turns/mean"] == 3.0 and record["episode/end/done"] == 1.0
        assert record["episode/policy_tokens/mean"] <= 9.0 < record["episode/environment_tokens/mean"]
        assert record["rollout/logprob_diff_mean"] < 0.02, "the trainer has the sampler's log-probs in these contexts"
        assert record["actor/grad_norm"] > 0 and record["actor/shared_tokens"] > 0
        samples = read_jsonl(tmp_path / "run" / "rollouts" / f"step_{step}.jsonl")
        assert len(samples) == 12 and all(len(sample["turns"]) == 3 for sample in samples)
        for sample in samples:
            assert sample["score"] == sum(turn["reward"] for turn in sample["turns"])
            assert [message["role"] for message in sample["messages"]] == [
                "user",
                *["assistant", "user"] * 2,
                "assistant",
            ]
        assert record["reward/mean"] == pytest.approx(sum(sample["score"] for sample in samples) / 12)
        assert {turn["version"] for sample in samples for turn in sample["turns"]} == {step - 1}


PROGRAM = """
import asyncio
import hrl
from openai import AsyncOpenAI

class Program(hrl.AgentEnvironment):
    async def run(self, row, client):
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:
            ask = lambda chat: openai.chat.completions.create(model=client.model, messages=chat, max_tokens=3)
            chat = [{"role": "user", "content": "Say a letter."}]
            first = (await ask(chat)).choices[0].message
            chat += [first, {"role": "user", "content": "Another one."}]
            await ask(chat)
            await ask([{"role": "user", "content": "Say a letter, and mean it."}])
        return float(sum(map(ord, first.content)) % 3)
"""


class Asking(threading.Thread):
    """Asks a run's policy from outside as long as the run goes on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._file = folder / "serving.env"
        self.mode = 0
        self.versions: list[int] = []
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._file.exists():
            if self._is_over.wait(0.05):
                return
        self.mode = stat.S_IMODE(self._file.stat().st_mode)
        url, key = (line.partition("=")[2] for line in self._file.read_text().splitlines())
        with OpenAI(base_url=url, api_key=key, max_retries=0) as client, contextlib.suppress(APIError):  # it has ended
            while not self._is_over.is_set():
                answer = client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "Say a letter."}],
                    max_tokens=3,
                    extra_body={"return_token_ids": True},
                )
                self.versions.append(answer.choices[0].policy_version)

    def end(self) -> None:
        self._is_over.set()
        self.join(30.0)


def test_a_program_that_calls_the_policy_trains_what_it_was_answered(
    runner: Runner, coin: Path, tmp_path: Path
) -> None:
    """Two turns of a conversation and a question apart, over HTTP: two rows of an episode, of two prompts.

    Meanwhile somebody asks from outside, which no row tells of.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    asking = Asking(tmp_path / "run")
    asking.start()
    records = two_steps(
        runner,
        coin,
        tmp_path / "run",
        f"environment.path={tmp_path}/program.py:Program",
        "actor_rollout_ref.rollout.serve=true",
        "reward.custom_reward_function.path=null",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
    )
    asking.end()
    assert {0, 1} <= set(asking.versions) <= {0, 1, 2} and asking.versions == sorted(asking.versions)
    assert asking.mode == 0o600 and not (tmp_path / "run" / "serving.env").exists(), "the key goes with the run"
    for step, record in enumerate(records, start=1):
        assert record["episode/turns/mean"] == 3.0 and record["episode/end/done"] == 1.0
        assert record["episode/branches/mean"] == 2.0
        assert record["serve/calls"] >= 12 * 3 and record["serve/tokens"] >= 12 * 3
        assert record["rollout/logprob_diff_mean"] < 0.02, "the trainer has the sampler's log-probs in these contexts"
        assert record["actor/grad_norm"] > 0
        samples = read_jsonl(tmp_path / "run" / "rollouts" / f"step_{step}.jsonl")
        assert [len(sample["turns"]) for sample in samples] == [3] * 12
        assert record["reward/mean"] == pytest.approx(sum(sample["score"] for sample in samples) / 12)
        assert {sample["turns"][-1]["reward"] for sample in samples} <= {0.0, 1.0, 2.0}


@pytest.mark.parametrize("name", ["Game", "Program"])
def test_the_experts_of_every_turn_are_replayed(runner: Runner, coin: Path, tmp_path: Path, name: str) -> None:
    """Those of another token would not be the trainer's, nor give the sampler's log-probs.

    With a template that rewrites what was said every turn of the game is a branch; a program's rows are made apart.
    """
    mixture = save_mixture(tmp_path / "mixture")
    (tmp_path / "environment.py").write_text(GAME if name == "Game" else PROGRAM)
    if name == "Game":
        (mixture / "chat_template.jinja").write_text(FORGETFUL)
    records = two_steps(
        runner,
        coin,
        tmp_path / "run",
        f"actor_rollout_ref.model.path={mixture}",
        f"environment.path={tmp_path}/environment.py:{name}",
        "environment.tool_parser=hermes",
        "environment.max_turn_tokens=3",
        "reward.custom_reward_function.path=null",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    )
    for record in records:
        assert record["episode/turns/mean"] == 3.0 and record["episode/branches/mean"] == (
            3.0 if name == "Game" else 2.0
        )
        assert record["moe/replayed"] == 1 and record["moe/router_agreement"] > 0.9
        assert record["rollout/logprob_diff_max"] < 1e-4


FORGETFUL = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" and not loop.last %}(said){% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""A template that rewrites what the policy said before, so that every turn is a branch."""


@pytest.fixture(scope="module")
def forgetful(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forgetful") / "policy"
    shutil.copytree(runner.model, folder)
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    return folder


@pytest.mark.parametrize(
    ("options", "turns", "signs"),
    [
        (
            [
                "recipe=pf_ppo",
                "algorithm.adv_estimator=gae_turns",
                "environment.on_truncation=bootstrap",
                "environment.max_turns=2",
            ],
            2,
            {"critic/vf_loss", "pf_ppo/distinct_rows", "actor/reward_kl_penalty"},
        ),
        (
            [
                "recipe=remax",
                "algorithm.rollout_correction.rollout_is=token",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            ],
            3,
            {"reward/baseline_mean", "rollout_corr/rollout_is_mean"},
        ),
    ],
    ids=["turns, cut off", "whole"],
)
def test_an_episode_that_goes_on_in_further_rows_is_one_sample(
    runner: Runner,
    coin: Path,
    forgetful: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    turns: int,
    signs: set[str],
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    given: list[AdvantageInput] = []

    def compute_advantages(name: str, inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
        given.append(inp)
        return advantages.compute_advantages(name, inp, config)

    monkeypatch.setattr("hrl.trainer.ppo.advantage.compute_advantages", compute_advantages)
    records = two_steps(
        runner,
        coin,
        tmp_path / "run",
        *options,
        f"actor_rollout_ref.model.path={forgetful}",
        f"environment.path={tmp_path}/game.py:Game",
        "environment.tool_parser=hermes",
        "environment.max_turn_tokens=3",
        "reward.custom_reward_function.path=null",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    )
    for step, record in enumerate(records, start=1):
        assert signs <= record.keys() and all(math.isfinite(value) for value in record.values())
        assert record["episode/branches/mean"] == turns == record["episode/turns/mean"]
        assert record["rollout/logprob_diff_mean"] < 0.02, "the trainer has the sampler's log-probs in these contexts"
        assert record["actor/grad_norm"] > 0
        samples = read_jsonl(tmp_path / "run" / "rollouts" / f"step_{step}.jsonl")
        scores = [sum(turn["reward"] for turn in sample["turns"]) for sample in samples]
        assert len(samples) == 12
        assert record["reward/mean"] == record["critic/score/mean"] == pytest.approx(sum(scores) / 12)
        assert record["rollout/truncated_responses"] == (12 if turns == 2 else 0)
    assert [len(inp.episode_ids.unique()) for inp in given] == [12, 12]
    if turns == 2:
        assert given[1].bootstrap_values.all(), "after its first update a critic expects something of each"


def test_an_episode_of_one_turn_is_a_response_digit_for_digit(runner: Runner, coin: Path, tmp_path: Path) -> None:
    plain = two_steps(runner, coin, tmp_path / "plain")
    episodes = two_steps(runner, coin, tmp_path / "episodes", "environment.path=single_turn")
    mine = ("actor/", "reward/mean", "rollout/", "response_length", "prompt_length", "score", "advantage")
    for step, (one, other) in enumerate(zip(plain, episodes, strict=True), start=1):
        names = [name for name in one if name.startswith(mine) and not name.startswith("rollout/max_")]
        # The engine samples whatever waits, so its own log-probs round with the size of each wave. Nothing learns them.
        rounds = [name for name in names if name.startswith("rollout/logprob_diff_")]
        assert {name: one[name] for name in rounds} == pytest.approx({name: other[name] for name in rounds}, abs=2e-6)
        names = [name for name in names if name not in rounds]
        assert len(names) > 20 and {name: one[name] for name in names} == {name: other[name] for name in names}
        samples, played = (
            [
                (s["uid"], s["sample_index"], s["response"], s["score"])
                for s in read_jsonl(folder / f"step_{step}.jsonl")
            ]
            for folder in (tmp_path / "plain" / "rollouts", tmp_path / "episodes" / "rollouts")
        )
        assert samples == played


#: Keys that no run in this process reads → why.
READ_ELSEWHERE = {
    **{
        f"actor_rollout_ref.rollout.{name}": "these runs sample with hf, not with vLLM"
        for name in ("enable_prefix_caching", "enforce_eager", "max_num_batched_tokens")
    },
    **{
        f"actor_rollout_ref.rollout.server.{name}": "these runs have an engine of their own"
        for name in ("api_key", "timeout_s", "urls", "weights_folder")
    },
    "distillation.teacher_models.teacher_model.server.api_key": "these runs hold their teacher",
    "distillation.teacher_key": "these runs have one teacher",
    "reward.reward_model.server_kwargs": "no server has the reward model of these runs",
    "reward.reward_model.step_separator": "read where a reward model scores steps",
    "actor_rollout_ref.actor.policy_loss.dro_beta": "a run has one loss, and none here has this one",
    "actor_rollout_ref.actor.checkpoint.load_contents": "read on resume",
    "distillation.distillation_loss.distillation_loss_coef": "the configuration makes the divergence's weight of it",
    "data.custom_cls.name": "the rows are those of the built-in class",
    "data.truncation": "read where a prompt is too long",
    "trainer.grace_s": "the command reads it where a signal comes, and these runs have none",
    "trainer.secrets": "read before a run, where its configuration is shown for the first time",
    "trainer.nnodes": "the configuration makes the size of pools of it",
    "trainer.total_epochs": "the configuration makes the number of steps of it",
}


def test_every_key_is_read_by_code(
    runner: Runner, coin: Path, tmp_path: Path, reads: KeyReads, request: pytest.FixtureRequest
) -> None:
    ran = {item.name for item in request.session.items}
    if any(f"test_a_recipe_makes_two_steps[{recipe}]" not in ran for recipe in RECIPES):
        pytest.skip("says something after the runs of all recipes")
    with_reward_model = (
        "reward.reward_model.enable=true", f"reward.reward_model.model_path={runner.reward_model}",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    two_steps(  # what no recipe asks for
        runner, coin, tmp_path / "one", *with_reward_model, "actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "critic.optim.lr_scheduler_type=linear",
        "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "trainer.save_freq=1",
        "data.val_files=bundled:addition/val", "data.val_max_samples=2", "trainer.test_freq=1",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1", "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    two_steps(runner, coin, tmp_path / "packed", *with_reward_model)
    two_steps(
        runner, coin, tmp_path / "taught", "recipe=distillation", "trainer.total_training_steps=1",
        "distillation.distillation_loss.use_task_rewards=true",
        f"distillation.teacher_models.teacher_model.model_path={runner.model}",
    )  # fmt: skip
    assert reads.unread(PPOTrainerConfig) == READ_ELSEWHERE.keys()
    source = "\n".join(file.read_text() for file in (ROOT / "hrl").rglob("*.py"))
    assert [key for key in READ_ELSEWHERE if not re.search(rf"[.\"]{key.rpartition('.')[2]}\b", source)] == []
