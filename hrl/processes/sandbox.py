"""Running a program that the policy wrote, in a process that can do nothing but compute.

A program gets a process, a session and an empty folder of its own, and an environment of two variables that name the
folder. The kernel holds it: Landlock lets it read Python's own files and write in its folder alone, a filter of system
calls refuses processes, threads, sockets, signals to others and all else that computing does not need, limits bound
memory, processor time, files and their size. The supervisor bounds the clock, what it prints and what lies in its
folder, and ends it with SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from hrl.errors import HrlError, RefusedError
from hrl.processes import sandbox_child
from hrl.processes.waiting import Places, in_line
from hrl.text import without_middle

TIME_S = 10.0
"""Seconds that a program may take where nothing else is said."""
_MIB = 1 << 20
_POLL_S = 0.02
_END_S = 5.0
"""How long a program that is given up may take to end; a signal ends it that nothing can catch."""
_LONGEST_OUTPUT = 1 << 20
"""Bytes; a program that prints more is ended."""
_MOST_FILES = 1000
_OPEN_FILES = 32
_SHOWN_OUTPUT = 20_000
"""Characters that the policy is shown; `environment.max_observation_tokens` cuts further."""
_FEWEST_PLACES = 2
PLACES = Places(_FEWEST_PLACES)
"""For programs of this process that run at the same time. First come, first served: whoever goes on asking for long
programs can't keep a short one waiting for longer than those before it take."""

End = Literal["done", "error", "time", "memory", "output", "files", "signal"]


def share_processors(processes: int) -> None:
    """Let this process run as many programs at the same time as its share of the machine's processors.

    Each process has its own line: none is left waiting for a place that another one held when it was killed, and those
    of a run get as many episodes each.

    Args:
        processes: How many of its kind there are on this machine.
    """
    known = getattr(os, "sched_getaffinity", None)
    processors = os.cpu_count() or 1 if known is None else len(known(0))
    PLACES.resize(max(_FEWEST_PLACES, processors // processes))


class SandboxError(RefusedError, RuntimeError):
    """Programs can't be run safely on this system, or not at all."""


class SandboxBusyError(HrlError, TimeoutError):
    """A program waited too long for others to end, and was not run."""


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program.

    Attributes:
        output: All that it printed, on both streams, with its traceback if it failed.
        end: Why it ended: by itself (done), with an exception or a status (error), or by a limit.
        seconds: By the clock, from its start.
        errors: What it printed on its standard error, where that is kept apart from `output`.
    """

    output: str
    end: End
    seconds: float
    errors: str = ""

    def as_text(self) -> str:
        """Return what the policy is shown."""
        output = without_middle(self.output, _SHOWN_OUTPUT)
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
        time_s: Seconds by the clock, and of the processor, that a program may take once it runs.
        memory_mib: Its address space. Python itself takes 30, numpy 300 more.
        disk_mib: What may lie in its folder, looked at 50 times a second.
        packages: Whether it may import what is installed beside hrl, and not only the standard library.
        trust: Run programs without the kernel's protection, where there is none: they can do what this user can.
        wait_s: Seconds that it may wait, before it runs, for other programs of this process to end.
        clock_s: Seconds by the clock, where they are not to be those of the processor: on a machine that is busy a
            program takes longer, and computes no more.
    """

    time_s: float = TIME_S
    memory_mib: int = 512
    disk_mib: int = 16
    packages: bool = False
    trust: bool = False
    wait_s: float = 60.0
    clock_s: float | None = None

    def check(self) -> None:
        """Refuse to go on where programs could do harm.

        Raises:
            SandboxError: The kernel can't hold them, and `trust` is not set; or a limit is none.
        """
        for name in ("time_s", "memory_mib", "disk_mib", "wait_s"):
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
            SandboxBusyError: Others ran for too long before it.
            SandboxError: It could not be run.
        """
        with self._place():
            return self._show(program)

    async def run_in_turn(self, program: str) -> ProgramResult:
        """Run a program as `run` does, and hold neither the event loop nor a thread while it waits.

        The clock of the call stands still until it runs. A call that is given up leaves the line, or ends its program.

        Raises:
            SandboxBusyError: Others ran for too long before it.
            SandboxError: It could not be run.
        """
        asked, given_up = PLACES.ask(), threading.Event()
        try:
            with in_line():
                await asyncio.wait_for(asyncio.wrap_future(asked), self.wait_s)
            running = asyncio.get_running_loop().run_in_executor(None, self._show, program, given_up)
        except TimeoutError as error:
            PLACES.leave(asked)
            raise self._busy() from error
        except BaseException:
            PLACES.leave(asked)
            raise
        running.add_done_callback(lambda _: PLACES.leave(asked))  # not before: until then it takes a processor
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait({running}, timeout=_END_S)
            raise

    def run_on(self, program: str, given: str) -> ProgramResult:
        """Run a program with a text on its standard input, and keep its standard error apart.

        Raises:
            SandboxBusyError: Others ran for too long before it.
            SandboxError: It could not be run.
        """
        with self._place(), self._started() as run:
            run.start(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            (process,) = run.processes
            assert process.stdin and process.stdout and process.stderr
            run.given[process.stdin] = memoryview(given.encode("utf-8", "replace"))
            run.taken = {process.stdout: bytearray(), process.stderr: bytearray()}
            return run.result()

    def run_together(self, asking: str, answering: str) -> tuple[ProgramResult, End | None]:
        """Run two programs, of which each reads what the other prints, until the first one's end.

        They share nothing else: neither sees the other's memory and files.

        Returns:
            What the first said on its standard error, and why the second ended before it; None if it did not.

        Raises:
            SandboxBusyError: Others ran for too long before it.
            SandboxError: They could not be run.
        """
        with self._place(), self._started() as run, contextlib.ExitStack() as ours:
            ends = [(os.fdopen(one, "rb"), os.fdopen(other, "wb")) for one, other in (os.pipe(), os.pipe())]
            for end in (end for pair in ends for end in pair):
                ours.enter_context(end)
            (asked, ask), (answered, answer) = ends
            run.start(asking, stdin=answered, stdout=ask, stderr=subprocess.PIPE)
            run.start(answering, stdin=asked, stdout=answer, stderr=subprocess.DEVNULL)
            ours.close()  # so that each reads an end when the other has ended
            said = run.processes[0].stderr
            assert said
            run.taken[said] = bytearray()
            result = run.result()
            return result, run.ends[1]

    def _show(self, program: str, given_up: threading.Event | None = None) -> ProgramResult:
        with self._started(given_up) as run:
            run.start(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, shows_last=True)
            output = run.processes[0].stdout
            assert output
            run.taken[output] = bytearray()
            return run.result()

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        asked = PLACES.ask()
        try:
            try:
                asked.result(self.wait_s)
            except TimeoutError as error:
                raise self._busy() from error
            yield
        finally:
            PLACES.leave(asked)

    def _busy(self) -> SandboxBusyError:
        return SandboxBusyError(
            f"the program was not run: for {self.wait_s:g} s (wait_s of the sandbox) there was no place for it, since "
            f"{PLACES.number} programs run at the same time, and others came before it"
        )

    @contextlib.contextmanager
    def _started(self, given_up: threading.Event | None = None) -> Iterator[_Run]:
        run = _Run(self, given_up or threading.Event())
        try:
            yield run
        finally:
            run.end()


class _Run:
    """Programs that run together; the first one's end is that of the run.

    Args:
        sandbox: Their limits.
        given_up: Ends them once it is set.

    Attributes:
        processes: Of the programs.
        given: Stream of a process → what is still to be written to it.
        taken: Stream of a process → what was read from it; the output comes first.
        ends: Of the programs that ended by themselves.
    """

    def __init__(self, sandbox: Sandbox, given_up: threading.Event) -> None:
        self._sandbox = sandbox
        self._given_up = given_up
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        self._begun_s = time.monotonic()
        self._killed = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.given: dict[IO[bytes], memoryview] = {}
        self.taken: dict[IO[bytes], bytearray] = {}
        self.ends: list[End | None] = []

    def start(
        self,
        program: str,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        stdout: IO[bytes] | int = subprocess.DEVNULL,
        stderr: IO[bytes] | int = subprocess.DEVNULL,
        shows_last: bool = False,
    ) -> None:
        """Start a program."""
        folder = tempfile.TemporaryDirectory(prefix="hrl-program-", ignore_cleanup_errors=True)
        self._folders.append(folder)
        with tempfile.TemporaryFile() as text:  # a file without a name, which it reads before it gives up its rights
            text.write(program.encode("utf-8", "replace"))
            text.seek(0)
            orders = _orders(self._sandbox, folder.name, text.fileno(), shows_last)
            # By its file, so that it imports nothing of hrl, and by the interpreter behind a virtual environment.
            command = [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", sandbox_child.__file__, *orders]
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder.name,
                    env={},
                    pass_fds=[text.fileno()],
                    start_new_session=True,
                )
            )

    def result(self) -> ProgramResult:
        """Wait for the end, and return what became of the first program.

        Raises:
            SandboxError: One could not be run.
        """
        limit = self._supervise()
        seconds = time.monotonic() - self._begun_s
        statuses = [process.poll() for process in self.processes]
        self.ends = [None if status is None else _end_of(status, "") for status in statuses]
        self._kill()
        output, *errors = (printed[:_LONGEST_OUTPUT].decode("utf-8", "replace") for printed in self.taken.values())
        said = "".join(errors) or output
        if any(process.returncode == sandbox_child.UNSAFE_STATUS for process in self.processes):
            raise SandboxError(f"a program of the policy could not be run: {said.strip() or 'its parent has ended'}")
        return ProgramResult(output, limit or _end_of(self.processes[0].returncode, said), seconds, "".join(errors))

    def end(self) -> None:
        """End what still runs, and remove the folders."""
        self._kill()
        for folder in self._folders:
            folder.cleanup()

    def _kill(self) -> None:
        for process in self.processes[self._killed :]:
            _kill(process)
        self._killed = len(self.processes)

    def _supervise(self) -> End | None:
        """Write and read until the first program has ended; return the limit that one of them has reached."""
        sandbox, first = self._sandbox, self.processes[0]
        deadline = self._begun_s + (sandbox.time_s if sandbox.clock_s is None else sandbox.clock_s)
        end: End | None = None
        with selectors.DefaultSelector() as selector:
            for streams, events in ((self.given, selectors.EVENT_WRITE), (self.taken, selectors.EVENT_READ)):
                for stream in streams:
                    os.set_blocking(stream.fileno(), False)
                    selector.register(stream, events)
            looked = time.monotonic()
            while True:
                for key, _ in selector.select(_POLL_S):
                    self._tend(selector, key.fileobj)  # type: ignore[arg-type]  # no numbers were registered
                now = time.monotonic()
                if now >= deadline or self._given_up.is_set():
                    end = "time"
                elif any(len(printed) > _LONGEST_OUTPUT for printed in self.taken.values()):
                    end = "output"
                elif now - looked >= _POLL_S:
                    looked = now
                    too_much = any(_takes_too_much(one.name, sandbox.disk_mib * _MIB) for one in self._folders)
                    end = "files" if too_much else None
                if end is not None or (first.poll() is not None and not self._read_rest()):
                    return end

    def _tend(self, selector: selectors.BaseSelector, stream: IO[bytes]) -> None:
        """Write or read what a stream takes or gives now."""
        if stream in self.taken:
            if not _read(stream, self.taken[stream]):
                selector.unregister(stream)
            return
        self.given[stream] = _write(stream, self.given[stream])
        if not self.given[stream]:
            selector.unregister(stream)
            stream.close()

    def _read_rest(self) -> bool:
        """Take what a process that has ended had printed before; return whether there may be more of it."""
        before = sum(map(len, self.taken.values()))
        for stream, printed in self.taken.items():
            _read(stream, printed)
        return sum(map(len, self.taken.values())) > before


def _orders(sandbox: Sandbox, folder: str, program: int, shows_last: bool) -> list[str]:
    """Return what a process is told; see `sandbox_child.Orders`."""
    single = {
        "parent": os.getpid(),
        "folder": folder,
        "program": program,
        "library": sysconfig.get_path("stdlib"),
        "shows_last": int(shows_last),
        "trust": int(sandbox.trust),
        "cpu_s": max(1, round(sandbox.time_s)),
        "memory_bytes": sandbox.memory_mib * _MIB,
        "file_bytes": sandbox.disk_mib * _MIB,
        "open_files": _OPEN_FILES,
    }
    lists = {
        "readable": _readable(sandbox.packages),
        "packages": _packages() if sandbox.packages else [],
        # One thread, since a program can start no other.
        "environment": [f"HOME={folder}", f"TMPDIR={folder}", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"],
    }
    repeated = [f"{name}={value}" for name, values in lists.items() for value in values]
    return [*(f"{name}={value}" for name, value in single.items()), *repeated]


def _write(stream: IO[bytes], left: memoryview) -> memoryview:
    try:
        return left[os.write(stream.fileno(), left[: 1 << 16]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[len(left) :]


def _read(stream: IO[bytes], printed: bytearray) -> bool:
    """Take what can be read; return whether there may be more to come."""
    try:
        chunk = os.read(stream.fileno(), 1 << 16)
    except BlockingIOError:
        return True
    printed += chunk
    return bool(chunk)


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


@functools.cache
def _readable(packages: bool) -> list[str]:
    """Return what a program may read: Python's own library and that of the system, and nothing that is installed.

    Beside its library, Python's folder may hold packages, other environments, and settings with a login (`pip.conf`).
    """
    library = Path(sysconfig.get_path("stdlib"))
    own = sorted(str(one) for one in library.iterdir() if one.name not in ("site-packages", "dist-packages"))
    shared = sorted(str(one) for one in Path(sys.base_prefix, "lib").glob("*.so*"))
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    devices = ["/dev/urandom", "/dev/zero"]
    return [*own, *shared, *system, *devices, *(_packages() if packages else [])]
