"""Environments of others, played with their real packages; `test_others.py` runs this in a process of its own.

Their packages lie apart, other packages import those that they find, and some of them change how modules are imported.
"""

import asyncio
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from hrl.data.tasks import bundled_rows
from hrl.environments.interface import Action, ToolCall
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec
from hrl.environments.registry import ENVIRONMENTS
from hrl.errors import RefusedError

sys.path.append(str(Path(sys.prefix) / "environments"))


def made(name: str, **kwargs):
    return EnvironmentMaker(EnvironmentSpec.of(name, kwargs)).make()


def first_row(split: str = "train", number: int = 0):
    return list(bundled_rows(f"games/{split}?size=30"))[number]


def say(text: str, **more) -> Action:
    return Action(text, content=text, **more)


# -------------------------------------------------------------------------------------------------------- textarena


def play_numbers(environment, row, seed: int = 5) -> tuple[str, list]:
    shown = environment.reset(row, seed)
    low, high, results = 1, 20, []
    while True:
        guess = (low + high) // 2
        result = environment.step(say(f"I say [{guess}]"))
        results.append(result)
        if result.done:
            return shown, results
        low, high = (guess + 1, high) if "higher" in result.observation else (low, guess - 1)


def test_a_game_of_textarena_is_won_by_halving_and_repeats_for_a_row():
    shown, results = play_numbers(made("textarena", game="GuessTheNumber-v0"), first_row())
    assert "guess the number between 1 and 20" in shown
    assert results[-1].reward == 1.0 and results[-1].metrics["invalid_move"] == 0
    assert all(result.observation.startswith("The target number is ") for result in results[:-1])
    assert "I say" not in "".join(result.observation for result in results[:-1])  # the policy's words are its own
    again = play_numbers(made("textarena", game="GuessTheNumber-v0-raw"), first_row(), seed=6)[1]
    assert [result.observation for result in again] == [result.observation for result in results]
    lengths = {
        len(play_numbers(made("textarena", game="GuessTheNumber-v0"), first_row(number=n))[1]) for n in range(12)
    }
    assert len(lengths) > 1


def test_games_played_at_the_same_time_are_as_if_each_were_alone():
    rows = [first_row(number=number) for number in range(8)]
    alone = [play_numbers(made("textarena", game="GuessTheNumber-v0"), row)[1] for row in rows]
    together: dict[int, list] = {}

    def play(number: int) -> None:
        together[number] = play_numbers(made("textarena", game="GuessTheNumber-v0"), rows[number])[1]

    threads = [threading.Thread(target=play, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(8)] == alone


def test_a_move_without_brackets_gets_them_and_nonsense_ends_the_game():
    environment = made("textarena", game="GuessTheNumber-v0", max_number=9)
    assert "between 1 and 9" in environment.reset({}, 3)
    # Without brackets the first number of 1 to 9 is a guess like others.
    hint = environment.step(say(" 1 "))
    assert hint.done or hint.observation == "The target number is higher."
    environment.reset({}, 3)
    assert "invalid move" in environment.step(say("I don't know")).observation
    result = environment.step(say("still not"))
    assert result.done and result.metrics["invalid_move"] == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"game": "GuesTheNumber-v0"}, "no game 'GuesTheNumber-v0'. Did you mean GuessTheNumber-v0"),
        ({"game": "GuessTheNumber-v0", "size": 3}, "does not take these environment.kwargs"),
    ],
)
def test_a_game_that_textarena_lacks_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        made("textarena", **kwargs)
    two = made("textarena", game="TicTacToe-v0")
    with pytest.raises(ValueError, match="TicTacToe-v0 can't be played by one player"):
        two.reset({}, 1)


# -------------------------------------------------------------------------------------------------------- gymnasium


LAKE = {"id": "FrozenLake-v1", "is_slippery": False, "actions": ["left", "down", "right", "up"]}


def test_a_lake_of_gymnasium_is_seen_as_text_and_crossed_by_words():
    environment = made("gymnasium", **LAKE, prompt="Reach G.")
    shown = environment.reset({}, 1)
    assert shown == "Reach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nAnswer with one of: left, down, right, up."
    first = environment.step(say("Not left, I go DOWN"))
    assert first.observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG" and first.reward == 0 and not first.done
    moves = ["[down] rather than right", "right", "right", "down"]
    results = [environment.step(say(move)) for move in moves]
    assert [result.done for result in results] == [False] * 4
    last = environment.step(say("right"))
    assert (last.reward, last.done, last.truncated, last.observation) == (1.0, True, False, None)
    environment.close()


def test_an_action_that_has_no_name_is_asked_for_again_and_changes_nothing():
    environment = made("gymnasium", **LAKE)
    environment.reset({}, 1)
    result = environment.step(say("upwards"))
    assert (result.observation, result.reward, result.done) == (
        "Answer with one of: left, down, right, up.",
        0.0,
        False,
    )
    assert environment.step(say("[up]")).observation.startswith("  (Up)\n[S]")
    hole = [environment.step(say(move)) for move in ("right", "down")]
    assert hole[-1].done and hole[-1].reward == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"id": "FrozenLakes-v1"}, "gymnasium can't make 'FrozenLakes-v1'"),
        ({**LAKE, "colour": 1}, "with these environment.kwargs"),
        ({**LAKE, "actions": ["a", "b"]}, "has 4 actions"),
        ({"id": "CartPole-v1"}, "CartPole-v1 shows Box and draws no text"),
    ],
)
def test_what_gymnasium_can_not_tell_in_text_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        made("gymnasium", **kwargs)


# -------------------------------------------------------------------------------------------------------- verifiers


HUB = '''
import asyncio
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b

class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"You said: {messages[-1].content}. Say it again."}]

def right(completion, answer, **kwargs):
    return float(answer in (completion[-1].content or ""))

def length(completion, **kwargs):
    return float(len(completion))

def load_environment(kind: str = "echo", turns: int = 3):
    rows = Dataset.from_list([{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(5)])
    held = Dataset.from_list([{"question": "held out", "answer": "0"}])
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.1])
    settings = {"dataset": rows, "eval_dataset": held, "rubric": rubric, "system_prompt": "Be brief."}
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=turns, **settings)
    if kind == "single":
        return vf.SingleTurnEnv(**settings)
    if kind in ("rewrites", "asks twice"):
        class Other(Echo):
            async def get_prompt_messages(self, state):
                messages = await super().get_prompt_messages(state)
                if kind == "rewrites" and state["trajectory"]:
                    return [{"role": "system", "content": "Judge."}, *messages[1:]]
                return messages

            async def get_model_response(self, state, prompt, **kwargs):
                ask = super().get_model_response
                asked = [prompt, prompt] if kind == "asks twice" else [prompt]
                return (await asyncio.gather(*(ask(state, one, **kwargs) for one in asked)))[0]
        return Other(max_turns=turns, **settings)
    if kind == "fails":
        class Fails(Echo):
            async def env_response(self, messages, state, **kwargs):
                raise RuntimeError("not today")
        return Fails(max_turns=turns, **settings)
    return Echo(max_turns=turns, **settings)
'''


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    (folder / "toy_hub.py").write_text(HUB)
    sys.path.append(str(folder))
    yield "toy_hub"
    sys.path.remove(str(folder))


def test_a_rollout_of_verifiers_asks_the_policy_turn_by_turn_and_its_rubric_rewards_it(hub):
    async def play():
        environment = made("verifiers", env=hub, arguments={"turns": 2})
        observation = await environment.reset(first_row(number=3), 1)
        assert observation.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 3 + 1?"},
        ]
        first = await environment.step(say("3"))
        assert first.observation == [{"role": "user", "content": "You said: 3. Say it again."}]
        last = await environment.step(say("It is 4", turn=1))
        await environment.close()
        return last

    last = asyncio.run(play())
    assert last.done and last.reward == pytest.approx(1.3)  # right, and three messages of 0.1
    assert (last.metrics["right"], last.metrics["length"]) == (1.0, 3.0)


def test_tools_of_verifiers_are_the_policy_s(hub):
    async def play():
        environment = made("verifiers", env=hub, arguments={"kind": "tool"})
        observation = await environment.reset(first_row(number=1), 1)
        (tool,) = observation.tools
        assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
        call = ToolCall("add", {"a": 1, "b": 1}, "call_0_0", '{"a": 1, "b": 1}')
        answered = await environment.step(Action("", tool_calls=(call,)))
        assert answered.observation == [{"role": "tool", "tool_call_id": "call_0_0", "content": "2"}]
        return await environment.step(say("2", turn=1))

    last = asyncio.run(play())
    assert last.done and last.metrics["right"] == 1.0


def test_rows_of_ones_own_are_the_same_game_for_samples_that_share_a_seed(hub):
    async def question(seed):
        environment = made("verifiers", env=hub)
        observation = await environment.reset({"prompt": []}, seed)
        await environment.close()
        return observation.messages[-1]["content"]

    asked = [asyncio.run(question(seed)) for seed in (12, 12, 13)]
    played = [len(play_numbers(made("textarena", game="GuessTheNumber-v0"), {}, seed)[1]) for seed in range(8)]
    again = [len(play_numbers(made("textarena", game="GuessTheNumber-v0"), {}, seed)[1]) for seed in range(8)]
    assert asked == ["What is 2 + 1?", "What is 2 + 1?", "What is 3 + 1?"]
    assert played == again and len(set(played)) > 1


@pytest.mark.parametrize("kind", ["rewrites", "asks twice"])
def test_a_rollout_that_does_not_go_on_from_the_policys_turn_is_refused_and_not_played_in_its_old_context(hub, kind):
    async def play():
        environment = made("verifiers", env=hub, arguments={"kind": kind})
        await environment.reset(first_row(), 1)
        with pytest.raises(RefusedError, match="did not go on from the policy's turn 0.*hrl.AgentEnvironment"):
            await environment.step(say("3"))
        await environment.close()

    asyncio.run(play())


def test_examples_for_validation_are_those_for_evaluation_and_one_turn_is_enough(hub):
    async def play():
        environment = made("verifiers", env=hub, arguments={"kind": "single"})
        observation = await environment.reset(first_row("val"), 1)
        assert observation.messages[-1]["content"] == "held out"
        return await environment.step(say("0"))

    assert asyncio.run(play()).reward == pytest.approx(1.1)


def test_an_episode_that_is_given_up_leaves_no_rollout_and_failures_are_told(hub):
    async def play():
        environment = made("verifiers", env=hub)
        await environment.reset(first_row(), 1)
        await environment.close()
        assert len(asyncio.all_tasks()) == 1
        failing = made("verifiers", env=hub, arguments={"kind": "fails"})
        await failing.reset(first_row(), 1)
        with pytest.raises(RuntimeError, match="not today"):
            await failing.step(say("3"))

    asyncio.run(play())
    with pytest.raises(ValueError, match="verifiers can't load the environment 'no_such_hub'"):
        made("verifiers", env="no_such_hub")


# ---------------------------------------------------------------------------------------------------------- openenv


@pytest.fixture(scope="module")
def server():
    import uvicorn
    from openenv.core.env_server import Action as ServerAction
    from openenv.core.env_server import Environment as ServerEnvironment
    from openenv.core.env_server import Observation as ServerObservation
    from openenv.core.env_server import State, create_fastapi_app

    class Word(ServerAction):
        message: str

    class Heard(ServerObservation):
        text: str = ""

    class Echo(ServerEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.count, self.seed = 0, seed
            return Heard(text=f"Say something ({seed}).", done=False, reward=None)

        def step(self, action, timeout_s=None, **kwargs):
            self.count += 1
            return Heard(text=f"{self.count}: {action.message}", done=self.count == 2, reward=float(self.count))

        @property
        def state(self):
            return State(step_count=self.count)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    application = create_fastapi_app(Echo, Word, Heard, max_concurrent_envs=4)
    running = uvicorn.Server(uvicorn.Config(application, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=running.run)
    thread.start()
    deadline = time.monotonic() + 60
    while not running.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join()


def test_an_environment_on_a_server_of_openenv_is_played_in_sessions(server):
    async def play():
        one, other = (made("openenv", url=server, observation="text", prompt="Hello.") for _ in range(2))
        row = first_row()
        shown = await one.reset(row, 1)
        assert shown == f"Hello.\n\nSay something ({row['extra_info']['game_seed'] % 2**31})."
        assert await other.reset({}, 7) == "Hello.\n\nSay something (7)."
        first = await one.step(say("a"))
        assert (first.observation, first.reward, first.done) == ("1: a", 1.0, False)
        assert (await other.step(say("x"))).observation == "1: x"  # a session of its own
        last = await one.step(say("b"))
        assert (last.observation, last.reward, last.done) == (None, 2.0, True)
        await asyncio.gather(one.close(), other.close())
        whole = made("openenv", url=server)
        assert '"text": "Say something (7)."' in await whole.reset({}, 7)
        await whole.close()

    asyncio.run(play())


def test_a_server_of_openenv_that_can_not_be_used_is_named(server):
    async def play(kwargs, message):
        environment = made("openenv", **kwargs)
        with pytest.raises(RuntimeError, match=message):
            await environment.reset({}, 7)
            await environment.step(say("a"))
        await environment.close()

    asyncio.run(play({"url": "http://127.0.0.1:9"}, r"http://127.0.0.1:9 can't be used \(environment.kwargs.url\)"))
    asyncio.run(play({"url": server, "observation": "words"}, r"has no field 'words'.*it has .*text"))
    asyncio.run(play({"url": server, "observation": "text", "action": "word"}, r"\(environment.kwargs.action\)"))


# ------------------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("name", ["textarena", "gymnasium", "verifiers", "openenv", "mcp"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name):
    for module in [one for one in sys.modules if one.partition(".")[0] == name or one == f"hrl.environments.{name}"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert ENVIRONMENTS[name].extra == name
    with pytest.raises(EnvironmentLoadError, match=rf"pip install (--python .*)?'({name}|openenv-core)[<>]"):
        made(name)
