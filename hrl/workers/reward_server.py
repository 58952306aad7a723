"""vLLM's server with a reward model or a judge, on the devices of the role `rm`, for reward functions that ask it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from hrl.errors import HrlError
from hrl.loopback import listening_socket
from hrl.models.source import find_on_this_node
from hrl.processes.lifetime import under_guard
from hrl.reward.spec import SERVED_NAME
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker import RANK_ENV_NAMES
from hrl.workers import reward_server_process
from hrl.workers.model_worker import ModelWorker
from hrl.workers.rollout.early_process import engine_environment
from hrl.workers.runtime import join_world

if TYPE_CHECKING:
    from hrl.config.reward import RewardModelConfig
    from hrl.workers.engine.engine import Engine
    from hrl.workers.runtime import Runtime

_ASK_S, _POLL_S, _END_S = 2.0, 0.5, 20.0
_SHOWN_BYTES = 8000
_CPU_CACHE_GIB = "1"


class RewardServerError(HrlError, RuntimeError):
    """The server of the reward model did not start; the message has the end of what it said."""


class RewardServerWorker(ModelWorker):
    """One rank of the pool whose devices the server has; the first one starts it, and ends it with the run.

    Args:
        settings: The section `reward.reward_model`.
        runtime, model_path: Of `ModelWorker`.
        driver_ip: Address of the driver's node, where reward functions run. The server listens to that machine alone if
            it is this one, and else at this machine's address in the cluster.
    """

    def __init__(self, settings: RewardModelConfig, *, runtime: Runtime, model_path: str, driver_ip: str) -> None:
        super().__init__(settings.model, runtime=runtime, model_path=model_path)
        self.arguments, self.driver_ip = dict(settings.server_kwargs), driver_ip
        self._server: ServedModel | None = None

    @property
    def engine(self) -> Engine:
        """The server is a process of its own: nothing is sharded here."""
        raise RuntimeError("a served reward model has no engine in its ranks")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the server over the devices of all ranks, which are on one machine, and wait until it answers."""
        self.model_path = str(find_on_this_node(self.model_path))
        device = join_world(self.runtime)
        visible: list[Any] = [None] * self.world_size
        dist.all_gather_object(visible, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if self.rank != 0:
            return
        on_cpu = device.type == "cpu"
        arguments = {"data_parallel_size": self.world_size // self.arguments.get("tensor_parallel_size", 1)}
        # What it says goes into a file, for months perhaps: nothing of single requests, nor every ten seconds.
        arguments |= {"disable_uvicorn_access_log": True, "disable_log_stats": True}
        if self.runtime.trust_remote_code:
            arguments["trust_remote_code"] = True
        environment = engine_environment(
            on_cpu,
            self.runtime.num_threads * self.world_size if on_cpu else self.runtime.engine_threads,
            ranks=self.world_size,
            visible_devices=None if on_cpu else ",".join(visible),
        )
        if on_cpu:  # vLLM's own default is half of the memory, which the run's other processes need
            environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
            arguments["enforce_eager"] = True  # as the policy's engine: it compiles for longer than it would save
        self._server = ServedModel(self.model_path, arguments | self.arguments, self._host(), environment)
        self._server.start(self.runtime.init_timeout_s)

    def _host(self) -> str:
        """Return the address of this machine at which the driver's node reaches it."""
        import ray

        own = str(ray.util.get_node_ip_address())
        return "127.0.0.1" if own == self.driver_ip else own

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address(self) -> str | None:
        """Return the server's address, with the `/v1` of OpenAI's protocol; None from ranks other than the first."""
        return None if self._server is None else self._server.address

    def close(self) -> None:
        """End the server and all that it has started."""
        if self._server is not None:
            self._server.end()


class ServedModel:
    """A process of `vllm serve`.

    Args:
        model: A local folder.
        arguments: Of the server, as `vllm serve` names them, with underscores.
        host: Where it listens.
        environment: Variables that are changed; None removes one.
    """

    def __init__(
        self, model: str, arguments: Mapping[str, Any], host: str, environment: Mapping[str, str | None]
    ) -> None:
        self._host = host
        with contextlib.closing(listening_socket(host, 0)) as probe:
            self._port = int(probe.getsockname()[1])
        where = ["--host", host, "--port", str(self._port), "--served-model-name", SERVED_NAME]
        self._command = [
            *(sys.executable, "-m", reward_server_process.__name__, "--model", model),
            *where,
            *command_line(arguments),
        ]
        # The place of this rank in its group is none of the server's.
        changed = {**os.environ, **dict.fromkeys(RANK_ENV_NAMES), **environment}
        self._environment = {name: value for name, value in changed.items() if value is not None}
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    @property
    def address(self) -> str:
        """With the `/v1` of OpenAI's protocol."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def start(self, timeout_s: float) -> None:
        """Start it, and wait until it answers.

        Raises:
            RewardServerError: It ended, or was not there in time.
        """
        self._said = tempfile.TemporaryFile(prefix="reward-model-")  # noqa: SIM115 it goes with the process
        self._process = subprocess.Popen(
            under_guard(self._command),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=Path.cwd(),
        )
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                why = f"did not answer within {timeout_s:.0f} s" if ended is None else f"ended with status {ended}"
                said = self._last_words()
                self.end()
                raise RewardServerError(
                    f"the server of the reward model {why}. Look at reward.reward_model.server_kwargs, or raise "
                    f"trainer.timeouts.init_s. It said:\n{said}"
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            # It is on this machine, whatever proxy the environment names.
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            direct.open(f"{self.address.removesuffix('/v1')}/health", timeout=_ASK_S).close()
        except OSError:  # of which those of urllib are
            return False
        return True

    def _last_words(self) -> str:
        assert self._said is not None, "it was started"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        return self._said.read().decode(errors="replace").strip()

    def end(self) -> None:
        """End it and all that it has started; its guard does, within some seconds."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def command_line(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a command line for arguments: true and false are switches, lists and dicts JSON."""
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif value is not None:
            yield f"--{option}"
            yield value if isinstance(value, str) else json.dumps(value)
