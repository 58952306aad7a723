import ast
import inspect

import pytest

from hrl.config import compose_cli
from hrl.report.phases import PHASES, Tokens, phase_groups, timing_metrics
from hrl.trainer import loop as training_loop
from hrl.trainer.kinds import KINDS
from hrl.trainer.offline import dpo
from hrl.trainer.offline import trainer as offline_trainer
from hrl.trainer.ppo import ray_trainer

NAMES = [phase.name for phase in PHASES]


def phases_timed_in(module):
    """In the order of the source, each where it stands first."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    timed = [
        call
        for call in calls
        if ast.unparse(call.func) in ("self.phase", "self._phase", "StepPhase")
        and isinstance(call.args[0], ast.Constant)
        and not any(word.arg == "is_timed" for word in call.keywords)
    ]
    return list(dict.fromkeys(call.args[0].value for call in sorted(timed, key=lambda call: call.lineno)))


def test_the_table_has_every_phase_that_the_trainers_time_in_its_order():
    assert phases_timed_in(training_loop) == ["step", "profile"]  # the whole, and what lies outside of it
    timed = phases_timed_in(ray_trainer)
    timed.remove("testing")  # beside the updates, or behind the step
    assert timed == [name for name in NAMES if name not in ("update", "testing")]
    assert phases_timed_in(offline_trainer) == ["update", "testing"]
    assert phases_timed_in(dpo) == ["ref"]


def test_no_two_phases_look_alike():
    for column in ("name", "label", "title"):
        values = [getattr(phase, column) for phase in PHASES]
        assert len(set(values)) == len(values), column


def test_groups_are_runs_of_neighbours_so_that_the_picture_stacks_them_in_order():
    grouped = [name for names in phase_groups().values() for name in names]
    assert grouped == [name for name in NAMES if name in grouped]


def test_the_bar_has_the_phases_that_the_run_has():
    assert KINDS["ppo"].phases(compose_cli(["recipe=ppo"])) == [
        name for name in NAMES if name not in ("rm", "update", "testing")
    ]
    without_models = KINDS["ppo"].phases(compose_cli([]))
    assert not {"ref", "values", "update_critic"} & set(without_models)
    assert {"gen", "reward", "adv", "update_actor", "weight_sync"} <= set(without_models)


def test_generation_time_is_per_response_token_and_the_rest_per_token():
    seconds = {"gen": 0.6, "update_actor": 1.2, "reward": 9.0, "step": 3.0}
    out = timing_metrics(seconds, Tokens(response=6, all=12), num_devices=1)
    assert out["timing_s/reward"] == 9.0
    assert out["timing_per_token_ms/gen"] == pytest.approx(600 / 6)
    assert out["timing_per_token_ms/update_actor"] == pytest.approx(1200 / 12)
    assert "timing_per_token_ms/reward" not in out


def test_throughput_is_per_device():
    out = timing_metrics({"step": 3.0}, Tokens(response=6, all=12), num_devices=2)
    assert out == {
        "timing_s/step": 3.0,
        "perf/total_num_tokens": 12.0,
        "perf/time_per_step": 3.0,
        "perf/throughput": 2.0,
    }


def test_a_step_without_responses_has_no_time_per_response_token():
    out = timing_metrics({"gen": 1.0, "step": 1.0}, Tokens(response=0, all=4), num_devices=1)
    assert "timing_per_token_ms/gen" not in out
