"""Writes `sglang.json`: what hrl asks of SGLang's server (requests, answers, routes, options) and of its engine.

Usage: unpack a release's wheel into ``SOURCE`` and run ``python -m tests.contracts.record_sglang SOURCE VERSION``.
Sources are parsed, never executed; only names of classes, fields, routes and options are recorded.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("sglang.json")
#: File → classes whose fields are recorded.
CLASSES = {
    "sglang/api/v1/api_types.py": ("GenerateRequest", "SamplingParams", "GenerateResponse", "GenerateMetaInfo"),
    "sglang/srt/managers/io_struct.py": (
        "GenerateReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightFromDiskReqOutput",
        "CheckWeightsReqInput",
        "UpdateWeightsFromTensorReqInput",
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "FlushCacheReqOutput",
    ),
}
SERVER, ARGUMENTS = "sglang/srt/entrypoints/http_server.py", "sglang/srt/arg_groups/fields"
#: Routes, and the options of the command, that hrl names.
ROUTES = ("/generate", "/health", "/model_info", "/server_info", "/flush_cache")
ROUTES += ("/update_weights_from_disk", "/weights_checker")
#: Functions of the server whose answers hrl reads, by the keys that they write.
ANSWERS = ("model_info", "check_weights", "update_weights_from_disk")
OPTIONS = (
    "chunked_prefill_size",
    "context_length",
    "device",
    "disable_cuda_graph",
    "disable_radix_cache",
    "dp_size",
    "dtype",
    "enable_deterministic_inference",
    "enable_fp32_lm_head",
    "enable_memory_saver",
    "host",
    "json_model_override_args",
    "log_level",
    "max_running_requests",
    "mem_fraction_static",
    "model_path",
    "nnodes",
    "port",
    "pp_size",
    "preferred_sampling_params",
    "sampling_defaults",
    "skip_tokenizer_init",
    "tp_size",
    "trust_remote_code",
    "weight_version",
)
#: File → methods of the engine that hrl calls, by the names of their parameters.
METHODS = {
    "sglang/srt/entrypoints/engine.py": ("async_generate", "shutdown"),
    "sglang/srt/managers/tokenizer_manager.py": ("abort_request",),
    "sglang/srt/managers/tokenizer_control_mixin.py": (
        "begin_weight_update",
        "check_weights",
        "end_weight_update",
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_tensor",
    ),
    "sglang/srt/weight_sync/tensor_bucket.py": ("__init__", "get_flattened_tensor", "get_metadata"),
    "sglang/srt/utils/common.py": ("serialize",),
}
#: File → classes and constants that hrl imports, or by whose value it calls.
NAMES = {
    "sglang/srt/entrypoints/engine.py": ("Engine",),
    "sglang/srt/managers/io_struct.py": tuple(CLASSES["sglang/srt/managers/io_struct.py"]),
    "sglang/srt/weight_sync/tensor_bucket.py": ("FlattenedTensorBucket",),
    "sglang/srt/utils/common.py": ("MultiprocessingSerializer",),
    "sglang/srt/constants.py": ("GPU_MEMORY_TYPE_KV_CACHE", "GPU_MEMORY_TYPE_WEIGHTS"),
}
#: Why a response ends.
REASONS = "sglang/srt/managers/schedule_batch.py"


def fields(tree: ast.Module, name: str) -> list[str]:
    """The fields of a class."""
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        field.target.id
        for field in found.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def routes(tree: ast.Module) -> dict[str, list[str]]:
    """Path → methods."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        path, kind = node.args[0], node.func.attr
        if kind not in ("get", "post", "api_route") or not isinstance(path, ast.Constant) or path.value not in ROUTES:
            continue
        given = [word.value for word in node.keywords if word.arg == "methods"]
        methods = ast.literal_eval(given[0]) if given else [kind.upper()]
        found[path.value] = sorted({*found.get(path.value, []), *methods})
    return found


def keys_written(tree: ast.Module, name: str) -> list[str]:
    """The keys that a function puts into dictionaries."""
    (found,) = (node for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name == name)
    keys = [key for node in ast.walk(found) if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in ast.walk(found) if isinstance(node, ast.Subscript)]
    return sorted({key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)})


def parameters(tree: ast.Module, name: str) -> list[str]:
    """The parameters of the one function or method of this name, or of the first, without `self`."""
    found = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )
    return [
        each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs) if each.arg != "self"
    ]


def named(tree: ast.Module, names: tuple[str, ...]) -> dict[str, str]:
    """Which of the names a file has, with the value of constants."""
    found = {node.name: "" for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found[node.targets[0].id] = str(ast.literal_eval(node.value))
    return found


def attributes_set(tree: ast.Module, name: str) -> list[str]:
    """What the initializer of a class gives its instances."""
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return sorted(
        {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    )


def reasons(tree: ast.Module) -> list[str]:
    """The `type` of every reason for the end of a response."""
    return sorted(
        {
            str(value.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name.startswith("FINISH")
            for each in ast.walk(node)
            if isinstance(each, ast.Dict)
            for key, value in zip(each.keys, each.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == "type" and isinstance(value, ast.Constant)
        }
    )


def record(root: Path, version: str) -> dict[str, Any]:
    """What is written."""
    files = {*CLASSES, SERVER, *METHODS, *NAMES, REASONS}
    trees = {file: ast.parse((root / file).read_text()) for file in files}
    of_arguments = {
        node.target.id
        for file in (root / ARGUMENTS).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {
        "version": version,
        "fields": {name: fields(trees[file], name) for file, names in CLASSES.items() for name in names},
        "routes": routes(trees[SERVER]),
        "answers": {name: keys_written(trees[SERVER], name) for name in ANSWERS},
        "options": [name for name in OPTIONS if name in of_arguments],
        "methods": {name: parameters(trees[file], name) for file, names in METHODS.items() for name in names},
        "names": {file: named(trees[file], names) for file, names in NAMES.items()},
        "engine": attributes_set(trees["sglang/srt/entrypoints/engine.py"], "Engine"),
        "reasons": reasons(trees[REASONS]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("version")
    given = parser.parse_args()
    RECORD.write_text(json.dumps(record(given.source, given.version), indent=1) + "\n")
