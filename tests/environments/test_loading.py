"""Environments come from a file, a name or an object, through plain data, and what is wrong with one is said."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import hrl
from hrl.config.environment import UNPAID
from hrl.environments import extras, registry
from hrl.environments.interface import Action
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec, EnvironmentTraits
from hrl.environments.registry import NamedEnvironment, UnknownEnvironmentError, load_named
from hrl.environments.single_turn import SingleTurn
from hrl.environments.tools import ToolEnvironment, ToolLimits, ToolSignatureError, tool, tool_of
from tests.environments.worlds import World, add, small

WORLDS = str(Path(__file__).with_name("worlds.py"))
REQUIRES = (
    "arena<0.8,>=0.7.4; extra == 'games'",
    "words>=1 ; python_version > '3' and extra == \"games\"",
    "board>=2; extra == 'game'",
    "torch",
)
OF_HRL = [name for name, known in registry.ENVIRONMENTS.items() if isinstance(known.target, str)]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "ENVIRONMENTS", registry.ENVIRONMENTS)
    before = dict(registry.ENVIRONMENTS)
    yield
    registry.ENVIRONMENTS.clear()
    registry.ENVIRONMENTS.update(before)


def maker(*args: Any, **kwargs: Any) -> EnvironmentMaker:
    spec = EnvironmentSpec.of(*args, **kwargs)
    plain = json.loads(json.dumps(spec.to_plain()))
    assert EnvironmentSpec.from_plain(plain) == spec
    return EnvironmentMaker(EnvironmentSpec.from_plain(plain))


def test_a_class_in_a_file_gets_its_arguments():
    made = maker(f"{WORLDS}:World", {"size": 7})
    one, other = made.make(), made.make()
    assert (type(one).__name__, one.size, one is other) == ("World", 7, False)


def test_a_function_in_a_file_may_make_the_environment():
    assert maker(f"{WORLDS}:small").make().size == 1


def test_a_class_of_a_module_that_can_be_imported_is_named_by_it_and_so_are_functions():
    made = maker("tests.environments.worlds:World", {"size": 7})
    assert type(made.make()) is World and made.make().size == 7
    assert list(maker("tools", tools=["tests.environments.worlds:add"]).make().tools) == ["add"]


def test_a_module_is_found_where_the_run_finds_it_and_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "lies_here_alone.py").write_text("import hrl\n\nclass Game(hrl.SingleTurn):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    spec = EnvironmentSpec.of("lies_here_alone:Game")
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", [*sys.path])  # which loading extends, as in a process of its own
    assert type(EnvironmentMaker(spec).make()).__name__ == "Game"


def test_a_module_whose_own_import_is_missing_is_not_taken_for_missing_itself(tmp_path, monkeypatch):
    (tmp_path / "lacks_another.py").write_text("import nothing_like_this\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_like_this"):
        maker("lacks_another:Game")


def test_a_file_that_imports_from_its_package_is_to_be_named_as_a_module(tmp_path):
    (tmp_path / "inner.py").write_text("from .other import thing\n")
    with pytest.raises(EnvironmentLoadError, match=r"name the module, such as package\.inner:Game"):
        maker(f"{tmp_path}/inner.py:Game")


def test_a_name_is_that_of_the_registry():
    assert type(maker("single_turn").make()) is SingleTurn


@pytest.mark.parametrize("given", [World, functools.partial(World, size=3), small, World(3)])
def test_a_class_a_function_or_an_object_may_be_given(given):
    environment = maker(None, given=given).make()
    assert type(environment).__name__ == "World" and environment is not given


def test_a_list_of_functions_is_an_environment_of_tools():
    environment = maker(None, given=[add], tool_limits=ToolLimits(call_s=7.0)).make()
    assert isinstance(environment, ToolEnvironment) and list(environment.tools) == ["add"]
    assert environment._limits.call_s == 7.0


def test_tools_of_a_file_are_beside_those_of_the_class():
    assert list(maker(f"{WORLDS}:Tools", tools=[f"{WORLDS}:add"]).make().tools) == ["own", "add"]
    assert list(maker("tools", tools=[f"{WORLDS}:add"]).make().tools) == ["add"]


def test_a_file_of_several_things_is_run_once():
    spec = EnvironmentSpec.of(f"{WORLDS}:Tools", tools=[f"{WORLDS}:add"])
    environment = EnvironmentMaker(spec).make()
    module = sys.modules[type(environment).__module__]
    assert environment.tools["add"].function is module.add


def test_a_row_may_name_another_environment_with_its_own_arguments_or_change_those_of_the_run():
    made = maker(f"{WORLDS}:World", {"size": 7})
    assert type(made.make("single_turn")) is SingleTurn
    assert made.make(None, {"size": 9}).size == 9
    assert made.make("big_world").size == 3, "registered by the file"
    assert made.make("big_world", {"size": 5}).size == 5
    assert "big_world" in made.names
    with pytest.raises(EnvironmentLoadError, match="env 'big_word', and no environment has.*Did you mean big_world"):
        made.make("big_word")


def test_an_argument_may_be_an_environment_variable():
    spec = EnvironmentSpec.of("single_turn", {"key": "env:MY_KEY", "other": 3})
    assert spec.env == {"key": "MY_KEY"}
    assert spec.resolve({"MY_KEY": "secret"}).kwargs == {"key": "secret", "other": 3}


@pytest.mark.parametrize(
    "path, told",
    [
        ("worlds.py", "environment.path is 'worlds.py', where a file or a module and a name are expected: my_env.py:"),
        ("worlds.py:", "where a file or a module and a name are expected: .* or package.module:Class"),
        ("my-worlds:World", "where a file or a module and a name are expected"),
        ("single_trun", "there is no environment 'single_trun'; there are .*. Did you mean single_turn"),
        ("something", "A class of yours is named by its file: my_env.py:Class"),
        (None, "there is no environment: name one with environment.path"),
    ],
)
def test_a_path_that_is_none_is_refused_before_anything_starts(path, told):
    with pytest.raises(EnvironmentLoadError, match=told):
        EnvironmentSpec.of(path)


@pytest.mark.parametrize(
    "path, kwargs, tools, told",
    [
        (f"{WORLDS}x.py:World", {}, [], r"worlds\.pyx\.py does not exist"),
        (f"{WORLDS}:Wrld", {}, [], "worlds.py has no class or function 'Wrld'; it has: .*Did you mean World"),
        (
            f"{WORLDS}:NoRow",
            {},
            [],
            r"has reset\(self\), which can't be called as reset\(self, row, seed\)",
        ),
        (f"{WORLDS}:OfGymnasium", {}, [], r"has reset\(self, \*, seed=.*environment.path=gymnasium"),
        (f"{WORLDS}:TwoOfStep", {}, [], r"has step\(self, action, state\), .* step\(self, action\): .*'state'"),
        ("tests.environments.worlds:Wrld", {}, [], "worlds.py has no class .*Did you mean World"),
        (
            "tests.environments.wrlds:World",
            {},
            [],
            "no module tests.environments.wrlds for .*: install its package",
        ),
        (
            "not_installed.anywhere:World",
            {},
            [],
            "no module not_installed for .*: install its package",
        ),
        (f"{WORLDS}:Unfinished", {}, [], "has no method step; an environment has reset, step, close"),
        (f"{WORLDS}:number", {}, [], "has no method reset"),
        (
            f"{WORLDS}:World",
            {"sise": 3},
            [],
            r"can't be made: environment.kwargs.sise is no argument of it. It takes \(size: int",
        ),
        (
            f"{WORLDS}:World",
            {},
            [f"{WORLDS}:add"],
            "environment.tools names functions, and World in .* is no hrl.ToolEnv",
        ),
        ("tools", {}, [f"{WORLDS}:ad"], "has no class or function 'ad'; it has: .*Did you mean add"),
    ],
)
def test_what_a_file_lacks_or_a_class_does_not_take_is_said(path, kwargs, tools, told):
    with pytest.raises(EnvironmentLoadError, match=told):
        maker(path, kwargs, tools)


def test_a_tool_that_can_be_none_is_refused_whether_named_or_given():
    with pytest.raises(ToolSignatureError, match="the tool bad takes"):
        maker("tools", {}, [f"{WORLDS}:bad"])
    with pytest.raises(ToolSignatureError, match="the tool print takes|can't be described|no type"):
        EnvironmentSpec.of(None, given=[print])
    with pytest.raises(EnvironmentLoadError, match="an entry of environment.tools is 'add'"):
        EnvironmentSpec.of("tools", tools=["add"])


class Locked(hrl.SingleTurn):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "given, kwargs, told",
    [
        (3, {}, "the environment given as an object is 3: give a class with reset, step, close"),
        (World(3), {"size": 4}, "environment.kwargs has size, and the environment given as an object is made"),
        (Locked(), {}, "Locked of .* can't be sent to the processes of environments: TypeError.*lock"),
        (World, {"sise": 4}, "can't be made: environment.kwargs.sise is no argument"),
    ],
)
def test_an_object_that_can_be_no_environment_is_refused(given, kwargs, told):
    with pytest.raises(EnvironmentLoadError, match=told):
        EnvironmentSpec.of(None, kwargs, given=given)


def test_an_object_and_a_path_are_not_both_taken():
    with pytest.raises(EnvironmentLoadError, match="given an environment as an object, and single_turn by"):
        EnvironmentSpec.of("single_turn", given=World)


def test_a_package_that_is_missing_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(registry.ENVIRONMENTS, "x", NamedEnvironment("not_installed_here:Class", "", "extra"))
    with pytest.raises(UnknownEnvironmentError, match="needs not_installed_here: .* 'hrl.extra.'") as refused:
        load_named("x")
    assert f"{sys.executable} -m pip install" in str(refused.value) or " --python " in str(refused.value)


def test_a_missing_package_is_installed_by_the_python_that_lacks_it_in_a_version_that_fits(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python")
    monkeypatch.setattr(extras.metadata, "requires", lambda _: [*REQUIRES])
    assert extras.install_line("games") == "'/opt/my python/bin/python' -m pip install 'arena<0.8,>=0.7.4' 'words>=1'"
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _: None)
    assert extras.install_line("game") == "uv pip install --python '/opt/my python/bin/python' 'board>=2'"


@pytest.mark.parametrize(
    "name, told",
    [
        ("number", r"environment.tools has number in .*worlds.py, which is an int, where a function is expected"),
        ("World", r"environment.tools has World in .*worlds.py, which is a class, where a function is expected"),
    ],
)
def test_what_is_named_as_a_tool_and_is_none_is_called_by_its_name(name, told):
    with pytest.raises(EnvironmentLoadError, match=told):
        maker("tools", {}, [f"{WORLDS}:{name}"])


def test_a_row_that_names_a_file_is_told_how_a_class_gets_a_name():
    with pytest.raises(
        EnvironmentLoadError, match=r"env 'nego.py:Nego', .*environments.registry.register\(name, Class"
    ):
        maker("single_turn").check_choice("nego.py:Nego", None)


def test_every_name_loads_and_is_described():
    for name, known in registry.ENVIRONMENTS.items():
        assert known.description and "\n" not in known.description
        if known.extra is None:
            assert isinstance(load_named(name), type)


def test_the_single_turn_is_over_with_the_first_answer():
    environment = SingleTurn()
    prompt = [{"role": "user", "content": "?"}]
    assert environment.reset({"prompt": prompt}, 0) == prompt
    result = environment.step(Action("x"))
    assert (result.done, result.reward, result.observation, result.truncated) == (True, None, None, False)


def test_the_interface_is_imported_without_torch():
    code = "import sys, hrl; hrl.Environment, hrl.SingleTurn, hrl.ToolEnvironment, hrl.tool; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert not {"torch", "ray", "transformers", "numpy", "pydantic", "hrl.config"} & set(done.stdout.split())


@pytest.mark.parametrize("name", OF_HRL)
def test_the_environments_that_give_no_reward_are_those_that_the_configuration_knows(name):
    try:
        traits = EnvironmentTraits.of(registry.load_named(name))
    except registry.UnknownEnvironmentError as error:
        pytest.skip(str(error))
    assert traits.is_unpaid == (name in UNPAID)


def test_a_class_tells_whether_it_pays_and_has_tools():
    class Notes(ToolEnvironment):
        @tool
        def note(self, text: str) -> str:
            """Note a text."""
            return text

    class Paid(Notes):
        def answered(self, action):
            return 1.0

    class Begins(Notes):
        def reset(self, row):
            return "Keep a note."

    (note,) = EnvironmentTraits.of(Notes).shown_tools
    assert note["function"]["name"] == "note"
    shown = [tool_of(add).schema]
    assert maker("tools", tools=[add]).traits == EnvironmentTraits(is_unpaid=True, has_tools=True, shown_tools=shown)
    assert maker("tools").traits == EnvironmentTraits(is_unpaid=True, lacks_tools=True, shown_tools=[])
    assert EnvironmentTraits.of(Notes) == EnvironmentTraits(is_unpaid=True, has_tools=True, shown_tools=[note])
    assert EnvironmentTraits.of(Paid) == EnvironmentTraits(has_tools=True, shown_tools=[note])
    assert EnvironmentTraits.of(Begins).shown_tools is None, "what its reset shows is its own affair"
    assert EnvironmentTraits.of(World).is_unpaid, "a SingleTurn with the step of its base"
    assert maker(None, given=small).traits == EnvironmentTraits(), "what a function makes is seen when it is made"
