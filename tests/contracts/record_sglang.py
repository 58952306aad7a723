"""Writes `sglang.json`: requests, answers, routes and options of SGLang's server that hrl asks, as released.

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
    ),
}
SERVER, ARGUMENTS = "sglang/srt/entrypoints/http_server.py", "sglang/srt/arg_groups/fields"
#: Routes, and the options of the command, that hrl names.
ROUTES = ("/generate", "/health", "/model_info", "/server_info", "/flush_cache")
ROUTES += ("/update_weights_from_disk", "/weights_checker")
#: Functions of the server whose answers hrl reads, by the keys that they write.
ANSWERS = ("model_info", "check_weights", "update_weights_from_disk")
OPTIONS = ("model_path", "dtype", "context_length", "enable_deterministic_inference", "sampling_defaults")


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


def record(root: Path, version: str) -> dict[str, Any]:
    """What is written."""
    trees = {file: ast.parse((root / file).read_text()) for file in (*CLASSES, SERVER)}
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
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("version")
    given = parser.parse_args()
    RECORD.write_text(json.dumps(record(given.source, given.version), indent=1) + "\n")
