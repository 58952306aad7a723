import ast
import inspect

from hrl.config import compose_cli
from hrl.report.phases import PHASES, phase_groups
from hrl.trainer import loop as training_loop
from hrl.trainer.offline import dpo
from hrl.trainer.offline import trainer as offline_trainer
from hrl.trainer.ppo import ray_trainer
from hrl.trainer.run import phases_of

NAMES = [phase.name for phase in PHASES]


def phases_timed_in(module):
    """In the order of the source, each where it stands first."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    timed = [
        call for call in calls if ast.unparse(call.func) == "self.phase" and isinstance(call.args[0], ast.Constant)
    ]
    return list(dict.fromkeys(call.args[0].value for call in sorted(timed, key=lambda call: call.lineno)))


def test_the_table_has_every_phase_that_the_trainers_time_in_its_order():
    assert phases_timed_in(training_loop) == ["step"]
    assert phases_timed_in(ray_trainer) == [name for name in NAMES if name != "update"]
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
    assert phases_of(compose_cli(["recipe=ppo"])) == [name for name in NAMES if name not in ("update", "testing")]
    without_models = phases_of(compose_cli([]))
    assert not {"ref", "values", "update_critic"} & set(without_models)
    assert {"gen", "reward", "adv", "update_actor", "weight_sync"} <= set(without_models)
