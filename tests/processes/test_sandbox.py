"""Programs of a policy that means harm: what they can't do, whatever they try."""

import asyncio
import contextlib
import http.server
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from hrl.processes import sandbox, sandbox_child
from hrl.processes.sandbox import Sandbox, SandboxError, sandbox_limit

pytestmark = pytest.mark.skipif(sandbox_limit() is not None, reason=f"no sandbox here: {sandbox_limit()}")

REFUSED = re.compile(r"PermissionError|can't start new thread|not allowed to raise maximum|\[Errno (1|13|18|38)\]")
"""18: a name can't be given to a file of another folder."""


def run(program: str, **settings: object) -> sandbox.ProgramResult:
    return Sandbox(**{"time_s": 20.0, **settings}).run(program)


def attempts(setup: str, *lines: str) -> dict[str, str]:
    """Run each line by itself in one program; line → what it raised, or `did it: …`."""
    program = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
{setup}
for line in {lines!r}:
    try:
        value = eval(line)
    except BaseException as error:
        print(line, "=>", type(error).__name__, error)
    else:
        print(line, "=> did it:", repr(value)[:60])
"""
    output = run(program).output
    return dict(re.findall(r"^(.*?) => (.*)$", output, re.MULTILINE))


def refused(setup: str, *lines: str) -> None:
    said = attempts(setup, *lines)
    assert said.keys() == set(lines)
    assert {line: what for line, what in said.items() if not REFUSED.search(what)} == {}


# ------------------------------------------------------------------------------------------------- what a program can


def test_a_program_prints_and_its_last_value_is_shown():
    result = run("import math\nprint('hi')\nmath.factorial(20)")
    assert (result.output, result.end) == ("hi\n2432902008176640000\n", "done")
    assert run("x = 1").as_text() == "[no output]"
    assert run("").end == "done"


def test_an_exception_is_shown_with_its_line_and_without_files_of_ours():
    result = run("def f(x):\n    return 1 / x\nf(0)\n")
    assert result.end == "error"
    assert result.output.splitlines()[1:4:2] == [
        '  File "<program>", line 3, in <module>',
        '  File "<program>", line 2, in f',
    ]
    assert "return 1 / x" in result.output and result.output.endswith("ZeroDivisionError: division by zero\n")
    assert "sandbox" not in result.output
    assert run("x = = 1").output.endswith("SyntaxError: invalid syntax\n")
    assert run("import sys\nsys.exit(3)").end == "error"


def test_files_live_in_a_folder_of_the_program_s_own_that_goes_with_it():
    program = "open('a.txt', 'w').write('x' * 10)\nimport os, tempfile\nt = tempfile.TemporaryFile()\nos.getcwd()"
    result = run(program)
    folder = result.output.strip().strip("'")
    assert result.end == "done" and not os.path.exists(folder)
    assert run("import os\nos.listdir()").output == "[]\n"


def test_nothing_of_the_environment_is_seen(monkeypatch):
    monkeypatch.setenv("HRL_TEST_SECRET", "swordfish")
    output = run("import os\nsorted(os.environ), open('/dev/null').read(), input").output
    assert "['HOME', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'TMPDIR']" in output


def test_asyncio_and_what_a_program_needs_of_the_library_work():
    program = """
import asyncio, collections, datetime, decimal, fractions, functools, heapq, itertools, json, random, re, statistics
async def main():
    await asyncio.sleep(0.001)
    return await asyncio.gather(*(asyncio.sleep(0, n) for n in range(3)))
print(asyncio.run(main()), datetime.date(2020, 1, 1), random.Random(1).random(), json.dumps({"a": [1]}))
"""
    assert run(program).output.startswith("[0, 1, 2] 2020-01-01 0.13436424411240122")


def test_packages_are_there_if_they_are_asked_for():
    assert "ModuleNotFoundError" in run("import numpy").output
    assert run("import numpy\nint(numpy.arange(4).sum())", packages=True, memory_mib=4096).output == "6\n"


# --------------------------------------------------------------------------------------------- what a program can't


def test_a_fork_bomb_is_no_process_and_no_thread():
    refused(
        "import threading, subprocess, multiprocessing",
        "os.fork()",
        "os.forkpty()",
        "subprocess.run(['/bin/ls'])",
        "os.posix_spawn('/bin/ls', ['ls'], {})",
        "os.execv('/bin/sh', ['sh'])",
        "os.popen('ls')",
        "threading.Thread(target=print).start()",
        "multiprocessing.Process(target=print).start()",
        "call(57)" if sys.platform.startswith("linux") and os.uname().machine == "x86_64" else "os.fork()",
    )
    before = len(psutil.pids())
    result = run("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", time_s=1.0)
    assert result.end == "time" and abs(len(psutil.pids()) - before) < 50


def test_a_program_can_not_live_on_in_the_background():
    result = run("import os\nif os.fork() == 0:\n    os.setsid()\n")
    assert "PermissionError" in result.output
    refused("", "os.setsid()", "os.setpgid(0, 0)", "os.nice(-5)")


def test_there_is_no_network():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        port = server.server_address[1]
        said = attempts(
            "import socket, urllib.request",
            "socket.socket()",
            f"socket.create_connection(('127.0.0.1', {port}))",
            f"urllib.request.urlopen('http://127.0.0.1:{port}/')",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(said) == 7 and all(REFUSED.search(what) for what in said.values()), said


def test_no_signal_reaches_another_process():
    refused(
        "import signal, fcntl, struct\nparent = os.getppid()",
        "os.kill(parent, 15)",
        "os.kill(-1, 9)",
        "os.kill(0, 9)",
        "os.killpg(parent, 9)",
        "os.kill(1, 0)",
        "os.pidfd_open(parent)",
        "fcntl.fcntl(1, fcntl.F_SETOWN, parent)",
        "fcntl.fcntl(1, 15, struct.pack('ii', 1, parent))",
        "fcntl.ioctl(1, 0x8901, struct.pack('i', parent))",
    )
    assert run("import os\nos.kill(os.getpid(), 15)").end == "signal"
    assert run("import os\nos.abort()").end == "signal"


def test_no_other_process_can_be_looked_into(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET": "swordfish"})
    try:
        refused(
            f"parent, other = os.getppid(), {other.pid}",
            "open(f'/proc/{parent}/environ').read()",
            "open(f'/proc/{other}/environ').read()",
            "open(f'/proc/{parent}/maps').read()",
            "open(f'/proc/{parent}/mem', 'rb')",
            "open(f'/proc/{parent}/cmdline').read()",
            "os.listdir('/proc')",
            "open('/proc/self/environ').read()",
            "call(101 if os.uname().machine == 'x86_64' else 117, 16, parent, 0, 0)",  # ptrace
            "call(310 if os.uname().machine == 'x86_64' else 270, parent, 0, 0, 0, 0, 0)",  # process_vm_readv
            "call(438, 3, 0, 0)",  # pidfd_getfd
        )
    finally:
        other.kill()
        other.communicate()


def test_no_file_outside_is_read_changed_or_made(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    refused(
        f"secret, folder = {str(secret)!r}, {str(tmp_path)!r}",
        "open(secret).read()",
        "open(secret, 'w')",
        "open(secret, 'a')",
        "os.open(secret, os.O_RDONLY | os.O_TRUNC)",
        "os.truncate(secret, 0)",
        "os.remove(secret)",
        "os.rename(secret, 'mine')",
        "os.link(secret, 'mine')",
        "os.chmod(secret, 0)",
        "os.chown(secret, 1, 1)",
        "os.utime(secret, (0, 0))",
        "os.setxattr(secret, 'user.a', b'1')",
        "os.listdir(folder)",
        "os.mkdir(folder + '/made')",
        "open(folder + '/made', 'w')",
        "os.symlink(secret, 'link') or open('link').read()",
        "open('/etc/passwd').read()",
        "open('/tmp/hrl-made', 'w')",
        "open('/dev/shm/hrl-made', 'w')",
        "open('/proc/cpuinfo').read()",
        "os.listdir('/sys')",
        "os.mkfifo('pipe')",
        "os.memfd_create('a')",
        "os.mkdir('folder')",
        "os.open('.', os.O_TMPFILE | os.O_RDWR)",
    )
    assert secret.read_text() == "swordfish" and [*tmp_path.iterdir()] == [secret]
    assert oct(secret.stat().st_mode & 0o777) != "0o0"


def test_of_python_s_folder_only_its_library_is_read():
    """Not packages, other environments, or settings in which a login may stand."""
    library = Path(os.__file__).parent
    installed = next((one for one in library.glob("site-packages/*") if one.is_file()), None)
    if installed is not None:
        refused("", f"open({str(installed)!r}, 'rb')", f"os.listdir({str(Path(sys.base_prefix, 'bin'))!r})")
    assert run("import os, json.tool, xml.dom.minidom, sqlite3, decimal\nopen(os.__file__).read(3)").end == "done"


def test_rights_that_were_given_up_do_not_come_back():
    refused(
        "import resource",
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "os.setuid(0)",
        "os.setgroups([0])",
        "os.chroot('/')",
        "call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)",  # unshare a user namespace
        "call(165 if os.uname().machine == 'x86_64' else 40, 0, 0, 0, 0, 0)",  # mount
        "call(321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0)",  # bpf
        "call(425, 1, 0)",  # io_uring_setup
        "call(250 if os.uname().machine == 'x86_64' else 219, 0, 0, 0, 0, 0)",  # keyctl
        "call(29 if os.uname().machine == 'x86_64' else 194, 0, 4096, 0o1666)",  # shmget
        "libc.prctl(22, 0, 0, 0, 0) and (_ for _ in ()).throw(PermissionError())",
        "call(298 if os.uname().machine == 'x86_64' else 241, 0, 0, 0, 0, 0)",  # perf_event_open
        "call(10_000)",  # whatever comes
    )


def test_memory_is_bounded():
    result = run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", memory_mib=200)
    assert result.end == "memory" and result.as_text().endswith("[ended: it took too much memory]")
    assert run("len(bytearray(1 << 40))").end == "memory"


def test_what_is_written_to_disk_is_bounded():
    program = "import os\nfor n in range(10**6):\n    with open(str(n), 'wb') as f: f.write(os.urandom(1 << 20))"
    result = run(program, disk_mib=4)
    assert (result.end, result.as_text()) == ("files", "[ended: it wrote too much]")
    assert run("for n in range(10**6): open(str(n), 'w').close()").end == "files"
    one = run("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))", disk_mib=4)
    assert one.end in ("error", "files", "signal")


def test_endless_output_ends_the_program_and_only_its_beginning_is_kept():
    result = run("while True: print('x' * 1000)")
    assert result.end == "output" and len(result.output) <= 1 << 20
    assert len(result.as_text()) < 30_000 and result.as_text().endswith("[ended: it printed too much]")
    assert run("print('x' * 100_000)").end == "done"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(100)",
        "import signal, time\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
        "import os\nos.close(0), os.close(1), os.close(2)\nwhile True: pass",
    ],
    ids=["busy", "asleep", "deaf", "silent"],
)
def test_time_is_bounded_whatever_is_ignored(program):
    begun = time.monotonic()
    result = run(program, time_s=0.7)
    assert result.end == "time" and time.monotonic() - begun < 20
    assert re.search(r"\[ended after \d+\.\d s: it took too long\]", result.as_text())


def test_nothing_is_left_of_a_program(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    for program in ("1", "while True: pass", "while True: print(1)", "import os\nos.kill(os.getpid(), 9)"):
        run(program, time_s=0.5)
    assert [*tmp_path.iterdir()] == []
    assert programs() == []


def programs() -> list[psutil.Process]:
    """Return the programs that run now; other tests of this process may have left it children of their own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it ends while we look
            if sandbox_child.__file__ in process.cmdline():
                found.append(process)
    return found


def test_a_program_ends_when_its_call_is_given_up_and_leaves_its_place():
    async def play():
        running = asyncio.create_task(Sandbox(time_s=60.0).run_in_turn("while True: pass"))
        async with asyncio.timeout(30):
            while not programs():
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})
        assert running.cancelled() and programs() == []

    for _ in range(sandbox.PLACES.number + 1):
        asyncio.run(play())


def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
    mark = f"{tmp_path}/mark"
    code = f"from hrl.processes.sandbox import Sandbox\nSandbox(time_s=60).run('while True: pass # {mark}')"
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 30
    while not (children := psutil.Process(runner.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # until it has asked for that signal
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert children and alive == []


def test_programs_run_in_a_process_that_is_isolated_itself():
    code = """
from hrl.processes.sandbox import Sandbox
from hrl.processes.isolation import isolate
isolate()
result = Sandbox(time_s=20).run("open('a', 'w').write('x'); import os; os.fork()")
assert "PermissionError: [Errno 1]" in result.output and "'a'" not in result.output.splitlines()[-1], result
assert Sandbox(time_s=20).run("1 + 1").output == "2\\n"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# --------------------------------------------------------------------------------------------- where it can't be safe


@pytest.mark.parametrize(
    ("gone", "why"), [("landlock_version", "no Landlock"), ("has_filters", "filters no system calls")]
)
def test_without_the_kernel_s_help_programs_are_refused_unless_they_are_trusted(monkeypatch, gone, why):
    monkeypatch.setattr(sandbox_child, gone, lambda: 0)
    with pytest.raises(SandboxError, match=rf"can't be run safely here: .*{why}.*environment.kwargs.trust=true"):
        Sandbox().check()
    Sandbox(trust=True).check()


def test_a_right_that_can_not_be_given_up_keeps_the_program_from_running(monkeypatch, tmp_path):
    made = tmp_path / "made"
    broken = tmp_path / "sandbox_child.py"
    text = Path(sandbox_child.__file__).read_text()
    broken.write_text(text.replace("_RESTRICT_SELF = 444, 445, 446", "_RESTRICT_SELF = 444, 445, 449"))
    monkeypatch.setattr(sandbox_child, "__file__", str(broken))
    with pytest.raises(SandboxError, match="could not be run: landlock_restrict_self"):
        run(f"open({str(made)!r}, 'w')")
    assert not made.exists()


def test_trusted_programs_still_have_limits_and_no_environment(monkeypatch):
    monkeypatch.setenv("HRL_TEST_SECRET", "swordfish")
    both = run("import os\nos.environ.get('HRL_TEST_SECRET'), os.fork() and os.wait()[1]", trust=True)
    assert both.output == "(None, 0)\n" * 2
    assert run("while True: pass", trust=True, time_s=0.5).end == "time"
    assert run("len(bytearray(1 << 40))", trust=True).end == "memory"


@pytest.mark.parametrize("limits", [{"time_s": 0}, {"memory_mib": -1}, {"disk_mib": 0}, {"wait_s": 0}])
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(SandboxError, match="must be greater than 0"):
        Sandbox(**limits).check()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_of_calls_are_those_of_the_kernel_s_headers(machine):
    headers = {
        "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        "aarch64": Path("/usr/include/asm-generic/unistd.h"),
    }
    if not headers[machine].is_file():
        pytest.skip("the kernel's headers are not installed")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", headers[machine].read_text())
    }
    numbers.setdefault("newfstatat", numbers.get("fstatat", 79))
    ours = sandbox_child._NUMBERS[machine]
    assert {name: number for name, number in ours.items() if numbers.get(name) != number} == {}
    never = {"fork", "vfork", "clone", "execve", "execveat", "socket", "connect", "bind", "ptrace", "prctl", "mount"}
    assert not never & ours.keys()
