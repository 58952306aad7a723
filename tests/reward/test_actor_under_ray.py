"""The reward loop as a Ray actor: where it runs, what it passes on, and what is said when it is gone."""

import os
import signal
from datetime import date

import pytest
import ray

from hrl.reward.actor import RewardActor, RewardError
from hrl.reward.function import UserFile
from hrl.reward.pool import RewardRow
from hrl.reward.spec import RewardSpec
from tests.processes.process_table import still_alive
from tests.reward.settings import reward

pytestmark = pytest.mark.usefixtures("ray_session")

FUNCTION = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        return {"score": 0.0, "child": child, "parent": os.getpid()}
    return {"score": float(solution_str), "right": solution_str == ground_truth}
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(FUNCTION)
    return RewardSpec(UserFile(str(file)))


@pytest.fixture(scope="module")
def actor(ray_session, spec):
    started = RewardActor(spec, reward(timeout_s=5.0))
    started.start()
    yield started
    started.shutdown()


def rows(number, **extra_info):
    return [RewardRow(("g", index), "sums", "1", extra_info) for index in range(number)]


def hand_over(actor, step, *texts):
    """As a worker does: no answer is awaited."""
    for index, text in enumerate(texts):
        actor.handle.submit.remote(step, ("g", index), text)


def test_samples_sent_without_awaiting_an_answer_are_scored(actor):
    actor.begin(1, rows(2))
    hand_over(actor, 1, "1", "0.5")
    scored = actor.collect(1, deadline_s=20.0)
    assert [outcome.score for outcome in scored] == [1.0, 0.5]
    assert [outcome.parts for outcome in scored] == [{"right": 1.0}, {"right": 0.0}]


def test_it_runs_on_the_drivers_node_and_nowhere_else(actor):
    here = ray.get_runtime_context().get_node_id()
    assert ray.get(actor.handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())) == here


def test_a_failing_sample_is_the_loops_own_error_and_names_what_was_scored(actor):
    actor.begin(2, rows(2), title="the validation after step 7")
    hand_over(actor, 2, "1", "no number")
    with pytest.raises(RewardError, match=r"(?s)mine.py failed on 1 of 2 samples of the validation after step 7.*g/1"):
        actor.collect(2, deadline_s=20.0)


def test_a_sample_that_could_not_be_taken_surfaces_at_the_next_collect_at_once(actor):
    actor.begin(3, rows(2, day=date(2020, 2, 2)))
    hand_over(actor, 3, "1")
    with pytest.raises(RewardError, match=r"(?s)compute_score in .*mine.py.*g/0 of step 3: extra_info of .*is a date"):
        actor.collect(3, deadline_s=300.0)


def test_a_sample_that_comes_when_its_step_is_over_is_not_lost_either(actor):
    actor.begin(4, rows(1))
    hand_over(actor, 4, "1")
    actor.collect(4, deadline_s=20.0)
    ray.get(actor.handle.submit.remote(4, ("g", 0), "1"))
    actor.begin(5, rows(1))
    hand_over(actor, 5, "1")
    with pytest.raises(RewardError, match="g/0 of step 4: step 4 was not begun, or is collected already"):
        actor.collect(5, deadline_s=20.0)
    actor.begin(6, rows(1))
    hand_over(actor, 6, "1")
    assert [outcome.score for outcome in actor.collect(6, deadline_s=20.0)] == [1.0]


def test_its_death_is_a_reward_error_that_names_the_process_and_what_to_do(spec):
    victim = RewardActor(spec, reward(timeout_s=5.0))
    victim.start()
    victim.begin(1, rows(1))
    os.kill(victim.pid, signal.SIGKILL)
    hand_over(victim, 1, "1")
    with pytest.raises(RewardError) as raised:
        victim.collect(1, deadline_s=60.0)
    message = str(raised.value)
    assert f"process {victim.pid} on the driver's node) died before it answered `collect`" in message
    assert "lower reward.num_workers" in message
    with pytest.raises(RewardError, match="died before it answered `begin`"):
        victim.begin(2, rows(1))
    victim.shutdown()


def test_no_answer_in_time_is_a_reward_error(actor):
    actor.begin(7, rows(1))
    with pytest.raises(RewardError, match=r"did not answer `collect` within 0.1 s"):
        actor._call("collect", 7, 1.0, timeout_s=0.1)


def end_by_shutdown(actor):
    actor.shutdown()


def end_by_sigkill(actor):
    os.kill(actor.pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [end_by_shutdown, end_by_sigkill])
def test_what_a_reward_function_started_ends_with_the_service(spec, end):
    ended = RewardActor(spec, reward(timeout_s=5.0))
    ended.start()
    ended.begin(1, rows(1))
    hand_over(ended, 1, "fork")
    (outcome,) = ended.collect(1, deadline_s=20.0)
    pids = [int(outcome.parts[name]) for name in ("parent", "child")]
    assert still_alive(pids, within_s=0) == pids
    end(ended)
    assert not still_alive([ended.pid, *pids], within_s=15)
    ended.shutdown()
