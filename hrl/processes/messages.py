"""Messages between a parent and a child that runs a stranger's code: one line of JSON each, over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

_LONGEST_GARBLE = 80


class GarbledError(ValueError):
    """A line between parent and child that is no message: the stranger's code wrote to its process's connection."""


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as one line of JSON in ASCII."""
    return (json.dumps(message) + "\n").encode("ascii")


async def open_stream(
    connection: socket.socket, longest_bytes: int = sys.maxsize
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return reader and writer of a connection, for lines up to a length."""
    return await asyncio.open_connection(sock=connection, limit=longest_bytes)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or `None` if the other side has closed the connection.

    Raises:
        GarbledError: What came is no message, or longer than the reader takes.
    """
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    except ValueError as error:  # how `readline` says that the line is too long
        raise GarbledError("a line of more bytes than a message has") from error
    if not line.endswith(b"\n"):
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GarbledError(line[:_LONGEST_GARBLE]) from error
    if not isinstance(message, dict):
        raise GarbledError(line[:_LONGEST_GARBLE])
    return message
