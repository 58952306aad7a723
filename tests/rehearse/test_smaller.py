"""A small run keeps the shape of its layout, is valid whatever the line, and touches nothing of the user's."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import LlamaConfig

from hrl.config.compose import compose_kind, to_yaml
from hrl.config.outline import outline_of
from hrl.config.placement import resolve_placement
from hrl.config.run_kind import DPO, PPO, SFT, config_folder
from hrl.config.section import MODEL
from hrl.models.adapter import AdapterError, adapter_of
from hrl.models.footprint import footprint
from hrl.models.loading import ModelSource
from hrl.models.twin import Sharing, write_twin
from hrl.rehearse import prepare
from hrl.rehearse.adapters import small_adapter
from hrl.rehearse.layout import MOST_PROCESSES, Shape, lost, not_kept, shapes_of
from hrl.rehearse.parts import Rehearsal, RehearsalError
from hrl.rehearse.prepare import look_at_all_rows, shown_here, small_run, with_a_teacher_of_its_own
from hrl.rehearse.rehearsal import _absent
from hrl.rehearse.smaller import smaller, with_twins
from tests.models.tiny import SHAPE
from tests.models.tiny_pictures import save_vl

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


SHARED = (
    "trainer.resource_pools={cards: 8, ref: 8, critic: 8}",
    "trainer.pool_options={cards: {max_colocate_count: 3, nodes: [big], accelerator_type: H100},"
    " ref: {split_of: cards}, critic: {split_of: cards}}",
    "trainer.role_pools={actor_rollout: cards, ref: ref, critic: critic}",
)
PARTS = (
    "trainer.resource_pools={cards: 16, train: 8, sample: 6, rest: 2}",
    "trainer.pool_options={train: {split_of: cards}, sample: {split_of: cards}, rest: {split_of: cards}}",
    "trainer.role_pools={actor: train, rollout: sample, critic: rest, ref: train}",
)
JOINED = (
    "trainer.resource_pools={train: 4, spare: 2}",
    "trainer.pool_options={all: {merge_of: [train, spare]}, train: {max_colocate_count: 2},"
    " spare: {max_colocate_count: 2, use_gpu: true}}",
    "trainer.role_pools={actor: train, rollout: spare, critic: all}",
)


@pytest.mark.parametrize(
    ("line", "most", "sizes"),
    [
        (SHARED, 4, {"cards": 2, "ref": 2, "critic": 2}),
        (SHARED, 1, {"cards": 1, "ref": 1, "critic": 1}),
        ((*SHARED, f"{FSDP}.fsdp_size=2"), 4, {"cards": 4, "ref": 4, "critic": 4}),
        (PARTS, 4, {"cards": 6, "train": 2, "sample": 2, "rest": 2}),
        (PARTS, 1, {"cards": 3, "train": 1, "sample": 1, "rest": 1}),
        (JOINED, 4, {"train": 2, "spare": 2, "all": 4}),
        (JOINED, 2, {"train": 1, "spare": 1, "all": 2}),
    ],
)
def test_pools_that_take_the_devices_of_others_still_do(line, most, sizes):
    config, small = made("recipe=ppo", *line, most=most)
    before, after = (resolve_placement(each) for each in (config, small.config))
    assert {pool: sum(each) for pool, each in small.config.trainer.resource_pools.items()} == sizes
    assert after.roles == before.roles
    for one, other in combinations(after.pools, 2):
        shares = [not {*each.devices(one)}.isdisjoint(each.devices(other)) for each in (before, after)]
        assert shares[0] == shares[1], (one, other)
    kept = small.config.trainer.pool_options
    assert {pool: (own.split_of, own.merge_of, own.max_colocate_count) for pool, own in kept.items()} == {
        pool: (own.split_of, own.merge_of, own.max_colocate_count) for pool, own in config.trainer.pool_options.items()
    }
    assert all(own.nodes == [] and own.accelerator_type is None for own in kept.values())


def test_the_small_placement_can_be_read_back_as_the_run_does(tmp_path):
    _, small = made("recipe=ppo", *SHARED)
    (tmp_path / "small.yaml").write_text(to_yaml(small.config, with_secrets=True))
    again = compose_kind(PPO, ["--config-path", str(tmp_path), "--config-name", "small"])
    assert resolve_placement(again) == resolve_placement(small.config)


def test_machines_that_pools_are_pinned_to_are_told_to_be_this_one():
    config, _ = made("recipe=ppo", *SHARED)
    assert [what for what, _ in not_kept(config)] == [
        "trainer.pool_options.cards.nodes=[big]",
        "trainer.pool_options.cards.accelerator_type=H100",
    ]
    (told,) = not_kept(made("trainer.resource_pools={cards: 8, cpus: 8}", "trainer.role_pools={ref: cpus}",
                            "trainer.pool_options={cpus: {use_gpu: false}}")[0])  # fmt: skip
    assert told[0] == "trainer.pool_options.cpus.use_gpu=false"


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


@pytest.mark.parametrize(
    ("name", "urls", "told"),
    [("server", True, "servers"), ("sglang", True, "SGLang's servers"), ("sglang", False, "SGLang's engines")],
)
def test_engines_of_others_are_not_asked_and_one_of_the_runs_own_stands_for_them(name, urls, told):
    rollout = "actor_rollout_ref.rollout"
    line = [f"{rollout}.server.urls=[http://10.0.0.5:8000]", f"{rollout}.server.weights_folder=/shared"] if urls else []
    config, small = made(f"{rollout}.name={name}", *line, engine=prepare._engine_here(compose_kind(PPO, [
        ROWS, f"{rollout}.name={name}", *line])))  # fmt: skip
    assert (small.config.actor_rollout_ref.rollout.name, small.config.actor_rollout_ref.rollout.server.urls) == (
        "hf",
        [],
    )
    assert (f"{rollout}.name", name, "hf") in small.changes
    assert told in dict(_absent(config))


@pytest.mark.parametrize(
    ("given", "kept", "told"),
    [
        ({"quantization": "fp8"}, {"quantization": "fp8_per_channel"}, ["quantization"]),
        ({"quantization": "fp8_per_channel", "seed": 3}, {"quantization": "fp8_per_channel", "seed": 3}, []),
        ({"speculative_config": {"method": "eagle", "model": "drafts"}, "attention_backend": "FLASH_ATTN"}, {},
         ["speculative_config", "attention_backend"]),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
         {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, []),
    ],
)  # fmt: skip
def test_vllm_is_told_what_its_cpu_backend_runs_and_the_rest_is_said(given, kept, told):
    config = compose_kind(PPO, [ROWS])
    kwargs = config.actor_rollout_ref.rollout.model_copy(update={"engine_kwargs": {"vllm": given}})
    config = config.model_copy(
        update={"actor_rollout_ref": config.actor_rollout_ref.model_copy(update={"rollout": kwargs})}
    )
    small = smaller(PPO, config, Path("/tmp/rehearsal/run"), 1)
    assert small.config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": kept}
    assert small.config.actor_rollout_ref.rollout.dtype == ("bfloat16" if "quantization" in given else "auto")
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    assert [change.what.removeprefix(key) for change in small.changes if change.what.startswith(key)] == told


@pytest.fixture
def roomy(monkeypatch):
    """A machine with memory enough, whatever else runs on this one."""
    monkeypatch.setattr(prepare.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**36))


JUDGED = ("recipe=grpo", "reward.reward_model.enable=true", "reward.reward_model.serve=true",
          "reward.reward_model.model_path=/mine/judge", "trainer.role_pools={rm: judge}",
          "trainer.resource_pools={global: [8], judge: [8]}")  # fmt: skip


@pytest.mark.usefixtures("roomy")
def test_a_served_judge_is_a_twin_of_its_own_on_fewer_devices_and_says_a_score(thirty, tmp_path):
    arguments = "reward.reward_model.server_kwargs={tensor_parallel_size: 4, quantization: fp8}"
    other = "{name: judge, label: other, base_url: 'http://a/v1', model: m}"
    asks = f"reward.functions=[{{name: judge, options: {{seed: 1}}}}, {other}]"
    line = [*JUDGED, arguments, asks, f"reward.reward_model.model_path={thirty[0]}", f"{MODEL}.path={thirty[0]}",
            "data.max_prompt_length=64", "data.max_response_length=32"]  # fmt: skip
    found = Rehearsal(show=lambda _: None)
    run = small_run(PPO, compose_kind(PPO, [ROWS, *line]), tmp_path, 4, found)
    model = run.reward.reward_model
    assert run.trainer.resource_pools == {"global": [2], "judge": [4]}
    assert model.server_kwargs == {"tensor_parallel_size": 2, "quantization": "fp8_per_channel"}
    assert footprint(ModelSource.to_look_at(Path(model.model_path), {}, trust_remote_code=False, max_model_len=1,
                                            adapter=None)).parameters < 1e7  # fmt: skip
    own, other = run.reward.functions
    assert own.kwargs["options"] == {"seed": 1, "structured_outputs": {"regex": "[0-9]"}} and own.kwargs["high"] == 9
    assert other.kwargs == {"base_url": "http://a/v1", "model": "m"}
    told = {change.what: (change.was, change.now) for change in found.changes}
    assert told["processes of pool judge sharing an engine"] == ("4", "2")
    assert "reward.functions, judge" in told
    assert any(part.detail.count("llama, 2 of 30 layers") == 2 for part in found.parts)


def test_a_served_model_that_is_not_here_is_told_with_its_key(thirty, tmp_path):
    config = compose_kind(PPO, [ROWS, *JUDGED, f"{MODEL}.path={thirty[0]}"])
    found = Rehearsal(show=lambda _: None)
    with pytest.raises(RehearsalError):
        small_run(PPO, config, tmp_path, 1, found)
    assert "add reward.reward_model.model_path=… to the line" in found.parts[0].detail


@pytest.mark.usefixtures("roomy")
def test_rows_with_pictures_are_sampled_by_what_shows_them_here_and_read_as_the_line_has_them(tmp_path, monkeypatch):
    model, found = save_vl(tmp_path / "model"), Rehearsal(show=lambda _: None)
    line = ["data.train_files=bundled:shapes/train?size=4&side=64", "data.train_batch_size=2", f"{MODEL}.path={model}",
            "data.max_prompt_length=160", "data.max_response_length=32", "trainer.n_gpus_per_node=8"]  # fmt: skip
    config = compose_kind(PPO, line)
    small = small_run(PPO, config, tmp_path, 1, found)
    assert look_at_all_rows(config, small, found)
    assert "pictures: 1 a row, 4 in all" in found.parts[-1].detail
    for is_there, engine in ((True, "vllm"), (False, "hf")):
        monkeypatch.setattr(prepare, "vllm_shows_pictures_here", lambda is_there=is_there: is_there)
        run = shown_here(PPO, small, found, pictures=True)
        assert run.actor_rollout_ref.rollout.name == engine
        assert any("torchvision" in change.now for change in found.changes) == (engine == "hf")
    assert shown_here(PPO, small, found, pictures=False) is small
    served = compose_kind(PPO, [*line, "actor_rollout_ref.rollout.name=sglang"])
    with pytest.raises(RehearsalError):
        look_at_all_rows(served, small, found)
    assert "which its engines are not sent" in found.parts[-1].detail


def test_a_wait_of_the_run_is_shorter_than_what_a_start_of_it_may_take():
    waits = [made(limit_s=limit_s)[1].config.trainer.timeouts for limit_s in (300, 900, 9000)]
    assert [wait.init_s for wait in waits] == [200, 600, 600]  # the line's own is 600
    assert [wait.call_s for wait in waits] == [200, 600, 1800]
