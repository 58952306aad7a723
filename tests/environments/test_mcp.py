"""Tools of real MCP servers, over standard streams and over HTTP."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hrl.environments.interface import Action, ToolCall
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec
from hrl.environments.tools import ToolLimits

mcp_environment = pytest.importorskip("hrl.environments.mcp")
McpEnvironment, McpError = mcp_environment.McpEnvironment, mcp_environment.McpError

SERVER = '''
import os, sys
from mcp.server import MCPServer

server = MCPServer("shop")
counted = 0

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def count() -> str:
    """Count calls."""
    global counted
    counted += 1
    shown = sorted(name for name in os.environ if name.startswith("SHOP") or "SECRET" in name)
    return f"{counted} {os.getpid()} {shown}"

@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)

def asking_for_a_token(app):
    async def guarded(scope, receive, send):
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != b"Bearer a-token":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return guarded

if __name__ == "__main__":
    if len(sys.argv) > 2:
        import uvicorn

        app = asking_for_a_token(server.streamable_http_app())
        uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


def call(name: str, **arguments: object) -> Action:
    return Action("", tool_calls=(ToolCall(name, arguments, "call_0_0"),))


async def said(environment, action: Action) -> str:
    (message,) = (await environment.step(action)).observation
    return message["content"]


async def begun(**kwargs):
    environment = McpEnvironment(**kwargs)
    observation = environment.with_tools(
        mcp_environment.Observation(await environment.reset({"prompt": [{"role": "user", "content": "?"}]}, 1))
    )
    return environment, observation


@pytest.fixture(scope="module")
def address(server):
    with listening(server) as found:
        yield found


@pytest.fixture(scope="module")
def guarded_address(server):
    with listening(server, "asks for a token") as found:
        yield found


@contextlib.contextmanager
def listening(server, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*server, str(port), *arguments], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_tools_of_a_server_are_shown_and_called(address):
    async def play():
        environment, observation = await begun(server=address, per="episode", start_timeout_s=60)
        schemas = {one["function"]["name"]: one["function"] for one in observation.tools}
        assert list(schemas) == ["add", "count", "fail", "leave"]
        assert schemas["add"]["description"] == "Add two numbers."
        assert schemas["add"]["parameters"]["required"] == ["a", "b"]
        assert await said(environment, call("add", a=2, b=3)) == "5"
        assert (await said(environment, call("fail", why="no"))).startswith("Error: fail failed: McpCallError: Error")
        assert (await said(environment, call("add", a=2))).startswith("Error: add failed: McpCallError")
        assert "there is no tool 'sub'" in await said(environment, call("sub", a=1))
        result = await environment.step(Action("5"))
        assert result.done and result.metrics["tool_calls/add"] == 2 and result.metrics["tool_errors"] == 3
        await environment.close()
        assert "has ended" in await said(environment, call("add", a=2, b=3))

    asyncio.run(play())


def test_a_server_that_asks_for_a_token_is_used_with_it_and_named_without_it(guarded_address):
    async def play():
        environment, _ = await begun(server=guarded_address, per="episode", start_timeout_s=60, token="a-token")
        assert await said(environment, call("add", a=20, b=22)) == "42"
        await environment.close()
        for token, why in ((None, "give it one"), ("another", "does not take the one")):
            with pytest.raises(McpError, match=rf"asks for a token \(HTTP status 401\).*{why}.*token=env:NAME") as told:
                await begun(server=guarded_address, start_timeout_s=60, token=token)
            assert "another" not in str(told.value)

    asyncio.run(play())


def test_some_tools_are_offered_and_no_others_are_called(address):
    async def play():
        environment, observation = await begun(server=address, per="episode", start_timeout_s=60, offered=["add"])
        assert [one["function"]["name"] for one in observation.tools] == ["add"]
        assert await said(environment, call("add", a=20, b=22)) == "42"
        assert "there is no tool 'count'" in await said(environment, call("count"))
        await environment.close()
        with pytest.raises(McpError, match=r"has no tool sub; it has: add, count, fail, leave"):
            await begun(server=address, offered=["add", "sub"], start_timeout_s=60)

    asyncio.run(play())


def test_a_function_of_the_name_of_a_servers_tool_is_refused_and_the_tool_can_be_left_out(address):
    def add(a: int, b: int) -> int:
        """Add otherwise."""
        return a - b

    async def play(**kwargs):
        environment = McpEnvironment(server=address, per="episode", start_timeout_s=60, **kwargs)
        environment.set_up([add], ToolLimits())
        try:
            await environment.reset({"prompt": [{"role": "user", "content": "?"}]}, 1)
            return await said(environment, call("add", a=3, b=2))
        finally:
            await environment.close()

    with pytest.raises(McpError, match=r"environment.tools both have a tool add: leave the server's out by"):
        asyncio.run(play())
    assert asyncio.run(play(offered=["count"])) == "1"


def test_no_secret_of_a_servers_command_or_address_is_in_an_error():
    for server in (
        [sys.executable, "-c", "pass", "--api-key", "k3yOfASh0p8tS"],
        "http://127.0.0.1:9/mcp?api_key=k3yOfASh0p8tS",
    ):
        with pytest.raises(McpError, match="can't be used") as raised:
            asyncio.run(asyncio.wait_for(begun(server=server), 60))
        assert "k3yOfASh0p8tS" not in str(raised.value)


def test_episodes_of_a_process_share_a_server_and_get_another_one_when_it_ends(server, monkeypatch):
    monkeypatch.setenv("HRL_TEST_SECRET", "swordfish")

    async def play():
        settings = {"server": server, "start_timeout_s": 120, "variables": {"SHOP": "1"}}
        shared = [(await begun(**settings))[0] for _ in range(2)]
        counts = [(await said(one, call("count"))).split(" ", 2) for one in shared]
        assert [count for count, _, _ in counts] == ["1", "2"] and counts[0][1] == counts[1][1]
        assert counts[0][2] == "['SHOP']"
        await asyncio.gather(*(one.close() for one in shared))
        assert (await said(shared[0], call("count"))).startswith("3 ")
        assert "has ended" in await said(shared[0], call("leave"))
        again, _ = await begun(**settings)
        assert (await said(again, call("count"))).startswith("1 ")
        for connection in mcp_environment._shared[asyncio.get_running_loop()].values():
            await connection.close()

    asyncio.run(play())
    assert not [one for one in psutil.Process().children(recursive=True) if one.cmdline()[-1:] == server[-1:]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server": ""}, "environment.kwargs.server is empty"),
        ({"server": "a", "per": "turn"}, "environment.kwargs.per is 'turn'"),
        ({"server": "/no/such/program"}, "MCP server /no/such/program can't be used: FileNotFoundError"),
        ({"server": [sys.executable, "-c", "pass"]}, "can't be used"),
        (
            {"server": [sys.executable, "-c", "import sys; sys.stdin.read()"], "start_timeout_s": 0.5},
            "has not answered within 0.5 s",
        ),
        ({"server": "http://127.0.0.1:9/mcp"}, "can't be used"),
    ],
)
def test_a_server_that_can_not_be_used_is_named(settings, message):
    with pytest.raises(McpError, match=message):
        asyncio.run(asyncio.wait_for(begun(**settings), 60))


def test_the_environment_is_named_in_the_configuration(server):
    maker = EnvironmentMaker(EnvironmentSpec.of("mcp", {"server": server}))
    assert type(maker.make()) is McpEnvironment
    with pytest.raises(EnvironmentLoadError, match="server"):
        EnvironmentMaker(EnvironmentSpec.of("mcp"))
    assert Path(server[1]).is_file()
