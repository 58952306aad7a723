"""An environment of tools answers whatever a policy calls, and ends with the first action without a call."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

import hrl
from hrl.environments.beginning import first_observation
from hrl.environments.interface import Action, EnvironmentReplyError, StepResult, ToolCall
from hrl.environments.replies import read_step
from hrl.environments.tools import ToolEnvironment, ToolLimits, ToolSignatureError, check_counts, text_of


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return f"slept {seconds}"


def fail() -> None:
    raise ZeroDivisionError("by the user")


def leave() -> None:
    sys.exit(3)


async def leave_async() -> None:
    sys.exit(3)


async def cancel() -> None:
    raise asyncio.CancelledError


def stop() -> None:
    raise StopIteration("x")


def huge() -> int:
    return 10**5000


def much() -> str:
    return "x" * 3_000_000


async def ignore() -> None:
    while True:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(4.0)
            return


FUNCTIONS = (add, wait, sleep, fail, leave, leave_async, cancel, stop, huge, much, ignore)


def made(*functions: Any, timeout_s: float = 20.0) -> ToolEnvironment:
    environment = ToolEnvironment()
    environment.set_up(functions or FUNCTIONS, ToolLimits(timeout_s))
    return environment


def call(name: str, arguments: dict[str, Any] | None = None, text: str = "") -> ToolCall:
    return ToolCall(name, {} if arguments is None and not text else arguments, f"id-{name}", text)


def step(environment: ToolEnvironment, *calls: ToolCall) -> StepResult:
    return asyncio.run(environment.step(Action("…", tool_calls=calls)))


def answers(result: StepResult) -> list[str]:
    return [message["content"] for message in result.observation]


def test_the_first_observation_has_the_rows_prompt_and_the_tools():
    environment = made(add)
    first = environment.reset({"prompt": [{"role": "user", "content": "1+2?"}]}, 0)
    observation = first_observation(environment, first)
    assert observation.messages == [{"role": "user", "content": "1+2?"}]
    assert [tool["function"]["name"] for tool in observation.tools] == ["add"]


def test_an_action_without_a_call_ends_the_episode_without_a_reward_of_its_own():
    result = step(made())
    assert (result.done, result.truncated, result.observation, result.reward) == (True, False, None, None)


def test_a_call_that_can_not_be_read_is_told_to_the_policy_and_ends_nothing():
    action = Action("<tool_call>{", content="<tool_call>{", error="JSONDecodeError: Expecting value \ud800")
    result = asyncio.run(made(add).step(action))
    assert not result.done
    assert result.observation == "Error: the call of a tool can't be read: JSONDecodeError: Expecting value \ufffd"


def test_calls_are_answered_in_order_with_their_ids_and_run_at_the_same_time():
    begun = time.monotonic()
    result = step(made(), call("sleep", {"seconds": 2.0}), call("wait", {"seconds": 1.5}), call("add", {"a": 1}))
    assert time.monotonic() - begun < 3.4
    assert result.observation == [
        {"role": "tool", "tool_call_id": "id-sleep", "name": "sleep", "content": "slept 2.0"},
        {"role": "tool", "tool_call_id": "id-wait", "name": "wait", "content": "waited 1.5"},
        {"role": "tool", "tool_call_id": "id-add", "name": "add", "content": "2"},
    ]
    assert not result.done and result.reward is None


@pytest.mark.parametrize(
    "asked, told",
    [
        (call("ad"), "Error: there is no tool 'ad'. The tools are: add, wait, sleep, fail, leave, "),
        (call("add", text="{broken"), "Error: the arguments of add are no JSON object: {broken"),
        (call("add", {"a": "x", "c": 1}), "Error: wrong arguments of add: a: Input should be a valid integer"),
        (call("fail"), "Error: fail failed: ZeroDivisionError: by the user"),
        (call("leave"), "Error: leave failed: RuntimeError: SystemExit: 3"),
        (call("leave_async"), "Error: leave_async failed: RuntimeError: SystemExit: 3"),
        (call("cancel"), "Error: cancel failed: CancelledError: "),
        (call("huge"), "Error: huge failed: ValueError: Exceeds the limit"),
        (call("stop"), "Error: stop failed: RuntimeError: StopIteration: x"),
        (call("\ud800" * 1000), "Error: there is no tool '"),
    ],
)
def test_whatever_is_wrong_with_a_call_is_told_to_the_policy_and_the_others_are_answered(asked, told):
    result = step(made(), asked, call("add", {"a": 1, "b": 2}))
    assert answers(result)[0].startswith(told) and answers(result)[1] == "3"
    answers(result)[0].encode()
    assert (result.metrics["tool_calls"], result.metrics["tool_errors"]) == (2, 1)


@pytest.mark.parametrize("name", ["wait", "sleep", "ignore"])
def test_a_call_past_its_deadline_is_told_to_the_policy(name):
    begun = time.monotonic()
    arguments = {} if name == "ignore" else {"seconds": 4.0}

    async def play() -> StepResult:
        result = await made(timeout_s=0.1).step(Action("…", tool_calls=(call(name, arguments),)))
        assert time.monotonic() - begun < 3.5
        return result

    assert answers(asyncio.run(play())) == [f"Error: {name} took longer than 0.1 s"]


@pytest.mark.parametrize("number", [2, 5])
def test_calls_of_a_turn_that_take_too_long_together_are_told_before_the_step_is_over(number):
    slow = Slow()
    slow.set_up([], ToolLimits(call_s=1.2, turn_s=1.8))
    begun = time.monotonic()
    said = answers(step(slow, *(call("wait") for _ in range(number))))
    assert time.monotonic() - begun < 9.0
    assert said[0] == "Error: wait took longer than 1.2 s" and said[1].startswith("Error: wait took longer than 0.")
    why = "those before it took all of the 1.8 s that a turn's calls may take"
    assert said[2:] == [f"Error: wait was not called: {why}"] * (number - 2)


def test_functions_that_wait_for_others_of_a_turn_are_told_too():
    environment = made(timeout_s=1.2)
    environment.set_up([wait], ToolLimits(call_s=1.2, turn_s=1.8, calls=40))
    said = Counter(answers(step(environment, *(call("wait", {"seconds": 10.0}) for _ in range(40)))))
    assert said["Error: wait took longer than 1.2 s"] == 16
    assert sum(count for text, count in said.items() if text.startswith("Error: wait was not called")) == 8


def test_of_more_calls_than_a_turn_may_make_the_policy_is_told():
    environment = made(add)
    environment.set_up([add], ToolLimits(calls=2))
    result = step(environment, *(call("add", {"a": one, "b": 1}) for one in range(3)), call("ad"))
    told = "was not called: at most 2 calls are made in a turn"
    assert answers(result) == ["1", "2", f"Error: add {told}", f"Error: ad {told}"]
    assert (result.metrics["tool_calls"], result.metrics["tool_errors"]) == (4, 2)
    assert (result.metrics["tool_calls/add"], result.metrics["tool_errors/add"]) == (3, 1)


def test_results_of_a_turn_share_what_a_reply_may_hold():
    result = step(made(), *(call("much") for _ in range(16)))
    read = read_step(result)  # refuses what is too long
    assert [len(message["content"]) for message in read.observation.messages] == [len(one) for one in answers(result)]
    assert all(100_000 < len(answer) < 140_000 for answer in answers(result))


def test_a_tool_may_have_a_deadline_of_its_own():
    @hrl.tool(timeout_s=0.05)
    async def slow() -> None:
        await asyncio.sleep(10)

    assert answers(step(made(slow), call("slow"))) == ["Error: slow took longer than 0.05 s"]


class Claims(ToolEnvironment):
    def answered(self, action: Action) -> StepResult:
        return StepResult(done=True, metrics={action.text: float(len(action.text))})


def test_a_metric_of_ones_own_replaces_no_count_of_calls():
    environment = Claims()
    environment.set_up([add], ToolLimits(1.0))
    step(environment, call("add", {"a": 1}), call("fail"))
    assert check_counts(environment, asyncio.run(environment.step(Action("of mine")))).metrics["tool_calls"] == 2
    claimed = asyncio.run(environment.step(Action("tool_errors")))
    with pytest.raises(EnvironmentReplyError, match="11 as the metric 'tool_errors', which is a count of hrl's own"):
        check_counts(environment, claimed)
    with pytest.raises(EnvironmentReplyError, match="the metric 'tool_calls', which is a count of hrl's own"):
        check_counts(object(), StepResult(done=True, metrics={"tool_calls": 3.0}))


def test_calls_and_errors_are_counted_over_the_episode_and_for_each_tool():
    environment = made()
    step(environment, call("add", {"a": 1}), call("fail"), call("nothing like it"))
    result = step(environment, call("add"))
    assert result.metrics == step(environment).metrics
    assert {f"{kind}/{name}" for kind in ("tool_calls", "tool_errors") for name in environment.tools} < set(
        result.metrics
    )
    assert {name: number for name, number in result.metrics.items() if number} == {
        "tool_calls": 4,
        "tool_errors": 3,
        "tool_calls/add": 2,
        "tool_calls/fail": 1,
        "tool_errors/add": 1,
        "tool_errors/fail": 1,
    }


class Shop(hrl.ToolEnvironment):
    """Its own state, with tools beside other methods."""

    def __init__(self, coins: int = 3) -> None:
        self.coins = coins
        self.inside = self.most = 0
        self.lock = threading.Lock()

    @hrl.tool
    def buy(self, what: str, price: int = 1) -> str:
        """Buy something."""
        before = self.coins
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.01)
        self.inside -= 1
        self.coins = before - price
        return f"{what} for {price}"

    @hrl.tool(name="look")
    async def look_around(self) -> dict[str, int]:
        return {"coins": self.coins}

    def cheat(self) -> None:
        self.coins = 1000

    def answered(self, action: Action) -> StepResult | float | None:
        if action.text == "go on":
            return StepResult("Anything else?", metrics={"asked": 1})
        return float(self.coins)


def test_marked_methods_are_tools_with_the_episodes_own_state_and_others_are_not():
    shop, other = Shop(), Shop(5)
    assert list(shop.tools) == ["buy", "look"]
    assert answers(step(shop, call("buy", {"what": "tea"}), call("look"))) == ["tea for 1", '{"coins":2}']
    assert answers(step(shop, call("cheat"))) == ["Error: there is no tool 'cheat'. The tools are: buy, look."]
    assert (step(shop).reward, step(other).reward, step(shop).done) == (2.0, 5.0, True)


def test_methods_run_one_after_the_other_so_that_what_they_keep_does_not_depend_on_which_is_faster():
    shop = Shop(10)
    result = step(shop, *[call("buy", {"what": "tea"}), call("look")] * 4)
    assert (shop.coins, shop.most) == (6, 1)
    assert answers(result)[1::2] == ['{"coins":9}', '{"coins":8}', '{"coins":7}', '{"coins":6}']


class Slow(hrl.ToolEnvironment):
    """A method that may outlive its deadline, beside others that look at what it leaves."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.state = "before"

    @hrl.tool
    def build(self) -> str:
        self.state = "half built"
        self.may_end.wait(10)
        self.state = "built"
        return self.state

    @hrl.tool
    async def look(self) -> str:
        return self.state

    @hrl.tool
    async def wait(self) -> None:
        await asyncio.sleep(10)


def test_no_method_begins_before_one_that_outlived_its_deadline_has_ended():
    slow = Slow()
    slow.set_up([], ToolLimits(0.2))

    async def play() -> None:
        def said(*names: str):
            return slow.step(Action("…", tool_calls=tuple(call(name) for name in names)))

        late = "Error: build took longer than 0.2 s"
        assert answers(await said("build", "look")) == [late, not_called("look")]
        assert answers(await said("look")) == [not_called("look")], "in the next turn neither"
        slow.may_end.set()
        assert answers(await said("look")) == ["built"]
        assert answers(await said("wait", "look")) == ["Error: wait took longer than 0.2 s", "built"]

    def not_called(name: str) -> str:
        return f"Error: {name} was not called: a call before it has not ended"

    asyncio.run(play())


def test_an_answer_may_let_the_episode_go_on():
    result = asyncio.run(Shop().step(Action("go on")))
    assert (result.observation, result.done, result.metrics["asked"]) == ("Anything else?", False, 1)


def test_methods_and_functions_of_the_same_name_are_refused():
    def buy() -> None: ...

    shop = Shop()
    shop.set_up([buy], ToolLimits(1.0))
    with pytest.raises(ToolSignatureError, match="two tools are named buy"):
        _ = shop.tools


def test_a_static_method_is_refused():
    class Wrong(ToolEnvironment):
        @staticmethod
        @hrl.tool
        def add(a: int) -> int:
            return a

    with pytest.raises(ToolSignatureError, match="the tool add of Wrong is a staticmethod"):
        _ = Wrong().tools


@dataclass
class Point:
    x: int


def recursive() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "value, text",
    [
        ("as it is é", "as it is é"),
        (3, "3"),
        (None, "null"),
        (True, "true"),
        (float("nan"), "NaN"),
        ({"a": [1, "é"]}, '{"a":[1,"é"]}'),
        (Point(3), '{"x":3}'),
        ({Point}, None),
        (object(), None),
        (recursive(), "[[...]]"),
        ("a\ud800b", "a\ufffdb"),
        (b"\xff", None),
    ],
)
def test_any_result_becomes_a_text(value, text):
    made = text_of(value)
    made.encode()
    assert text is None or made == text


def test_a_result_of_megabytes_loses_its_middle():
    (answer,) = answers(step(made(), call("much")))
    assert len(answer) < 1_100_000 and "characters left out" in answer
