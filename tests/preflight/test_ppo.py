"""What a run's files can have wrong with them is found before anything starts, all of it at once."""

from __future__ import annotations

import json
import os
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from hrl.cluster.manifest import Manifest
from hrl.cluster.remote_store import RemoteStore
from hrl.config import compose_cli
from hrl.config.load import validate_kind
from hrl.config.run_kind import PPO
from hrl.data.streamed import FIRST_ROWS
from hrl.preflight.findings import Findings, PreflightError
from hrl.preflight.folder_plan import FolderPlan, look_at_store
from hrl.preflight.machine_look import look_at_cpu_engine
from hrl.preflight.preflight import inspect_run, preflight
from tests.preflight.small_run import PROMPT, ROW, SCORE, save_model, small_run, write_rows

validate = partial(validate_kind, PPO)


@pytest.fixture
def run(tmp_path):
    """Runs the preflight of a small configuration, with changes."""
    small = dict(argument.split("=", 1) for argument in small_run(tmp_path))
    numbers = {key: int(value) for key, value in small.items() if value.isdigit()}

    def run(**changes):
        return preflight(validate(small | numbers | {"algorithm.adv_estimator": "gae"} | changes))

    return run


def refused(run, **changes) -> list[str]:
    with pytest.raises(PreflightError) as caught:
        run(**changes)
    return [str(problem) for problem in caught.value.problems]


def test_what_fits_passes(run):
    ready = run(**{"trainer.total_epochs": 3})
    assert (ready.folders["critic"], ready.total_training_steps) == (ready.folders["actor"], 6)
    assert len(ready.val_dataset) == 4
    assert any("no chat template" in note for note in ready.findings.notes)


def test_everything_that_is_wrong_comes_at_once(run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "busy").write_text("a file")
    found = refused(
        run,
        **{
            "data.train_files": [str(tmp_path / "rowz.jsonl")],
            "data.val_files": [str(tmp_path / "policy")],
            "actor_rollout_ref.model.path": str(tmp_path / "polizy"),
            "reward.custom_reward_function.path": str(tmp_path / "rewards.py"),
            "trainer.default_local_dir": str(tmp_path / "busy" / "run"),
            "trainer.logger": ["console", "wandb", "mlflow"],
            "trainer.device": "cuda",
        },
    )
    assert [problem.split()[0] for problem in found] == [
        "trainer.logger",
        "trainer.logger",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "reward.custom_reward_function.path",
        "trainer.device",
        "trainer.default_local_dir",
    ]


def test_the_error_counts_its_problems(run, tmp_path):
    with pytest.raises(
        PreflightError, match=r"^1 problem with what the configuration names:\n  1\. data.train_files can"
    ):
        run(**{"data.train_files": [str(tmp_path / "rowz.jsonl")]})


def test_positions_are_those_of_the_overridden_config(run):
    too_long = {"data.max_response_length": 100}
    assert refused(run, **too_long) == [
        "data.max_prompt_length + data.max_response_length are 116 tokens, but policy has 64 positions. "
        "Lower one of the two."
    ]
    run(**too_long, **{"actor_rollout_ref.model.override_config": {"max_position_embeddings": 128}})
    assert (
        "32 tokens, but policy has 20 positions"
        in refused(run, **{"actor_rollout_ref.model.override_config": {"max_position_embeddings": 20}})[0]
    )


def test_a_sequence_group_shares_the_heads_of_every_model_that_it_runs(run):
    (problem,) = refused(
        run, **{"trainer.n_gpus_per_node": 6, "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 3}
    )
    assert problem == (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size is 3, which does not divide the 4 "
        "attention heads of policy. Set it to one of 1, 2, 4."
    )
    others = {"critic.ulysses_sequence_parallel_size": 3, "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 6}
    found = refused(run, **{"trainer.n_gpus_per_node": 6, "algorithm.use_kl_in_reward": True, **others})
    assert [problem.split(" is ")[0] for problem in found] == [
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
        "critic.model.fsdp_config.ulysses_sequence_parallel_size",
    ]


def test_groups_that_cut_weights_are_told_by_the_models_config(run):
    found = refused(
        run,
        **{
            "trainer.n_gpus_per_node": 6,
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.actor.tensor_parallel_size": 3,
            "critic.expert_parallel_size": 2,
        },
    )
    assert found == [
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size is 3, and policy can't be cut so: its 4 attention "
        "heads can't be shared by 3 processes. Set it to one of 1, 2, 4.",
        "critic.model.fsdp_config.expert_parallel_size is 2, and policy can't be cut so: llama has no experts. "
        "Set it to 1: FSDP2 shards every model.",
    ]


# ---------------------------------------------------------------------- rewards


def test_what_a_built_in_function_pays_for_is_said(tmp_path):
    """`math` is DAPO's rule, as in verl, and no comparison by value: the summary has the words."""
    rows = write_rows(tmp_path / "math.jsonl", [{**ROW, "data_source": "math"}] * 4)
    own = ("data.train_files", "data.val_files", "reward.custom_reward_function.path")
    arguments = [argument for argument in small_run(tmp_path) if not argument.startswith(own)]
    _, findings = inspect_run(compose_cli([*arguments, f"data.train_files={rows}", f"data.val_files={rows}"]))
    facts = {fact.label: fact.text for fact in findings.facts}
    assert facts["reward"] == "math pays for the line 'Answer: …', else the box, in Minerva's normal form; 1 and -1"


@pytest.mark.parametrize(
    "source",
    [
        SCORE,
        f"async {SCORE}",
        "def compute_score(solution_str, **row):\n    return 1.0",
        "from math import fsum\ndef compute_score(*, solution_str, scale=fsum([1.0]), **row):\n    return scale",
    ],
)
def test_a_reward_function_is_loaded_in_a_process_of_its_own(run, tmp_path, source):
    seen = tmp_path / "pid"
    (tmp_path / "reward.py").write_text(f"import os\nopen({str(seen)!r}, 'w').write(str(os.getpid()))\n{source}")
    run()
    assert int(seen.read_text()) != os.getpid()


def test_what_a_reward_function_raises_begins_in_its_own_file(run, tmp_path):
    (tmp_path / "reward.py").write_text(f"import no_such_package\n{SCORE}")
    (found,) = refused(run)
    first_frame = found.split("File ")[1]
    assert first_frame.startswith(f'"{tmp_path}/reward.py", line 1')


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "path can't be used: .*reward.py does not exist"),
        ("", "name is compute_score, which .*reward.py does not define; it has: nothing. Define it there"),
        ("def compute_score(:", "path can't be used: .*reward.py is not valid Python"),
        ("def compute_score(a=1, b):\n    pass", "path can't be used: .*reward.py is not valid Python"),
        (
            "def compute_scor(): pass\ndef aaa(): pass\ndef _own():\n    compute_score = 1",
            r"name is compute_score, which .*reward.py does not define; it has: aaa, compute_scor. "
            r"Set reward.custom_reward_function.name=compute_scor\?",
        ),
        (
            "import abc\ndef helper(): pass\ndef score_it(**row): return 1.0\nif __name__ == '__main__':\n    pass",
            r"name is compute_score, .* abc, helper, score_it. Set reward.custom_reward_function.name=score_it\?",
        ),
        ("import sys\nsys.exit(3)", "name is compute_score, .* it has: sys. Define it there"),
        (f"import no_such_package\n{SCORE}", "path can't be used: .*No module named 'no_such_package'"),
        (f"1 / 0\n{SCORE}", "path can't be used: .*ZeroDivisionError"),
        ("def compute_score(solution_str=no_such_name):\n    pass", "path can't be used: .*no_such_name"),
        ("compute_score = 3", "path can't be used: .*compute_score"),
        ("class compute_score:\n    def __init__(self, **row): pass", "path can't be used: .*is a class"),
        ("def compute_score(text):\n    pass", "path can't be used: .*needs text, which nothing gives"),
        ("def compute_score(weight, **row):\n    pass", "path can't be used: .*needs weight"),
        (f"raise SystemExit(3)\n{SCORE}", "path can't be used: .*SystemExit: 3"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded_is_named(run, tmp_path, source, message):
    (tmp_path / "reward.py").unlink()
    if source is not None:
        (tmp_path / "reward.py").write_text(source)
    with pytest.raises(PreflightError, match=rf"(?s)reward.custom_reward_function\.{message}"):
        run()


def test_built_in_scorers_know_every_data_source_and_find_the_ground_truth(run, tmp_path):
    rows = [{**ROW, "data_source": "gsm8kk"}, {**ROW, "data_source": "numeric", "reward_model": {}}]
    write_rows(tmp_path / "mixed.jsonl", rows)
    built_in = {"reward.custom_reward_function.path": None}
    unknown, lacking = refused(
        run, **built_in, **{"data.train_files": str(tmp_path / "mixed.jsonl"), "data.val_files": [],
        "trainer.val_before_train": False},
    )  # fmt: skip
    assert unknown.startswith("data.train_files has rows that can't be scored: no built-in reward function")
    assert "'gsm8kk'" in unknown and "gsm8k" in unknown.replace("gsm8kk", "")
    assert lacking.startswith("data.train_files has 1 row without reward_model.ground_truth")
    assert "mixed.jsonl line 2" in lacking and "reward.custom_reward_function.path" in lacking
    right = write_rows(tmp_path / "right.jsonl", [{**ROW, "data_source": "numeric"}] * 2)
    run(**built_in, **{"data.train_files": str(right), "data.val_files": str(right)})


def test_of_streamed_rows_only_the_first_are_looked_at(run, tmp_path, monkeypatch):
    rows = [{**ROW, "reward_model": {}}, *[ROW] * 400]
    rows[3], rows[300] = {**ROW, "prompt": ""}, {**ROW, "prompt": ""}
    streamed = {"path": str(write_rows(tmp_path / "many.jsonl", rows)), "streaming": True}
    ready = run(**{"data.train_files": [streamed], "data.bad_rows": "skip"})
    assert ready.train_dataset.counts.read == FIRST_ROWS
    what = "1 row without an answer (a column `answer`, or reward_model.ground_truth): compute_score gets None there"
    assert f"{what} (looked at: 255 of 401 streamed rows)" in ready.findings.notes
    (problem,) = refused(
        run, **{"reward.custom_reward_function.path": None, "reward.functions": ["numeric"], "data.bad_rows": "skip",
        "data.train_files": [streamed], "data.val_files": [], "trainer.val_before_train": False},
    )  # fmt: skip
    assert "has 1 row (looked at: 255 of 401 streamed rows) without reward_model.ground_truth" in problem


def test_a_folder_of_nothing_but_test_rows_is_not_trained_on_unless_its_files_are_named(run, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("math_test.jsonl", "sums_test.jsonl"):
        write_rows(folder / name, [ROW] * 8)
    (problem,) = refused(run, **{"data.train_files": [str(folder)]})
    assert problem.startswith(f"data.train_files names a folder with rows to test on alone, by their names: {folder}")
    assert "name the files themselves: data.train_files=" in problem
    run(**{"data.train_files": [str(folder / "math_test.jsonl")], "data.val_files": [str(folder / "sums_test.jsonl")]})


def test_a_column_may_be_mapped_to_messages(run, tmp_path):
    chat = {"conversations": [{"from": "human", "value": PROMPT}], "reward_model": ROW["reward_model"]}
    file = write_rows(tmp_path / "chats.jsonl", [chat] * 4)
    ready = run(
        **dict.fromkeys(("data.train_files", "data.val_files"), str(file)),
        **{"data.map": {"messages": "conversations"}},
    )
    assert ready.train_dataset.rows[0].messages == [{"role": "user", "content": PROMPT}]


def test_an_answer_at_the_end_of_a_prompt_is_noted_and_can_be_taken_off(run, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config = json.loads((tmp_path / "policy" / "tokenizer_config.json").read_text())
    (tmp_path / "policy" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    chat = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "two"}]
    file = write_rows(tmp_path / "chats.jsonl", [{"prompt": chat, "data_source": "x"}] * 4)
    files = dict.fromkeys(("data.train_files", "data.val_files"), str(file))
    what = "4 prompts of data.train_files end with a message of the assistant"
    assert any(note.startswith(what) for note in run(**files).findings.notes)
    taken = run(**files, **{"data.prompt_key": "messages", "data.map": {"messages": "prompt"}})
    assert not any("end with a message" in note for note in taken.findings.notes)
    row = taken.train_dataset.rows[0]
    assert (row.messages, row.reward_model) == (chat[:1], {"ground_truth": "two"})


def test_rows_for_agent_loops_of_verl_are_noted_where_every_prompt_has_one_answer(run, tmp_path):
    def noted(loop):
        file = write_rows(tmp_path / f"{loop}.jsonl", [{**ROW, "agent_name": loop}] * 4)
        return [note for note in run(**{"data.train_files": str(file)}).findings.notes if "agent_name" in note]

    (note,) = noted("tool_agent")
    assert "(tool_agent)" in note and "environment.path" in note
    assert noted("single_turn_agent") == []


def test_rows_that_cannot_be_read_are_not_missed_by_the_reward(run, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(response, level):\n    return 1.0\n")
    (problem,) = refused(run, **{"data.train_files": "no_such.jsonl"})
    assert problem.startswith("data.train_files can't be used: data file no_such.jsonl does not exist")


def test_what_no_reward_function_gets_to_see_is_noted(run, tmp_path):
    rows = pa.Table.from_pylist([{**ROW, "made": datetime(2020, 1, 1), "raw": b"x", "response": "theirs"}] * 4)
    pq.write_table(rows, tmp_path / "typed.parquet")
    typed = {"data.train_files": str(tmp_path / "typed.parquet")}
    notes = run(**typed).findings.notes
    (left_out,) = (note for note in notes if note.startswith("left out for the reward"))
    (hidden,) = (note for note in notes if note.startswith("the rows' own response: reward functions get the sampled"))
    assert left_out.startswith("left out for the reward: made is a datetime, raw is a bytes. Only numbers, text")
    assert hidden.endswith("data.map={reference: response}")
    (tmp_path / "reward.py").write_text("def compute_score(response, made):\n    return 1.0\n")
    (problem,) = refused(run, **typed)
    assert "needs made, which nothing gives" in problem
    assert "Left out of the rows: made is a datetime, raw is a bytes." in problem


# ---------------------------------------------------------------------- rows


def test_columns_that_are_missing_are_named_with_those_that_are_there(run, tmp_path):
    file = write_rows(tmp_path / "other.jsonl", [{"question": "what", "origin": "x"}])
    assert refused(run, **{"data.train_files": str(file)}) == [
        f"data.prompt_key is prompt, a column that {file} does not have. It has: question, origin. The first "
        "row: {question: 'what', origin: 'x'}. Set data.prompt_key=question?",
    ]
    file = write_rows(tmp_path / "third.jsonl", [{"prompts": "what", "zzz": "x"}])
    second, first, of_validation = refused(run, **{"data.train_files": str(file), "data.reward_fn_key": "kind"})
    assert first.endswith("Set data.prompt_key=prompts?")
    assert second.endswith(
        "It has: prompts, zzz. The first row: {prompts: 'what', zzz: 'x'}. Add the column, or name yours with "
        "data.map.data_source."
    )
    assert of_validation.startswith("data.map takes data_source from kind, a column that ")


def test_columns_of_a_parquet_file_are_named(run, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"problem": ["what"], "data_source": ["x"]}), file)
    (problem,) = refused(run, **{"data.train_files": str(file)})
    assert problem.endswith(
        "It has: problem, data_source. The first row: {problem: 'what', data_source: 'x'}. Set data.prompt_key=problem?"
    )
    run(**{"data.train_files": str(file), "data.prompt_key": "problem", "data.train_batch_size": 1,
           "actor_rollout_ref.actor.ppo_mini_batch_size": 1, "data.val_files": str(file)})  # fmt: skip


def test_a_batch_that_the_rows_do_not_fill_gets_a_size_that_they_do(run, tmp_path):
    file = write_rows(tmp_path / "few.jsonl", [ROW] * 7)
    (problem,) = refused(run, **{"data.train_files": str(file), "data.train_batch_size": 8})
    assert problem.startswith("data.train_batch_size is 8: too few rows for one batch")
    assert "7 kept, 8 needed" in problem and problem.endswith("Set data.train_batch_size=4.")


def test_a_batch_of_the_default_size_is_asked_for_where_it_takes_hours(tmp_path, monkeypatch):
    monkeypatch.setattr("hrl.preflight.data_look.gpus_here", lambda: 0)
    arguments = [argument for argument in small_run(tmp_path) if "train_batch_size" not in argument]
    write_rows(tmp_path / "rows.jsonl", [ROW] * 1024)
    _, findings = inspect_run(compose_cli(arguments))
    assert [str(problem) for problem in findings.problems] == [
        "data.train_batch_size is not set, and one step of its default, 1,024 prompts × 8 samples, takes hours without "
        "a GPU. Set it, e.g. data.train_batch_size=8."
    ]
    assert not inspect_run(compose_cli([*arguments, "data.train_batch_size=1024"]))[1].problems
    monkeypatch.setattr("hrl.preflight.data_look.gpus_here", lambda: 8)
    assert not inspect_run(compose_cli(arguments))[1].problems


# ---------------------------------------------------------------------- models


def reward_model(path):
    return {"reward.reward_model.enable": True, "reward.reward_model.model_path": str(path)}


def test_a_link_out_of_the_models_folder_is_refused_before_a_checkpoint_has_what_it_leads_to(run, tmp_path):
    (tmp_path / "token").write_text("{}")
    (tmp_path / "policy" / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "policy" / "generation_config.json").symlink_to(tmp_path / "token")
    assert any("generation_config.json is a link to" in problem for problem in refused(run))


def test_a_critic_has_the_vocabulary_in_use_and_a_reward_model_reads_its_own(run, tmp_path):
    same, other = save_model(tmp_path / "same"), save_model(tmp_path / "other", f"{PROMPT} three")
    assert run(**{"critic.model.path": str(same)}, **reward_model(same)).reward_reader is None
    (problem,) = refused(run, **{"critic.model.path": str(other)})
    assert problem.startswith("critic.model.path names other, which has another vocabulary")
    ready = run(**reward_model(other))
    assert ready.reward_reader.max_position_embeddings == 64 and "three" in ready.reward_reader.tokenizer.get_vocab()
    assert dict(ready.findings.facts)["reward model"] == (
        "has another vocabulary: it gets each chat rendered as its own"
    )
    assert any("names other, whose tokenizer has no chat template" in note for note in ready.findings.notes)
    (same / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert run(**reward_model(same)).reward_reader is None  # of two templates there is one
    assert run(**{"actor_rollout_ref.model.tokenizer_path": str(other)}, **reward_model(other)).reward_reader is None


def test_a_reward_model_without_a_head_is_named(run, tmp_path):
    save_file({"lm_head.weight": np.zeros((1, 4), np.float32)}, save_model(tmp_path / "plain") / "model.safetensors")
    (problem,) = refused(run, **reward_model(tmp_path / "plain"))
    assert problem.startswith("reward.reward_model.model_path can't be used") and "no scalar head" in problem
    run(**{"critic.model.path": str(tmp_path / "plain")})  # a critic's head starts anew


@pytest.mark.parametrize("key", ["critic.model.path", "actor_rollout_ref.model.path"])
def test_a_folder_without_tokenizer_explains_itself(run, tmp_path, key):
    folder = save_model(tmp_path / "bare")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (problem,) = refused(run, **{key: str(folder), "critic.model.path": str(folder)})
    assert problem.startswith(f"{key} can't be used: no usable tokenizer in {folder}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json holds a list"),
        ('{"model_type": "no_such_model"}', "describes no model known here"),
        ("{}", "describes no model known here"),
        ('{"quantization_config": {"quant_method": "awq"}}', "holds weights quantised by awq, which can't be trained"),
    ],
)
def test_a_broken_config_explains_itself(run, tmp_path, text, message):
    (tmp_path / "policy" / "config.json").write_text(text)
    (problem,) = refused(run)
    assert problem.startswith("actor_rollout_ref.model.path can't be used") and message in problem


def test_an_override_that_does_not_fit_is_named(run):
    (problem,) = refused(run, **{"actor_rollout_ref.model.override_config": {"hidden_sise": 3}})
    assert problem.startswith("actor_rollout_ref.model.override_config can't be used") and "hidden_size" in problem


def test_a_hub_id_that_is_not_here_is_not_checked_and_everything_else_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_rows(tmp_path / "few.jsonl", [ROW, {**ROW, "prompt": None}])
    arguments = [*small_run(tmp_path), "actor_rollout_ref.model.path=org/model", "data.train_batch_size=8"]
    ready, findings = inspect_run(
        compose_cli([*arguments, f"data.train_files={tmp_path / 'few.jsonl'}"]), download=False
    )
    assert ready is None
    (unchecked,) = findings.unchecked
    assert unchecked.startswith("actor_rollout_ref.model.path: org/model is a hub id that is not on this machine")
    (bad,) = (str(problem) for problem in findings.problems)
    assert bad.startswith("data.train_files can't be used: 1 bad rows")
    ready, findings = inspect_run(compose_cli(arguments), download=False)
    (few,) = (str(problem) for problem in findings.problems)
    assert few == "data.train_batch_size is 8, but there are only 4 rows. Lower it."


def test_a_name_that_no_hub_has_is_refused(run):
    (problem,) = refused(run, **{"actor_rollout_ref.model.path": "not a hub id!"})
    assert "is neither a folder nor a hub id" in problem


# ---------------------------------------------------------------------- the run folder, and devices


def test_the_run_folder_is_looked_at_before_anything_starts(run, tmp_path):
    folder = tmp_path / "run"
    state = folder / "checkpoints" / "step_3"
    state.mkdir(parents=True)
    (torn,) = refused(run)
    assert torn.startswith("trainer.default_local_dir can't be used") and "none is whole" in torn
    (state / "state.json").write_text(json.dumps({"step": 3, "data": {"rows": 1}}))
    Manifest.of(state, 3).write(state)
    (other,) = refused(run)
    assert "was saved with other training data" in other
    (anew,) = refused(run, **{"trainer.resume_mode": "disable"})
    assert "holds checkpoints of an earlier run" in anew
    (missing,) = refused(
        run, **{"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "gone")}
    )
    assert missing.startswith("trainer.resume_from_path can't be used") and "is no whole checkpoint" in missing


@pytest.mark.parametrize(
    "begin",
    [
        {"resume_mode": "disable"},
        {"resume_mode": "resume_path", "resume_from_path": "memory://other/checkpoints/step_1"},
    ],
    ids=["from scratch", "with another run's"],
)
def test_a_run_that_begins_anew_is_refused_a_store_that_has_checkpoints(tmp_path, begin):
    address = f"memory://store-{tmp_path.name}"
    trainer = compose_cli(small_run(tmp_path)).trainer.model_copy(update={"default_remote_dir": address, **begin})
    plan = FolderPlan(tmp_path) if begin["resume_mode"] == "disable" else None  # which has to be fetched first
    look_at_store(empty := Findings(), trainer, plan)
    assert not empty.problems
    store = RemoteStore(address)
    store._fs.pipe_file(store._path(2, "manifest.json"), b"{}")
    look_at_store(found := Findings(), trainer, plan)
    (problem,) = map(str, found.problems)
    assert "holds checkpoints of an earlier run" in problem


@pytest.mark.parametrize(
    ("gpus", "changes", "problem"),
    [
        (0, {}, None),
        (0, {"trainer.n_gpus_per_node": 4}, None),  # ranks take turns on the CPU's cores
        (0, {"trainer.n_gpus_per_node": 9}, "asks for 9 processes, but this machine has no GPU for them and 2 cores"),
        (2, {"trainer.n_gpus_per_node": 9, "trainer.device": "cpu"}, "Ask for at most 2"),
        (0, {"trainer.device": "cuda"}, "trainer.device is cuda, but no GPU was found on this machine."),
        (2, {"trainer.n_gpus_per_node": 2}, None),
        (2, {"trainer.n_gpus_per_node": 4}, "trainer.n_gpus_per_node asks for 4 processes with a GPU each"),
        (2, {"trainer.n_gpus_per_node": 2, "trainer.nnodes": 2}, "this machine has 2."),
        (2, {"trainer.n_gpus_per_node": 4, "trainer.device": "cpu"}, None),
        (2, {"trainer.n_gpus_per_node": 4, "trainer.ray_kwargs": {"num_gpus": 4}}, None),
        (0, {"trainer.device": "cuda", "trainer.ray_kwargs": {"address": "auto"}}, None),
    ],
)
def test_devices_are_counted_where_the_run_starts_its_own_ray(run, monkeypatch, gpus, changes, problem):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("hrl.preflight.machine_look.gpus_here", lambda: gpus)
    monkeypatch.setattr("hrl.preflight.machine_look.available_cores", lambda: 2)
    if problem is None:
        crowded = [note for note in run(**changes).findings.notes if "take turns on 2 cores" in note]
        assert len(crowded) == ("trainer.ray_kwargs" not in changes and changes.get("trainer.n_gpus_per_node") == 4)
    else:
        (found,) = refused(run, **changes)
        assert problem in found


def test_a_data_set_class_that_raises_is_named(run, tmp_path):
    (tmp_path / "own.py").write_text("import no_such_package\n")
    (problem,) = refused(run, **{"data.custom_cls.path": str(tmp_path / "own.py"), "data.custom_cls.name": "Own"})
    assert problem.startswith("data.custom_cls.path can't be used") and "ModuleNotFoundError" in problem
    (problem,) = refused(run, **{"data.custom_cls.path": str(Path(tmp_path, "onw.py")), "data.custom_cls.name": "Own"})
    assert "Did you mean" in problem and "own.py?" in problem


def test_an_argument_that_the_installed_vllm_does_not_take_is_found_before_it_starts(run):
    def given(**arguments):
        return {
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.engine_kwargs": {"vllm": arguments},
        }

    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    assert refused(run, **given(disable_mm_preprocessor_cache=True, disable_custom_all_reduc=True)) == [
        f"{key}.disable_mm_preprocessor_cache is not an argument of the installed vLLM's engine. Remove it.",
        f"{key}.disable_custom_all_reduc is not an argument of the installed vLLM's engine. "
        "Did you mean disable_custom_all_reduce?",
    ]
    run(**given(disable_custom_all_reduce=True, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}))


def test_what_the_cpu_backend_of_vllm_has_no_kernels_for_is_refused_on_a_cpu_alone(run, monkeypatch):
    def given(**arguments):
        return {
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.engine_kwargs": {"vllm": arguments},
        }

    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    eagle = {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3}
    assert refused(run, **given(quantization="mxfp4", speculative_config=eagle), **{"trainer.device": "cpu"}) == [
        f"{key}.quantization is mxfp4, for whose linear layers vLLM's CPU backend has no kernel on every machine. "
        "On a CPU, set it to fp8_per_channel or remove it.",
        f"{key}.speculative_config.method is eagle3, which is for GPUs. "
        "On a CPU, set it to ngram, draft_model or eagle.",
    ]
    possible = given(
        quantization="fp8_per_channel", speculative_config={"method": "ngram", "num_speculative_tokens": 2}
    )
    monkeypatch.setattr("hrl.preflight.machine_look.fastest_dtype", lambda device: "float32")
    assert refused(run, **possible, **{"trainer.device": "cpu"}) == [
        "actor_rollout_ref.rollout.dtype is auto, which is float32 on this machine, and beside that vLLM has no kernel "
        "for fp8_per_channel. Set it to bfloat16."
    ]
    run(**possible, **{"trainer.device": "cpu", "actor_rollout_ref.rollout.dtype": "bfloat16"})
    monkeypatch.setattr("hrl.preflight.machine_look.fastest_dtype", lambda device: "bfloat16")
    run(**possible, **{"trainer.device": "cpu"})
    findings, rollout = Findings(), validate(given(quantization="mxfp4", speculative_config=eagle))
    look_at_cpu_engine(findings, rollout.actor_rollout_ref.rollout, "cuda", head_size=8)
    assert not findings.problems


def test_heads_that_the_cpu_backend_of_vllm_has_no_attention_for_are_refused(run):
    (problem,) = refused(run, **{"actor_rollout_ref.model.override_config": {"head_dim": 16}, "trainer.device": "cpu"})
    assert problem == (
        "actor_rollout_ref.rollout.name is vllm, whose CPU backend has no attention for heads of 16 elements; it has "
        "for 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512. Set it to hf, or take another model."
    )


def test_a_vllm_of_another_version_is_found_before_anything_starts(run, monkeypatch):
    monkeypatch.setattr("hrl.preflight.machine_look.vllm_version", lambda package: "0.33.0")
    (problem,) = refused(run, **{"actor_rollout_ref.rollout.name": "vllm"})
    assert problem.startswith("actor_rollout_ref.rollout.name can't be used: vLLM 0.33.0 is installed; ")


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[]", "holds a list, expected an object")])
def test_a_broken_generation_config_is_named(run, tmp_path, text, message):
    (tmp_path / "policy" / "generation_config.json").write_text(text)
    (problem,) = refused(run)
    assert problem.startswith("actor_rollout_ref.model.path can't be used") and message in problem


def test_a_place_where_nothing_can_be_written_is_no_run_folder(run):
    (problem,) = refused(run, **{"trainer.default_local_dir": "/proc/runs/one"})  # whoever asks
    assert problem.startswith("trainer.default_local_dir can't be used: the run folder /proc/runs/one can't be written")


def test_the_home_of_nobody_is_no_folder(run):
    keys = ("data.train_files", "actor_rollout_ref.model.path", "reward.custom_reward_function.path")
    found = refused(run, **dict.fromkeys(keys, "~no_such_user/file.jsonl"))
    assert {problem.split()[0] for problem in found} == set(keys) and all("does not exist" in one for one in found)


def test_what_can_not_fit_is_refused_and_what_may_not_fit_is_noted(run, monkeypatch):
    monkeypatch.setattr("hrl.preflight.memory_look.memory_here", lambda: 64 * 2**20)  # the KV cache alone is 1 GiB
    (found,) = refused(run)
    assert found.startswith("actor_rollout_ref.actor.fsdp_config does not fit: this machine has 0.1 GiB")
    assert "KV cache 1.0" in found
    assert "What helps: actor_rollout_ref.rollout.kv_cache_gib=0.5 (0.50 GiB less)" in found
    monkeypatch.setattr("hrl.preflight.memory_look.memory_here", lambda: 2 * 2**30)
    assert any("may take" in note and "this machine has 2.0 GiB" in note for note in run().findings.notes)


def test_an_adapter_is_counted_and_one_that_fits_no_layer_is_refused(run, tmp_path):
    model = "actor_rollout_ref.model"
    facts = dict(run(**{f"{model}.lora_rank": 4, "critic.model.lora_rank": 2}).findings.facts)
    # Each of two layers: queries, keys, values and output between 64 and 4 × 32, and three matrices of 64 × 64.
    assert facts["adapter of actor"].startswith(
        f"{4 * 2 * (4 * 192 + 3 * 128):,} weights beside 14 matrices are trained"
    )
    assert facts["adapter of critic"].startswith(
        f"{2 * 2 * (4 * 192 + 3 * 128):,} weights beside 14 matrices are trained"
    )
    (found,) = refused(run, **{f"{model}.lora_rank": 4, f"{model}.target_modules": ["q_prj"]})
    assert found.startswith(f"{model}.target_modules can't be used: target_modules has 'q_prj'")
    (found,) = refused(run, **{f"{model}.lora_adapter_path": str(tmp_path / "none")})
    assert found.startswith(f"{model}.lora_adapter_path can't be used") and "no folder of an adapter" in found


def test_processes_that_a_cpu_has_no_memory_for_are_to_be_fewer(run, monkeypatch):
    monkeypatch.setattr("hrl.preflight.memory_look.memory_here", lambda: 64 * 2**20)
    fewer = "trainer.n_gpus_per_node=1 ("
    assert fewer not in refused(run)[0]
    assert fewer in refused(run, **{"trainer.n_gpus_per_node": 2})[0]


def test_a_function_of_ones_own_that_will_get_no_ground_truth_is_noted(run, tmp_path):
    (tmp_path / "bare.jsonl").write_text(json.dumps({k: v for k, v in ROW.items() if k != "reward_model"}) + "\n")
    bare = {"data.val_files": [str(tmp_path / "bare.jsonl")]}
    assert (
        "1 row without an answer (a column `answer`, or reward_model.ground_truth): compute_score gets None there"
        in run(**bare).findings.notes
    )
    assert not any("ground_truth" in note for note in run().findings.notes)
    own = tmp_path / "own.py"
    bare |= {"reward.custom_reward_function.path": str(own)}
    for taken, is_noted in (("response, data_source", False), ("response, answer", True), ("**columns", True)):
        own.write_text(f"def compute_score({taken}):\n    return 1.0\n")
        assert any("compute_score gets None" in note for note in run(**bare).findings.notes) is is_noted, taken


def test_rows_without_an_answer_are_learnt_from_a_teacher_alone_and_labelled_ones_still_validate(run, tmp_path):
    write_rows(bare := tmp_path / "bare.jsonl", [{"prompt": PROMPT}] * 4)
    write_rows(sums := tmp_path / "sums.jsonl", [{"prompt": PROMPT, "data_source": "openai/gsm8k", "answer": "3"}])
    alone = {
        "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": str(save_model(tmp_path / "teacher")),
        "distillation.distillation_loss.use_task_rewards": False,
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "reward.custom_reward_function.path": None,
        "data.train_files": [str(bare)],
    }
    ready = run(**alone, **{"data.val_files": [str(bare)]})
    assert ready.scored == (False, False)
    assert any(fact.label == "reward" and fact.text.startswith("none: ") for fact in ready.findings.facts)
    ready = run(**alone, **{"data.val_files": [str(sums)]})
    assert ready.scored == (False, True)
    assert any(note.startswith("data.train_files has rows without an answer or") for note in ready.findings.notes)
    assert run(**alone | {"data.train_files": [str(sums)] * 2}, **{"data.val_files": [str(sums)]}).scored == (
        True,
        True,
    )
    own = {"reward.custom_reward_function.path": str(tmp_path / "reward.py")}
    assert run(**alone | own, **{"data.val_files": [str(bare)]}).scored == (True, True)
    (problem,) = refused(run, **alone, **{"algorithm.use_pf_ppo": True})
    assert problem.startswith("algorithm.use_pf_ppo needs scores, and the rows to train on have none")


def test_a_teacher_has_the_vocabulary_and_positions_that_its_pupil_needs(run, tmp_path):
    same, other = save_model(tmp_path / "same"), save_model(tmp_path / "other", f"{PROMPT} three")
    teacher = "distillation.teacher_models.teacher_model.model_path"
    enabled = {"distillation.enabled": True}
    ready = run(**enabled, **{teacher: str(same)})
    assert ready.folders["ref"] == same and ready.folders["actor"] != same
    assert any(fact.label == "teacher" and "same" in fact.text for fact in ready.findings.facts)
    (problem,) = refused(run, **enabled, **{teacher: str(other)})
    assert problem.startswith(f"{teacher} names other, which has another vocabulary than the policy")
    loss = "distillation.distillation_loss"
    top = {f"{loss}.loss_mode": "reverse_kl_topk", f"{loss}.topk": 10_000_000}
    (problem,) = refused(run, **enabled, **{teacher: str(same)}, **top)
    assert problem.startswith("distillation.distillation_loss.topk is 10000000, and same knows ")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4}))
    (problem,) = refused(run, **enabled, **{teacher: str(same)})
    assert "but same has 4 positions" in problem
    (same / "config.json").write_text(json.dumps(config | {"vocab_size": 3}))
    (problem,) = refused(run, **enabled, **{teacher: str(same)})
    assert problem.startswith(f"{teacher} names same, which embeds 3 tokens, and its tokenizer has ")
    (same / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    fewer = "embeds 99 tokens and the policy 100. The rest stand for no text"
    assert any(fewer in note for note in run(**enabled, **{teacher: str(same)}).findings.notes)
    own = run(**enabled, **{teacher: str(ready.folders["actor"])})
    assert any("names the policy's own model" in note for note in own.findings.notes)
