"""From a command line to a configuration: groups, values, files of the user, help."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hrl.config import ConfigError, compose_cli, load_config, run_kind
from hrl.config.help import check_help

ROOT = Path(__file__).parents[2]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose_cli(argv)
    return [str(problem) for problem in caught.value.problems]


def test_no_argument_is_the_quickstart():
    config = compose_cli([])
    assert config.actor_rollout_ref.model.path == "bundled:smollm2-135m-instruct"
    assert config.data.train_files == ["bundled:addition/train"]
    assert config.algorithm.adv_estimator == "grpo"
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (8, 8)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (64, 32)
    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert not config.needs_critic and not config.needs_reference and not config.needs_reward_model


@pytest.mark.parametrize("recipe", choices("recipe"))
def test_every_recipe_composes(recipe):
    config = compose_cli([f"recipe={recipe}"])
    assert config.trainer.experiment_name == recipe
    assert config.trainer.default_local_dir == f"outputs/hrl/{recipe}"


@pytest.mark.parametrize("placement", choices("placement"))
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_every_placement_composes_with_and_without_a_critic(recipe, placement):
    compose_cli([f"recipe={recipe}", f"placement={placement}", "trainer.n_gpus_per_node=2", "trainer.nnodes=2"])


def test_values_win_over_recipes_and_recipes_over_the_quickstart():
    config = compose_cli(["actor_rollout_ref.rollout.n=4", "recipe=grpo"])
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.actor.use_kl_loss


def test_all_problems_of_a_command_line_come_at_once():
    assert set(problems("algorithm.adv_estimatr=grpo", "trainer.total_epoch=3")) == {
        "algorithm.adv_estimatr is not a key of hrl. Did you mean algorithm.adv_estimator?",
        "trainer.total_epoch is not a key of hrl. Did you mean trainer.total_epochs?",
    }


def test_a_number_of_machines_that_is_none_is_one_problem():
    assert problems("trainer.nnodes=") == [
        "trainer.nnodes is empty, expected a whole number. Give it a value, or leave the key out."
    ]


def test_files_grammar_and_fields_are_reported_together():
    found = problems("recipe=grop", "trainer.seed=[1", "stray", "=", "a=1,2", "trainer.nnodes=0", "--fast")
    assert found == [
        "recipe has no choice 'grop'. Did you mean grpo?",
        "trainer.seed can't read '[1': no viable alternative at input '[1'. "
        "Write a list without spaces, or quote it: 'trainer.seed=[…,…]'.",
        "stray is not an override. Write key=value.",
        "= is not an override. Write key=value.",
        "a has several values; one run takes one. For a list write 'a=[1,2]'.",
        "--fast is not an option of this command. Write key=value; see --help.",
        "trainer.nnodes is 0, must be more than 0.",
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["data.train_files", "=", "x.jsonl"], "data.train_files=x.jsonl"),
        (["data.train_files", "=x.jsonl"], "data.train_files=x.jsonl"),
        (["data.train_files=", "x.jsonl"], "data.train_files=x.jsonl"),
        (["+trainer.seed", "=", "3"], "+trainer.seed=3"),
        (["data.train_files = x.jsonl"], "data.train_files=x.jsonl"),  # in quotes
        (["data.train_files\n=x.jsonl"], "data.train_files=x.jsonl"),
    ],
)
def test_blanks_around_the_sign_are_named_once(written, meant):
    what = f"{' '.join(written)} has blanks around the `=`. Write {meant}."
    assert problems(*written, "trainer.seed=x") == [what, "trainer.seed is 'x', expected a whole number."]


@pytest.mark.parametrize("key", ["é", "a b", '"a"', "a,b", "{a}", "a[0]", "a*", "(a)", "trainer;seed", "~trainer seed"])
def test_what_no_key_can_be_is_a_problem_among_the_others(key):
    text = key if key.startswith("~") else f"{key}=3"
    assert problems(text, "trainer.seed=x") == [
        f"{key.lstrip('~')} can't be a key. A key is made of words with dots between them, such as trainer.seed.",
        "trainer.seed is 'x', expected a whole number.",
    ]


def test_an_empty_value_beside_another_argument_is_no_blank():
    config = compose_cli(["trainer.experiment_name=", "trainer.nnodes=1"])
    assert (config.trainer.experiment_name, config.trainer.nnodes) == ("", 1)


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_a_plus_neither_hides_a_wrong_key_nor_harms_a_right_one(prefix):
    assert problems(f"{prefix}trainer.total_epoch=3") == [
        "trainer.total_epoch is not a key of hrl. Did you mean trainer.total_epochs?"
    ]
    assert compose_cli([f"{prefix}trainer.total_epochs=3"]).trainer.total_epochs == 3
    model = compose_cli([f"{prefix}actor_rollout_ref.model.override_config.max_position_embeddings=64"])
    assert model.actor_rollout_ref.model.override_config == {"max_position_embeddings": 64}


def test_a_tilde_returns_a_key_to_its_default():
    assert compose_cli(["~data.train_batch_size", "~actor_rollout_ref.actor.ppo_mini_batch_size"]).data == (
        load_config({"data": {"max_prompt_length": 64, "max_response_length": 32}}).data
    )
    assert compose_cli(["~actor_rollout_ref"]).actor_rollout_ref.actor.optim.lr == 1e-6


GENERATED = "reasoning_gym:gsm_symbolic?size=100&seed=1"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train_files", GENERATED, [GENERATED]),
        ("train_files", "~/rows.parquet", ["~/rows.parquet"]),
        ("train_files", "[a.parquet,'b c.jsonl']", ["a.parquet", "b c.jsonl"]),
        ("apply_chat_template_kwargs", "{enable_thinking: false}", {"enable_thinking": False}),
        ("max_prompt_length", "${data.max_response_length}", 32),
        ("seed", "${actor_rollout_ref.rollout.n}", 8),
    ],
)
def test_values_are_read_as_written(key, text, value):
    assert getattr(compose_cli([f"data.{key}={text}"]).data, key) == value


def test_a_reference_to_nothing_is_a_problem():
    (problem,) = problems("trainer.seed=${trainer.sed}")
    assert problem == "trainer.seed can't be resolved: Interpolation key 'trainer.sed' not found."


def test_pools_given_as_a_whole_replace_the_placement():
    config = compose_cli(["trainer.resource_pools={a: 1, b: [2]}", "trainer.role_pools={actor: a, rollout: b}"])
    assert config.trainer.resource_pools == {"a": [1], "b": [2]}
    assert config.trainer.role_pools == {"actor": "a", "rollout": "b"}


ROWS = "data:\n  train_files: rows.jsonl\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  seed: 5\n{ROWS}")
    (tmp_path / "bare.yaml").write_text(f"trainer:\n  seed: 6\n{ROWS}  train_batch_size: 256\n")
    (tmp_path / "wrong.yaml").write_text("trainer:\n  sed: 6\n")
    (tmp_path / "broken.yaml").write_text("trainer: [\n")
    (tmp_path / "mandatory.yaml").write_text("data:\n  train_files: ???\n")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "house.yaml").write_text("# @package _global_\ntrainer:\n  experiment_name: house\n")
    return tmp_path


def test_a_file_of_the_user_builds_on_hrls(own):
    config = compose_cli(["--config-path", str(own), "--config-name", "mine", "recipe=ppo"])
    assert (config.trainer.seed, config.algorithm.adv_estimator, config.data.train_batch_size) == (5, "gae", 1024)


def test_a_file_of_the_user_may_stand_alone_and_still_choose_a_recipe(own):
    config = compose_cli([f"--config-path={own}", "--config-name=bare.yaml", "recipe=rloo"])
    assert (config.trainer.seed, config.data.train_batch_size, config.data.max_prompt_length) == (6, 256, 512)
    assert config.algorithm.adv_estimator == "rloo"


def test_groups_of_the_user_stand_beside_hrls(own):
    assert compose_cli(["--config-dir", str(own), "recipe=house"]).trainer.experiment_name == "house"


@pytest.mark.parametrize("option", ["--config-dir", "--config-path"])
def test_a_folder_that_is_missing_is_the_only_problem(own, option):
    (problem,) = problems(option, str(own / "house"), "trainer.seed=3")
    assert problem.startswith(f"{option} names {own / 'house'}, which is not a folder.")


def test_a_relative_path_starts_at_the_working_folder(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    assert compose_cli(["-cp", own.name, "-cn", "mine"]).trainer.seed == 5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("wrong", "trainer.sed is not a key of hrl. Did you mean trainer.seed?"),
        ("broken", "broken.yaml can't be composed"),
        ("missing", "missing.yaml is not in "),
        ("x" * 400, "xx.yaml is not in "),
        ("mandatory", "data.train_files needs a value"),
    ],
)
def test_problems_of_a_file_are_problems_of_the_configuration(own, name, sentence):
    assert any(sentence in problem for problem in problems("-cp", str(own), "-cn", name))


def test_the_packaged_tree_is_used_where_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "hrl" / "_configs").mkdir(parents=True)
    (tmp_path / "hrl" / "_configs" / "ppo_trainer.yaml").write_text("")
    monkeypatch.setattr(run_kind.resources, "files", lambda package: tmp_path / package)
    run_kind.config_folder.cache_clear()
    try:
        assert run_kind.config_folder() == tmp_path / "hrl" / "_configs"
    finally:
        run_kind.config_folder.cache_clear()


def test_help_shows_groups_keys_and_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        compose_cli(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "recipe=" in text and "placement=" in text and "algorithm.adv_estimator" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_examples_of_check_are_lines_to_be_typed():
    text = check_help("ppo", ["ppo"])
    assert "usage: hrl check ppo [--full] [--config-only] [--json] [group=choice ...] [key=value ...]" in text
    assert "[" not in text.partition("examples:")[2]


def test_the_printed_configuration_loads_to_itself(capsys):
    with pytest.raises(SystemExit):
        compose_cli(["--cfg", "job", "recipe=ppo"])
    assert load_config(yaml.safe_load(capsys.readouterr().out)) == compose_cli(["recipe=ppo"])


def test_the_entry_names_both_keys_before_anything_large_is_imported():
    command = [sys.executable, "-X", "importtime", "-m", "hrl.trainer.main_ppo"]
    keys = ["algorithm.adv_estimatr=grpo", "trainer.total_epoch=3"]
    done = subprocess.run([*command, *keys], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "algorithm.adv_estimator?" in done.stderr and "trainer.total_epochs?" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in imported and not imported & {"torch", "ray", "transformers", "vllm"}
