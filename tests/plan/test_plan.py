"""The plan of a launch line: whether it fits, the layout that is found, the line that starts it."""

from dataclasses import replace

import pytest

from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.errors import ConfigError
from hrl.plan.cost import Phase, together_s
from hrl.plan.hardware import GPUS
from hrl.plan.launch_line import LaunchLine, PlanError
from hrl.plan.layout import OPTIMIZER_OFFLOAD, SLEEPS, best_layout, with_changes
from hrl.plan.lengths import Lengths
from hrl.plan.plan import cost_model, plan
from hrl.plan.shapes import sizes_of
from hrl.plan.show import lines
from hrl.preflight.memory_ledger import ledgers_of
from tests.plan.models import EXPERTS, SEVEN, SEVENTY, folder_of
from tests.plan.recorded import TWO_CORES

H100 = GPUS["h100"]
WORK = ("data.train_files=rows.jsonl", "data.train_batch_size=512", "data.max_prompt_length=1024",
        "data.max_response_length=3072")  # fmt: skip
ALONE = ("trainer.role_pools={actor: null}", "trainer.total_training_steps=0", "trainer.resume_mode=disable")
ON_POLICY = ("actor_rollout_ref.actor.ppo_mini_batch_size=512", "actor_rollout_ref.actor.use_kl_loss=false")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    models = {"seven": SEVEN, "seventy": SEVENTY, "experts": EXPERTS}
    return {name: folder_of(config, place / name) for name, config in models.items()}


def planned(folder, devices, *more, hardware=H100):
    line = LaunchLine.of(["grpo", *WORK, f"actor_rollout_ref.model.path={folder}", *more])
    return plan(line, hardware, devices, Lengths())


def test_memory_is_the_ledgers(folders):
    found = planned(folders["seven"], 8)
    model = found.model
    ledgers = ledgers_of(model.config, sizes_of(model.shapes), "cuda", H100.memory)
    assert found.cost.peak_bytes == max(ledger.peak.num_bytes for ledger in ledgers)


@pytest.mark.parametrize("name", ["seven", "experts"])
def test_the_best_layout_fits_is_not_slower_and_its_line_composes(folders, name):
    found = planned(folders[name], 16)
    assert found.best.model.misfit() is None
    assert found.misfit is not None or found.best.cost.seconds <= found.cost.seconds
    config = found.best_line.config()
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    again = plan(found.best_line, H100, None, Lengths())
    assert again.cost.seconds == pytest.approx(found.best.cost.seconds)


def test_what_does_not_fit_as_given_gets_a_layout_that_does(folders):
    found = planned(folders["seventy"], 64)
    assert "its weights take 131" in found.misfit
    assert dict(found.best.changes)["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 8
    assert found.apart.cost.seconds > found.best.cost.seconds  # the two halves take turns


def test_what_fits_no_layout_is_told_with_the_number_that_it_takes(folders):
    with pytest.raises(PlanError, match=r"no layout fits 2 × h100.*With --gpus 16 there is a layout that fits"):
        planned(folders["seventy"], 2)


def test_devices_fill_their_machines():
    with pytest.raises(PlanError, match="take a multiple of 8, or say how many GPUs a machine has"):
        plan(LaunchLine.of(["grpo"]), H100, 12, Lengths())


def test_a_mean_above_the_longest_is_refused():
    for lengths, said in (
        (Lengths(prompt=65), "--prompt-tokens 65 is above data.max_prompt_length=64"),
        (Lengths(response=33), "--response-tokens 33 is above data.max_response_length=32"),
    ):
        with pytest.raises(PlanError, match=said):
            plan(LaunchLine.of([]), H100, 8, lengths)


def test_what_is_said_of_episodes_goes_with_the_line_and_with_itself():
    with pytest.raises(PlanError, match=r"--turns 3 is of episodes, and environment.path is null: set it, or leave"):
        plan(LaunchLine.of([]), H100, 8, Lengths(turns=3))
    line = LaunchLine.of(["environment.path=guess.py:Guess", "environment.max_turn_tokens=9"])
    for lengths, said in (
        (Lengths(turns=9), "--turns 9 is above environment.max_turns=8: take a smaller mean"),
        (Lengths(turn_tokens=10), "--turn-tokens 10 is above environment.max_turn_tokens=9"),
        (Lengths(turn_tokens=9), "episodes of 4 turns with --turn-tokens 9 do not go into responses of 32 tokens"),
        (Lengths(environment_tokens=32), "with --environment-tokens 32 do not go into responses of 32 tokens"),
        (Lengths(response=30, turn_tokens=2, environment_tokens=9), "leave out one of them"),
        (Lengths(shared=1.0), "--shared-tokens 1 leaves nothing to compute"),
    ):
        with pytest.raises(PlanError, match=said):
            plan(line, H100, 8, lengths)


def test_a_plan_of_episodes_says_what_it_takes_them_to_be_and_what_they_wait_for(folders):
    line = LaunchLine.of(["grpo", *WORK, f"actor_rollout_ref.model.path={folders['seven']}",
                          "environment.path=guess.py:Guess", "environment.max_concurrent_episodes=64"])  # fmt: skip
    found = plan(line, H100, 8, Lengths(turns=4, turn_tokens=200, environment_s=300))
    assert found.model.engines().max_episodes == 8
    assert found.cost.bottleneck[:2] == ("gen", "waiting for environments")
    text = "\n".join(map(str, lines(found)))
    assert "responses of 1,600 tokens" in text
    assert (
        "episodes of 4 turns: 800 tokens of the policy's, 800 of the environment's, 300 s with it; prompts are shared "
        "(assumed: --shared-tokens)"
    ) in text


def test_machines_are_as_large_as_the_line_says(folders):
    found = planned(folders["seven"], 12, "trainer.n_gpus_per_node=4")
    trainer, hardware = found.model.config.trainer, found.model.hardware
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (3, 4)
    assert (hardware.per_machine, hardware.network_rate) == (4, 200e9)
    assert planned(folders["seven"], 4).model.hardware == H100  # half of a machine of eight


def test_pools_of_another_number_of_devices_are_refused(folders):
    pools = "trainer.resource_pools={global: [8]}"
    assert planned(folders["seven"], 8, pools).cost.devices == 8
    with pytest.raises(PlanError, match="--gpus 16 does not go with trainer.resource_pools, which have 8 devices"):
        planned(folders["seven"], 16, pools)


def test_a_run_that_does_not_learn_is_refused(folders):
    with pytest.raises(PlanError, match="nothing learns"):
        planned(folders["seven"], None, *ALONE)


def test_engines_that_need_not_sleep_are_found_and_those_apart_where_they_are_quicker(folders):
    small = ("quickstart=ppo", "data.train_files=rows.jsonl")
    found = plan(LaunchLine.of(list(small)), H100, 8, Lengths())
    assert dict(found.best.changes)[SLEEPS] is False
    sleeping = next(phase for phase in found.cost.phases if phase.name == "weight_sync").seconds
    awake = next(phase for phase in found.best.cost.phases if phase.name == "weight_sync").seconds
    assert sleeping - awake == pytest.approx(3.0)
    assert found.best.cost.seconds == min(found.apart.cost.seconds, found.together.cost.seconds)


def test_the_given_layout_stays_where_none_is_better(folders):
    first = planned(folders["seven"], 64)
    again = plan(first.best_line, H100, None, Lengths())
    assert (again.best.changes, again.best.cost) == ((), again.cost)


def test_critic_and_reference_are_laid_out_as_the_actor(folders):
    line = ("recipe=ppo", f"critic.model.path={folders['seven']}")
    changes = dict(planned(folders["seven"], 4, *line).best.changes)
    assert changes[OPTIMIZER_OFFLOAD] is True
    assert changes["critic.model.fsdp_config.optimizer_offload"] is True
    alone = dict(planned(folders["seven"], 1).best.changes)
    assert alone["actor_rollout_ref.ref.fsdp_config.param_offload"] is True
    assert not [key for key in alone if key.startswith("critic")]


def test_phases_are_those_that_the_run_has(folders):
    names = [phase.name for phase in planned(folders["seven"], 8, *ON_POLICY).cost.phases]
    assert names == ["gen", "adv", "update_actor", "weight_sync"]  # on policy: no log-prob beyond the update
    names = [phase.name for phase in planned(folders["seven"], 8, "recipe=ppo").cost.phases]
    assert names == [
        "gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "weight_sync",
    ]  # fmt: skip


def test_more_devices_make_neither_sampling_nor_an_update_slower(folders):
    line = LaunchLine.of(["grpo", *WORK, f"actor_rollout_ref.model.path={folders['seven']}"])
    model, seconds = cost_model(line.config(), H100, Lengths()), []
    for machines in (1, 2, 4, 8, 16):
        wider = with_changes(model, (("trainer.resource_pools", {"global": [8] * machines}),))
        seconds.append({phase.name: phase.seconds for phase in wider.cost().phases})
    for phase in ("gen", "update_actor"):
        assert [each[phase] for each in seconds] == sorted((each[phase] for each in seconds), reverse=True)


def test_the_quickstart_is_planned_for_this_machine():
    found = plan(LaunchLine.of([]), TWO_CORES, None, Lengths(45, 22))
    assert found.misfit is None
    assert found.apart is None
    assert 5 < found.cost.seconds < 15


def test_the_search_keeps_what_hardly_matters(folders):
    found = planned(folders["seven"], 8)
    for key, _ in found.best.changes:
        fewer = tuple(change for change in found.best.changes if change[0] != key)
        without = with_changes(found.model, fewer)
        assert without.misfit() is not None or without.cost().seconds > found.best.cost.seconds


def test_a_layout_leaves_memory_free(folders):
    for gpus in (4, 8):
        found = planned(folders["seven"], gpus)
        assert found.best.cost.peak_bytes <= 0.92 * H100.memory
        tight = replace(H100, memory=found.best.cost.peak_bytes / 0.95)
        layout = best_layout(replace(found.model, hardware=tight))
        assert layout.cost.peak_bytes <= 0.92 * tight.memory


def test_nothing_is_found_where_nothing_fits(folders):
    found = planned(folders["seven"], 8)
    assert best_layout(replace(found.model, hardware=replace(H100, memory=4e9))) is None


@pytest.mark.parametrize(
    ("words", "program", "implied"),
    [
        ([], "hrl train", ()),
        (["grpo"], "hrl train grpo", ("recipe=grpo",)),
        (["hrl", "train", "ppo"], "hrl train ppo", ("recipe=ppo",)),
        (["python", "-m", "hrl.trainer.main_ppo"], "python -m hrl.trainer.main_ppo", ()),
    ],
)
def test_a_launch_line_is_read_as_it_is_typed(words, program, implied):
    line = LaunchLine.of([*words, "trainer.seed=3"])
    assert (" ".join(line.program), line.implied, line.arguments) == (program, implied, ("trainer.seed=3",))
    assert str(line.with_values((("trainer.seed", 4),))) == f"{program} trainer.seed=4"


def test_a_plan_needs_no_rows(folders):
    line = LaunchLine.of(["grpo", f"actor_rollout_ref.model.path={folders['seven']}"])
    assert not line.names_rows
    with_rows = plan(line.with_values((("data.train_files", "rows.parquet"),)), H100, 8, Lengths())
    found = plan(line, H100, 8, Lengths())
    assert found.cost == with_rows.cost
    assert "train_files" not in str(found.best_line)
    assert LaunchLine.of([]).names_rows  # the quickstart's are bundled
    with pytest.raises(ConfigError, match=r"^1 problem in the configuration:\n  1. data.train_batch_size"):
        line.with_values((("data.train_batch_size", 0),)).config()


def test_other_kinds_of_run_and_wrong_keys_are_refused():
    with pytest.raises(PlanError, match=r"python -m hrl.trainer.main_dpo … can't be planned: only python -m hrl"):
        LaunchLine.of(["python", "-m", "hrl.trainer.main_dpo", "trainer.seed=3"])
    with pytest.raises(PlanError, match="dpo can't be planned"):
        LaunchLine.of(["dpo"])
    with pytest.raises(ConfigError):
        plan(LaunchLine.of(["data.no_such_key=3"]), TWO_CORES, None, Lengths())


def test_a_budget_takes_those_along_that_follow_it():
    line = LaunchLine.of([])
    model = plan(line, TWO_CORES, None, Lengths()).model
    changed = with_changes(model, (("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 8192),)).config
    composed = compose_kind(PPO, ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"])
    assert changed.micro_batches() == composed.micro_batches()


# ---------------------------------------------------------------------------------------------- phases at once


def test_phases_on_devices_of_their_own_take_as_long_as_the_longest_row_of_them():
    def phase(name, seconds, *devices):
        return Phase(name, {"work": seconds}, frozenset(devices) if devices else None)

    # The policy's device scores for 3 + 2 s, the critic's for 6, the reward model's for 4; then 5 and 7 s of updates.
    step = [
        phase("gen", 10.0), phase("reward", 4.0, "r"), phase("old_log_prob", 3.0, "a"), phase("ref", 2.0, "a"),
        phase("values", 6.0, "c"), phase("adv", 1.0), phase("update_critic", 5.0, "c"),
        phase("update_actor", 7.0, "a"), phase("weight_sync", 2.0),
    ]  # fmt: skip
    assert together_s(step) == 10 + 6 + 1 + 7 + 2
    assert together_s([replace(each, devices=frozenset("a") if each.devices else None) for each in step]) == 40
    assert together_s([replace(each, devices=None) for each in step]) == 40
    # The whole policy waits for a critic on one of its two devices, and a reference beside the critic does not.
    shared = [phase("old_log_prob", 3.0, "a", "b"), phase("ref", 2.0, "b"), phase("values", 6.0, "a")]
    assert together_s(shared) == 3 + 6
    assert together_s([]) == 0


PPO_WITH_MODEL = ("reward.reward_model.enable=true", "algorithm.use_kl_in_reward=true",
                  "actor_rollout_ref.actor.ppo_mini_batch_size=256")  # fmt: skip


@pytest.mark.parametrize(
    ("more", "together"),
    [
        (("placement=separate",), (("reward", "old_log_prob", "ref", "values"), ("update_critic", "update_actor"))),
        (("placement=colocated",), ()),
        # Actor and reference share devices, and so do critic and reward model, whose scores others wait for.
        (("placement=pairs",), ((("old_log_prob", "ref"), "values"), ("update_critic", "update_actor"))),
        (("placement=separate", "algorithm.rollout_correction.rollout_rs=token_k1",
          "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0"),
         (("ref", "values"), ("update_critic", "update_actor"))),
    ],
)  # fmt: skip
def test_a_plan_takes_the_longest_of_the_phases_that_run_at_once(folders, more, together):
    model = folders["seven"]
    line = LaunchLine.of(["ppo", *WORK, *PPO_WITH_MODEL, *more, f"actor_rollout_ref.model.path={model}",
                          f"critic.model.path={model}", f"reward.reward_model.model_path={model}",
                          "trainer.n_gpus_per_node=8"])  # fmt: skip
    cost = cost_model(line.config(), H100, Lengths()).cost()
    seconds = {phase.name: phase.seconds for phase in cost.phases}
    assert set(seconds) == {"gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
                            "weight_sync"}  # fmt: skip
    saved = 0.0
    for group in together:
        rows = [sum(seconds[name] for name in ([row] if isinstance(row, str) else row)) for row in group]
        saved += sum(rows) - max(rows)
    assert cost.overlap_s == pytest.approx(saved) and (saved > 0) == bool(together)
    assert cost.seconds == pytest.approx(sum(seconds.values()) - saved)
    assert cost.tokens_per_second == pytest.approx(cost.work.tokens / cost.seconds)
    on_cpus = cost_model(line.config(), TWO_CORES, Lengths()).cost()
    assert on_cpus.overlap_s == 0.0, "they share the cores"


def test_models_on_cpus_beside_gpus_are_not_planned_as_if_on_gpus(folders):
    line = LaunchLine.of(["ppo", *WORK, *PPO_WITH_MODEL, "placement=cpu_scorers",
                          f"actor_rollout_ref.model.path={folders['seven']}", "trainer.n_gpus_per_node=8",
                          f"reward.reward_model.model_path={folders['seven']}"])  # fmt: skip
    with pytest.raises(
        PlanError, match=r"ref, rm would compute on CPUs \(trainer.pool_options.scorers.use_gpu=false\)"
    ):
        plan(line, H100, None, Lengths())
