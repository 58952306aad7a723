"""Rows are data: what starts a program, imports a package, reaches an address or loosens a limit, no row can choose."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

import hrl
from hrl.environments import registry
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec
from hrl.environments.registry import RowChoiceError, check_row_kwargs

SHOP = """
from hrl.environments.mcp import McpEnvironment


class Shop(McpEnvironment):
    pass


class OfARow(McpEnvironment):
    def __init__(self, shop="books"):
        super().__init__(f"https://{shop}.example.org/mcp")
"""


def maker(path: str, kwargs: dict[str, Any] | None = None, **named: dict[str, Any]) -> EnvironmentMaker:
    spec = EnvironmentSpec.of(path, kwargs, row_environments=named)
    plain = json.loads(json.dumps(spec.to_plain()))
    return EnvironmentMaker(EnvironmentSpec.from_plain(plain).resolve({"TOK": "of-the-run"}))


@pytest.mark.parametrize(
    "env, kwargs",
    [
        ("mcp", {"server": ["sh", "-c", "id > f"]}),
        ("openenv", {"url": "http://169.254.169.254"}),
        ("verifiers", {"env": "a_package_of_the_row"}),
        ("mcp", None),
    ],
)
def test_a_row_names_no_environment_that_starts_imports_or_asks_what_the_configuration_does_not_name(env, kwargs):
    made = maker("single_turn")
    for choose in (functools.partial(made.make, env, kwargs), functools.partial(made.is_async, env)):
        with pytest.raises(RowChoiceError, match=rf"the row has env '{env}'.*environment\.row_environments\.{env}="):
            choose()
    assert env not in made.names


@pytest.mark.parametrize(
    "path, env, kwargs",
    [
        ("single_turn", "python", {"trust": True}),
        ("single_turn", "python", {"packages": True}),
        ("python", None, {"memory_mib": 1 << 20}),
        ("python", "python", {"trust": True}),
        ("single_turn", "textarena", {"game": "GuessTheNumber-v0", "topics_path": "/etc/passwd"}),
        ("single_turn", "gymnasium", {"id": "FrozenLake-v1", "xml_file": "/etc/passwd"}),
    ],
)
def test_a_row_gives_no_right_no_file_and_no_limit(path, env, kwargs):
    if env in ("textarena", "gymnasium"):
        pytest.importorskip(env)
    worst = [*kwargs][-1]
    with pytest.raises(RowChoiceError, match=rf"env_kwargs\.{worst}, and a row may give .*environment\.kwargs"):
        maker(path).make(env, kwargs)


def test_a_token_of_the_configuration_goes_to_no_server_of_a_rows(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "shop.py").write_text(SHOP)
    given = {"server": "https://example.org/mcp", "token": "env:TOK"}
    for path in ("mcp", "hrl.environments.mcp:McpEnvironment", f"{tmp_path / 'shop.py'}:Shop"):
        made = maker(path, given)
        assert made.make()._server.token == "of-the-run"
        with pytest.raises(RowChoiceError, match=r"env_kwargs\.server, and a row may give .* nothing"):
            made.make(None, {"server": "http://evil.example"})
    listed = maker("single_turn", mcp=given)
    assert "mcp" in listed.names
    assert listed.make("mcp")._server.token == "of-the-run"
    assert listed.make("mcp")._server.address == "https://example.org/mcp"
    with pytest.raises(RowChoiceError, match=r"env_kwargs\.server.*environment\.row_environments"):
        listed.make("mcp", {"server": "http://evil.example"})


def test_a_class_of_the_users_with_a_constructor_of_its_own_says_itself_what_rows_give(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "shop.py").write_text(SHOP)
    environment = maker(f"{tmp_path / 'shop.py'}:OfARow").make(None, {"shop": "toys"})
    assert environment._server.address == "https://toys.example.org/mcp"


def test_a_game_is_named_and_never_by_a_module_to_import():
    pytest.importorskip("gymnasium")
    from hrl.environments.gymnasium import GymnasiumEnvironment

    for made in (GymnasiumEnvironment, functools.partial(GymnasiumEnvironment, prompt="Go.")):
        check_row_kwargs(made, "gymnasium", {"id": "FrozenLake-v1", "prompt": "Reach: G.", "actions": ["left"]})
        for named in ("evil.module:Game-v0", "", 3, ["FrozenLake-v1"]):
            with pytest.raises(RowChoiceError, match=r"env_kwargs\.id .*plain name"):
                check_row_kwargs(made, "gymnasium", {"id": named})


def test_a_row_chooses_what_does_no_harm():
    made = maker("single_turn", retry={"attempts": 5, "discount": 0.5})
    environment = made.make("retry", {"attempts": 2})
    assert (environment._attempts, environment._discount) == (2, 0.5)


def test_variables_of_environments_that_rows_name_are_asked_for_by_their_names():
    spec = EnvironmentSpec.of("single_turn", {"a": "env:ONE"}, row_environments={"mcp": {"token": "env:TOK"}})
    assert spec.env == {"a": "ONE", "mcp.token": "TOK"}


def test_a_listed_name_that_no_environment_has_is_refused_at_the_start():
    with pytest.raises(EnvironmentLoadError, match=r"row_environments lists 'mpc'.*Did you mean mcp"):
        maker("single_turn", mpc={})


def test_what_is_registered_and_what_is_in_a_file_takes_all_that_a_row_gives(monkeypatch):
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(registry.ENVIRONMENTS))

    class Own(hrl.SingleTurn):
        def __init__(self, server: str = "") -> None:
            self.server = server

    registry.register("own", Own)
    assert maker("single_turn").names[-1] == "own"
    monkeypatch.setattr("hrl.environments.loading.ENVIRONMENTS", registry.ENVIRONMENTS)
    assert maker("single_turn").make("own", {"server": "x"}).server == "x"


OF_HRL = sorted(name for name, known in registry.ENVIRONMENTS.items() if known.row_kwargs is not None)


@pytest.mark.parametrize("name", OF_HRL)
def test_no_environment_of_hrl_lets_a_row_give_all(name):
    known = registry.ENVIRONMENTS[name]
    dangerous = {"server", "url", "token", "variables", "trust", "env", "arguments", "packages", "time_s", "memory_mib"}
    assert not dangerous & known.row_kwargs.keys()
    assert {"single_turn", "tools", "python", "mcp", "openenv", "verifiers"} <= {*OF_HRL}
