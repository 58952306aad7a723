"""What hrl asks of SGLang's server and of its engine is what its released source has; see `record_sglang.py`."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from hrl.config import engine_rules
from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout import sglang_engine, sglang_process, sglang_server
from hrl.workers.rollout.sglang_server import generate_request, server_command, update_request
from tests.contracts.record_sglang import RECORD
from tests.workers.rollout.settings import engine_setup

SGLANG = json.loads(RECORD.read_text())
FIELDS = {name: set(fields) for name, fields in SGLANG["fields"].items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_has_only_fields_that_the_server_knows(temperature):
    body = generate_request([5, 6], SamplingParams(temperature=temperature), [1])
    assert body.keys() <= FIELDS["GenerateReqInput"] & FIELDS["GenerateRequest"]
    assert body["sampling_params"].keys() <= FIELDS["SamplingParams"]  # whose unknown keys are refused


def test_weights_are_sent_by_fields_that_the_server_knows():
    assert update_request(Path("/weights"), "hrl-a-1").keys() <= FIELDS["UpdateWeightFromDiskReqInput"]
    assert "success" in SGLANG["answers"]["update_weights_from_disk"]
    assert "action" in FIELDS["CheckWeightsReqInput"]
    assert "per_engine_checksum" in SGLANG["answers"]["check_weights"]


def test_what_is_read_of_an_answer_is_there():
    assert {"output_ids", "meta_info"} <= FIELDS["GenerateResponse"]
    read = {"output_token_logprobs", "finish_reason", "weight_version", "weight_versions"}
    assert read <= FIELDS["GenerateMetaInfo"]
    looked = {"architectures", "is_generation", "model_path", "preferred_sampling_params", "weight_version"}
    assert looked <= set(SGLANG["answers"]["model_info"])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("GENERATE", "POST"),
        ("MODEL_INFO", "GET"),
        ("SERVER_INFO", "GET"),
        ("HEALTH", "GET"),
        ("UPDATE", "POST"),
        ("FLUSH", "POST"),
        ("CHECK", "POST"),
    ],
)
def test_every_route_takes_the_method(name, method):
    assert method in SGLANG["routes"][getattr(sglang_server, name)]


def test_the_command_has_only_options_that_there_are():
    command = server_command(engine_setup("sglang", "model", TokenIds(0, (1,), 8), 16))
    named = [word.removeprefix("--").replace("-", "_") for word in command.split() if word.startswith("--")]
    assert set(named) <= set(SGLANG["options"]) and len(named) >= 4


def test_the_record_is_of_the_release_that_the_engine_is_written_for():
    assert SGLANG["version"] == sglang_engine.VERSION


def test_reasons_and_what_else_is_read_of_a_server_are_there():
    assert set(SGLANG["reasons"]) == set(sglang_server._FINISH_REASONS)
    # `/server_info` answers with the resolved options, and the release.
    read = {"dtype", "context_length", "enable_deterministic_inference", "enable_fp32_lm_head"}
    assert read | {"json_model_override_args"} <= set(SGLANG["options"])
    assert {"message", "success"} <= set(SGLANG["answers"]["update_weights_from_disk"])


# ---------------------------------------------------------------------------------- the engine inside a run

PROCESS = ast.parse(Path(sglang_process.__file__).read_text())


def test_the_engine_is_opened_with_options_that_there_are():
    setup = engine_setup("sglang", "model", TokenIds(0, (1,), 8), 16)
    assert sglang_engine.engine_args(setup).keys() <= set(SGLANG["options"])
    of_rules = engine_rules._SET_BY_FOR_SGLANG.keys() | engine_rules._FIXED_FOR_SGLANG.keys()
    assert of_rules <= set(SGLANG["options"])
    unnamed = sglang_engine.engine_args(setup).keys() - of_rules
    assert unnamed == {"log_level"}  # which a user may set


def test_everything_that_is_imported_of_sglang_is_there():
    found = {
        (node.module, alias.name)
        for node in ast.walk(PROCESS)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang")
        for alias in node.names
    }
    files = {
        "sglang.srt.entrypoints.engine": "sglang/srt/entrypoints/engine.py",
        "sglang.srt.managers.io_struct": "sglang/srt/managers/io_struct.py",
        "sglang.srt.utils": "sglang/srt/utils/common.py",
        "sglang.srt.weight_sync.tensor_bucket": "sglang/srt/weight_sync/tensor_bucket.py",
    }
    assert {name for module, name in found if name in SGLANG["names"].get(files.get(module, ""), {})} == {
        name for module, name in found if module != "sglang.version"
    }
    assert len(found) == 10


def test_every_call_of_the_engine_has_the_arguments_that_it_takes():
    """Requests by their fields, and methods by their parameters."""
    methods = SGLANG["methods"] | {"FlattenedTensorBucket": SGLANG["methods"]["__init__"]}
    seen = set()
    for node in ast.walk(PROCESS):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {word.arg for word in node.keywords if word.arg}
        if name in FIELDS:
            assert not node.args and given <= FIELDS[name], name
            seen.add(name)
        elif name in methods and name != "__init__":
            known = methods[name]
            assert len(node.args) <= len(known) and given <= set(known), name
            seen.add(name)
    assert seen >= (SGLANG["methods"].keys() - {"__init__"}) | {
        "BeginWeightUpdateReqInput",
        "CheckWeightsReqInput",
        "EndWeightUpdateReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightsFromTensorReqInput",
    }
    body = generate_request([5, 6], SamplingParams(), [1]) | {"rid": "0-1"}
    assert body.keys() <= set(SGLANG["methods"]["async_generate"])
    assert {"tokenizer_manager", "loop"} <= set(SGLANG["engine"]) and "success" in FIELDS["FlushCacheReqOutput"]


def test_memory_is_given_back_by_the_names_that_sglang_has_for_it():
    constants = SGLANG["names"]["sglang/srt/constants.py"]
    assert constants["GPU_MEMORY_TYPE_WEIGHTS"] == sglang_engine._WEIGHTS
    assert constants["GPU_MEMORY_TYPE_KV_CACHE"] == sglang_engine._CACHE
