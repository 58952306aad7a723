"""What runs inside vLLM's processes: executors, the receiving end of a weight sync, the trainer's arithmetic.

vLLM mixes `RolloutWorkerExtension` into its worker; its methods are called with plain data by `collective_rpc`.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from xxhash import xxh3_64

from hrl.models.hf_config import plain_fields
from hrl.models.ops.cpu_product import PackedWeight, can_multiply
from hrl.models.ops.log_prob import allow_bf16_matmul
from hrl.models.ops.residual import PLAIN_RESIDUAL_FAMILIES, add_and_norm
from hrl.processes.lifetime import die_with_parent
from hrl.profiling.recorder import start_profile, stop_profile
from hrl.profiling.spans import phase_span
from hrl.workers.rollout.drawing import Positions, draw
from hrl.workers.rollout.vllm_adapter import VllmAdapterWriter, multiply_plainly
from hrl.workers.rollout.vllm_routing import NoRoutingError, RoutingRecorder, routed_layers
from hrl.workers.weight_sync.receiver import ModelWriter, WeightReceiver
from hrl.workers.weight_sync.wire import WeightSyncError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_FILE_STORE = "file://"
_TRACE = ".json.gz"
#: Of every parameter, by which a server's process knows its weights again.
SAMPLED_BYTES = 4096
#: Rows of logits that are computed at once, the same number for all batches: kernels sum in another order for other
#: shapes, and a token's logits, and so what its seed draws, must not depend on how many other requests run.
HEAD_ROWS = 32
#: Entries of the vocabulary whose weights are float32 at once.
HEAD_ENTRIES = 8192


class SingleProcessExecutor(UniProcExecutor):
    """Runs the model in the engine's own process.

    On a CPU vLLM would start a second process for it, to bind threads, which the environment does here. One process
    starts sooner, takes 0.7 GB less and does not spin on a message queue.
    """

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class TensorParallelExecutor(MultiprocExecutor):
    """Runs one worker process per tensor-parallel rank. Workers end when this process does."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class VllmModelWriter:
    """Writes weights in the checkpoint's form into a running vLLM model, by vLLM's layer-wise reload.

    A plain `load_weights` fails on an engine that keeps weights in another form than it loads them: packed on a CPU,
    quantised to FP8, transposed for a kernel. The layer-wise reload brings every layer back to its loadable form and
    names, collects its weights, converts them again, and copies the result into the memory that the kernels use.
    Conversions look up vLLM's current configuration, so it is set around all of this.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._required: set[str] = set()
        self._loaded: set[str] | None = None
        self._tied: list[nn.Module] = []
        self._written: dict[str, Tensor] = {}
        self._silent = False

    def begin(self) -> None:
        """Bring every layer back to its loadable form."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._tied = _tied_modules(self._model)
        self._loaded = set()
        _forget_expert_kernels(self._model)
        with set_current_vllm_config(self._vllm_config):
            initialize_layerwise_reload(self._model)
        self._required = _required_parameters(self._model, self._tied)

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Hand weights to vLLM's loader.

        Raises:
            WeightSyncError: The loader refuses one; names the first and the last of the bucket.
        """
        from vllm.config import set_current_vllm_config

        try:
            with set_current_vllm_config(self._vllm_config):
                loaded = self._model.load_weights(iter(weights))
        except (KeyError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
            refused = f"the engine's model refused one of {weights[0][0]!r} to {weights[-1][0]!r}"
            raise WeightSyncError(f"{refused}: {type(error).__name__}: {error}") from error
        if loaded is None and not self._silent:
            self._silent = True
            kind = type(self._model).__name__
            logger.warning("%s doesn't say which weights it loaded, so a missing one goes unnoticed", kind)
        if loaded is not None and self._loaded is not None:
            self._loaded |= loaded
        else:
            self._loaded = None
        self._keep_unfinished_layers(weights)

    def finish(self, kept: Collection[str] = ()) -> None:
        """Convert the layers to what the kernels use, if all of them got all their weights but for those in `kept`.

        Raises:
            WeightSyncError: Weights are missing; names them.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._loaded is not None:
            missing = [
                f"nothing for {name}"
                for name in sorted(self._required - self._loaded)
                if not is_kept(name, kept, self._loaded)
            ]
            missing += self._incomplete_modules()
            if missing:
                raise WeightSyncError(f"the trainer sent {'; '.join(missing[:8])} (the engine's names){self._hint()}")
        judged = self._loaded is not None
        with set_current_vllm_config(self._vllm_config), _kept_layers_unannounced() if judged else nullcontext():
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            for module in self._tied:
                # A module that shares another one's weight (the output head of tied embeddings) was sent none of its
                # own, and still has what it packed from the old one.
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
        _forget_packed_heads(self._model)
        self._written = dict(_as_loaded(self._model))

    def cancel(self) -> None:
        """Drop what layers have collected, and convert back those that are complete."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        with set_current_vllm_config(self._vllm_config):
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        _forget_packed_heads(self._model)

    def read_back(self, name: str) -> Tensor | None:
        """Return a parameter that vLLM keeps as it is loaded; None for others."""
        return self._written.get(name)

    def _hint(self) -> str:
        """Return what to do about a folder with quantised weights, for whose scales a trainer has nothing to send."""
        stored = getattr(self._vllm_config.model_config.hf_config, "quantization_config", None)
        if stored is None:
            return ""
        return (
            ". The model's folder holds quantised weights: take its unquantised one, and have the engine quantise what "
            "it gets, with rollout.engine_kwargs.vllm.quantization=fp8"
        )

    def _incomplete_modules(self) -> list[str]:
        """Return the modules that got only a part of what they fuse, such as queries and values without keys."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        found = []
        for name, module in self._model.named_modules():
            got = get_layerwise_info(module).load_numel
            # An embedding is padded beyond what is loaded, and never fused: its name alone tells whether it was sent.
            if not got or isinstance(module, VocabParallelEmbedding):
                continue
            want = sum(_load_numel(p) for p in module.parameters(recurse=False))
            if got < want:
                found.append(f"{got} of {want} elements of {name}")
        return found

    def _keep_unfinished_layers(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Copy what unfinished layers hold of this bucket, whose memory will be written again."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        bucket = {tensor.untyped_storage().data_ptr() for _, tensor in weights}
        for module in self._model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for key, value in call.arguments.items():
                    sent = isinstance(value, Tensor) and not value.is_meta and key != "param"
                    if sent and value.untyped_storage().data_ptr() in bucket:
                        call.arguments[key] = value.clone()


@contextmanager
def _kept_layers_unannounced() -> Iterator[None]:
    """Silence vLLM's warning about layers that deliberately got no weights."""
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def is_other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    reload.addFilter(is_other)
    try:
        yield
    finally:
        reload.removeFilter(is_other)


def is_kept(name: str, kept: Collection[str], loaded: Collection[str]) -> bool:
    """Return whether a parameter of the engine belongs to a tower of which the trainer sends nothing.

    Args:
        name: Of the parameter in the engine.
        kept: Names in the checkpoint of what is not sent.
        loaded: Names in the engine of what was sent.
    """
    # The engine fuses and renames what is inside a tower. So the tower's own name is compared: the first part of the
    # engine's, which occurs somewhere in the checkpoint's. A tower of which anything was sent must be sent as a whole.
    tower = name.partition(".")[0]
    is_named = any(tower in other.split(".") for other in kept)
    return is_named and not any(other.startswith(f"{tower}.") for other in loaded)


def _required_parameters(model: nn.Module, tied: Sequence[nn.Module]) -> set[str]:
    """Return the names of what a model in its loadable form has to be sent.

    Left out are weights that a module shares with an earlier one, and the scales of an attention layer's cache, which a
    checkpoint need not have.
    """
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if not any(module is other for other in tied)
        and not isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for name, _ in module.named_parameters(recurse=False)
    }


def _as_loaded(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are kept as they are loaded, so that they can be compared with what was sent."""
    # A quantised parameter may have the name, shape and dtype of the one that it was made from.
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            for name, parameter in module.named_parameters(recurse=False):
                yield (f"{path}.{name}" if path else name), parameter.detach()


def is_quantised(model: nn.Module) -> bool:
    """Return whether any layer of a loaded model multiplies by something else than the weights of its folder."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    plain = "Unquantized"  # in the names of vLLM's classes for layers, embeddings and experts
    return any(
        not isinstance(method, BaseKVCacheMethod) and not type(method).__name__.startswith(plain)
        for method in methods
        if method is not None
    )


class RolloutWorkerExtension:
    """Methods that vLLM mixes into its worker. Their names must not be vLLM's own."""

    def hrl_join(self, adapter: Mapping[str, Any] | None = None, routing: bool = False) -> dict[str, Any]:
        """Bind this process to its parent's life, prepare its model, and return rank, pid and number of threads.

        Args:
            adapter: What is to be known of the adapter that a sync brings (`vllm_adapter.plain_fields`); None where it
                brings a model.
            routing: The experts that tokens go to will be asked for; also return the layers that have some.
        """
        if multiprocessing.parent_process() is not None:
            die_with_parent()
        _unlink_collective_memory()
        self._hrl_unlink_rendezvous()
        self._hrl_prepare(adapter)
        rank, model = self._hrl_rank(), self.model_runner.get_model()  # type: ignore[attr-defined]
        method = self.vllm_config.model_config.quantization  # type: ignore[attr-defined]
        if method is not None and not is_quantised(model):
            return {
                "error": f"quantization={method} quantises no layer of this model: what vLLM has under this name is "
                "for experts alone, or all layers are left out. Remove it from rollout.engine_kwargs.vllm, or take "
                "one for linear layers, such as fp8_per_channel"
            }
        joined: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "threads": torch.get_num_threads()}
        self._hrl_routing: RoutingRecorder | None = None
        if routing:
            joined["routed_layers"] = routed_layers(model)
            joined["num_experts"] = self.model_runner.model_config.get_num_experts()  # type: ignore[attr-defined]
            if not torch.cuda.is_available() and rank == 0:  # all ranks choose the same
                try:
                    self._hrl_routing = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]
                except NoRoutingError as error:
                    return {"error": str(error)}
        return joined

    def _hrl_prepare(self, adapter: Mapping[str, Any] | None) -> None:
        """Give the model the trainer's arithmetic, and open the receiving end of weight syncs."""
        model, manager = self.model_runner.get_model(), None  # type: ignore[attr-defined]
        if adapter is not None:
            manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        use_float32_head(model)
        top_k_top_p = getattr(self.model_runner.sampler, "topk_topp_sampler", None)  # type: ignore[attr-defined]
        if top_k_top_p is not None:
            _draw_by_one_number(top_k_top_p, getattr(self.model_runner, "rejection_sampler", None))  # type: ignore[attr-defined]
        if not torch.cuda.is_available():
            _count_no_ranks()
            match_trainer(model, self.model_runner.model_config.hf_config.model_type)  # type: ignore[attr-defined]
            if manager is not None:
                multiply_plainly(manager)
        config: VllmConfig = self.vllm_config  # type: ignore[attr-defined]
        self._hrl_writer: ModelWriter = VllmModelWriter(model, config)
        if adapter is not None:
            self._hrl_writer = VllmAdapterWriter(manager, adapter, config)
        self._hrl_open_receiver()

    def _hrl_open_receiver(self) -> None:
        rank = self._hrl_rank()
        self._hrl_receiver = WeightReceiver(self._hrl_writer, f"vllm worker {rank}", rank)

    def hrl_look(self) -> dict[str, Any]:
        """Return what a run needs to know of a server before it samples from it; changes nothing."""
        config: VllmConfig = self.vllm_config  # type: ignore[attr-defined]
        model, text = config.model_config, config.model_config.hf_text_config
        return {
            "model": model.model,
            "config": plain_fields(text),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "generation_config": model.generation_config,
            "cuts_seeded_prompts": not torch.cuda.is_available() and config.scheduler_config.enable_chunked_prefill,
            # On a CPU, and in a vLLM without this setting, a run brings a head of its own.
            "rounds_logits": torch.cuda.is_available() and getattr(model, "head_dtype", torch.float32) != torch.float32,
            "data_parallel_size": config.parallel_config.data_parallel_size,
        } | self.hrl_state()

    def hrl_join_run(self, mark: str) -> dict[str, Any]:
        """Make a server's process part of the run with this mark, which gives it weights from here on."""
        if getattr(self, "_hrl_mark", None) is None:
            self._hrl_prepare(None)
            self._hrl_routing = None
        else:  # of an earlier run, or of one that takes it from another
            self._hrl_receiver.abort()
            self._hrl_open_receiver()
        self._hrl_mark: str | None = mark
        return self.hrl_state()

    def hrl_state(self) -> dict[str, Any]:
        """Return the mark of the run that gives this process weights, and their version; None without whole ones.

        Also whether they are half written, by a sync that is under way or whose sender died.
        """
        mark = getattr(self, "_hrl_mark", None)
        receiver = None if mark is None else self._hrl_receiver
        has_some = receiver is not None and receiver.has_received and receiver.intact
        if has_some and self._hrl_sample_of_weights() != self._hrl_committed:
            has_some = False  # somebody has loaded others by another way
        return {
            "mark": mark,
            "version": receiver.served_version if has_some else None,  # type: ignore[union-attr]
            "half_written": receiver is not None and not receiver.intact,
        }

    def _hrl_sample_of_weights(self) -> int:
        """Return a checksum of the first bytes of every parameter, as they lie in memory."""
        model, whole = self.model_runner.get_model(), xxh3_64()  # type: ignore[attr-defined]
        first = [
            torch.empty(0, dtype=torch.uint8, device=weight.device).set_(weight.untyped_storage())[:SAMPLED_BYTES]
            for weight in model.parameters()
            if weight.layout == torch.strided and not weight.is_meta
        ]
        whole.update(torch.cat(first).cpu().numpy())  # in one copy from a GPU
        return int(whole.intdigest())

    def hrl_take_routed(self, request: str) -> dict[str, Any]:
        """Return the experts of a finished request, `(tokens, L, K)` as plain data; see `RoutingRecorder.take`."""
        routed = None if self._hrl_routing is None else self._hrl_routing.take(request)
        if routed is None:
            return {}
        return {"shape": list(routed.shape), "dtype": routed.dtype.name, "data": routed.tobytes()}

    def hrl_answer(self) -> dict[str, Any]:
        """Say that this process is alive."""
        return {}

    def hrl_weights_begin(self, manifest: Mapping[str, Any], handle: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Announce a sync. See `WeightReceiver.begin`."""
        receiver = self._hrl_receiver
        return _answer(receiver.begin, receiver.manifest_of(manifest), handle, version)

    def hrl_weights_load(self, index: int) -> dict[str, Any]:
        """Take a bucket. See `WeightReceiver.load`."""
        with phase_span("weight sync"):
            return _answer(self._hrl_receiver.load, index)

    def hrl_weights_commit(self) -> dict[str, Any]:
        """Put the new weights into effect and return a `ReceiverReport`. See `WeightReceiver.commit`."""
        if self._hrl_routing is not None:
            self._hrl_routing.forget()
        with phase_span("weight sync"):
            answer = _answer(lambda: asdict(self._hrl_receiver.commit()))
        if "error" not in answer and getattr(self, "_hrl_mark", None) is not None:
            self._hrl_committed = self._hrl_sample_of_weights()
        if "error" not in answer and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the cache, which wakes next in a pool of its own, needs what the sync used
        return answer

    def hrl_weights_abort(self) -> dict[str, Any]:
        """Drop a sync; say which version's weights are here, and whether all of them are."""
        return {"intact": self._hrl_receiver.abort(), "version": self._hrl_receiver.served_version}

    def hrl_profile_start(self) -> dict[str, Any]:
        """Profile this process."""
        start_profile()
        return {}

    def hrl_profile_stop(self, trace: str) -> dict[str, Any]:
        """Write the trace, whose name has this process's rank if it is not the first one; return the profile."""
        stem, ending = trace.removesuffix(_TRACE), _TRACE
        own = f"{stem}_{self._hrl_rank()}{ending}" if self._hrl_rank() else trace
        return stop_profile(Path(own), rest="sampling").to_plain()

    def _hrl_unlink_rendezvous(self) -> None:
        """Remove the file through which the engine's processes met, which vLLM leaves in the temporary folder."""
        # Only on a CPU: on a GPU, NCCL's watchdog looks there for as long as the engine lives.
        method: str = self.distributed_init_method  # type: ignore[attr-defined]
        if method.startswith(_FILE_STORE) and not torch.cuda.is_available():
            Path(method.removeprefix(_FILE_STORE)).unlink(missing_ok=True)

    def _hrl_rank(self) -> int:
        return int(self.rank)  # type: ignore[attr-defined]


def _answer(step: Callable[..., dict[str, Any] | None], *args: Any) -> dict[str, Any]:
    """Return what a step of the sync returns, or its error as data."""
    # vLLM would turn an exception into the text of another one, without the sentence that names the tensor.
    try:
        return step(*args) or {}
    except WeightSyncError as error:
        return {"error": str(error)}


def _count_no_ranks() -> None:
    """Let a CPU engine leave out the rank of a sampled token among all, which nobody reads.

    Counting takes two passes over the log-probs of the whole vocabulary, which is as long as sampling itself; and vLLM
    would first compile it, in 23 s of the first step.
    """
    from vllm.v1.sample import sampler

    def no_ranks(logprobs: Tensor, _: Tensor) -> Tensor:
        return torch.zeros(len(logprobs), dtype=torch.int64)

    sampler.batched_count_greater_than = no_ranks


def _draw_by_one_number(top_k_top_p: Any, rejection_sampler: Any = None) -> None:
    """Let vLLM's first model runner draw a token by one random number.

    Its own sampler makes one for each entry of the vocabulary, on a GPU with a kernel for each request that has a seed,
    as all of ours have. The second runner, which GPUs get from 0.29 on, has seeds in its one kernel.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if top_k_top_p.logprobs_mode != "processed_logprobs":
        return
    positions = Positions()

    def forward(
        logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        uniform = torch.rand(len(logits), dtype=torch.float64)
        numbers = uniform.numpy()  # the same memory, which a tensor takes longer to write one by one
        for row, generator in generators.items():
            numbers[row] = positions.number(generator)
        return draw(apply_top_k_top_p(logits, k, p), uniform.to(logits.device, non_blocking=True))

    top_k_top_p.forward = forward
    if rejection_sampler is not None:
        from hrl.workers.rollout.vllm_speculation import draw_every_place

        draw_every_place(rejection_sampler, positions)


def _unlink_collective_memory() -> None:
    """Remove the names of the segments through which CPU workers reduce tensors."""
    # Every worker has mapped them by now. vLLM removes them in a destructor, which a killed process does not run.
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.startswith("/dev/shm/") and "cpushm" in path:
            Path(path).unlink(missing_ok=True)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Let a CPU engine pack its experts' weights again when new ones have come."""
    # vLLM packs them when it makes its CPU kernel, and keeps the kernel: later weights would be read as if they were
    # packed. Kernels on a GPU take weights as they are, and graphs hold on to the kernels.
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        on_cpu = any(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))
        if on_cpu and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _forget_packed_heads(model: nn.Module) -> None:
    for module in model.modules():
        head = getattr(module, "hrl_head", None)
        if head is not None:
            head.forget()


def _tied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weight is also an earlier module's."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in seen and hasattr(module, "quant_method"):
            tied.append(module)
        seen.add(id(weight))
    return tied


# ---------------------------------------------------------------------- the trainer's arithmetic


def match_trainer(model: nn.Module, model_type: str) -> None:
    """Give a bfloat16 model on a CPU the trainer's logits and, where its family allows that, its residual stream."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    if next(model.parameters()).dtype != torch.bfloat16:
        return
    # Only the head multiplies in float32 (`head_dtype`), and its factors are bfloat16 numbers.
    allow_bf16_matmul()
    head: Any = getattr(model, "logits_processor", None)
    if head is not None:
        head._apply_head = head.hrl_head = FloatHead()
    if model_type in PLAIN_RESIDUAL_FAMILIES:
        for module in model.modules():
            if type(module) is RMSNorm:
                module._forward_method = partial(_forward, module, module._forward_method)


def use_float32_head(model: nn.Module) -> None:
    """Let a vLLM before 0.26, whose generating models have no `head_dtype`, compute logits in float32 as well.

    Models that compute in float32, and heads of another dtype than the model's, are left as they are.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    for module in model.modules():
        if isinstance(module, LogitsProcessor) and not _has_head_dtype(module):
            module.hrl_head = FloatHead()
            module._get_logits = partial(_get_logits, module, module._get_logits)


def _get_logits(head: Any, original: Any, hidden: Tensor, lm_head: nn.Module, bias: Tensor | None) -> Tensor | None:
    if hidden.dtype == torch.float32 or lm_head.weight.dtype != hidden.dtype:
        logits: Tensor | None = original(hidden, lm_head, bias)
        return logits
    # As vLLM does after its projection: gather the vocabulary's shards, cut off the padding.
    gathered = head._gather_logits(head.hrl_head(lm_head, hidden, bias))
    return None if gathered is None else gathered[..., : head.org_vocab_size]


def _forward(norm: Any, original: Any, hidden: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return original(hidden)
    return add_and_norm(hidden, residual, norm.weight, norm.variance_epsilon)


class FloatHead:
    """Float32 logits `(t, V)` of `hidden (t, H)`, in place of vLLM's projection."""

    def __init__(self) -> None:
        self._packed: PackedWeight | None = None

    def forget(self) -> None:
        """Pack the weight again before the next product: it has changed."""
        self._packed = None

    def __call__(self, head: nn.Module, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of a head whose weight has the dtype of `hidden`."""
        if hidden.is_cuda:  # sums in float32 without a float32 copy of the weight
            logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
        elif can_multiply(hidden, head.weight):
            self._packed = self._packed or PackedWeight.of(head.weight.detach())
            logits = self._packed.product(hidden)
        else:
            logits = _product_by_tiles(hidden, head.weight.detach())
        return logits if bias is None else logits.add_(bias.float())


def _product_by_tiles(hidden: Tensor, weight: Tensor) -> Tensor:
    padded = functional.pad(hidden.float(), (0, 0, 0, -len(hidden) % HEAD_ROWS))
    logits = torch.empty(len(padded), len(weight))
    tiles = zip(weight.split(HEAD_ENTRIES), logits.split(HEAD_ENTRIES, dim=1), strict=True)
    for entries, columns in tiles:
        right = entries.float().t()  # stays in the cache, where a float32 copy of the whole weight would not
        for block, out in zip(padded.split(HEAD_ROWS), columns.split(HEAD_ROWS), strict=True):
            out.copy_(torch.mm(block, right))
    return logits[: len(hidden)]


# ---------------------------------------------------------------------- differences between versions of vLLM


def _load_numel(parameter: Tensor) -> int:
    """Return how many elements a checkpoint has for the parameter. Before 0.31, which declares no padding: all."""
    utils = importlib.import_module("vllm.model_executor.model_loader.reload.utils")
    if hasattr(utils, "get_tensor_load_numel"):
        return int(utils.get_tensor_load_numel(parameter))
    return parameter.numel()


def _has_head_dtype(logits_processor: nn.Module) -> bool:
    """Return whether a generating model's head can have its own dtype (from 0.26 on)."""
    return hasattr(logits_processor, "_apply_head")
