"""A process that can look into no other process, and end none that it did not start.

Processes of one user may read each other's environment and memory (`/proc/<pid>/environ`, `ptrace`) and send each other
signals. A process in a Landlock domain of its own may not, whichever user it belongs to: Linux offers it to everyone
since 5.13, and holds back signals since 6.12. It costs nothing and takes nothing else away, except that a program
can't gain rights by being started (`sudo`).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same number on every architecture
_VERSION_FLAG = 1
_FROM_VERSION_WITH_SIGNALS = 6
_MAKE_BLOCK_DEVICE = 1 << 11
"""A domain has to forbid something: making block devices, which no reward function does."""
_SCOPE_SIGNAL = 1 << 1
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 38, 24
_CAPABILITY_VERSION = 0x20080522
_LOOKING = {"SYS_RAWIO": 17, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "PERFMON": 38, "BPF": 39, "CHECKPOINT_RESTORE": 40}
"""Capabilities with which root may read the memory of others, whatever the domain (`mm_access` asks for PERFMON)."""


def isolation_limit() -> str | None:
    """Return why a process can't be isolated here, as the end of a sentence; None if it can."""
    version = _landlock_version()
    if version >= 1:
        return None
    if version == 0:
        return "this system is not Linux"
    return "its kernel has no Landlock (since Linux 5.13, if it is built in and on), or a container forbids it"


def isolate() -> None:
    """Put this process, and what it starts from now on, into a domain of its own; without Landlock, do nothing.

    Call it while the process has one thread. It can't be undone.

    Raises:
        OSError: The kernel offers Landlock and refused.
    """
    version = _landlock_version()
    if _LIBC is None or version < 1:
        return
    _drop_capabilities()
    attributes = struct.pack("Q", _MAKE_BLOCK_DEVICE)
    if version >= _FROM_VERSION_WITH_SIGNALS:
        attributes += struct.pack("QQ", 0, _SCOPE_SIGNAL)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    _check(ruleset, "landlock_create_ruleset")
    try:
        _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(_LIBC.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _landlock_version() -> int:
    """Return the version of Landlock that the kernel offers: 0 on another system, -1 if it offers none."""
    if _LIBC is None:
        return 0
    return int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def _drop_capabilities() -> None:
    """Give up what lets root look into other processes, for this process and all that it starts."""
    assert _LIBC is not None
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(24)
    _check(_LIBC.capget(header, held), "capget")
    low_effective, low_permitted, low_inherited, high_effective, high_permitted, high_inherited = struct.unpack(
        "6I", held.raw
    )
    permitted = low_permitted | high_permitted << 32
    if not any(permitted >> number & 1 for number in _LOOKING.values()):
        return
    low = high = 0xFFFFFFFF
    for number in _LOOKING.values():
        # What a process started by root would be given again; without SETPCAP, as in some containers, it stays, and
        # what is started here is root's program with root's rights.
        _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
        low &= ~(1 << number) if number < 32 else low
        high &= ~(1 << number - 32) if number >= 32 else high
    kept = struct.pack(
        "6I",
        low_effective & low,
        low_permitted & low,
        low_inherited & low,
        high_effective & high,
        high_permitted & high,
        high_inherited & high,
    )
    _check(_LIBC.capset(header, kept), "capset")


def _check(result: int, name: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name} failed: {os.strerror(error)}")
