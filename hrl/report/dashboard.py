"""The live view of a run that serves it itself (`trainer.dashboard`), in a process of its own.

A page takes tenths of a second to make, of a long run seconds, and would take them from the run. The run listens on
the address, so that it can tell it at once, and hands the socket on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import Self

from hrl.processes.child_environment import child_environment
from hrl.processes.lifetime import die_with_parent
from hrl.report.page_server import LiveView, address_of, listen_on

_NICE = 10
_END_S = 30.0
"""How long the end of the process is waited for."""


class Dashboard:
    """Serves the page of a run for the duration of a `with` block.

    Args:
        folder: The run folder.
        port: The port; 0 for a free one.

    Attributes:
        address: The address of the page.

    Raises:
        LiveViewError: The port is taken.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._listening = listen_on("127.0.0.1", port)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = address_of(self._listening)

    def __enter__(self) -> Self:
        number = self._listening.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._folder), str(number), str(os.getpid())],
            env=child_environment(),
            pass_fds=[number],
            stdin=subprocess.PIPE,  # its end is the end of the run
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for the run, which then tells its outcome
        )
        self._listening.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._process is None:
            self._listening.close()
            return
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(folder: str, number: str, parent: str) -> None:
    """Serve the page of a folder at a socket that is open here, until standard input ends."""
    die_with_parent(int(parent))
    os.nice(_NICE)
    with LiveView(Path(folder), listening=socket(fileno=int(number))) as view:
        sys.stdin.buffer.read()
        view.let_browsers_see_the_end()


if __name__ == "__main__":
    main(*sys.argv[1:])
