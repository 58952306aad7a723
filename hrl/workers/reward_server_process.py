"""vLLM's server as a process of a run: `python -m hrl.workers.reward_server_process`, with the arguments of vLLM's.

The copies of a model meet at a TCP store that the server opens, and torch's listens on every interface, to everybody.
Here it listens on the address that vLLM gives it, which is this machine's loopback.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch.distributed as dist

from hrl.loopback import listening_socket

_SERVER = "vllm.entrypoints.openai.api_server"


class OwnStore(dist.TCPStore):
    """A store that listens on its own address alone.

    Args:
        host_name: An address of this machine, where it is the master.
        port: Where it listens; 0 takes any that is free.
        world_size: As torch's.
        is_master: As torch's.
        others, options: As torch's.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *others: Any,
        **options: Any,
    ) -> None:
        if is_master and options.get("master_listen_fd") is None:
            listener = listening_socket(host_name, port)
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, *others, **options)


def main() -> None:
    """Run vLLM's server in this process."""
    dist.TCPStore = OwnStore
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
