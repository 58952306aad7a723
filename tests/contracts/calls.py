"""What hrl asks of torch, vLLM, flash-attn and transformers, read from its source without running it.

A *call* is a call site with the shape of its arguments; a *name* is anything that is imported or read from one of the
governed modules. Objects have no type in a syntax tree, so what is called on them is found by their spelling:
`RECEIVERS` says which class stands behind which expression.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hrl"

#: Modules whose names need a contract: what only CUDA runs, or what moved between the versions of our range. A name
#: below them counts too.
GOVERNED = (
    "flash_attn",
    "torch.UntypedStorage",
    "torch.cuda",
    "torch.distributed",
    "torch.nn.attention",
    "torch.ops.aten",
    "transformers",
    "vllm",
)

_ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
_FSDP = "torch.distributed.fsdp.FSDPModule"
_LAYER = "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo"

#: Per file (relative to the package), expressions and the class of what they give.
RECEIVERS: dict[str, dict[str, str]] = {
    "episodes/parsing.py": {
        "parser": "vllm.parser.abstract_parser.Parser",
        "self._request": "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
    },
    "workers/rollout/vllm_engine.py": {
        "llm": _ASYNC_LLM,
        "self._llm": _ASYNC_LLM,
        "self._running()": _ASYNC_LLM,
        "output": "vllm.outputs.RequestOutput",
        "completion": "vllm.outputs.CompletionOutput",
        "completion.logprobs": "vllm.logprobs.FlatLogprobs",
    },
    "workers/rollout/vllm_worker.py": {
        "self.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "info": _LAYER,
        "get_layerwise_info(module)": _LAYER,
    },
    "workers/rollout/vllm_adapter.py": {
        "self._manager": "vllm.lora.model_manager.LRUCacheLoRAModelManager",
        "manager": "vllm.lora.model_manager.LRUCacheLoRAModelManager",
        "wrapper": "vllm.lora.punica_wrapper.punica_base.PunicaWrapperBase",
        "self._wrapper": "vllm.lora.punica_wrapper.punica_base.PunicaWrapperBase",
    },
    "workers/weight_sync/broadcast.py": {
        "group": "torch.distributed.ProcessGroup",
        "work": "torch.distributed.Work",
    },
    "workers/weight_sync/cuda_ipc.py": {"buffer.untyped_storage()": "torch.UntypedStorage"},
}

#: Methods that belong to one governed class, whatever the expression before them.
METHODS = dict.fromkeys(
    (
        "reshard",
        "unshard",
        "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor",
        "set_is_last_backward",
        "set_modules_to_backward_prefetch",
        "set_modules_to_forward_prefetch",
        "set_requires_gradient_sync",
        "set_reshard_after_backward",
        "set_reshard_after_forward",
        "set_unshard_in_backward",
    ),
    _FSDP,
)

#: What hrl relies on without spelling it out: what it overrides, replaces in a loaded model, or reads from the object
#: that it is mixed into.
RELIED_ON = (
    "vllm.logprobs.FlatLogprobs.__len__",
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.lora_a_stacked",
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.lora_b_stacked",
    "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU.add_lora_linear",
    "vllm.lora.worker_manager.WorkerLoRAManager._adapter_manager",
    "vllm.model_executor.custom_op.CustomOp._forward_method",
    "vllm.model_executor.layers.layernorm.RMSNorm.variance_epsilon",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor._gather_logits",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor._get_logits",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor.org_vocab_size",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor._init_executor",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor._init_executor",
    # The fields of `speculative_config` that hrl and its page name, what may draft, and where it lies: apart from the
    # model whose weights a sync brings.
    "vllm.config.speculative.SpeculativeConfig.method",
    "vllm.config.speculative.SpeculativeConfig.model",
    "vllm.config.speculative.SpeculativeConfig.num_speculative_tokens",
    "vllm.config.speculative.SpeculativeConfig.prompt_lookup_max",
    "vllm.config.speculative.SpeculativeConfig.prompt_lookup_min",
    "vllm.config.speculative.SpeculativeConfig.rejection_sample_method",
    "vllm.config.speculative.SpeculativeMethod",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.drafter",
    # What `vllm_speculation` replaces and reads.
    "vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized",
    "vllm.v1.metrics.loggers.StatLoggerBase.record",
    "vllm.v1.metrics.stats.SchedulerStats.spec_decoding_stats",
    "vllm.v1.outputs.LogprobsTensors.logprob_token_ids",
    "vllm.v1.outputs.LogprobsTensors.logprobs",
    "vllm.v1.outputs.LogprobsTensors.selected_token_ranks",
    "vllm.v1.sample.metadata.SamplingMetadata.generators",
    "vllm.v1.sample.metadata.SamplingMetadata.temperature",
    "vllm.v1.sample.metadata.SamplingMetadata.top_k",
    "vllm.v1.sample.metadata.SamplingMetadata.top_p",
    "vllm.v1.sample.rejection_sampler.RejectionSampler.forward",
    "vllm.v1.sample.rejection_sampler.RejectionSampler.sampler",
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata.draft_token_ids",
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata.num_draft_tokens",
    "vllm.v1.spec_decode.metrics.SpecDecodingStats.num_accepted_tokens",
    "vllm.v1.spec_decode.metrics.SpecDecodingStats.num_draft_tokens",
    "vllm.v1.spec_decode.metrics.SpecDecodingStats.num_drafts",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.rejection_sampler",
    # Which of its two runners a GPU gets, vLLM decides by version and model: 0.32 takes this one for nearly all.
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.get_model",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.lora_manager",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.model_config",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.model_config",
    "vllm.v1.worker.worker_base.WorkerBase.distributed_init_method",
    "vllm.v1.worker.worker_base.WorkerBase.rank",
)

_VLLM_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")


@dataclass(frozen=True)
class Call:
    """A call of hrl's to a governed name.

    Attributes:
        where: ``file:line``.
        name: qualified, as hrl spells it.
        positional: number of positional arguments.
        keywords: names of keyword arguments.
        open_ended: there are ``*args`` or ``**kwargs`` too, so that the rest of the arguments isn't known.
    """

    where: str
    name: str
    positional: int
    keywords: tuple[str, ...]
    open_ended: bool


@dataclass(frozen=True)
class Name:
    """A governed name that hrl imports, reads, subclasses or calls."""

    where: str
    name: str


def is_governed(name: str) -> bool:
    """Whether the name needs a contract."""
    return any(name == module or name.startswith(f"{module}.") for module in GOVERNED)


def collect(path: Path, relative: str) -> tuple[list[Call], list[Name]]:
    """The governed calls and names of one file."""
    tree = ast.parse(path.read_text(), str(path))
    imports, names = _imports(tree, relative)
    receivers = RECEIVERS.get(relative, {})
    calls: list[Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found = _qualified(node, imports, receivers)
            if found is not None and is_governed(found):
                names.append(Name(f"{relative}:{node.lineno}", found))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VLLM_VARIABLE.fullmatch(node.value):
            names.append(Name(f"{relative}:{node.lineno}", f"vllm.envs.{node.value}"))
        if isinstance(node, ast.Call):
            found = _qualified(node.func, imports, receivers)
            if found is not None and is_governed(found):
                calls.append(_call(f"{relative}:{node.lineno}", found, node))
    return calls, names


@cache
def all_of_hrl() -> tuple[tuple[Call, ...], tuple[Name, ...]]:
    """The governed calls and names of the whole package."""
    calls: list[Call] = []
    names: list[Name] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        some_calls, some_names = collect(path, path.relative_to(PACKAGE).as_posix())
        calls += some_calls
        names += some_names
    names += [Name("tests/contracts/calls.py", name) for name in RELIED_ON]
    return tuple(calls), tuple(names)


def _imports(tree: ast.AST, relative: str) -> tuple[dict[str, str], list[Name]]:
    """Local name → qualified name of everything that the file imports, and the governed ones among them."""
    imports: dict[str, str] = {}
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                imports[local] = alias.name if alias.asname else local
                if is_governed(alias.name):
                    names.append(Name(f"{relative}:{node.lineno}", alias.name))
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            for alias in node.names:
                qualified = f"{node.module}.{alias.name}"
                imports[alias.asname or alias.name] = qualified
                if is_governed(qualified):
                    names.append(Name(f"{relative}:{node.lineno}", qualified))
    return imports, names


def _qualified(node: ast.expr, imports: dict[str, str], receivers: dict[str, str]) -> str | None:
    """The qualified name of an expression, where it is one."""
    if isinstance(node, ast.Name):
        return imports.get(node.id)
    if not isinstance(node, ast.Attribute) or ast.unparse(node) in receivers:
        return None
    owner = receivers.get(ast.unparse(node.value)) or METHODS.get(node.attr)
    if owner is not None:
        return f"{owner}.{node.attr}"
    if isinstance(node.value, ast.Attribute) and ast.unparse(node.value.value) in receivers:
        return None  # an attribute of what a governed class holds is that thing's own affair
    parent = _qualified(node.value, imports, receivers)
    return None if parent is None else f"{parent}.{node.attr}"


def _call(where: str, name: str, node: ast.Call) -> Call:
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    named = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    return Call(
        where,
        name,
        sum(not isinstance(argument, ast.Starred) for argument in node.args),
        named,
        starred or len(named) < len(node.keywords),
    )


def spelled_receivers() -> Iterator[tuple[str, str]]:
    """(file, expression) of every entry of `RECEIVERS`, each of which must still stand in that file."""
    for relative, expressions in RECEIVERS.items():
        yield from ((relative, expression) for expression in expressions)
