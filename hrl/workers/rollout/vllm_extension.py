"""Methods that vLLM mixes into its worker (`worker_extension_cls`), called with plain data by `collective_rpc`.

They report failures of the weight sync as data, ``{"error": sentence}``: vLLM would turn an exception into the text of
another one, without the sentence that names the tensor.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hrl.single_controller.processes import die_with_parent
from hrl.workers.rollout.vllm_precision import match_trainer, use_float32_head
from hrl.workers.rollout.vllm_versions import load_numel
from hrl.workers.weight_sync.errors import WeightSyncError
from hrl.workers.weight_sync.manifest import Manifest
from hrl.workers.weight_sync.receiver import WeightReceiver

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger(__name__)

_FILE_STORE = "file://"


class VllmModelWriter:
    """Writes checkpoint-format weights into a running vLLM model by its layer-wise reload.

    A plain `load_weights` fails on a running CPU engine, where the loaded weights were re-packed for the kernels and
    the originals dropped. The layer-wise reload brings every layer back to its loadable form, collects its weights,
    packs them again, and copies the result into the memory that the kernels already use.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self._model = model
        self._model_config = model_config
        self._parameters: set[str] = set()
        self._loaded: set[str] | None = None
        self._tied: list[nn.Module] = []
        self._written: dict[str, Tensor] = {}
        self._silent = False

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._parameters = {name for name, _ in self._model.named_parameters()}
        self._tied = _tied_modules(self._model)
        self._loaded = set()
        _forget_expert_kernels(self._model)
        initialize_layerwise_reload(self._model)

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        try:
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
        self._keep_unfinished_layers()
        _finish_copies(weights)

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._loaded is not None:
            missing = [f"nothing for {name}" for name in sorted(self._parameters - self._loaded)]
            missing += self._incomplete_modules()
            if missing:
                raise WeightSyncError(f"the trainer sent {'; '.join(missing[:8])} (the engine's names)")
        finalize_layerwise_reload(self._model, self._model_config)
        for module in self._tied:
            # A module that shares another one's weight (the output head of tied embeddings) got no weight of its own to
            # load, and so kept what it had packed from the old one.
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
        self._written = {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def cancel(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self._model, self._model_config)

    def read_back(self, name: str) -> Tensor | None:
        return self._written.get(name)

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

    def _keep_unfinished_layers(self) -> None:
        """Copies what layers with weights still to come hold of this bucket, whose memory will be written again."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self._model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for key, value in call.arguments.items():
                    if isinstance(value, Tensor) and not value.is_meta and key != "param":
                        call.arguments[key] = value.clone()


def _finish_copies(weights: Sequence[tuple[str, Tensor]]) -> None:
    """Waits until every copy out of the weights' memory is made: the sender writes there again.

    Under tensor parallelism the weights lie on the sender's GPU: what was cloned there runs on that GPU's stream, what
    was copied into this process's model on that of its own.
    """
    if torch.cuda.is_available():
        own = torch.device("cuda", torch.cuda.current_device())
        for device in {own} | {tensor.device for _, tensor in weights if tensor.is_cuda}:
            torch.cuda.synchronize(device)


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
            VllmModelWriter(self.model_runner.get_model(), self.model_runner.model_config),  # type: ignore[attr-defined]
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
        """Takes a bucket. See `WeightReceiver.load`."""
        try:
            self._hrl_receiver.load(index)
        except WeightSyncError as error:
            return {"error": str(error)}
        return {}

    def hrl_weights_commit(self) -> dict[str, Any]:
        """Puts the new weights into effect. See `WeightReceiver.commit`."""
        try:
            return self._hrl_receiver.commit()
        except WeightSyncError as error:
            return {"error": str(error)}

    def hrl_weights_abort(self) -> dict[str, Any]:
        """Forgets a sync; says which version's weights are here, and whether wholly."""
        return {"intact": self._hrl_receiver.abort(), "version": self._hrl_receiver.served_version}

    def _hrl_unlink_rendezvous(self) -> None:
        """Removes the file through which the engine's processes met; vLLM leaves it in the folder for temporary files.

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
    """Takes the names away from the segments through which CPU workers reduce tensors.

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
