"""Start or join a Ray cluster quietly, and find the GPU that Ray assigned to this process."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import ray
from ray._common.network_utils import get_localhost_ip
from ray._common.utils import get_system_memory
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.node import Node
from ray._private.utils import get_shared_memory_bytes
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError, RpcError

from hrl.processes.child_environment import changed_environment
from hrl.processes.lifetime import guarded_environment, guarded_processes, guarded_start, telling_of
from hrl.processes.signals import kept_from_children
from hrl.single_controller.own_ray import OwnRay
from hrl.single_controller.ray_start import coming_up
from hrl.single_controller.worker_errors import PlacementError

_PROBE_S = 10.0
_LOOPBACK = "127.0.0.1"
_SHARED_MEMORY_SHARE = 0.95  # of the free shared memory; Ray's own limit

_SYSTEM_CONFIG = {
    # Ray starts a worker per core in advance. A worker group's processes have their own environment and can't use
    # them, so each would waste seconds and a hundred megabytes.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # When Ray ends a worker, it kills its children and process group, including the resource tracker of
    # `multiprocessing` before it has unlinked the others' semaphores. The group's guard ends them in the right order.
    "kill_child_processes_on_worker_exit": False,
    "process_group_cleanup_enabled": False,
}

#: What workers inherit through a Ray that is started here; those of a cluster that is joined have their nodes' own.
_WORKER_ENVIRONMENT = {
    # The kernel clears memory that is new to a process, which takes longer than most operations on it. So what a tensor
    # leaves, the next one takes, instead of going back to the kernel to be cleared again: tensors of up to 32 MiB (the
    # most that glibc allows) come from the heap, and the heap's end is not given back. Huge pages (torch's
    # THP_MEM_ALLOC_ENABLE) are no help: where memory is in pieces, the kernel stops the process to join them.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # oneDNN compiles each matrix product for its shape, and it and torch keep 1,024 of these each. Packed rows make new
    # shapes at every step, so a rank would grow by half a gigabyte of products that no step needs again. A micro-batch
    # needs about twenty; to compile one takes one or two milliseconds.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    # Ray's workers would yield to all other processes. Whatever else the machine did would hold one of the threads of a
    # matrix product, for which the others wait.
    "RAY_worker_niceness": "0",
}


def most_object_store_bytes() -> int:
    """Return the bytes available for batches: Ray's default share of memory, limited by what is free in `/dev/shm`."""
    share = int(get_system_memory() * ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION)
    return min(share, int(get_shared_memory_bytes() * _SHARED_MEMORY_SHARE))


@contextmanager
def ray_cluster(
    address: str | None = "local",
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_bytes: int | None = None,
    log_to_driver: bool = False,
    **ray_kwargs: Any,
) -> Iterator[None]:
    """Connect this process to a Ray cluster for the duration of a `with` block.

    A cluster started here consists of this machine only: it and the libraries in its processes listen on loopback, it
    has neither dashboard nor autoscaler, calls nobody, and its processes end with this one, however it ends.

    Args:
        address: `local` starts a cluster; anything else joins one (`auto`, or its address).
        num_cpus: CPUs that the machine offers; None for its number of cores. Only with `local`.
        num_gpus: GPUs that it offers; None for those that Ray finds. Only with `local`.
        object_store_bytes: Shared memory for batches; None leaves it to Ray. Only with `local`.
        log_to_driver: Show the workers' output in the driver's terminal; otherwise it is only in Ray's session folder.
        ray_kwargs: Further arguments of `ray.init`.

    Raises:
        PlacementError: No cluster answers at the address, or this machine has no loopback to listen on.
        ClusterLostError: The cluster that is started here does not come up, or a process of it has ended within the
            block.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; avoids its warning
    # Ray's control process would keep a record of every call, 4 KiB each and up to 100,000, for views that are off.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    inherited = {name: os.environ.get(name, value) for name, value in _WORKER_ENVIRONMENT.items()}
    settings: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": log_to_driver}
    if address == "local":
        settings |= {"num_cpus": num_cpus, "num_gpus": num_gpus, "object_store_memory": object_store_bytes}
        # A copy: Ray writes into it where this cluster spills, and the next one would spill there too.
        settings |= {"include_dashboard": False, "_system_config": {**_SYSTEM_CONFIG}}
        with _own_cluster(settings | ray_kwargs, inherited):
            yield
        return
    with reaching(address), changed_environment(inherited), _own_handlers():
        ray.init(address=address, **settings | ray_kwargs)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_cluster(settings: Mapping[str, Any], inherited: Mapping[str, str]) -> Iterator[None]:
    """Start a cluster of this machine alone, and end it with the block, or with this process.

    Args:
        settings: Arguments of `ray.init`.
        inherited: Environment variables for the processes that it starts.
    """
    # Silences a warning that the cluster is protected by a token, which is intended.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Everything that Ray starts ends with this process, except for the raylet's agents: after a SIGKILL they try for a
    # minute to reach a cluster that is gone. They are there before `ray.init` returns. The mark does not always find
    # them, because a process that gives itself a title may write over its environment.
    with guarded_environment() as mark, ExitStack() as starting:
        starting.enter_context(guarded_start())
        bare = _bare(with_dashboard=settings["include_dashboard"])
        environment = changed_environment({**inherited, **mark})
        with reaching("local"), bare, environment, kept_from_children(), _own_handlers(), coming_up():
            ray.init(address="local", **settings)
        own: OwnRay | None = None
        try:
            own = OwnRay()
            own.watch()
            _end_by_force(own)
            with guarded_processes(own.raylet_pid), telling_of(own.needed), own.supervised():
                starting.close()
                yield
        finally:
            ray.shutdown()
            if own is not None:
                own.forget()


@contextmanager
def reaching(address: str | None) -> Iterator[None]:
    """Fail within seconds if no cluster answers; wraps `ray.init`, which would try for minutes and then abort.

    Args:
        address: `local`, `auto`, `host:port` or `ray://host:port`.

    Raises:
        PlacementError: Nobody answers there within 10 s, Ray finds no cluster, or the cluster refuses this process.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
            if not str(address).startswith("ray://"):
                _knock(str(address))
        yield
    except AuthenticationError as error:
        raise PlacementError(
            f"the Ray cluster at {address} refuses this process: its token is missing or wrong. Set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH with a file, to what the cluster began with"
        ) from error
    except OSError as error:
        if address == "local":
            raise
        raise PlacementError(
            f"cannot reach the Ray cluster at {address}: {error}. The address is that of trainer.ray_kwargs.address or "
            "RAY_ADDRESS; start the cluster there, or set neither for a Ray of this run's own"
        ) from error


def _knock(address: str) -> None:
    """Ask a cluster who it is: `ray.init` would try a wrong token for 20 s, and then say that it could not connect.

    Raises:
        AuthenticationError: It wants another token.
        ConnectionError: Who answers there is no Ray, or one that wants TLS with certificates of another authority.
    """
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ensure_token_if_auth_enabled(create_token_if_missing=False)  # without one, Ray's core would abort
    try:
        GcsClient(address=address)
    except RpcError as error:
        if isinstance(error, AuthenticationError):
            raise
        # To who greets without TLS, or with a certificate of another authority, a server is silent.
        raise ConnectionError(
            f"somebody listens, and Ray got no answer ({str(error).rstrip('.')}). If it is a cluster with TLS, set "
            "RAY_USE_TLS=1, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT here as on its machines"
        ) from error


@contextmanager
def _bare(*, with_dashboard: bool) -> Iterator[None]:
    """Make a Ray started within the block one that nobody else reaches, and that calls nobody.

    Args:
        with_dashboard: Whether the user wants Ray's dashboard, which does call out.

    Raises:
        PlacementError: This machine has no loopback, or its name `localhost` is not one.
    """
    with _on_loopback(), _without(["start_monitor"] if with_dashboard else ["start_monitor", "start_api_server"]):
        yield


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make a Ray started within the block use 127.0.0.1 as this machine's address.

    Its servers then listen only there, and so do torch, NCCL and vLLM in the processes that it starts.
    """
    interface = _loopback_interface()
    # Ray does this by itself where it can't form clusters, but has no argument for it: `_node_ip_address=127.0.0.1` is
    # resolved to the machine's own address.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    settings = {
        # Read by the processes that Ray starts; this one uses the constant.
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        # Left to themselves, they listen on the address that the machine's name has, or on that of a route elsewhere.
        # What a user set for runs on several machines is of no use here.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "VLLM_HOST_IP": _LOOPBACK,
    }
    try:
        with changed_environment(settings):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _loopback_interface() -> str:
    if not ipaddress.ip_address(own := get_localhost_ip()).is_loopback:
        raise PlacementError(
            f"this machine's `localhost` is {own}, which other machines can reach, and a Ray of this run's own listens "
            "there: write `127.0.0.1 localhost` into /etc/hosts"
        )
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == _LOOPBACK for entry in addresses):
            return name
    raise PlacementError(
        "no interface of this machine has the address 127.0.0.1, on which the processes of a run talk: bring it up "
        "(`ip link set lo up`)"
    )


@contextmanager
def _without(services: Sequence[str]) -> Iterator[None]:
    """Leave services out of a Ray started within the block that nobody uses, and that listen or call out.

    The autoscaler's monitor serves its metrics to whoever asks. The dashboard's process, which Ray starts without a
    dashboard, too, asks the metadata servers of clouds where it runs, for usage statistics that nobody sends.

    Args:
        services: Names of the methods of Ray's node that start them.
    """

    def leave_out(node: Node, **_: Any) -> None:
        node._webui_url = ""

    methods = {name: getattr(Node, name) for name in services}
    for name in services:
        setattr(Node, name, leave_out)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Node, name, method)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep Ray from answering SIGTERM in this process, with an end of its own."""
    utils = ray._private.utils
    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


def _end_by_force(own: OwnRay) -> None:
    """Have `ray.shutdown` kill Ray's processes at once: they block SIGTERM, for which it would wait."""
    node = ray._private.worker._global_node
    end = node.kill_all_processes

    def kill(*, wait: bool = False, **_: bool) -> None:
        own.kill()
        end(check_alive=False, allow_graceful=False, wait=wait)

    node.kill_all_processes = kill


def assigned_gpu() -> str | None:
    """Return Ray's name for the GPU of this process, as in `CUDA_VISIBLE_DEVICES`; None outside Ray or without a GPU.

    Works even if `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` keeps Ray from setting that variable.
    """
    if not ray.is_initialized():
        return None
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(ids[0]) if ids else None


def visible_index(gpu: str, visible: str | None) -> int:
    """Return the index of a GPU in this process.

    Args:
        gpu: Name of the GPU as in `CUDA_VISIBLE_DEVICES`.
        visible: Value of `CUDA_VISIBLE_DEVICES`; None if unset, when all GPUs are visible in their own order.

    Raises:
        RuntimeError: The GPU is not visible.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is None and gpu.isdecimal():
        return int(gpu)
    if names is None or gpu not in names:
        raise RuntimeError(
            f"Ray gave this process GPU {gpu}, but CUDA_VISIBLE_DEVICES is {visible!r}: unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, or do not change CUDA_VISIBLE_DEVICES for workers"
        )
    return names.index(gpu)
