"""What Ray's errors say, without what Ray says around it."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError


def cause_of(error: RayError) -> BaseException:
    """Return the exception that the remote method raised; Ray's own where it did not get as far as raising one."""
    return error.cause if isinstance(error, RayTaskError) else error


def is_death(error: RayError) -> bool:
    """Return whether the process is gone."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def death_reason(error: RayError) -> str:
    """Return what Ray knows about the end of a process, in one line."""
    lines = [line.strip() for line in without_colours(str(error)).splitlines() if line.strip()]
    if isinstance(error, ActorDiedError):  # the head only repeats names that the caller's own message has
        keys = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
        lines = [line for line in lines if not line.startswith(keys) and line != ActorDiedError.BASE_ERROR_MSG]
    return " ".join(lines).partition(" Some common causes include")[0]  # what follows is general advice


def without_colours(text: str) -> str:
    """Ray colours its tracebacks; a message of ours is plain."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
