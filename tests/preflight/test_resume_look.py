"""What a run that resumes may do otherwise, and what is refused by name."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hrl
from hrl.cluster.precision import with_dtypes
from hrl.config import compose_cli
from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.override import as_override
from hrl.config.run_kind import OFFLINE_KINDS
from hrl.data.order import EpochOrder, fingerprint
from hrl.preflight.findings import Findings
from hrl.preflight.folder_plan import FolderPlan
from hrl.preflight.given import Given
from hrl.preflight.resume_look import look_at_changes
from hrl.preflight.run_inputs import _adapters, run_inputs
from tests.models.tiny import save_llama

INPUTS: dict[str, Any] = {
    "kind": "ppo",
    "models": {"actor": "a1", "critic": "c1", "rm": "r1"},
    "tokenizer": "t1",
    "validation": "v1",
    "code": {},
    "versions": {"hrl": "0.1.0", "torch": "2.11"},
}
CPU = "trainer.device=cpu"


def state(*overrides: str, **parts: Any) -> dict[str, Any]:
    config = with_dtypes(compose_cli([CPU, *overrides]), "cpu")  # as a trainer has it
    written = {"step": 7, "config": config.model_dump(mode="json"), "inputs": INPUTS, "ranks": {"actor": 1}, **parts}
    return json.loads(json.dumps(written))


def batches(size: int) -> list[str]:
    return [f"data.train_batch_size={size}", f"actor_rollout_ref.actor.ppo_mini_batch_size={size}"]


def looked(saved: dict[str, Any], *overrides: str, own: bool = True, **inputs: Any) -> Findings:
    findings, config = Findings(), compose_cli([CPU, *overrides])
    plan = FolderPlan(Path("/run"), Path("/run/checkpoints/step_7"), own, saved)
    look_at_changes(findings, config, outline_of(config), plan, INPUTS | inputs)
    return findings


def test_what_may_change_is_told_in_one_block_and_refused_nowhere() -> None:
    code = {"reward.custom_reward_function.path (mine.py)": "d1"}
    with_model = "reward.reward_model.enable=true", "reward.reward_model.model_path=/rm"
    found = looked(
        state(*with_model, *batches(8), inputs=INPUTS | {"code": code}),
        *with_model,
        *batches(4),
        models=INPUTS["models"] | {"rm": "r2"},
        code={"reward.custom_reward_function.path (mine.py)": "d2"},
    )
    assert not found.problems and found.changed == "changed since step 7 was saved"
    assert found.changes == [
        "data.train_batch_size: 8 → 4",
        "actor_rollout_ref.actor.ppo_mini_batch_size: 8 → 4",
        "critic.ppo_mini_batch_size: 8 → 4",
        'weights of reward.reward_model.model_path: "r1" → "r2"',
        'code of reward.custom_reward_function.path (mine.py): "d1" → "d2"',
    ]


@pytest.mark.parametrize(
    ("override", "inputs", "key", "says"),
    [
        ("trainer.seed=2", {}, "trainer.seed", "is 2, and was 1: the steps after 7 would be those of another run"),
        (
            "trainer.seed=1",
            {"models": INPUTS["models"] | {"actor": "a2"}},
            "actor_rollout_ref.model.path",
            "is another model than the one that /run/checkpoints/step_7 began with",
        ),
        ("trainer.seed=1", {"tokenizer": "t2"}, "actor_rollout_ref.model.tokenizer_path", "has another vocabulary"),
        ("trainer.seed=1", {"kind": "dpo"}, "trainer.default_local_dir", "of a run of kind ppo; this is a run of kind"),
        ("algorithm.adv_estimator=gae", {}, "trainer.default_local_dir", "which has actor and no critic"),
    ],
)
def test_another_seed_model_tokenizer_kind_and_critic_are_refused_by_key(
    override: str, inputs: dict[str, Any], key: str, says: str
) -> None:
    (problem,) = looked(state(), override, **inputs).problems
    assert problem.key == key and says in problem.what and problem.hint


@pytest.mark.parametrize("key", ["lora_alpha=8", "use_rslora=true", "target_modules=[q_proj]"])
def test_an_adapter_that_would_mean_something_else_is_refused_where_its_run_goes_on(key: str) -> None:
    section = "actor_rollout_ref.model"
    saved = state(f"{section}.lora_rank=4")
    (problem,) = looked(saved, f"{section}.lora_rank=4", f"{section}.{key}").problems
    assert problem.key == f"{section}.{key.partition('=')[0]}" and "would be those of another run" in problem.what
    begun_with = [
        problem.what for problem in looked(saved, f"{section}.lora_rank=4", f"{section}.{key}", own=False).problems
    ]
    if key.startswith("target_modules"):
        assert not begun_with, "the weights that are read say it"
    else:
        assert begun_with[0].endswith("with another factor it is another policy.")
    assert not looked(state(), f"{section}.{key}").problems, "nothing reads it without an adapter"


@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_another_adapter_in_the_folder_to_go_on_from_is_refused_where_it_is_the_reference(
    kind: str, tmp_path: Path
) -> None:
    given = [CPU, "data.train_files=[a.jsonl]", f"model.lora_adapter_path={tmp_path}"]
    config = compose_kind(OFFLINE_KINDS[kind], given)
    saved = json.loads(json.dumps(with_dtypes(config, "cpu").model_dump(mode="json")))
    digests = []
    for weight in (np.zeros(4, np.float32), np.ones(4, np.float32)):
        save_file({"w": torch.from_numpy(weight)}, tmp_path / "adapter_model.safetensors")
        digests.append(dict(_adapters(config)))
    assert [*digests[0]] == ["model.lora_adapter_path"] and digests[0] != digests[1]
    inputs = INPUTS | {"kind": kind, "models": {"actor": "m1"}}
    plan = FolderPlan(
        Path("/run"),
        Path("/run/checkpoints/step_7"),
        True,
        {"step": 7, "config": saved, "inputs": inputs | {"adapters": digests[0]}, "ranks": {"actor": 1}},
    )
    findings = Findings()
    look_at_changes(findings, config, outline_of(config), plan, inputs | {"adapters": digests[1]})
    said = [problem.what for problem in findings.problems]
    if kind == "dpo":
        assert "holds another adapter than the one that /run/checkpoints/step_7 began with" in said[0]
    else:
        assert not said and findings.changes[0].startswith("weights of model.lora_adapter_path")


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("own", [True, False])
def test_another_optimizer_is_refused_with_both_names_where_its_state_is_read(own: bool) -> None:
    muon = f"{ACTOR}.optim.name=muon"
    (problem,) = looked(state(), muon, own=own).problems
    assert problem.key == f"{ACTOR}.optim.name"
    assert problem.what == "is muon, and /run/checkpoints/step_7 holds the state of adamw."
    assert not looked(state(muon), muon, own=own).problems
    weights_alone = looked(state(), muon, f"{ACTOR}.checkpoint.load_contents=[model]", own=own)
    assert not weights_alone.problems and f"{ACTOR}.optim.name: adamw → muon" in str(weights_alone.changes).replace(
        '"', ""
    )
    saved = state("algorithm.adv_estimator=gae", ranks={"actor": 1, "critic": 1})
    asked = ("algorithm.adv_estimator=gae", "critic.optim.name=adafactor", f"{ACTOR}.checkpoint.load_contents=[model]")
    (problem,) = looked(saved, *asked, own=own).problems
    assert problem.key == "critic.optim.name", "a critic is read completely"
    older = state()
    for section in (older["config"]["actor_rollout_ref"]["actor"], older["config"]["critic"]):
        del section["optim"]["name"]
    assert not looked(older, own=own).problems, "it was AdamW"


def test_a_critic_that_nobody_would_train_is_refused_in_the_run_s_own_folder() -> None:
    saved = state("algorithm.adv_estimator=gae", ranks={"actor": 1, "critic": 1})
    (problem,) = looked(saved, "algorithm.adv_estimator=grpo").problems
    assert "has a critic that learns; this run has none" in problem.what
    assert not looked(saved, "algorithm.adv_estimator=grpo", own=False).problems


def test_another_run_s_checkpoint_may_have_another_seed_and_model_which_are_told() -> None:
    found = looked(state(), "trainer.seed=2", own=False, models=INPUTS["models"] | {"actor": "a2"})
    assert not found.problems
    assert "trainer.seed: 1 → 2" in found.changes
    assert 'weights of actor_rollout_ref.model.path: "a1" → "a2"' in found.changes
    assert found.changed == "changed since /run/checkpoints/step_7 was saved"


def test_other_versions_are_told_also_of_a_package_that_only_one_of_the_runs_had() -> None:
    found = looked(state(), versions={"hrl": "0.1.0", "torch": "2.12", "flash-attn": "2.8"})
    assert found.changes == ['version of torch: "2.11" → "2.12"', 'version of flash-attn: null → "2.8"']
    found = looked(state(), versions={"hrl": "0.1.0"})
    assert found.changes == ['version of torch: "2.11" → null']
    older = {name: value for name, value in INPUTS.items() if name != "versions"}
    assert not looked(state(inputs=older)).changes


def test_other_rows_to_validate_on_are_told_and_refused_nowhere() -> None:
    found = looked(state(), validation="v2")
    assert not found.problems and found.changes == ['rows of data.val_files: "v1" → "v2"']
    older = {name: value for name, value in INPUTS.items() if name != "validation"}
    assert not looked(state(inputs=older)).changes


def test_a_checkpoint_of_an_older_version_is_continued_and_says_what_is_not_known() -> None:
    for saved in ({"step": 7}, state(inputs={})):  # the latter of a trainer that was built by hand
        found = looked(saved)
        assert not found.problems and not found.changes and "older version of hrl" in found.notes[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model") / "one")


class Tokenizer:
    special_tokens_map: ClassVar = {"eos_token": "</s>"}

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def inputs_of(
    model: Path, reward: Any = None, tokens: tuple[str, ...] = ("a", "b"), path: Path | None = None, val: Any = None
) -> Any:
    own = [] if path is None else [f"reward.custom_reward_function.path={path}"]
    given = Given(reward=reward)
    return run_inputs(compose_cli(own), given, {"actor": model}, Tokenizer(*tokens), val)  # type: ignore[arg-type]


def test_a_model_is_known_by_its_weights_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "moved"
    other.mkdir()
    weights = load_file(model / "model.safetensors")
    (other / "config.json").write_bytes((model / "config.json").read_bytes())
    names = sorted(weights)
    save_file({name: weights[name] for name in names[1:]}, other / "b.safetensors", {"format": "other"})
    save_file({names[0]: weights[names[0]]}, other / "a.safetensors")
    assert inputs_of(other)["models"] == inputs_of(model)["models"]
    weights[names[3]] += 1e-3
    save_file({name: weights[name] for name in names[1:]}, other / "b.safetensors")
    assert inputs_of(other)["models"] != inputs_of(model)["models"]


def test_a_text_that_speaks_of_a_python_file_is_no_path(model: Path) -> None:
    prompt = "Judge this. " * 100 + "The candidate's file solution.py: {response}"
    judge = {"name": "judge", "kwargs": {"prompt": prompt}}
    own = compose_cli([f"reward.functions={as_override([judge])}"])
    assert run_inputs(own, Given(), {"actor": model}, Tokenizer("a"), None)["code"] == {}  # type: ignore[arg-type]


def test_code_of_the_user_is_known_by_its_content(model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def compute_score(response, answer):\n    return 1.0\n")
    before = inputs_of(model, path=mine)["code"]
    assert list(before) == ["reward.custom_reward_function.path (mine.py)"]
    mine.write_text("def compute_score(response, answer):\n    return 2.0\n")
    assert inputs_of(model, path=mine)["code"] != before

    mine.write_text("import lib.helper\n")
    (tmp_path / "lib").mkdir()
    helper = tmp_path / "lib" / "helper.py"
    helper.write_text("RIGHT = 1.0\n")
    before = inputs_of(model, path=mine)["code"]
    assert [*before] == [f"reward.custom_reward_function.path ({name})" for name in ("mine.py", "lib/helper.py")]
    helper.write_text("RIGHT = 2.0\n")
    after = inputs_of(model, path=mine)["code"]
    assert [name for name in after if after[name] != before[name]] == [[*before][1]]

    def one(response: str) -> float:
        return 1.0

    def other(response: str) -> float:
        return 2.0

    other.__name__ = "one"
    (name,) = inputs_of(model, one)["code"]
    assert name == "reward (one)" and inputs_of(model, one)["code"] != inputs_of(model, other)["code"]


def test_rows_to_validate_on_are_known_by_what_they_hold_and_not_by_their_order(model: Path) -> None:
    def validation(rows: int = 2, seed: int = 1, level: int = 3) -> Any:
        found = fingerprint(EpochOrder(rows, seed), [np.array([1, 2])] * rows, [{"level": level}] * rows)
        return inputs_of(model, val=SimpleNamespace(fingerprint=found))["validation"]

    assert validation() == validation(seed=2)
    assert len({validation(), validation(rows=3), validation(level=4), inputs_of(model)["validation"]}) == 4


def test_the_versions_are_those_of_this_environment(model: Path) -> None:
    found = inputs_of(model)["versions"]
    assert (found["hrl"], found["torch"]) == (hrl.__version__, metadata.version("torch"))
    assert {"python", "transformers", "numpy"} <= found.keys()


def test_a_tokenizer_is_known_by_its_vocabulary(model: Path) -> None:
    assert inputs_of(model)["tokenizer"] == inputs_of(model)["tokenizer"]
    assert inputs_of(model, tokens=("b", "a"))["tokenizer"] != inputs_of(model)["tokenizer"]


@pytest.mark.parametrize("kind", OFFLINE_KINDS)
def test_runs_from_a_data_set_are_compared_too(kind: str) -> None:
    before = with_dtypes(compose_kind(OFFLINE_KINDS[kind], [f"quickstart={kind}", CPU]), "cpu")
    after = compose_kind(OFFLINE_KINDS[kind], [f"quickstart={kind}", CPU, "optim.lr=0.5"])
    inputs, role = INPUTS | {"kind": kind, "models": {}}, "rm" if kind == "rm" else "actor"
    saved = {"step": 1, "config": before.model_dump(mode="json"), "inputs": inputs, "ranks": {role: 1}}
    findings, plan = Findings(), FolderPlan(Path("/run"), Path("/run/checkpoints/step_1"), True, saved)
    look_at_changes(findings, after, outline_of(after), plan, inputs)
    assert not findings.problems
    assert findings.changes == [f"optim.lr: {before.optim.lr} → 0.5"]
