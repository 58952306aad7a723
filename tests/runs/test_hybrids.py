"""Whole runs of models whose layers carry a state along the row: padded, said aloud, and right at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hrl.config.offline import DPOTrainerConfig, RMTrainerConfig, SFTTrainerConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.errors import HrlError
from hrl.models.source import resolve_model
from hrl.preflight.given import Given
from hrl.report.run_folder import read_jsonl
from tests.models.hybrids import save_hybrid
from tests.runs.in_process import run_configured, spread, two_steps

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("this_process")]
#: Prompts of several lengths, so that the engine's waves and the trainer's rows are ragged.
ROWS = [
    {"prompt": [{"role": "user", "content": "one two three four five six seven eight " * times}], "data_source": "own"}
    for times in (1, 2, 4, 6)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated delta nets beside a mixture of experts."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m-instruct"))
    return save_hybrid(tmp_path_factory.mktemp("model"), "qwen3_next", tokenizer=tokenizer)


def policy(model: Path, folder: Path, **actor: Any) -> dict[str, Any]:
    fsdp = {"dtype": "float32"}
    learns = {"ppo_mini_batch_size": 2, "optim": {"lr": 3e-3}, "use_kl_loss": True, "fsdp_config": fsdp}
    return {
        "data": {"train_files": ["given"], "train_batch_size": 4, "max_prompt_length": 96, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": learns | {"ppo_max_token_len_per_gpu": 240} | actor,
            "ref": {"fsdp_config": fsdp},
            "rollout": {"name": "hf", "n": 3, "dtype": "float32", "max_model_len": 128},
        },
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"model": {"path": str(model), "fsdp_config": fsdp}, "optim": {"lr": 1e-3}},
        "trainer": two_steps(folder),
    }


def test_ppo_with_a_critic_and_a_reference(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PPOTrainerConfig.model_validate(policy(model, tmp_path, router_aux_loss_coef=0.01))
    run_configured("ppo", config, Given(reward=spread(), train_rows=ROWS))
    steps = [record for record in read_jsonl(tmp_path / "metrics.jsonl") if "actor/grad_norm" in record]
    # The engine's forward, token by token from a cache, has the log-probs of the trainer's on padded rows.
    assert [step["rollout/logprob_diff_max"] < 1e-4 for step in steps] == [True, True]
    assert steps[0]["actor/grad_norm"] > 0 and steps[0]["critic/grad_norm"] > 0 and steps[0]["moe/aux_loss"] > 0
    assert steps[0]["actor/kl_loss"] < steps[1]["actor/kl_loss"]
    said = " ".join(capsys.readouterr().out.split())
    assert "padded rows Qwen3NextForCausalLM can't run packed rows" in said
    assert "token budgets count the padding" in said


@pytest.mark.parametrize(
    ("kind", "schema"), [("sft", SFTTrainerConfig), ("dpo", DPOTrainerConfig), ("rm", RMTrainerConfig)]
)
def test_what_learns_from_given_answers(model: Path, tmp_path: Path, kind: str, schema: Any) -> None:
    answers = {"completion": "ten"} if kind == "sft" else {"chosen": "nine ten", "rejected": "zero"}
    values = {
        "model": {"path": str(model), "fsdp_config": {"dtype": "float32"}},
        "data": {"train_files": ["given"], "train_batch_size": 4, "max_length": 128},
        "optim": {"lr": 3e-3},
        "trainer": two_steps(tmp_path),
    }
    run_configured(kind, schema.model_validate(values), Given(train_rows=[row | answers for row in ROWS]))
    losses = [record["train/loss"] for record in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_slices_of_a_padded_row_are_refused_before_the_run(model: Path, tmp_path: Path) -> None:
    fsdp = {"dtype": "float32", "ulysses_sequence_parallel_size": 2}
    values = policy(model, tmp_path, fsdp_config=fsdp)
    values["trainer"]["n_gpus_per_node"] = 2
    with pytest.raises(HrlError) as caught:
        run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(reward=spread(), train_rows=ROWS))
    assert "ulysses_sequence_parallel_size is 2, and rows are padded, not packed" in str(caught.value)
