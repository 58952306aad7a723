import functools
import time
from contextlib import contextmanager

import pytest

from hrl.reward.actor import RewardError, RewardLoop, reward_metrics
from hrl.reward.function import BuiltIn, UserFile
from hrl.reward.pool import PlayedEpisode, RewardRow
from hrl.reward.spec import RewardSpec
from tests.reward.settings import reward

FUNCTION = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str == "raise":
        raise ZeroDivisionError("by the user")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "skip":
        return None
    if solution_str == "stuck":
        time.sleep(1000)
    if solution_str == "turns":
        return {"score": 1.0, "turn_scores": [float(len(turn)) for turn in kwargs["turns"]]}
    if solution_str == "conversation":
        said = " / ".join(f"{one['role']}: {one['content']}" for one in kwargs["conversation"])
        return {"score": 1.0, "said": said}
    if solution_str == "a score too many":
        return {"turn_scores": [0.0, *map(len, kwargs["turns"])]}
    if file := extra_info.get("file"):
        open(file, "w").close()
    time.sleep(float(extra_info.get("sleep_s", 0.0)))
    return {"score": float(solution_str), "right": solution_str == ground_truth, "pred": solution_str}
"""


@contextmanager
def started(spec, **section):
    loop = RewardLoop(spec, reward(**section))
    loop.start()
    yield loop
    loop.shutdown()


@pytest.fixture(scope="module")
def function_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(FUNCTION)
    return str(file)


@pytest.fixture(scope="module")
def strict(function_file):
    with started(RewardSpec(UserFile(function_file)), num_workers=2, timeout_s=2.0) as loop:
        yield loop


@pytest.fixture(scope="module")
def lenient(function_file):
    spec = RewardSpec(UserFile(function_file))
    with (
        pytest.MonkeyPatch.context() as patch,
        started(spec, num_workers=2, timeout_s=1.0, on_error="skip") as loop,
    ):
        patch.setattr("hrl.reward.actor.MAX_FAILED_SHARE", 0.5)
        yield loop


def rows(number, **extra_info):
    return [RewardRow(("g", index), "s", "1", extra_info) for index in range(number)]


def run(loop, texts, step=1):
    loop.begin(step, rows(len(texts)))
    for index, text in enumerate(texts):
        loop.submit(step, ("g", index), text)
    return loop.collect(step, deadline_s=20)


def scores(outcomes):
    return [outcome.score for outcome in outcomes]


def column(outcomes, name):
    return [outcome.parts.get(name) for outcome in outcomes]


def test_results_come_in_the_order_of_the_rows_whatever_finishes_first(strict):
    strict.begin(4, [RewardRow(i, "s", "1", {"sleep_s": 0.2 if i == 0 else 0.0}) for i in range(6)])
    for index in (3, 0, 5, 1, 4, 2):
        strict.submit(4, index, str(index))
    batch = strict.collect(4, deadline_s=20)
    assert scores(batch) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert column(batch, "right") == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert column(batch, "pred") == list("012345")


def test_an_episode_of_no_turn_is_worth_0_and_no_function_sees_it(strict):
    strict.begin(9, rows(2))
    strict.submit(9, ("g", 0), "raise", PlayedEpisode([]))
    strict.submit(9, ("g", 1), "1", PlayedEpisode(["1"]))
    assert scores(strict.collect(9, deadline_s=20)) == [0.0, 1.0]


def test_samples_are_scored_while_others_are_still_to_come(strict, tmp_path):
    is_scored = tmp_path / "is scored"
    strict.begin(1, [RewardRow(0, "s", "1", {"file": str(is_scored)}), RewardRow(1, "s", "1", {})])
    strict.submit(1, 0, "1")
    while not is_scored.exists():  # ends by the deadline of tests
        time.sleep(0.01)
    strict.submit(1, 1, "1")
    assert scores(strict.collect(1, deadline_s=20)) == [1.0, 1.0]


@pytest.mark.parametrize(
    "bad, message", [("raise", "ZeroDivisionError: by the user"), ("nan", "returned nan"), ("stuck", "killed")]
)
def test_one_failure_stops_a_strict_step_naming_function_and_sample(strict, bad, message):
    with pytest.raises(RewardError) as error:
        run(strict, ["1", bad, "1"])
    text = str(error.value)
    assert "compute_score in" in text
    assert "mine.py failed on 1 of 3 samples of step 1 (reward.on_error=raise)" in text
    assert "sample g/1 (data source 's')" in text
    assert message in text


def test_a_failure_is_told_before_the_last_sample_comes(strict):
    strict.begin(1, rows(2))
    strict.submit(1, ("g", 0), "raise")
    with pytest.raises(RewardError, match="by the user"):
        strict.collect(1, deadline_s=20)


def test_a_lenient_step_leaves_failures_out_and_counts_them(lenient):
    batch = run(lenient, ["1", "raise", "2", "stuck", "nan", "skip", "3", "4"])
    assert scores(batch) == [1.0, None, 2.0, None, None, None, 3.0, 4.0]
    metrics = reward_metrics(batch)
    counts = {name: metrics[f"reward/num_{name}"].result() for name in ("errors", "timeouts", "crashes", "skipped")}
    assert counts == {"errors": 2, "timeouts": 1, "crashes": 0, "skipped": 1}
    assert [result.error is None for result in batch] == [True, False, True, False, False, True, True, True]


def test_too_many_failures_stop_a_lenient_step_with_the_first_traceback(lenient):
    with pytest.raises(RewardError, match=r"failed on \d of 4 samples.*skip allows 2.*\n(?s:.*)by the user"):
        run(lenient, ["raise", "raise", "raise", "1"])


def test_samples_that_never_come_are_named_at_the_deadline(strict):
    strict.begin(1, rows(3))
    strict.submit(1, ("g", 0), "1")
    with pytest.raises(RewardError, match="2 samples were never submitted.*the first: g/1"):
        strict.collect(1, deadline_s=0.2)


def test_a_step_after_a_failed_one_is_untouched(strict):
    with pytest.raises(RewardError):
        run(strict, ["raise", *["1"] * 20], step=7)
    assert scores(run(strict, ["2", "3"], step=8)) == [2.0, 3.0]


def test_two_steps_are_scored_at_a_time_and_a_third_drops_the_older_one(strict):
    for step in (21, 22):
        strict.begin(step, rows(2))
    for index, text in enumerate("12"):
        strict.submit(22, ("g", index), text)
        strict.submit(21, ("g", index), text + text)
    assert scores(strict.collect(21, deadline_s=20)) == [11.0, 22.0]
    strict.begin(23, rows(1))
    strict.begin(24, rows(1))
    for step in (22, 23, 24):
        strict.submit(step, ("g", 0), "3")  # late for the first, which is no news
    assert scores(strict.collect(24, deadline_s=20)) == [3.0]
    assert scores(strict.collect(23, deadline_s=20)) == [3.0]
    with pytest.raises(KeyError, match="step 22 was not begun, or is collected already"):
        strict.collect(22, deadline_s=20)


def test_wrong_keys_and_steps_are_refused(strict):
    with pytest.raises(ValueError, match="two samples of step 1 have the key"):
        strict.begin(1, rows(1) + rows(1))
    strict.begin(2, rows(1))
    strict.submit(2, ("g", 9), "1")
    strict.submit(3, ("g", 0), "1")
    with pytest.raises(RewardError, match="not be given 2 sample.*g/9 of step 2: the sample was not announced"):
        strict.collect(2, deadline_s=10)
    strict.submit(2, ("g", 0), "1")  # of a step that was given up: no news
    strict.begin(4, rows(1))
    strict.submit(4, ("g", 0), "1")
    strict.submit(4, ("g", 0), "1")
    with pytest.raises(RewardError, match="g/0 of step 4: the sample was submitted twice"):
        strict.collect(4, deadline_s=10)
    with pytest.raises(KeyError, match="step 4 was not begun, or is collected already"):
        strict.collect(4, deadline_s=10)


def test_responses_that_break_a_built_in_function_do_not_stop_a_strict_run_and_are_counted():
    endless, right = r"\boxed{10^{10^{10}}}", r"\boxed{3}"
    with started(RewardSpec(BuiltIn(("math_verify",))), timeout_s=20.0) as loop:
        loop.begin(1, [RewardRow(index, "math_verify", "3") for index in range(3)])
        for index, text in enumerate((endless, right, endless)):
            loop.submit(1, index, text)
        batch = loop.collect(1, deadline_s=30)
        assert scores(batch) == [0.0, 1.0, 0.0]
        assert reward_metrics(batch)["reward/num_unscorable"].result() == 2
        assert reward_metrics(batch)["reward/num_errors"].result() == 0
        assert ["too complex" in (why or "") for why in column(batch, "unscorable")] == [True, False, True]
        loop.begin(2, [RewardRow(0, "math_verify", "")])
        loop.submit(2, 0, right)
        with pytest.raises(RewardError, match=r"on_error=raise(?s:.*)ground truth '' of data source 'math_verify'"):
            loop.collect(2, deadline_s=30)


def test_a_function_sees_the_turns_of_an_episode_and_says_what_each_is_worth(strict):
    strict.begin(50, rows(2))
    strict.submit(50, ("g", 0), "turns", PlayedEpisode(["one", "three"]))
    strict.submit(50, ("g", 1), "turns")
    episode, single = strict.collect(50, deadline_s=20)
    assert (episode.score, episode.turn_scores, episode.parts) == (1.0, [3.0, 5.0], {"turn_scores": 8.0})
    assert (single.score, single.turn_scores) == (6.0, None), "a response is one turn, and its score that of the whole"


def test_a_function_sees_the_whole_chat_however_deep_a_call_in_it_is_nested(strict):
    asked = [{"role": "user", "content": "2 + 2?"}]
    deep = functools.reduce(lambda inner, _: {"x": inner}, range(98), 1)
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": deep}}
    chat = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    strict.begin(52, [RewardRow(number, "s", "4", prompt=asked) for number in range(2)])
    strict.submit(52, 0, "conversation", PlayedEpisode(["", "conversation"], chat))
    strict.submit(52, 1, "conversation")
    said = [outcome.parts["said"] for outcome in strict.collect(52, deadline_s=20)]
    assert said == [
        "user: 2 + 2? / assistant:  / tool: 4 / assistant: It is 4.",
        "user: 2 + 2? / assistant: conversation",
    ]


def test_another_number_of_scores_than_of_turns_names_function_and_sample(strict):
    strict.begin(51, rows(1))
    strict.submit(51, ("g", 0), "a score too many", PlayedEpisode(["one", "three"]))
    what = r"reward function compute_score in .*mine.py failed on 1 of 1 .* sample g/0 .* returned 3 turn_scores where "
    with pytest.raises(RewardError, match=f"{what}the sample has 2 of the policy's turns"):
        strict.collect(51, deadline_s=20)
