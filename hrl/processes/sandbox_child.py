"""The process of a program that the policy wrote: gives up all rights but those of computing, then runs the program.

It is started as a file (`python -I -S`) with its orders as arguments, and reads the program from a file that it is
given open. It imports only what it needs of the standard library: a start is most of what a small program takes.
Nothing of what it gives up can be had back, so that the program may do in this process whatever it likes.
"""

from __future__ import annotations

import _ast
import builtins
import ctypes
import os
import resource
import struct
import sys

if sys.flags.no_site == 0:  # elsewhere than in its own process
    from typing import Any, NoReturn

_SIGKILL = 9
UNSAFE_STATUS = 97
"""Exit status of a process that could not give up its rights; the program was not run."""
PROGRAM = "<program>"

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_CAP_AMBIENT = 1, 38, 24, 22, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1

# Landlock's rights, by bit.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
"""No folders in it: what is in a flat one is counted and removed at once."""
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Version of Landlock → how many rights over files it knows; 16 since version 5."""
_NET_FROM, _SCOPES_FROM = 4, 6

# Seccomp's filters: instructions of a small machine that sees number, architecture and arguments of a system call.
_LOAD, _EQUAL, _SET, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

# fmt: off
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "newfstatat": 262,
        "statx": 332, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "mremap": 25, "msync": 26, "mincore": 27,
        "madvise": 28, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127,
        "rt_sigsuspend": 130, "rt_sigtimedwait": 128, "sigaltstack": 131, "pread64": 17, "pwrite64": 18, "readv": 19,
        "writev": 20, "preadv": 295, "pwritev": 296, "access": 21, "faccessat": 269, "faccessat2": 439, "pipe": 22,
        "pipe2": 293, "select": 23, "pselect6": 270, "poll": 7, "ppoll": 271, "epoll_create": 213,
        "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232, "epoll_pwait": 281, "eventfd2": 290,
        "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287, "sched_yield": 24,
        "sched_getaffinity": 204, "sched_getparam": 143, "sched_getscheduler": 145, "sched_get_priority_max": 146,
        "sched_get_priority_min": 147, "getpriority": 140, "dup": 32, "dup2": 33, "dup3": 292, "pause": 34,
        "nanosleep": 35, "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229, "gettimeofday": 96,
        "time": 201, "getitimer": 36, "setitimer": 38, "alarm": 37, "timer_delete": 226, "getpid": 39, "getppid": 110,
        "gettid": 186, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108, "getgroups": 115,
        "getresuid": 118, "getresgid": 120, "getpgid": 121, "getpgrp": 111, "getsid": 124, "uname": 63, "getcwd": 79,
        "chdir": 80, "fchdir": 81, "sendfile": 40, "copy_file_range": 326, "flock": 73, "fsync": 74, "fdatasync": 75,
        "ftruncate": 77, "getdents64": 217, "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83,
        "mkdirat": 258, "rmdir": 84, "unlink": 87, "unlinkat": 263, "link": 86, "linkat": 265, "symlink": 88,
        "symlinkat": 266, "readlink": 89, "readlinkat": 267, "umask": 95, "getrlimit": 97, "setrlimit": 160,
        "getrusage": 98, "sysinfo": 99, "times": 100, "statfs": 137, "fstatfs": 138, "futex": 202,
        "set_tid_address": 218, "set_robust_list": 273, "get_robust_list": 274, "rseq": 334, "getrandom": 318,
        "getcpu": 309, "membarrier": 324, "close_range": 436, "fadvise64": 221, "readahead": 187, "exit": 60,
        "exit_group": 231, "restart_syscall": 219, "recvfrom": 45, "sendto": 44, "recvmsg": 47, "sendmsg": 46,
        "shutdown": 48, "getsockopt": 55, "setsockopt": 54, "getsockname": 51, "getpeername": 52, "openat": 257,
        "creat": 85, "arch_prctl": 158, "ioctl": 16, "fcntl": 72, "kill": 62, "tgkill": 234, "prlimit64": 302,
        "socketpair": 53, "clone3": 435, "openat2": 437,
    },
    "aarch64": {
        "read": 63, "write": 64, "close": 57, "fstat": 80, "newfstatat": 79, "statx": 291, "lseek": 62, "mmap": 222,
        "mprotect": 226, "munmap": 215, "mremap": 216, "msync": 227, "mincore": 232, "madvise": 233, "brk": 214,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "rt_sigpending": 136, "rt_sigsuspend": 133,
        "rt_sigtimedwait": 137, "sigaltstack": 132, "pread64": 67, "pwrite64": 68, "readv": 65, "writev": 66,
        "preadv": 69, "pwritev": 70, "faccessat": 48, "faccessat2": 439, "pipe2": 59, "pselect6": 72, "ppoll": 73,
        "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "eventfd2": 19, "timerfd_create": 85,
        "timerfd_settime": 86, "timerfd_gettime": 87, "sched_yield": 124, "sched_getaffinity": 123,
        "sched_getparam": 121, "sched_getscheduler": 120, "sched_get_priority_max": 125,
        "sched_get_priority_min": 126, "getpriority": 141, "dup": 23, "dup3": 24, "nanosleep": 101,
        "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114, "gettimeofday": 169, "getitimer": 102,
        "setitimer": 103, "timer_delete": 111, "getpid": 172, "getppid": 173, "gettid": 178, "getuid": 174,
        "geteuid": 175, "getgid": 176, "getegid": 177, "getgroups": 158, "getresuid": 148, "getresgid": 150,
        "getpgid": 155, "getsid": 156, "uname": 160, "getcwd": 17, "chdir": 49, "fchdir": 50, "sendfile": 71,
        "copy_file_range": 285, "flock": 32, "fsync": 82, "fdatasync": 83, "ftruncate": 46, "getdents64": 61,
        "renameat": 38, "renameat2": 276, "mkdirat": 34, "unlinkat": 35, "linkat": 37, "symlinkat": 36,
        "readlinkat": 78, "umask": 166, "getrlimit": 163, "setrlimit": 164, "getrusage": 165, "sysinfo": 179,
        "times": 153, "statfs": 43, "fstatfs": 44, "futex": 98, "set_tid_address": 96, "set_robust_list": 99,
        "get_robust_list": 100, "rseq": 293, "getrandom": 278, "getcpu": 168, "membarrier": 283, "close_range": 436,
        "fadvise64": 223, "readahead": 213, "exit": 93, "exit_group": 94, "restart_syscall": 128, "recvfrom": 207,
        "sendto": 206, "recvmsg": 212, "sendmsg": 211, "shutdown": 210, "getsockopt": 209, "setsockopt": 208,
        "getsockname": 204, "getpeername": 205, "openat": 56, "ioctl": 29, "fcntl": 25, "kill": 129, "tgkill": 131,
        "prlimit64": 261, "socketpair": 199, "clone3": 435, "openat2": 437,
    },
}
# fmt: on
"""Machine → system calls that a program may make, some with conditions. Not among them, whatever its user may do:
making processes and threads, starting programs, opening sockets, looking into other processes, changing who may read a
file, shared memory, keys, mounts, namespaces, modules, and all that will be invented."""
_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000
_O_TMPFILE_BIT = 0o20000000
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)
"""Duplicates, flags and locks; not whom a signal is sent to (`F_SETOWN`)."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether it is a terminal, its size, how much can be read, blocking or not, closed by another program or not."""


class UnsafeError(Exception):
    """A right could not be given up."""


# ---- what is given up --------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers; 0 or less if it offers none."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def has_filters() -> bool:
    """Return whether system calls can be filtered on this machine, as far as can be told without doing it."""
    if os.uname().machine not in _NUMBERS:
        return False
    # With a null pointer the kernel says EFAULT where it knows filters, else EINVAL.
    libc = _libc()
    return libc.prctl(_PR_SET_SECCOMP, 2, None, 0, 0) != 0 and ctypes.get_errno() == 14


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result < 0:
        raise UnsafeError(f"{call}: {os.strerror(ctypes.get_errno())}")


def limit_resources(orders: Orders) -> None:
    """Set the limits of this process, which it can't raise again without capabilities."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: orders.file_bytes,
        resource.RLIMIT_NOFILE: orders.open_files,
        resource.RLIMIT_AS: orders.memory_bytes,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    # The first ends a program with a signal of its own, the second one that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (orders.cpu_s, orders.cpu_s + 1))


def drop_capabilities() -> None:
    """Give up root's rights, for good: there is no program here that could give them back."""
    libc = _libc()
    for number in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # without SETPCAP they stay, and are of no use
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _check(libc.capset(header, struct.pack("6I", 0, 0, 0, 0, 0, 0)), "capset")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def restrict_files(readable: list[str], library: str, own: str) -> None:
    """Allow reading some folders and files, and writing in one; no TCP, no signals to others.

    Args:
        readable: What may be read.
        library: A folder whose names may be seen, which imports do; what is in the files is not readable by that.
        own: The one to write in.
    """
    libc, version = _libc(), landlock_version()
    if version < 1:
        raise UnsafeError("the kernel has no Landlock")
    handled = (1 << _FS_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("Q", handled)
    if version >= _NET_FROM:
        attributes += struct.pack("Q", 0b11)
    if version >= _SCOPES_FROM:
        attributes += struct.pack("Q", 0b11)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    _check(ruleset, "landlock_create_ruleset")
    others = [(library, _READ_DIR), ("/dev/null", _READ | _WRITE_FILE), (own, _OWN)]
    for path, rights in [*((path, _READ) for path in readable), *others]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # this system has no such folder
        allowed = rights & handled & (-1 if os.path.isdir(path) else _OF_FILES)
        rule = struct.pack("=Qi", allowed, descriptor)
        _check(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, ctypes.c_uint32(0)), "landlock_add_rule")
        os.close(descriptor)
    _check(libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock_restrict_self")
    os.close(ruleset)


def _instruction(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, value)


def _one_of(argument: int, values: tuple[int, ...]) -> list[bytes]:
    """Return instructions that allow a call if an argument has one of these values, and refuse it else."""
    found = [_instruction(_LOAD, _ARGUMENTS + 8 * argument)]
    for value in values:
        found += [_instruction(_EQUAL, value, 0, 1), _instruction(_RETURN, _ALLOW)]
    return [*found, _instruction(_RETURN, _ERRNO | _EPERM)]


def _opening(argument: int) -> list[bytes]:
    """Return instructions that allow opening a file, but not emptying one without the right to write to it.

    Landlock sees that only since its third version. Files without a name, which no supervisor could count, are refused.
    """
    return [
        _instruction(_LOAD, _ARGUMENTS + 8 * argument),
        _instruction(_SET, _O_TMPFILE_BIT, 4, 0),
        _instruction(_SET, _O_TRUNC, 0, 2),
        _instruction(_SET, _O_ACCMODE, 1, 0),
        _instruction(_RETURN, _ERRNO | _EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | _EPERM),
    ]


def program_of_filter(machine: str, own_pid: int) -> bytes:
    """Return the filter of system calls: what is not allowed fails with EPERM."""
    numbers = _NUMBERS[machine]
    refuse = _instruction(_RETURN, _ERRNO | _EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    conditions = {
        "open": _opening(1),
        "openat": _opening(2),
        # glibc asks for the older call where this one is not known; where it is, the filter can't see what is asked.
        "clone3": [_instruction(_RETURN, _ERRNO | _ENOSYS)],
        "openat2": [_instruction(_RETURN, _ERRNO | _ENOSYS)],
        "fcntl": _one_of(1, _FCNTL),
        "ioctl": _one_of(1, _IOCTL),
        "kill": _one_of(0, (own_pid,)),
        "tgkill": _one_of(0, (own_pid,)),
        "prlimit64": [  # reading limits, not setting those of others
            _instruction(_LOAD, _ARGUMENTS + 8 * 2),
            _instruction(_EQUAL, 0, 0, 3),
            _instruction(_LOAD, _ARGUMENTS + 8 * 2 + 4),
            _instruction(_EQUAL, 0, 0, 1),
            allow,
            refuse,
        ],
        "socketpair": [  # two ends of one line, with which nobody else can be reached
            _instruction(_LOAD, _ARGUMENTS),
            _instruction(_EQUAL, _AF_UNIX, 0, 4),
            _instruction(_LOAD, _ARGUMENTS + 8),
            _instruction(_AND, _SOCK_TYPE),
            _instruction(_EQUAL, _SOCK_STREAM, 0, 1),
            allow,
            refuse,
        ],
    }
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _AUDIT_ARCHITECTURE[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(_SET, _X32_BIT, 0, 1), _instruction(_RETURN, _KILL)]
    for name, number in numbers.items():
        body = conditions.get(name, [allow])
        program += [_instruction(_EQUAL, number, 0, len(body)), *body]
    return b"".join([*program, refuse])


def filter_calls() -> None:
    """Refuse all system calls from now on that computing does not need."""
    instructions = program_of_filter(os.uname().machine, os.getpid())
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(held))
    _check(_libc().prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "prctl(PR_SET_SECCOMP)")


# ---- the program -------------------------------------------------------------------------------------------------


def run(program: str, shows_last: bool) -> int:
    """Run a program as `python` would, and where that is asked show the value of its last line; return its status."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    try:
        tree: Any = compile(program, PROGRAM, "exec", _ast.PyCF_ONLY_AST)
        is_value = shows_last and tree.body and isinstance(tree.body[-1], _ast.Expr)
        last = tree.body.pop() if is_value else None
        exec(compile(tree, PROGRAM, "exec"), names)  # noqa: S102  (this is what the process is for)
        if isinstance(last, _ast.Expr):
            expression: Any = _ast.Expression(last.value)
            value = eval(compile(expression, PROGRAM, "eval"), names)  # noqa: S307
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as error:
        if isinstance(error.code, str):
            _complain(f"{error.code}\n")
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except MemoryError:  # there may be none left for more words
        _complain("MemoryError\n")
        return 1
    except BaseException as error:  # noqa: BLE001  (a program may raise anything)
        _show(error, program)
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _show(error: BaseException, program: str) -> None:
    """Print a program's traceback with its lines, and without this file."""
    import linecache
    import traceback

    linecache.cache[PROGRAM] = (len(program), None, program.splitlines(keepends=True), PROGRAM)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    _complain("".join(traceback.format_exception(type(error), error, frames)))


def _complain(text: str) -> None:
    """Write to the standard error, behind all that was printed."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()


class Orders:
    """What the supervisor says, as arguments `name=value` of the command line; lists are repeated arguments.

    Attributes:
        parent: Number of the supervisor's process.
        folder: The only one that the program may write in.
        program: Number of the open file that has the program.
        library: Folder of Python's library, whose names it may see.
        shows_last: Whether the value of its last line is printed.
        cpu_s, memory_bytes, file_bytes, open_files: Limits.
        trust: Whether the program keeps the rights of its user.
        readable: What the program may read.
        packages: Where else than in the standard library modules are found.
        environment: Its environment, `NAME=value`.
    """

    def __init__(self, arguments: list[str]) -> None:
        given: dict[str, list[str]] = {}
        for argument in arguments:
            name, _, value = argument.partition("=")
            given.setdefault(name, []).append(value)
        self.parent, self.cpu_s, self.memory_bytes, self.file_bytes, self.open_files, trust = (
            int(given[name][0]) for name in ("parent", "cpu_s", "memory_bytes", "file_bytes", "open_files", "trust")
        )
        self.trust = trust == 1
        self.program, self.shows_last = int(given["program"][0]), given["shows_last"] == ["1"]
        self.folder, self.library = given["folder"][0], given["library"][0]
        self.readable, self.packages = given["readable"], given.get("packages", [])
        self.environment = dict(one.split("=", 1) for one in given["environment"])


def main() -> NoReturn:
    """Read the orders and the program, give up all rights, run the program."""
    orders = Orders(sys.argv[1:])
    with open(orders.program, "rb") as file:
        program = file.read().decode("utf-8", "replace")
    _libc().prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != orders.parent:
        os._exit(UNSAFE_STATUS)
    sys.argv = [""]
    sys.path += orders.packages
    os.environ.clear()  # of what Python itself puts there
    os.environ |= orders.environment
    try:
        limit_resources(orders)
        if not orders.trust:
            drop_capabilities()
            restrict_files(orders.readable, orders.library, orders.folder)
            filter_calls()
    except (UnsafeError, OSError, ValueError) as error:
        sys.stderr.write(str(error))
        sys.stderr.flush()
        os._exit(UNSAFE_STATUS)
    status = 1
    try:
        status = run(program, orders.shows_last)
    finally:
        os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
