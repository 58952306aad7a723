"""The plan of a launch line: whether it fits, the layout that is found, the line that starts it."""

from dataclasses import replace

import pytest

from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.errors import ConfigError
from hrl.plan.hardware import GPUS
from hrl.plan.launch_line import LaunchLine, PlanError
from hrl.plan.layout import best_layout, with_changes
from hrl.plan.plan import Lengths, cost_model, plan
from hrl.plan.shapes import sizes_of
from hrl.preflight.memory_ledger import ledgers_of
from tests.plan.models import EXPERTS, SEVEN, SEVENTY, folder_of
from tests.plan.recorded import TWO_CORES

H100 = GPUS["h100"]
WORK = ("data.train_files=rows.jsonl", "data.train_batch_size=512", "data.max_prompt_length=1024",
        "data.max_response_length=3072")  # fmt: skip
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
    ledgers = ledgers_of(model.config, sizes_of(model.shapes), "cuda", 80e9)
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
    with pytest.raises(PlanError, match="take a multiple of 8"):
        plan(LaunchLine.of(["grpo"]), H100, 12, Lengths())


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


def test_other_kinds_of_run_and_wrong_keys_are_refused():
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
