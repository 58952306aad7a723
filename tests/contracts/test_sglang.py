"""What hrl asks of SGLang's server is what its released source has; see `record_sglang.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout import sglang_server
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
