"""The policy's worker: trains it, samples from it, scores with it, in whichever combination its role asks for.

`role` is a name of the parts that live in this process:

- `actor_rollout`: the hybrid engine. The trained model and a generation engine share the rank's device; weights pass
  by memory handles.
- `actor` and `rollout`: the two halves on different resource pools; weights pass by broadcast.
- `ref`: a frozen copy that only scores.

The worker holds no algorithm: the driver says which rows run where (`RankPlan`), `Policy` does the arithmetic and
`RolloutHost` the sampling.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hrl.errors import HrlError
from hrl.models.dtypes import dtype_of
from hrl.models.hf_config import vocabulary_of
from hrl.models.source import find_on_this_node
from hrl.models.tokenizer import find_tokenizer_on_this_node, load_tokenizer
from hrl.processes.imports import quick_imports
from hrl.protocol import DataProto
from hrl.single_controller.dispatch import Dispatch, Execute, register
from hrl.workers.model_worker import ModelWorker
from hrl.workers.rollout.base import EngineSetup, RolloutError, sample_keys
from hrl.workers.runtime import Runtime, join_world, release_cached_memory

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.model import CheckpointConfig, ForwardShardingConfig, FsdpConfig, ModelConfig
    from hrl.config.rollout import RolloutConfig
    from hrl.metrics import Metric
    from hrl.models.ops.divergence import TeacherHead
    from hrl.workers.engine.engine import Engine
    from hrl.workers.policy import Policy
    from hrl.workers.requests import AnyPolicyUpdate, LogProbRequest, SampleRequest, Training
    from hrl.workers.rollout.host import OnSample, RolloutHost
    from hrl.workers.rollout.single_requests import Inbox
    from hrl.workers.weight_sync.sender import SyncReport, WeightSync
    from hrl.workers.weight_sync.tensor_parallel import FellowRank, Lead
    from hrl.workers.weight_sync.wire import Manifest, ReceiverReport

logger = logging.getLogger(__name__)

ROLES = ("actor_rollout", "actor", "rollout", "ref")
ENGINE_ROLES = ("actor_rollout", "rollout")


class UnknownTokenError(HrlError, ValueError):
    """The policy has sampled a token that its teacher has no embedding for."""


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the actor, the rollout, the reference policy, or of actor and rollout together.

    Args:
        model: The policy's section.
        role: One of `ROLES`.
        fsdp: How the trained or frozen model is sharded; `None` where there is none.
        training: How the model learns; `None` for a role that does not.
        checkpoint: What is saved and loaded of a model that learns; `None` for its whole state.
        rollout: The engine's section; `None` where there is none.
        pupil_vocabulary: Of a teacher, the number of tokens that the policy's head has; `None` for the policy itself.
        runtime: Device, threads and deadlines of this process.
        model_path: Folder of the model on the driver's node.

    Attributes:
        policy: The trained or frozen model, in roles that have one.

    Raises:
        ValueError: `role` is unknown.
    """

    model: ModelConfig
    policy: Policy

    def __init__(
        self,
        model: ModelConfig,
        role: str,
        *,
        fsdp: FsdpConfig | ForwardShardingConfig | None = None,
        training: Training | None = None,
        checkpoint: CheckpointConfig | None = None,
        rollout: RolloutConfig | None = None,
        pupil_vocabulary: int | None = None,
        runtime: Runtime,
        model_path: str,
    ) -> None:
        super().__init__(model, training, checkpoint, runtime=runtime, model_path=model_path)
        if role not in ROLES:
            raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
        self.role = role
        self.fsdp = fsdp
        self._rollout = rollout
        self._pupil_vocabulary = pupil_vocabulary
        self._host: RolloutHost | None = None
        self._broadcast: WeightSync | None = None
        self._lead: Lead | None = None
        self._fellow: FellowRank | None = None
        self._reward_sink: Any = None
        self._tokenizer_path = ""
        self._tokenizer: Any = None

    # ------------------------------------------------------------------ set-up and state

    @property
    def engine(self) -> Engine:
        """The sharded policy."""
        return self.policy.engine

    @property
    def host(self) -> RolloutHost:
        """The engine; only on the rank that drives it."""
        if self._host is None:
            raise RuntimeError(f"rank {self.rank} of role {self.role!r} drives no engine")
        return self._host

    @property
    def rollout(self) -> RolloutConfig:
        """The engine's section; only in roles that sample, or give weights to those that do."""
        if self._rollout is None:
            raise RuntimeError(f"role {self.role!r} was built without rollout settings")
        return self._rollout

    @property
    def drives_engine(self) -> bool:
        """Whether this is the first of the ranks that form one tensor-parallel engine."""
        return self.role in ENGINE_ROLES and self.rank % self.rollout.tensor_model_parallel_size == 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the parts of this role.

        On a CPU vLLM starts, in its own process, while the policy loads. On a GPU it starts after, so that it sees the
        memory left; and so does an engine in this process, since transformers cannot load two models at once.
        """
        self.model_path = str(find_on_this_node(self.model_path))
        if self.role in ENGINE_ROLES:
            self._tokenizer_path = find_tokenizer_on_this_node(self.model.tokenizer_path or self.model_path)
        self.device = join_world(self.runtime)
        visible_devices = self._engine_devices() if self.role in ENGINE_ROLES else None
        if self.drives_engine:
            self._host = self._build_host(visible_devices)
            if self.device.type == "cpu" and self._host.engine.own_process:
                # Both import transformers, whose modules import each other in circles: two threads that do so at once
                # can meet a half-initialised one. So one does it after the other, before both are at work.
                self._host.prepare()
                with quick_imports():
                    importlib.import_module("hrl.workers.policy")
                self._host.begin_start()
        if self.role != "rollout":
            self.policy = self._build_policy()
            # vLLM refuses to start where less is free than it is to use: what may leave the device leaves it before.
            self.engine.offload()
        release_cached_memory(self.device)
        if self._host is not None:
            self._host.start(timeout_s=self.runtime.init_timeout_s)

    def _build_policy(self) -> Policy:
        from hrl.workers.policy import Policy

        if self.fsdp is None:
            raise RuntimeError(f"role {self.role!r} has a model, and was built without fsdp settings")
        vocabulary = self._pupil_vocabulary
        return Policy(self.model_source(), self.training, self.fsdp, device=self.device, vocabulary=vocabulary)

    def _engine_devices(self) -> str | None:
        """Return the GPUs of the ranks that form this rank's engine, for CUDA_VISIBLE_DEVICES; every rank calls it.

        Ranks that send weights to the same engine find each other here.

        Raises:
            RolloutError: The ranks of an engine are on several nodes.
        """
        if self.device.type == "cpu":
            return None
        own = own_device(os.environ.get("CUDA_VISIBLE_DEVICES"), self.device.index)
        size = self.rollout.tensor_model_parallel_size
        first = self.rank - self.rank % size
        together = self.role == "actor_rollout" and self.rollout.name == "vllm" and size > 1
        if together and self.drives_engine:
            from hrl.workers.weight_sync.tensor_parallel import Lead

            self._lead = Lead(range(first + 1, first + size), self.rollout.weight_sync.timeout_s)
        places: list[Any] = [None] * self.world_size
        dist.all_gather_object(places, (socket.gethostname(), own, self._lead.address if self._lead else ""))
        devices = engine_devices([(node, device) for node, device, _ in places], self.rank, size)
        if together and not self.drives_engine:
            from hrl.workers.weight_sync.tensor_parallel import FellowRank

            sync = self.rollout.weight_sync
            self._fellow = FellowRank(
                places[first][2],
                self.rank,
                first,
                self.device,
                bucket_bytes=sync.bucket_mb << 20,
                timeout_s=sync.timeout_s,
            )
        return devices

    def _build_host(self, visible_devices: str | None) -> RolloutHost:
        from hrl.workers.rollout.host import RolloutHost

        runtime, source = self.runtime, self.model_source()
        # Models pad their embedding beyond the tokenizer, and a sampler can draw what is there.
        vocab_size = max(runtime.tokens.vocab_size, self._own_vocabulary)
        setup = EngineSetup(
            self.rollout,
            source,
            replace(runtime.tokens, vocab_size=vocab_size),
            self.device,
            num_threads=runtime.num_threads if self.device.type == "cpu" else runtime.engine_threads,
            visible_devices=visible_devices,
            shares_device=self.role == "actor_rollout",
            rank=self.rank,
            run_mark=runtime.run_mark,
        )
        name = f"rollout rank {self.rank}"
        return RolloutHost(setup, name=name, lead=self._lead)

    @functools.cached_property
    def _own_vocabulary(self) -> int:
        """The number of tokens that this role's model embeds, those included that fill its embedding up."""
        source = self.model_source()
        return vocabulary_of(source.path, source.override_config, trust_remote_code=source.trust_remote_code)

    def close(self) -> None:
        """End the engine and its processes."""
        if self._broadcast is not None:
            self._broadcast.close()
        if self._fellow is not None:
            self._fellow.close()
        if self._host is not None:
            self._host.shutdown()

    # ------------------------------------------------------------------ scoring and training

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_log_prob(self, batch: DataProto, request: LogProbRequest[RankPlan]) -> DataProto:
        """Compute log-probs `old_log_probs (B, R)` of the sampled tokens and what else is asked, no gradient."""
        return self.policy.compute_log_prob(batch, request)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def compute_ref_log_prob(self, batch: DataProto, request: LogProbRequest[RankPlan]) -> DataProto:
        """Compute log-probs `ref_log_prob (B, R)` of the sampled tokens under the reference policy, no gradient.

        Raises:
            UnknownTokenError: A teacher does not know a token that the policy has sampled.
        """
        if self._pupil_vocabulary is not None and self._pupil_vocabulary > self._own_vocabulary:
            require_known(batch, self._own_vocabulary, self.model_path)
        return self.policy.compute_log_prob(batch, request).rename("old_log_probs", "ref_log_prob")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def head_of_teacher(self) -> TeacherHead | None:
        """Return the head of a teacher, from the first rank; the others have nothing to say."""
        if self.fsdp is None:
            raise RuntimeError(f"role {self.role!r} has a model, and was built without fsdp settings")
        with self.engine.resident():
            head: TeacherHead = self.engine.module.teacher_head(dtype_of(self.fsdp.dtype))
        return head if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn_from_head(self, head: TeacherHead) -> None:
        """Keep a teacher's head, of which updates make its distributions."""
        self.policy.teacher_head = head

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def update_actor(self, batch: DataProto, request: AnyPolicyUpdate) -> dict[str, Metric]:
        """Take every optimizer step of the plan, on the loss that the request is for; returns its metrics."""
        return self.policy.update(batch, request)

    # ------------------------------------------------------------------ sampling

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def begin_sampling(self, batch: DataProto, request: SampleRequest[RankPlan]) -> None:
        """Begin the responses that `generate_sequences` will be asked for; see `RolloutHost.begin_sampling`."""
        if len(batch):
            self.host.begin_sampling(batch, request, self._reward_hook(batch, request.reward_round))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PLAN)
    def generate_sequences(self, batch: DataProto, request: SampleRequest[RankPlan]) -> DataProto:
        """Sample one response per row, or wait for those that were begun.

        Each finished sample goes to the reward service at once, so that rewards are computed while the rest of the
        batch is still being generated.
        """
        if len(batch) == 0:  # a tensor-parallel peer of the rank that drives the engine
            return DataProto()
        on_sample = self._reward_hook(batch, request.reward_round)
        return self.host.generate_sequences(batch, request, on_sample, timeout_s=self.runtime.collective_timeout_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serve_requests(self, inbox: Inbox) -> int:
        """Answer requests that come one by one until there are no more to come; return how many they were.

        Args:
            inbox: Where they come from.

        Raises:
            RolloutError: The engine failed, or whoever gives the requests is gone.
        """
        if self._host is None:  # a tensor-parallel peer of the rank that drives the engine
            return 0
        engine = self.rank // self.rollout.tensor_model_parallel_size
        take = functools.partial(inbox.take, engine)
        return self._host.serve_requests(take, inbox.give, timeout_s=self.runtime.collective_timeout_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_reward_sink(self, sink: Any) -> None:
        """Name the Ray actor that finished samples are sent to, where a request asks for it."""
        self._reward_sink = sink
        self._tokenizer = load_tokenizer(self._tokenizer_path, trust_remote_code=self.model.trust_remote_code)

    def _reward_hook(self, batch: DataProto, reward_round: int | None) -> OnSample | None:
        if reward_round is None:
            return None
        keys = sample_keys(batch)

        def send(row: int, token_ids: list[int], finish_reason: str) -> None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            self._reward_sink.submit.remote(reward_round, keys[row], text)

        return send

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Give the engine's device memory to the trainer that it shares the device with.

        Do nothing on a CPU, where vLLM cannot sleep, and on a pool of the engine's own.
        """
        if self._host is not None and self.role == "actor_rollout":
            self._host.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_engine_profile(self) -> None:
        """Profile the engine's own processes, if it has any."""
        if self._host is not None:
            self._host.start_profile()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_engine_profile(self, name: str) -> list[dict[str, Any]]:
        """Write a trace of each of the engine's own processes, and return their profiles."""
        if self._host is None:
            return []
        trace = str(self.trace_file(name))
        return self._host.stop_profile(trace, timeout_s=self.runtime.collective_timeout_s)

    # ------------------------------------------------------------------ weights, by handles within this process

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the policy's weights to the engine of this process as `version` and get it ready to sample.

        The engine wakes in two stages, so that its cache does not take the memory that the gathered weights need.
        """
        self.engine.offload()  # before the engine takes back what it gave the trainer
        release_cached_memory(self.device)
        try:
            report = self._push_weights(version)
        finally:  # also after a failure: the others wait here
            release_cached_memory(self.device)
        if self._host is None:
            return {}
        self._host.wake(("kv_cache",))
        sent = {} if report is None else sync_metrics(report)  # None: the first rank sends to servers that all share
        return sent | self._host.take_counts()

    def _push_weights(self, version: int) -> SyncReport | None:
        """Do this rank's part of a sync. Every rank gathers all weights and keeps none of them."""
        dtype = getattr(torch, self.rollout.dtype)
        weights, kept = self.engine.iter_full_params(dtype, cast_by_reader=True), self.engine.frozen_names()
        if self._host is not None:
            try:
                self._host.wake(("weights",))
            except RolloutError as error:
                self._host.refuse_weights(str(error))
                deque(weights, maxlen=0)  # the other ranks are gathering already
                raise
            return self._host.push_weights(version, self.engine.param_specs(dtype), weights, kept)
        if self._fellow is not None:
            return self._fellow.push_weights(version, self.engine.param_specs(dtype), weights, kept)
        deque(weights, maxlen=0)  # a rank of a tensor-parallel engine on a CPU, whose lead sends for all
        return None

    # ------------------------------------------------------------------ weights, by broadcast between pools

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def open_weight_broadcast(self, num_receivers: int, address: str) -> tuple[Manifest, dict[str, Any]]:
        """Open the group on trainer rank 0, which engines reach at `address`; returns what they need to join it."""
        from hrl.workers.weight_sync.broadcast import BroadcastSender
        from hrl.workers.weight_sync.sender import WeightSync
        from hrl.workers.weight_sync.wire import Manifest

        rollout, sync = self.rollout, self.rollout.weight_sync
        specs = self.engine.param_specs(getattr(torch, rollout.dtype))
        manifest = Manifest.build(specs, sync.bucket_mb << 20, self.engine.frozen_names())
        sender = BroadcastSender(manifest, num_receivers, device=self.device, timeout_s=sync.timeout_s, address=address)
        self._broadcast = WeightSync(manifest, sender, timeout_s=sync.timeout_s)
        return manifest, sender.handle()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int) -> dict[str, float]:
        """Broadcast the policy's weights; every trainer rank gathers, rank 0 sends."""
        weights = self.engine.iter_full_params(getattr(torch, self.rollout.dtype), cast_by_reader=True)
        if self._broadcast is None:
            deque(weights, maxlen=0)
            return {}
        return sync_metrics(self._broadcast.push(version, weights))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int, manifest: Manifest, handle: dict[str, Any]) -> dict[str, float]:
        """Take the weights that trainer rank 0 broadcasts. Ranks of an engine are consecutive."""
        if self._host is None:
            return {}
        reports = self._host.receive_weights(version, manifest, handle | {"first_rank": 1 + self.rank})
        return read_back_metrics(reports) | self._host.take_counts()


def require_known(batch: DataProto, known: int, teacher: str) -> None:
    """Refuse sampled tokens that a teacher does not embed; `known` is the number of those that it does.

    Raises:
        UnknownTokenError: Names the row, the token and the way out.
    """
    width = batch.batch["prompts"].shape[1]
    unknown = (batch.batch["responses"] >= known) & batch.batch["attention_mask"][:, width:].bool()
    if unknown.any():
        row, place = unknown.nonzero()[0].tolist()
        raise UnknownTokenError(
            f"row {row} (uid {batch.non_tensor_batch['uid'][row]}): the policy sampled token "
            f"{int(batch.batch['responses'][row, place])}, and the teacher {teacher} has {known}. Beyond these lie "
            "rows that fill up the policy's head and stand for no text: give the teacher as many (transformers' "
            "resize_token_embeddings), or take another one"
        )


def own_device(visible: str | None, index: int) -> str:
    """Return how CUDA_VISIBLE_DEVICES (`visible`; None where it is unset) names this process's device `index`."""
    return str(index) if visible is None else visible.split(",")[index].strip()


def engine_devices(places: Sequence[tuple[str, str]], rank: int, size: int) -> str:
    """Return the GPUs of the `size` consecutive ranks that form the engine of `rank`, for CUDA_VISIBLE_DEVICES.

    Args:
        places: Node and device of every rank, see `own_device`.
        rank: Of one of the engine's processes.
        size: `rollout.tensor_model_parallel_size`.

    Raises:
        RolloutError: The ranks of the engine are on several nodes.
    """
    first = rank - rank % size
    members = places[first : first + size]
    nodes = sorted({node for node, _ in members})
    if len(nodes) > 1:
        raise RolloutError(
            f"ranks {first} to {first + size - 1} form one engine (rollout.tensor_model_parallel_size={size}), but "
            f"are on the nodes {nodes}: take a size that divides a node's GPUs"
        )
    return ",".join(dict.fromkeys(device for _, device in members))


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """Return the metrics of a weight sync, as its sender measured it."""
    return {
        "weight_sync/seconds": report.seconds,
        "weight_sync/bytes": float(report.nbytes),
        "weight_sync/tensors": float(report.tensors),
    } | read_back_metrics(report.receivers)


def read_back_metrics(reports: Sequence[ReceiverReport]) -> dict[str, float]:
    """Return the number of tensors that every process of an engine read back as they were sent."""
    return {"weight_sync/read_back_tensors": float(min(r.read_back for r in reports))} if reports else {}
