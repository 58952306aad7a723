"""Tools of an MCP server: a program that is started here, or one that answers at an address."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import mcp
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import CONNECTION_CLOSED

from hrl.environments.interface import Message, Observation
from hrl.environments.tool_functions import Tool
from hrl.environments.tools import ToolEnvironment
from hrl.errors import HrlError, RefusedError
from hrl.masking import masked_text

_MOST_TOOLS = 1000
_CLOSE_S = 5.0
_REFUSALS = (401, 403)
_FIRST_ERROR = 400
"""HTTP statuses of answers that ask for a token, and the first of those that are none."""


class McpError(HrlError, RuntimeError):
    """An MCP server can't be reached, or lacks a tool; names it and the way out."""


class McpServerError(McpError, RefusedError):
    """The arguments make no sense, or name a program that there is not."""


class McpCallError(Exception):
    """A tool of an MCP server says that a call failed; the policy is told its words."""


@dataclass(frozen=True)
class _Server:
    """How a server is reached.

    Attributes:
        address: Of one that runs; empty for one that is started.
        command: Of one that is started.
        variables: Its environment variables beside those that programs need.
        token: That one with an address asks for.
    """

    address: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    token: str | None

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return masked_text(self.address or shlex.join(self.command))

    def client(self, stack: contextlib.AsyncExitStack, statuses: list[int]) -> mcp.Client:
        """Return what talks to it; `statuses` gets those of its HTTP answers."""
        if not self.address:
            program, *arguments = self.command
            return mcp.Client(
                mcp.StdioServerParameters(command=program, args=arguments, env=dict(self.variables) or None)
            )

        async def note(response: Any) -> None:
            statuses.append(response.status_code)

        http = create_mcp_http_client(headers={} if self.token is None else {"Authorization": f"Bearer {self.token}"})
        http.event_hooks["response"].append(note)
        stack.push_async_exit(http.__aexit__)
        transport: AbstractAsyncContextManager[Any] = streamable_http_client(self.address, http_client=http)
        return mcp.Client(transport)

    def said(self, error: BaseException, statuses: Sequence[int]) -> str:
        """Return what went wrong, and by its HTTP status why: the package does not tell it."""
        status = statuses[-1] if statuses else 0
        if status in _REFUSALS:
            way_out = "give it one" if self.token is None else "it does not take the one that it is given"
            return f"it asks for a token (HTTP status {status}), {way_out}: environment.kwargs.token=env:NAME"
        by_status = f" (HTTP status {status})" if status >= _FIRST_ERROR else ""
        way_out = "is it running, and is that its address?" if self.address else f"start it by hand: {self.title}"
        return f"{_innermost(error)}{by_status}; {way_out}"


def _server_of(
    server: str | Sequence[str | int | float], variables: Mapping[str, str] | None, token: str | None
) -> _Server:
    """Read the arguments that say how a server is reached.

    Raises:
        McpServerError: There is no such program.
    """
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        return _Server(server, (), (), token)
    # A number in a command, such as a port, is a text there.
    command = tuple(map(str, shlex.split(server) if isinstance(server, str) else server))
    if not command:
        raise McpServerError("environment.kwargs.server is empty: give the address of an MCP server, or its command")
    named = dict(variables or {})
    if shutil.which(command[0], path=named.get("PATH")) is None:
        raise McpServerError(
            f"environment.kwargs.server starts {masked_text(command[0])!r}, and there is no such program on PATH: "
            "install it, give its whole path, or the address of a server that runs (http://…)"
        )
    return _Server("", command, tuple(sorted(named.items())), token)


class _Connection:
    """A connection to a server, held by a task of its own.

    Args:
        server: The server.
    """

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.tools: Sequence[Any] = ()
        self._client: mcp.Client | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        # What was entered in a task has to be left in the same one.
        self._task = asyncio.create_task(self._hold())

    @property
    def is_open(self) -> bool:
        """Whether it can be used, now or when it is ready."""
        return not self._task.done() and not self._stop.is_set()

    async def ready(self, timeout_s: float) -> None:
        """Return when the server has told its tools.

        Raises:
            McpError: It has not, in time.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            await self.close()
            raise McpError(
                f"the MCP server {self.server.title} has not answered within {timeout_s:g} s; start it by hand to see "
                "why, or raise environment.kwargs.start_timeout_s"
            ) from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool says.

        Raises:
            McpCallError: The tool says that it failed.
            McpError: The server has gone.
        """
        if not self.is_open or self._client is None:
            raise McpError(f"the MCP server {self.server.title} has ended")
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except mcp.MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._stop.set()
                raise McpError(f"the MCP server {self.server.title} has ended") from error
            raise McpCallError(error.message) from error
        text = _text_of(result)
        if result.is_error:
            raise McpCallError(text)
        return text

    async def close(self) -> None:
        """End the connection, and a server that was started for it."""
        self._stop.set()
        if self._client is not None:  # else it waits for the server's first words, and not for this
            await asyncio.wait({self._task}, timeout=_CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_S)

    async def _hold(self) -> None:
        statuses: list[int] = []
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(self.server.client(stack, statuses))
                self.tools = await _tools_of(client)
                self._client = client
                self._ready.set_result(None)
                await self._stop.wait()
        # The package raises groups of whatever went wrong in its tasks.
        except Exception as error:  # noqa: BLE001
            if not self._ready.done():
                self._ready.set_exception(
                    McpError(f"the MCP server {self.server.title} can't be used: {self.server.said(error, statuses)}")
                )


async def _tools_of(client: mcp.Client) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while len(tools) < _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _text_of(result: Any) -> str:
    """Return the content of a result as text; what is none is named."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and getattr(block.resource, "text", None) is not None:
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}: {getattr(block, 'mime_type', None) or getattr(block, 'uri', 'no text')}]")
    return "\n".join(map(str, parts))


class _RemoteTool(Tool):
    """A tool whose server looks at its arguments."""

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return dict(arguments)


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Server, _Connection]] = WeakKeyDictionary()


class McpEnvironment(ToolEnvironment):
    """A tool environment whose tools are those of an MCP server, besides the functions of `environment.tools`.

    Args:
        server: Address of a server that speaks streamable HTTP, or the command of one that speaks over its standard
            streams, as a list or a text.
        offered: Names of the tools to offer; all by default.
        per: `process` has all episodes of an environment process share a connection; `episode` gives each its own, and
            where the server is started, a server of its own.
        variables: Environment variables of a server that is started, beside those that programs need.
        token: Sent to an address as `Authorization: Bearer …`; `env:NAME` takes it from an environment variable.
        start_timeout_s: Seconds until the server must have told its tools.

    Raises:
        McpServerError: The arguments make no sense.
    """

    def __init__(
        self,
        server: str | Sequence[str | int | float],
        offered: Collection[str] | None = None,
        per: Literal["process", "episode"] = "process",
        variables: Mapping[str, str] | None = None,
        token: str | None = None,
        start_timeout_s: float = 30.0,
    ) -> None:
        if per not in ("process", "episode"):
            raise McpServerError(f"environment.kwargs.per is {per!r}, must be process or episode")
        self._server = _server_of(server, variables, token)
        self._offered = None if offered is None else frozenset(offered)
        self._is_own = per == "episode"
        self._start_timeout_s = start_timeout_s
        self._connection: _Connection | None = None

    @classmethod
    def check_arguments(cls, server: Any, variables: Any = None, token: Any = None, **_: Any) -> None:
        """Refuse a server that can't be started, before a run is.

        Raises:
            McpServerError: Its command is empty, or there is no such program.
        """
        _server_of(server, variables, token)

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Sequence[Message] | str:  # type: ignore[override]  # the base allows both
        """Connect to the server, and begin with the row's prompt."""
        self._connection = await self._connect()
        if self._offered is not None and (missing := self._offered - {one.name for one in self._connection.tools}):
            known = ", ".join(one.name for one in self._connection.tools) or "none"
            raise McpError(
                f"the MCP server {self._server.title} has no tool {', '.join(sorted(missing))}; it has: {known}"
            )
        if twice := sorted(super().tools.keys() & {one.name for one in self._shown()}):
            raise McpError(
                f"the MCP server {self._server.title} and environment.tools both have a tool {', '.join(twice)}: leave "
                "the server's out by environment.kwargs.offered, or rename the function with @hrl.tool(name=…)"
            )
        prompt: Sequence[Message] = row["prompt"]
        return prompt

    async def close(self) -> None:  # type: ignore[override]  # the base allows both
        """End a connection of the episode's own."""
        if self._is_own and self._connection is not None:
            await self._connection.close()

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Name → tool: the functions, then those of the server."""
        return {**super().tools, **{one.name: self._remote(self._connection, one) for one in self._shown()}}

    def _shown(self) -> list[Any]:
        """Return the tools of the server that the policy is shown."""
        known = () if self._connection is None else self._connection.tools
        return [one for one in known if self._offered is None or one.name in self._offered]

    async def _connect(self) -> _Connection:
        known = _shared.setdefault(asyncio.get_running_loop(), {})
        connection = None if self._is_own else known.get(self._server)
        if connection is None or not connection.is_open:
            connection = _Connection(self._server)
            if not self._is_own:
                known[self._server] = connection
        await connection.ready(self._start_timeout_s)
        return connection

    @staticmethod
    def _remote(connection: Any, described: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            text: str = await connection.call(described.name, arguments)
            return text

        schema = {
            "type": "function",
            "function": {
                "name": described.name,
                "description": described.description or "",
                "parameters": described.input_schema,
            },
        }
        return _RemoteTool(described.name, call, is_async=True, timeout_s=None, schema=schema, model=None)  # type: ignore[arg-type]
