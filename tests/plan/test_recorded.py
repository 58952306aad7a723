"""The model of cost against steps that were measured: nothing is timed here."""

import pytest

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.plan.step import CostModel
from hrl.plan.workload import Workload
from tests.plan.recorded import DECODING, SMOL, STEPS, TWO_CORES

WITHIN = 0.20


def model_of(step):
    config = with_dtypes(compose_kind(PPO, ["actor_rollout_ref.rollout.dtype=bfloat16", *step.overrides]), "cpu")
    work = Workload.of(config, step.prompt, step.response, step.rows_run)
    return CostModel(config, {"actor": SMOL, "critic": SMOL}, TWO_CORES, work)


CASES = [(step, phase) for step in STEPS for phase in step.seconds]


@pytest.mark.parametrize(("step", "phase"), CASES, ids=[f"{step.name}: {phase}" for step, phase in CASES])
def test_a_phase_takes_what_the_model_says(step, phase):
    said = {each.name: each.seconds for each in model_of(step).cost().phases}
    assert said[phase] == pytest.approx(step.seconds[phase], rel=WITHIN)


@pytest.mark.parametrize("requests", DECODING)
def test_a_decode_step_takes_what_the_model_says(requests):
    said = sum(model_of(STEPS[0]).engines().iteration(requests, 60).values())
    assert said == pytest.approx(DECODING[requests][0], rel=WITHIN)


def test_most_of_what_is_compared_was_predicted():
    fixed = sum(len(step.fixes) for step in STEPS) + sum(fixes for _, fixes in DECODING.values())
    assert fixed < 0.25 * (len(CASES) + len(DECODING))
