"""The base class of everything that runs on a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hrl.single_controller.decorator import Dispatch, Execute, register


@dataclass(frozen=True)
class RankEnv:
    """Where a process stands in its group, in the environment variables that `torch.distributed` reads."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankEnv:
        """Read it back.

        Raises:
            RuntimeError: A variable is missing, because no worker group (nor torchrun) started this process.
        """
        missing = [name for name in RANK_ENV_NAMES if name not in environ]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)} not set: a Worker knows its rank only inside a worker group (or under torchrun)"
            )
        values = {name.lower(): environ[name] for name in RANK_ENV_NAMES}
        master_addr = values.pop("master_addr")
        return cls(master_addr=master_addr, **{name: int(value) for name, value in values.items()})

    def as_environ(self) -> dict[str, str]:
        """Return the variables to set, as strings."""
        return {name: str(getattr(self, name.lower())) for name in RANK_ENV_NAMES}


RANK_ENV_NAMES = tuple(name.upper() for name in RankEnv.__dataclass_fields__)


class Worker:
    """One rank of a worker group: subclass it and `register` the methods that the driver may call."""

    @cached_property
    def rank_env(self) -> RankEnv:
        """This rank's place in its group."""
        return RankEnv.from_environ()

    @property
    def rank(self) -> int:
        """Position in the group, from 0. The ranks of one node are consecutive."""
        return self.rank_env.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.rank_env.world_size

    @property
    def local_rank(self) -> int:
        """Position among the group's ranks on this node, from 0."""
        return self.rank_env.local_rank

    def close(self) -> None:
        """Called on a polite shutdown, before the process is ended. Release here what outlives a process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_pid(self) -> int:
        """Return the id of the process this rank runs in."""
        return os.getpid()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def execute_func(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(self, *args, **kwargs)` on every rank."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(self, *args, **kwargs)` on every rank, with the DataProto arguments cut over the ranks."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(*args, **kwargs)` on rank 0."""
        return func(*args, **kwargs)
