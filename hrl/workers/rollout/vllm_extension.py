"""Methods that vLLM mixes into its worker (`worker_extension_cls`), called with plain data by `collective_rpc`.

They report failures of the weight sync as data, `{"error": sentence}`: vLLM would turn an exception into the text of
another one, without the sentence that names the tensor.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hrl.processes.lifetime import die_with_parent
from hrl.workers.rollout.vllm_precision import match_trainer, use_float32_head
from hrl.workers.rollout.vllm_versions import load_numel
from hrl.workers.weight_sync.manifest import Manifest, WeightSyncError
from hrl.workers.weight_sync.receiver import WeightReceiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_FILE_STORE = "file://"


class VllmModelWriter:
    """Writes checkpoint-format weights into a running vLLM model by its layer-wise reload.

    A plain `load_weights` fails on a running engine that keeps its weights in another form than it loads them in:
    packed on a CPU, quantised to FP8, transposed for a kernel. The layer-wise reload brings every layer back to its
    loadable form, with the names that it then has, collects its weights, converts them again, and copies the result
    into the memory that the kernels already use. Conversions look up vLLM's current configuration, so all of it runs
    under that.
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
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._tied = _tied_modules(self._model)
        self._loaded = set()
        _forget_expert_kernels(self._model)
        with set_current_vllm_config(self._vllm_config):
            initialize_layerwise_reload(self._model)
        self._required = _required_parameters(self._model, self._tied)

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
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
                # A module that shares another one's weight (the output head of tied embeddings) got no weight of its
                # own to load, and so kept what it had packed from the old one.
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
        self._written = dict(_as_loaded(self._model))

    def cancel(self) -> None:
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

    def read_back(self, name: str) -> Tensor | None:
        return self._written.get(name)

    def _hint(self) -> str:
        """Return what to do about a folder whose weights are stored quantised, scales and all.

        A trainer has no scales.
        """
        stored = getattr(self._vllm_config.model_config.hf_config, "quantization_config", None)
        if stored is None:
            return ""
        return (
            ". The model's folder holds quantised weights: take its unquantised one, and have the engine quantise what "
            "it gets, with rollout.engine_kwargs.vllm.quantization=fp8"
        )

    def _incomplete_modules(self) -> list[str]:
        """Modules that got only some of what they fuse, such as queries and values without keys."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        found = []
        for name, module in self._model.named_modules():
            got = get_layerwise_info(module).load_numel
            # An embedding is padded beyond what there is to load, and never fused: its name says whether it was.
            if not got or isinstance(module, VocabParallelEmbedding):
                continue
            want = sum(load_numel(p) for p in module.parameters(recurse=False))
            if got < want:
                found.append(f"{got} of {want} elements of {name}")
        return found

    def _keep_unfinished_layers(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Copy what layers with weights still to come hold of this bucket, whose memory will be written again.

        What they hold of earlier ones was copied then.
        """
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
    """vLLM warns of every layer that got nothing; those that are left by then are meant to keep what they have."""
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

    The engine fuses and renames what is inside of a tower, so the tower's name is compared: the first part of the
    engine's, which stands somewhere in the checkpoint's. A tower of which anything was sent has to be sent wholly.

    Args:
        name: The engine's.
        kept: Names in the checkpoint of what is not sent.
        loaded: The engine's names of what was.
    """
    tower = name.partition(".")[0]
    is_named = any(tower in other.split(".") for other in kept)
    return is_named and not any(other.startswith(f"{tower}.") for other in loaded)


def _required_parameters(model: nn.Module, tied: Sequence[nn.Module]) -> set[str]:
    """Names of what a model in its loadable form has to be sent.

    Not the weight that a module shares with an earlier one, and not the scales of an attention layer's cache: a
    checkpoint may have them, and without them they are what they were.
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
    """Parameters that are kept in the form in which they are loaded, so that they can be compared with what was sent.

    What a quantisation made can have the name, shape and dtype of what it was made from, and other contents.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            for name, parameter in module.named_parameters(recurse=False):
                yield (f"{path}.{name}" if path else name), parameter.detach()


class RolloutWorkerExtension:
    """Mixed into vLLM's worker; the names must not be vLLM's own."""

    def hrl_join(self) -> dict[str, Any]:
        """Binds this process to its parent's life and says who it is."""
        if multiprocessing.parent_process() is not None:
            die_with_parent()
        _unlink_collective_memory()
        self._hrl_unlink_rendezvous()
        rank = self._hrl_rank()
        use_float32_head(self.model_runner.get_model())  # type: ignore[attr-defined]
        if not torch.cuda.is_available():
            _count_ranks_without_a_compiler()
            match_trainer(self.model_runner.get_model(), self.model_runner.model_config.hf_config.model_type)  # type: ignore[attr-defined]
        self._hrl_receiver = WeightReceiver(
            VllmModelWriter(self.model_runner.get_model(), self.vllm_config),  # type: ignore[attr-defined]
            f"vllm worker {rank}",
            rank,
        )
        return {"rank": rank, "pid": os.getpid(), "threads": torch.get_num_threads()}

    def hrl_weights_begin(self, manifest: Mapping[str, Any], handle: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Announces a sync. See `WeightReceiver.begin`."""
        try:
            self._hrl_receiver.begin(Manifest.from_plain(manifest), handle, version)
        except WeightSyncError as error:
            return {"error": str(error)}
        return {}

    def hrl_weights_load(self, index: int) -> dict[str, Any]:
        """Take a bucket. See `WeightReceiver.load`."""
        try:
            self._hrl_receiver.load(index)
        except WeightSyncError as error:
            return {"error": str(error)}
        return {}

    def hrl_weights_commit(self) -> dict[str, Any]:
        """Put the new weights into effect. See `WeightReceiver.commit`."""
        try:
            report = self._hrl_receiver.commit()
        except WeightSyncError as error:
            return {"error": str(error)}
        if torch.cuda.is_available():  # what the sync used is the cache's, which wakes next in a pool of its own
            torch.cuda.empty_cache()
        return report

    def hrl_weights_abort(self) -> dict[str, Any]:
        """Forgets a sync; says which version's weights are here, and whether wholly."""
        return {"intact": self._hrl_receiver.abort(), "version": self._hrl_receiver.served_version}

    def _hrl_unlink_rendezvous(self) -> None:
        """Remove the file through which the engine's processes met; vLLM leaves it in the folder for temporary files.

        On a CPU nobody looks there again. On a GPU, NCCL's watchdog does, for as long as the engine lives.
        """
        method: str = self.distributed_init_method  # type: ignore[attr-defined]
        if method.startswith(_FILE_STORE) and not torch.cuda.is_available():
            Path(method.removeprefix(_FILE_STORE)).unlink(missing_ok=True)

    def _hrl_rank(self) -> int:
        return int(self.rank)  # type: ignore[attr-defined]


def _count_ranks_without_a_compiler() -> None:
    """Has a CPU engine count the rank of a sampled token with two operators.

    vLLM compiles the two into one, to save a temporary that matters on a GPU. Here that is 23 s of the first step.
    """
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)


def _unlink_collective_memory() -> None:
    """Take the names away from the segments through which CPU workers reduce tensors.

    Every worker has mapped them by now, and vLLM removes them only in a destructor that a killed process doesn't run.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.startswith("/dev/shm/") and "cpushm" in path:
            Path(path).unlink(missing_ok=True)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Has a CPU engine pack its experts' weights again when they have come.

    vLLM packs them for its CPU kernel when it makes that kernel, and keeps the kernel from load to load: later weights
    would be read as if they were packed. Kernels on a GPU take weights as they are, and graphs hold on to them.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        on_cpu = any(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))
        if on_cpu and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _tied_modules(model: nn.Module) -> list[nn.Module]:
    """Modules whose weight is also another, earlier module's."""
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
