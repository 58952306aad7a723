"""A small run keeps the shape of its layout, is valid whatever the line, and touches nothing of the user's."""

from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import LlamaConfig

from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import DPO, PPO, SFT, config_folder
from hrl.config.section import MODEL
from hrl.models.adapter import AdapterError, adapter_of
from hrl.models.footprint import footprint
from hrl.models.loading import ModelSource
from hrl.models.twin import Sharing, write_twin
from hrl.rehearse import prepare
from hrl.rehearse.adapters import small_adapter
from hrl.rehearse.parts import Rehearsal
from hrl.rehearse.prepare import small_run, with_a_teacher_of_its_own
from hrl.rehearse.smaller import MOST_PROCESSES, Shape, lost, shapes_of, smaller, with_twins
from tests.models.tiny import SHAPE

ROWS = "data.train_files=rows.jsonl"
ACTOR = "actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
CLUSTER = ("trainer.nnodes=8", "trainer.n_gpus_per_node=8")


def choices(group):
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def made(*line, kind=PPO, most=MOST_PROCESSES, **options):
    config = compose_kind(kind, [ROWS, *line])
    return config, smaller(kind, config, Path("/tmp/rehearsal/run"), most, **options)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ((), Shape(1, 1, 1, 1)),
        (CLUSTER, Shape(2, 2, 1, 1)),
        ((*CLUSTER, f"{FSDP}.fsdp_size=8"), Shape(4, 2, 1, 1)),
        ((*CLUSTER, f"{FSDP}.fsdp_size=1"), Shape(2, 1, 1, 1)),
        ((*CLUSTER, f"{FSDP}.ulysses_sequence_parallel_size=8"), Shape(4, 4, 2, 1)),
        (("trainer.n_gpus_per_node=8", f"{FSDP}.ulysses_sequence_parallel_size=8"), Shape(2, 2, 2, 1)),
        ((*CLUSTER, f"{TP}=8"), Shape(4, 4, 1, 2)),
        (("trainer.n_gpus_per_node=8", f"{TP}=8"), Shape(2, 2, 1, 2)),
        ((*CLUSTER, f"{FSDP}.tensor_parallel_size=4"), Shape(4, 4, 1, 1, 2)),
        ((*CLUSTER, f"{FSDP}.expert_parallel_size=8"), Shape(4, 4, 1, 1, 1, 2)),
        ((*CLUSTER, f"{TP}=4", f"{FSDP}.fsdp_size=16", f"{FSDP}.ulysses_sequence_parallel_size=2"), Shape(4, 2, 2, 2)),
    ],
)
def test_processes_that_shared_something_still_do(line, shape):
    config, small = made(*line)
    assert shapes_of(small.config) == {"global": shape}
    assert lost(config, small.config) == []


def test_what_few_processes_can_not_keep_is_said():
    line = (*CLUSTER, f"{TP}=8", f"{FSDP}.fsdp_size=8")
    config, small = made(*line, most=2)
    assert shapes_of(small.config) == {"global": Shape(2, 2, 1, 2)}
    assert lost(config, small.config) == ["copies beside each other", "several engines"]
    config, small = made(*line, most=1)
    assert lost(config, small.config) == ["several processes"]


def test_pools_stay_apart_and_keep_their_roles():
    pools = "trainer.resource_pools={train: [8, 8], sample: [4, 4]}"
    roles = "trainer.role_pools={actor: train, ref: train, rollout: sample}"
    config, small = made("recipe=grpo", pools, roles, f"{TP}=4")
    assert shapes_of(config) == {"train": Shape(16, 16, 1, 1), "sample": Shape(8, 1, 1, 4)}
    assert shapes_of(small.config) == {"train": Shape(2, 2, 1, 1), "sample": Shape(4, 1, 1, 2)}
    assert small.config.trainer.role_pools == config.trainer.role_pools


@pytest.mark.parametrize(
    ("recipe", "placement", "most"),
    [*((recipe, "colocated", 4) for recipe in choices("recipe")), *(("ppo", name, 2) for name in choices("placement"))],
)
def test_every_recipe_and_placement_is_valid_when_small(recipe, placement, most):
    line = (f"recipe={recipe}", f"placement={placement}", "trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{TP}=2")
    config, small = made(*line, most=most)
    assert max(shape.processes for shape in shapes_of(small.config).values()) <= most
    assert small.config.algorithm.adv_estimator == config.algorithm.adv_estimator
    assert small.config.needs_critic == config.needs_critic
    assert small.config.needs_reference == config.needs_reference


@pytest.mark.parametrize("size", choices("size"))
def test_every_size_is_valid_when_small_and_loses_nothing(size):
    config, small = made("recipe=grpo", f"size={size}")
    assert lost(config, small.config) == []
    assert small.config.trainer.nnodes == 1


def test_a_row_that_is_too_long_for_a_rank_still_is():
    line = ("trainer.n_gpus_per_node=8", f"{FSDP}.ulysses_sequence_parallel_size=4", "data.max_prompt_length=2000",
            "data.max_response_length=6000", f"{ACTOR}.ppo_max_token_len_per_gpu=2000")  # fmt: skip
    _, small = made(*line)
    actor = small.config.actor_rollout_ref.actor
    assert small.config.data.max_response_length == 16
    assert actor.ppo_max_token_len_per_gpu == 1008  # half of 2016, of which two ranks run each half


def test_a_step_keeps_its_mini_batches_and_passes():
    _, small = made("data.train_batch_size=1024", f"{ACTOR}.ppo_mini_batch_size=256", f"{ACTOR}.ppo_epochs=4")
    actor = small.config.actor_rollout_ref.actor
    assert (small.config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (4, 2, 2)
    _, small = made("data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=256")
    assert (small.config.data.train_batch_size, small.config.actor_rollout_ref.actor.ppo_mini_batch_size) == (2, 2)


def test_nothing_of_the_users_is_written_to_and_nobody_is_told():
    _, small = made("trainer.default_remote_dir=s3://mine/runs", "trainer.logger=[console,wandb]",
                    "trainer.dashboard=true", "trainer.resume_mode=resume_path",
                    "trainer.resume_from_path=/mine/step_3",
                    "trainer.ray_kwargs={address: auto}", "trainer.max_restarts=3")  # fmt: skip
    trainer = small.config.trainer
    assert trainer.default_local_dir == "/tmp/rehearsal/run"
    assert trainer.default_remote_dir is None and trainer.resume_from_path is None and trainer.ray_kwargs == {}
    assert trainer.logger == ["console-json"] and trainer.dashboard is False and trainer.max_restarts == 0
    told = {change.what: (change.was, change.now) for change in small.changes}
    assert told["trainer.default_remote_dir"] == ("s3://mine/runs", "null")
    assert told["trainer.resume_mode"] == ("resume_path", "auto")


def test_groups_are_not_filtered_because_a_random_model_is_never_right():
    _, small = made("recipe=dapo")
    assert not small.config.algorithm.filter_groups.enable
    assert ("algorithm.filter_groups.enable", "true", "false") in small.changes
    assert small.config.reward.overlong_buffer.enable and small.config.reward.overlong_buffer.len == 3


def test_episodes_keep_some_turns_and_room_for_what_the_environment_says():
    _, small = made("environment.path=single_turn", "environment.max_turns=9", "data.max_response_length=8000",
                    f"{ACTOR}.ppo_max_token_len_per_gpu=16384")  # fmt: skip
    settings = small.config.environment
    assert (settings.max_turns, settings.max_turn_tokens, small.config.data.max_response_length) == (2, 16, 1024)


@pytest.mark.parametrize("kind", [SFT, DPO], ids=["sft", "dpo"])
def test_runs_on_data_sets_too(kind):
    line = (*CLUSTER, "model.fsdp_config.ulysses_sequence_parallel_size=2", "data.max_token_len_per_gpu=4096")
    config, small = made(*line, kind=kind)
    assert shapes_of(small.config) == {"global": Shape(4, 4, 2, 1)}
    pair = 2 if kind is DPO else 1
    assert small.config.data.max_token_len_per_gpu == pair * config.data.max_length // 2
    assert small.config.data.train_batch_size == 4


def test_twins_take_the_place_of_models():
    _, small = made("recipe=ppo", "critic.model.path=/mine/critic",
                    "actor_rollout_ref.model.override_config={rope_theta: 1e6}")  # fmt: skip
    twins = {"actor": Path("/t/actor"), "critic": Path("/t/critic")}
    run = with_twins(PPO, small.config, twins, {"critic.model.lora_rank": 8})
    model = run.actor_rollout_ref.model
    assert (model.path, run.critic.model.path) == ("/t/actor", "/t/critic")
    assert (model.override_config, model.lora_rank, run.critic.model.lora_rank) == ({}, 0, 8)


# ---------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def thirty(tmp_path_factory):
    """The folder of a model of 30 layers, of which there is the config alone, and that of its twin, which has 2."""
    root = tmp_path_factory.mktemp("thirty")
    LlamaConfig(**SHAPE | {"num_hidden_layers": 30}, architectures=["LlamaForCausalLM"]).save_pretrained(root / "whole")
    options = {"override_config": {}, "trust_remote_code": False, "seed": 1}
    twin = write_twin(root / "whole", root / "twin", Sharing(), **options)
    assert twin.layers == (2, 30)
    return root / "whole", twin.folder


def quoted(each):
    """An assignment whose value, if it is a regular expression, is quoted as on a command line."""
    key, _, value = each.partition("=")
    return f'{key}="{value}"' if "\\" in value else each


def beside_twin(thirty, *line):
    """The adapter's section of the small run beside the twin, and what of it was reduced."""
    whole, twin = thirty
    _, small = made(f"{MODEL}.path={whole}", *(f"{MODEL}.{each}" for each in map(quoted, line)))
    (model,) = outline_of(small.config).models.values()
    adapter = small_adapter(model, whole, twin, trust_remote_code=False, seed=1)
    run = with_twins(PPO, small.config, {"actor": twin}, adapter.values).actor_rollout_ref.model
    source = ModelSource.to_look_at(twin, {}, trust_remote_code=False, max_model_len=32, adapter=adapter_of(run, 1))
    assert footprint(source).adapter > 0
    return run, {change.what.removeprefix(f"{MODEL}."): (change.was, change.now) for change in adapter.changes}


def test_an_adapter_that_the_tiny_model_can_have_stays(thirty):
    run, told = beside_twin(thirty, "lora_rank=16", r"target_modules=model\.layers\.\d+\.self_attn\.[qv]_proj",
                            "exclude_modules=[v_proj]", "use_rslora=true", "lora_alpha=5")  # fmt: skip
    assert told == {}
    assert (run.lora_rank, run.lora_alpha, run.use_rslora) == (16, 5, True)
    assert (run.target_modules, run.exclude_modules) == (r"model\.layers\.\d+\.self_attn\.[qv]_proj", ["v_proj"])


@pytest.mark.parametrize(
    ("line", "found", "reduced"),
    [
        ([r"target_modules=model\.layers\.2[0-9]\..*q_proj"], ("all-linear", None), ["target_modules"]),
        (["target_modules=[layers.20.self_attn.q_proj]", "exclude_modules=[down_proj]"],
         ("all-linear", ["down_proj"]), ["target_modules"]),
        (["target_modules=[q_proj]", r"exclude_modules=model\.layers\.[01]\..*"],
         (["q_proj"], None), ["exclude_modules"]),
        ([r"target_modules=model\.layers\.2[0-9]\..*_proj", "exclude_modules=[layers.20.self_attn.q_proj]"],
         ("all-linear", None), ["target_modules", "exclude_modules"]),
    ],
    ids=["expression", "list", "excluded", "both"],
)  # fmt: skip
def test_layers_that_the_tiny_model_lacks_are_replaced_and_told(thirty, line, found, reduced):
    run, told = beside_twin(thirty, "lora_rank=16", *line)
    assert (run.target_modules, run.exclude_modules) == found
    assert list(told) == reduced
    assert all(now.endswith("the tiny model lacks such layers") for _, now in told.values())


def test_layers_that_the_model_itself_lacks_are_refused_as_in_the_run(thirty):
    with pytest.raises(AdapterError, match=r"target_modules=.* leaves no linear layer of LlamaForCausalLM"):
        beside_twin(thirty, "lora_rank=16", r"target_modules=model\.layers\.3[0-9]\..*")


def test_a_folders_adapter_begins_anew_with_the_folders_own_fields(thirty, tmp_path):
    LoraConfig(r=4, lora_alpha=12, use_rslora=True, target_modules=["v_proj", "q_proj"]).save_pretrained(tmp_path)
    run, told = beside_twin(thirty, f"lora_adapter_path={tmp_path}", "lora_alpha=0", "target_modules=[up_proj]")
    assert (run.lora_adapter_path, run.lora_rank, run.lora_alpha, run.use_rslora) == (None, 4, 12, True)
    assert (run.target_modules, run.exclude_modules) == (["q_proj", "v_proj"], None)
    assert told == {"lora_adapter_path": (str(tmp_path), "null: a new one, rank 4")}


def test_a_folder_that_is_elsewhere_has_a_new_adapter_in_its_place(thirty):
    run, told = beside_twin(thirty, "lora_adapter_path=/mine/adapter", "lora_alpha=0", "target_modules=[layers.20.x]")
    assert (run.lora_adapter_path, run.lora_rank, run.lora_alpha, run.target_modules) == (None, 8, 16, "all-linear")
    assert told == {"lora_adapter_path": ("/mine/adapter, which is not here", "null: a new one, rank 8")}
    assert beside_twin(thirty, "lora_adapter_path=/mine/adapter", "lora_rank=32")[0].lora_rank == 32


def test_a_line_that_goes_on_from_an_adapter_elsewhere_is_made_small_and_told(thirty, tmp_path):
    model = [f"{MODEL}.path={thirty[0]}", f"{MODEL}.lora_adapter_path=/mine/adapter", f"{MODEL}.lora_alpha=0"]
    lengths, found = ["data.max_prompt_length=64", "data.max_response_length=32"], Rehearsal(show=lambda _: None)
    run = small_run(PPO, compose_kind(PPO, [ROWS, *model, *lengths]), tmp_path, 1, found)
    assert (run.actor_rollout_ref.model.lora_rank, run.actor_rollout_ref.model.lora_alpha) == (8, 16)
    assert (
        f"{MODEL}.lora_adapter_path",
        "/mine/adapter, which is not here",
        "null: a new one, rank 8",
    ) in found.changes


def test_the_memory_of_a_rehearsal_is_that_of_an_adapter_where_one_is_trained(thirty, tmp_path):
    line = [ROWS, f"{MODEL}.path={thirty[0]}", "data.max_prompt_length=64", "data.max_response_length=32"]
    moments = {}
    for rank in (0, 4):
        config, found = compose_kind(PPO, [*line, f"{MODEL}.lora_rank={rank}"]), Rehearsal(show=lambda _: None)
        run = small_run(PPO, config, tmp_path / str(rank), 1, found)
        (phase,) = [phase for phase in prepare._ledger(run).phases if phase.name == "actor optimizer"]
        moments[rank] = sum(entry.num_bytes for entry in phase.entries if entry.label == "actor moments")
    folder = Path(run.actor_rollout_ref.model.path)
    adapter = adapter_of(run.actor_rollout_ref.model, 1)
    source = ModelSource.to_look_at(folder, {}, trust_remote_code=False, max_model_len=96, adapter=adapter)
    size = footprint(source)
    assert moments == {0: 8 * size.parameters, 4: 8 * size.adapter}


def test_a_folder_that_holds_no_adapter_is_refused_as_in_the_run(thirty, tmp_path):
    with pytest.raises(AdapterError, match=r"is no folder of an adapter: it has no adapter_config\.json"):
        beside_twin(thirty, f"lora_adapter_path={tmp_path}")


def test_an_engine_that_can_not_run_here_is_replaced_and_told():
    _, small = made(*CLUSTER, f"{TP}=8", "actor_rollout_ref.rollout.engine_kwargs={vllm: {seed: 3}}", engine="hf")
    rollout = small.config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.engine_kwargs) == ("hf", 1, {})
    assert ("actor_rollout_ref.rollout.name", "vllm", "hf") in small.changes


def test_a_served_teacher_is_not_asked_and_has_a_twin_in_its_place():
    teacher = "distillation.teacher_models.teacher_model"
    line = [ROWS, "recipe=distillation", f"{teacher}.server.urls=[http://10.0.0.5:8000]", f"{teacher}.model_path=null"]
    config = with_a_teacher_of_its_own(PPO, compose_kind(PPO, line))
    assert not config.teacher_is_served and outline_of(config).models["ref"].path == config.actor_rollout_ref.model.path
    plain = compose_kind(PPO, [ROWS])
    assert with_a_teacher_of_its_own(PPO, plain) is plain
