"""Running a program that the policy wrote, in a process that can do nothing but compute.

A program gets a process, a session and an empty folder of its own, and an environment of two variables that name the
folder. The kernel holds it: Landlock lets it read Python's own files and write in its folder alone, a filter of system
calls refuses processes, threads, sockets, signals to others and all else that computing does not need, limits bound
memory, processor time, files and their size. The supervisor bounds the clock, what it prints and what lies in its
folder, and ends it with SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hrl.environments import sandbox_child
from hrl.environments.tool_functions import tool
from hrl.environments.tools import ToolEnvironment
from hrl.errors import RefusedError

_MIB = 1 << 20
_POLL_S = 0.02
_LONGEST_OUTPUT = 1 << 20
"""Bytes; a program that prints more is ended."""
_MOST_FILES = 1000
_OPEN_FILES = 32
_SHOWN_OUTPUT = 20_000
"""Characters that the policy is shown; `environment.max_observation_tokens` cuts further."""
_AT_ONCE = max(2, os.cpu_count() or 1)
"""Programs that run at the same time, of one process of environments."""
_slots = threading.BoundedSemaphore(_AT_ONCE)

End = Literal["done", "error", "time", "memory", "output", "files", "signal"]


class SandboxError(RefusedError, RuntimeError):
    """Programs can't be run safely on this system, or not at all."""


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program.

    Attributes:
        output: All that it printed, on both streams, with its traceback if it failed.
        end: Why it ended: by itself (done), with an exception or a status (error), or by a limit.
        seconds: By the clock.
    """

    output: str
    end: End
    seconds: float

    def as_text(self) -> str:
        """Return what the policy is shown."""
        output = self.output
        if len(output) > _SHOWN_OUTPUT:
            half = _SHOWN_OUTPUT // 2
            output = f"{output[:half]}\n[… {len(output) - 2 * half:,} characters left out …]\n{output[-half:]}"
        said = {
            "time": f"[ended after {self.seconds:.1f} s: it took too long]",
            "memory": "[ended: it took too much memory]",
            "output": "[ended: it printed too much]",
            "files": "[ended: it wrote too much]",
            "signal": "[ended by a signal]",
        }.get(self.end, "")
        text = f"{output.rstrip()}\n{said}".strip()
        return text or "[no output]"


def sandbox_limit() -> str | None:
    """Return why programs can't be run safely here, as the end of a sentence; None if they can."""
    if sandbox_child.landlock_version() < 1:
        return (
            "this system is not Linux"
            if not sys.platform.startswith("linux")
            else "its kernel has no Landlock (since Linux 5.13, if it is built in and on), or a container forbids it"
        )
    if not sandbox_child.has_filters():
        return f"its kernel filters no system calls, or hrl does not know those of {os.uname().machine}"
    return None


@dataclass(frozen=True)
class Sandbox:
    """Where programs run.

    Attributes:
        time_s: Seconds by the clock, and of the processor, that a program may take.
        memory_mib: Its address space. Python itself takes 30, numpy 300 more.
        disk_mib: What may lie in its folder, looked at 50 times a second.
        packages: Whether it may import what is installed beside hrl, and not only the standard library.
        trust: Run programs without the kernel's protection, where there is none: they can do what this user can.
    """

    time_s: float = 10.0
    memory_mib: int = 512
    disk_mib: int = 16
    packages: bool = False
    trust: bool = False

    def check(self) -> None:
        """Refuse to go on where programs could do harm.

        Raises:
            SandboxError: The kernel can't hold them, and `trust` is not set; or a limit is none.
        """
        for name in ("time_s", "memory_mib", "disk_mib"):
            if not getattr(self, name) > 0:
                raise SandboxError(f"{name} of the sandbox is {getattr(self, name)}, must be greater than 0")
        why = None if self.trust else sandbox_limit()
        if why is not None:
            raise SandboxError(
                f"programs of the policy can't be run safely here: {why}. Run on a system that can, or, if a program "
                "may do all that this user can, set trust=true (environment.kwargs.trust=true)"
            )

    def run(self, program: str) -> ProgramResult:
        """Run a Python program to its end or to a limit; the value of its last line is printed, if it has one.

        Raises:
            SandboxError: It could not be run.
        """
        with _slots, tempfile.TemporaryDirectory(prefix="hrl-program-", ignore_cleanup_errors=True) as folder:
            return self._run(program, folder)

    def _run(self, program: str, folder: str) -> ProgramResult:
        begun = time.monotonic()
        process = subprocess.Popen(
            # By its file, so that it imports nothing of hrl, and by the interpreter behind a virtual environment.
            [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", sandbox_child.__file__, *self._orders(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, end = self._supervise(process, program.encode("utf-8", "replace"), folder)
        finally:
            _kill(process)
        seconds = time.monotonic() - begun
        status = process.returncode
        if status == sandbox_child.UNSAFE_STATUS:
            raise SandboxError(f"a program of the policy could not be run: {output.strip() or 'its parent has ended'}")
        return ProgramResult(output, end or _end_of(status, output), seconds)

    def _orders(self, folder: str) -> list[str]:
        """Return what the process is told; see `sandbox_child.Orders`."""
        single = {
            "parent": os.getpid(),
            "folder": folder,
            "trust": int(self.trust),
            "cpu_s": max(1, round(self.time_s)),
            "memory_bytes": self.memory_mib * _MIB,
            "file_bytes": self.disk_mib * _MIB,
            "open_files": _OPEN_FILES,
        }
        lists = {
            "readable": _readable(self.packages),
            "packages": _packages() if self.packages else [],
            # One thread, since a program can start no other.
            "environment": [f"HOME={folder}", f"TMPDIR={folder}", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"],
        }
        repeated = [f"{name}={value}" for name, values in lists.items() for value in values]
        return [*(f"{name}={value}" for name, value in single.items()), *repeated]

    def _supervise(self, process: subprocess.Popen[bytes], given: bytes, folder: str) -> tuple[str, End | None]:
        """Write the program and read what it prints until it ends; return that, and the limit that it reached."""
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + self.time_s
        printed, left = bytearray(), memoryview(given)
        end: End | None = None
        with selectors.DefaultSelector() as selector:
            for stream, events in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, events)
            looked = time.monotonic()
            while True:
                for key, _ in selector.select(_POLL_S):
                    if key.fileobj is process.stdin:
                        left = _write(process.stdin, left)
                        if not left:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                    elif not _read(process.stdout, printed):
                        selector.unregister(process.stdout)
                now = time.monotonic()
                if now >= deadline:
                    end = "time"
                elif len(printed) > _LONGEST_OUTPUT:
                    end = "output"
                elif now - looked >= _POLL_S:
                    looked = now
                    end = "files" if _takes_too_much(folder, self.disk_mib * _MIB) else None
                if end is not None or (process.poll() is not None and not _read_rest(process.stdout, printed)):
                    return printed[:_LONGEST_OUTPUT].decode("utf-8", "replace"), end


def _write(stream: Any, left: memoryview) -> memoryview:
    try:
        return left[os.write(stream.fileno(), left[: 1 << 16]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[len(left) :]


def _read(stream: Any, printed: bytearray) -> bool:
    """Take what can be read; return whether there may be more to come."""
    try:
        chunk = os.read(stream.fileno(), 1 << 16)
    except BlockingIOError:
        return True
    printed += chunk
    return bool(chunk)


def _read_rest(stream: Any, printed: bytearray) -> bool:
    """Take what a process that has ended had printed before; return whether there may be more of it."""
    before = len(printed)
    _read(stream, printed)
    return len(printed) > before


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which only a trusted one can, and wait for its end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    process.wait()


def _end_of(status: int, output: str) -> End:
    if status >= 0:
        return "done" if status == 0 else "memory" if _last_line(output).startswith("MemoryError") else "error"
    return "time" if -status == signal.SIGXCPU else "signal"


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _takes_too_much(folder: str, most_bytes: int) -> bool:
    """Return whether a folder holds too much; what is gone by the time that it is looked at counts as nothing."""
    taken = 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, 1):
            with contextlib.suppress(OSError):
                taken += entry.stat(follow_symlinks=False).st_blocks * 512
            if count > _MOST_FILES or taken > most_bytes:
                return True
    return False


def _packages() -> list[str]:
    return [path for name in ("purelib", "platlib") if (path := sysconfig.get_paths()[name])][:1]


def _readable(packages: bool) -> list[str]:
    """Return what a program may read: the interpreter, its library and those of the system."""
    prefix = Path(sys.base_prefix)
    own = [str(prefix)] if len(prefix.parts) > 2 else [str(prefix / name) for name in ("bin", "lib", "lib64", "share")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    devices = ["/dev/urandom", "/dev/zero"]
    return [*dict.fromkeys([*own, *system, *devices, *(_packages() if packages else [])])]


class PythonEnvironment(ToolEnvironment):
    """A tool environment whose tool `python` runs a program of the policy's.

    Args:
        time_s, memory_mib, disk_mib, packages, trust: Of `Sandbox`.

    Raises:
        SandboxError: Programs can't be run safely here, and `trust` is not set.
    """

    def __init__(
        self,
        time_s: float = 10.0,
        memory_mib: int = 512,
        disk_mib: int = 16,
        packages: bool = False,
        trust: bool = False,
    ) -> None:
        self._sandbox = Sandbox(time_s, memory_mib, disk_mib, packages, trust)
        self._sandbox.check()

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Each program runs by itself: it sees no names and files of the one before. The value of its last line is
        printed, too. There is no network.

        Args:
            code: The program.
        """
        return self._sandbox.run(code).as_text()


def python_tool() -> Callable[[str], str]:
    """Return the tool `python`, for `environment.tools`.

    Raises:
        SandboxError: Programs can't be run safely here.
    """
    sandbox = Sandbox()
    sandbox.check()

    def python(code: str) -> str:
        return sandbox.run(code).as_text()

    python.__doc__ = PythonEnvironment.python.__doc__
    return python
