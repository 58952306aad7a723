"""The model of cost against steps that were measured: nothing is timed here."""

from dataclasses import replace
from statistics import median

import pytest

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.plan.assumptions import ON_CPU, ON_GPU
from hrl.plan.lengths import Lengths
from hrl.plan.step import CostModel, driver_s
from hrl.plan.sync import sync_s
from hrl.plan.training import PRODUCTS
from hrl.plan.workload import Workload
from tests.plan.recorded import DECODING, EPISODES, EPISODES_OVERRIDES, HOP_TOKENS, HOPS, SMOL, STEPS, SYNC_S, TWO_CORES

WITHIN = 0.20


def model_of(step):
    return model(config_of(step.overrides), Lengths(step.prompt, step.response, step.rows_run))


def config_of(overrides):
    return with_dtypes(compose_kind(PPO, ["actor_rollout_ref.rollout.dtype=bfloat16", *overrides]), "cpu")


def model(config, lengths):
    return CostModel(config, {"actor": SMOL, "critic": SMOL}, TWO_CORES, Workload.of(config, lengths))


def off_with_episodes():
    """Return phase → the model's seconds over the measured ones, of each step with episodes."""
    config, off = config_of(EPISODES_OVERRIDES), {}
    for lengths, seconds in EPISODES:
        said = {each.name: each.seconds for each in model(config, lengths).cost().phases}
        for phase, measured in seconds.items():
            off.setdefault(phase, []).append((measured, said[phase]))
    return off


def test_phases_of_steps_with_episodes_take_what_the_model_says_in_the_median():
    for phase, steps in off_with_episodes().items():
        assert median(said / measured for measured, said in steps) == pytest.approx(1.0, abs=WITHIN), phase


CASES = [(step, phase) for step in STEPS for phase in step.seconds]
NAMES = [f"{step.run}, step {step.number}: {phase}" for step, phase in CASES]


@pytest.mark.parametrize(("step", "phase"), CASES, ids=NAMES)
def test_a_phase_takes_what_the_model_says(step, phase):
    said = {each.name: each.seconds for each in model_of(step).cost().phases}
    assert said[phase] == pytest.approx(step.seconds[phase], rel=WITHIN)


def of_a_token(requests):
    """Return the seconds of a batch of requests of 45 + 32 tokens over these 32, without hrl's own part."""
    engines = model_of(STEPS[0]).engines()
    work = Workload(max(1, requests // 8), min(requests, 8), 45, 32, 32)
    return (sum(engines.seconds(work).values()) - ON_CPU.wave_s) / 32


@pytest.mark.parametrize("requests", DECODING)
def test_an_engine_takes_what_the_model_says(requests):
    assert of_a_token(requests) == pytest.approx(DECODING[requests][0], rel=WITHIN)


def test_a_weight_sync_takes_what_the_model_says():
    said = sum(sync_s(SMOL, 1, TWO_CORES, ON_CPU, shares=True, sleeps=True).values())
    assert [said] * 2 == pytest.approx(SYNC_S, rel=WITHIN)


@pytest.mark.parametrize("ranks", HOPS)
def test_a_hop_takes_what_the_model_says(ranks):
    assert driver_s(ON_GPU, HOP_TOKENS, ranks) == pytest.approx(HOPS[ranks], rel=WITHIN)


def test_most_of_what_is_compared_was_predicted():
    fixed = sum(len(step.fixes) for step in STEPS) + sum(fixes for _, fixes in DECODING.values())
    assert fixed < 0.25 * (len(CASES) + len(DECODING))


def test_a_critic_learns_from_rows_that_teach_the_policy_nothing():
    whole = model_of(STEPS[-1])  # of PPO
    half = replace(whole, work=replace(whole.work, teaching=0.5))
    said, less = ({phase.name: phase.terms[PRODUCTS] for phase in each._updates() if PRODUCTS in phase.terms}
                  for each in (whole, half))  # fmt: skip
    assert less["update_critic"] == said["update_critic"]
    assert less["update_actor"] == pytest.approx(said["update_actor"] / 2)
