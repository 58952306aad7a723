"""Whole runs with a teacher: a Llama that samples approaches what a Qwen2 of another size says of its samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from hrl.preflight.findings import PreflightError
from hrl.report.run_folder import read_jsonl
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import TWO_ROWS, Runner
from tests.workers.rollout.test_scoring_server import ScoringStub
from tests.workers.rollout.test_server_engine import running

pytestmark = pytest.mark.cluster
LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"
FIRST_LETTERS = 200
"""Tokens that the teacher gives nearly all of its probability to."""


@pytest.fixture(scope="module", autouse=True)
def this_process() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture(scope="module")
def teacher(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 that prefers the first tokens of the vocabulary, whatever it reads."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(runner.model)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight[0] = 0.0
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight[:FIRST_LETTERS] *= 20.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def padded_teacher(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of more rows than there are tokens, which it would rather say than any token."""
    folder = tmp_path_factory.mktemp("padded")
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    model.resize_token_embeddings(len(tokenizer) + 64, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 40.0 * torch.randn(64, model.config.hidden_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def steps_of(runner: Runner, teacher: Path, folder: Path, *changes: str) -> list[dict[str, Any]]:
    run_in_process(
        *runner.arguments(folder, *TWO_ROWS), "recipe=distillation",
        f"{TEACHER}.model_path={teacher}", "trainer.total_training_steps=6",
        "actor_rollout_ref.actor.optim.lr=3e-3", "actor_rollout_ref.rollout.n=4", *changes,
    )  # fmt: skip
    return [step for step in read_jsonl(folder / "metrics.jsonl") if "distillation/loss" in step]


def test_the_policy_nears_its_teacher(runner: Runner, teacher: Path, tmp_path: Path) -> None:
    steps = steps_of(runner, teacher, tmp_path / "run", f"{LOSS}.topk=16", "trainer.total_training_steps=6")
    losses, masses = ([step[f"distillation/{name}"] for step in steps] for name in ("loss", "student_mass"))
    assert losses[-1] < 0.9 * losses[0] and masses[-1] > masses[0]
    assert all(step["timing_s/ref"] > 0 and "actor/pg_loss" not in step for step in steps)


def test_rows_that_nobody_can_score_are_learnt_from(runner: Runner, teacher: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is one and two?"}\n{"prompt": "Name a colour."}\n')
    bare = ("reward.custom_reward_function.path=null", f"data.train_files={rows}", f"data.val_files={rows}")
    changes = (*bare, "data.max_prompt_length=64", "trainer.val_before_train=true", "trainer.total_training_steps=1")
    (step,) = steps_of(runner, teacher, tmp_path / "run", *changes)
    assert step["distillation/loss"] > 0 and step["actor/grad_norm"] > 0
    assert not [name for name in step if name.startswith(("reward/", "critic/score")) or "mean@" in name]
    assert len(read_jsonl(tmp_path / "run" / "rollouts" / "val_step_0.jsonl")) == 2


def test_the_whole_distribution_is_learnt_and_is_further_away_than_its_likeliest_tokens(
    runner: Runner, teacher: Path, padded_teacher: Path, tmp_path: Path
) -> None:
    one = ("trainer.total_training_steps=1", f"{LOSS}.topk=16")
    (coarse,) = steps_of(runner, teacher, tmp_path / "coarse", *one)
    whole = f"{LOSS}.loss_mode=reverse_kl"
    found = [steps_of(runner, folder, tmp_path / folder.name, whole, *one)[0] for folder in (teacher, padded_teacher)]
    assert found[0]["distillation/loss"] > coarse["distillation/loss"]
    assert found[1]["distillation/loss"] == pytest.approx(found[0]["distillation/loss"], rel=1e-4)
    assert found[0]["actor/grad_norm"] > 0 and "distillation/teacher_mass" not in found[0]


def test_what_fills_up_a_teachers_head_is_no_part_of_its_distribution(
    runner: Runner, teacher: Path, padded_teacher: Path, tmp_path: Path
) -> None:
    found = []
    for number, folder in enumerate((teacher, padded_teacher)):
        changes = (f"{LOSS}.topk=16", "trainer.total_training_steps=1")
        (step,) = steps_of(runner, folder, tmp_path / str(number), *changes)
        found.append([step[f"distillation/{name}"] for name in ("loss", "student_mass", "teacher_mass")])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.fixture(scope="module")
def stubs(teacher: Path) -> list[ScoringStub]:
    """Two servers of the teacher, not started."""
    model, tokenizer = (
        Qwen2ForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        AutoTokenizer.from_pretrained(teacher),
    )

    @torch.no_grad()
    def log_probs(tokens: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    async def tokenise(request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": tokenizer.encode(text, add_special_tokens=False)})

    both = [ScoringStub(log_probs=log_probs, reach=4096) for _ in range(2)]
    for stub in both:
        stub.instead["/tokenize"] = tokenise
    return both


def test_each_of_several_teachers_scores_its_own_rows(
    runner: Runner, teacher: Path, stubs: list[ScoringStub], tmp_path: Path
) -> None:
    tokenizer, rows, found = AutoTokenizer.from_pretrained(teacher), tmp_path / "rows.jsonl", []
    texts = {"1": "What is one and two?", "2": "Name a colour."}
    rows.write_text("".join(json.dumps({"prompt": text, "grade": int(name)}) + "\n" for name, text in texts.items()))
    bare = ("reward.custom_reward_function.path=null", f"data.train_files={rows}", "data.val_files=null")
    changes = (
        *(*bare, f"{TEACHER}.model_path=null", "distillation.teacher_key=grade", "data.max_prompt_length=64"),
        *("actor_rollout_ref.actor.fsdp_config.dtype=float32", f"{LOSS}.topk=16", "trainer.total_training_steps=1"),
    )
    with running(*stubs):
        one, two = stubs
        of_each = f"{{1: [{one.url}], 2: {two.url}, 3: {two.url}}}"  # of which one has rows of two names
        for number, urls in enumerate((f"[{one.url}]", of_each)):
            for stub in stubs:
                stub.bodies.clear()
            (step,) = steps_of(runner, teacher, tmp_path / str(number), *changes, f"{TEACHER}.server.urls={urls}")
            found.append([step[name] for name in ("distillation/loss", "actor/grad_norm")])
        for stub, text in zip(stubs, texts.values(), strict=True):
            read = [tokenizer.decode(body["prompt"]) for body in stub.bodies if len(body["prompt"]) > 4]
            assert len(read) == 4 and all(text in each for each in read)
        with pytest.raises(
            PreflightError, match=r"urls names no servers for 2 \(1 row, first \S+ line 2\), in the column grade"
        ):
            steps_of(runner, teacher, tmp_path / "third", *changes, f"{TEACHER}.server.urls={{1: [{one.url}]}}")
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-6, atol=0)


def test_a_teacher_that_is_served_teaches_as_one_that_the_run_holds(
    runner: Runner, teacher: Path, stubs: list[ScoringStub], tmp_path: Path
) -> None:
    stub, found = stubs[0], []
    stub.bodies.clear()
    with running(stub):
        served = (f"{TEACHER}.server.urls=[{stub.url}]", f"{TEACHER}.model_path=null")
        for number, changes in enumerate(((), served)):
            exact = [f"actor_rollout_ref.{role}.fsdp_config.dtype=float32" for role in ("actor", "ref")]
            changes = (*changes, *exact, f"{LOSS}.topk=16", "trainer.total_training_steps=2")
            steps = steps_of(runner, teacher, tmp_path / str(number), *changes)
            names = ("distillation/loss", "distillation/student_mass", "distillation/teacher_mass", "actor/grad_norm")
            found.append([[step[name] for name in names] for step in steps])
    assert len(found[0]) == 2 and stub.bodies
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        (f"{LOSS}.loss_mode=k2", f"{LOSS}.use_task_rewards=true", "actor_rollout_ref.actor.ppo_mini_batch_size=1"),
        (
            f"{LOSS}.loss_mode=k1",
            f"{LOSS}.use_policy_gradient=true",
            f"{LOSS}.loss_max_clamp=0.01",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=1",
        ),
    ],
    ids=["in the loss beside rewards, in two steps", "as a reward, clamped, of one sample"],
)
def test_what_the_teacher_says_of_sampled_tokens_is_learnt_from(
    runner: Runner, teacher: Path, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    (step,) = steps_of(runner, teacher, tmp_path / "run", *changes, "trainer.total_training_steps=1")
    is_clamped = f"{LOSS}.loss_max_clamp=0.01" in changes
    assert abs(step["distillation/loss"]) > 0 and is_clamped == (abs(step["distillation/loss"]) < 0.0101)
    assert step["actor/grad_norm"] > 0 and "actor/pg_loss" in step
