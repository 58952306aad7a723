"""What an export writes beside the weights."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig

from hrl.models.checkpoint_form import CheckpointForm
from hrl.workers.engine import weights
from hrl.workers.policy import Policy
from tests.models.tiny import fsdp_config, model_config, save_llama
from tests.workers.asked import Actor

pytestmark = pytest.mark.usefixtures("world")

#: As early Llama 2 and Vicuna have it. transformers reads it, and refuses to write it.
SAMPLING_WITHOUT_DO_SAMPLE = b'{\n  "bos_token_id": 1,\n  "temperature": 0.9,\n  "top_p": 0.6\n}\n'


def policy_of(source: Path) -> Policy:
    return Actor(model_config(source), None, fsdp_config("float32"), device=torch.device("cpu"), total_steps=None)


def export(source: Path, target: Path) -> Path:
    policy_of(source).engine.export_hf(target)
    return target


def test_a_full_tensor_is_gone_before_the_next_one_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = policy_of(save_llama(tmp_path / "source")).engine
    given: list[weakref.ref[torch.Tensor]] = []
    alive = []
    cast = weights._outgoing_dtype

    def look(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:  # asked when the next one is cast and gathered
        alive.append(sum(reference() is not None for reference in given))
        return cast(tensor, dtype)

    monkeypatch.setattr(weights, "_outgoing_dtype", look)
    for _, tensor in engine.iter_full_params(torch.bfloat16):
        given.append(weakref.ref(tensor))
        del tensor
    assert len(alive) == len(given) > 5 and not any(alive)


def test_who_copies_may_cast_and_gets_the_same_numbers(tmp_path: Path) -> None:
    engine = policy_of(save_llama(tmp_path / "source")).engine
    cast = dict(engine.iter_full_params(torch.bfloat16))
    stored = dict(engine.iter_full_params(torch.bfloat16, cast_by_reader=True))
    assert cast.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, cast[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(torch.empty_like(cast[name]).copy_(tensor), cast[name])


def test_an_offloaded_tensor_is_cast_on_the_device_and_nobody_waits_for_its_copy(tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(save_llama(tmp_path / "source")).config
    module = torch.nn.Module()
    module.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # in host memory
    form, crossed = CheckpointForm.of(module.model), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
                crossed.append((kwargs.get("dtype") or args[0].dtype, kwargs["non_blocking"]))
            return function(*args, **kwargs)

    with Watch():
        sent = [
            (tensor.device.type, tensor.dtype)
            for _, tensor in weights.iter_full_params(module, form, torch.bfloat16, torch.device("meta"))
        ]
    assert len(sent) > 5 and set(sent) == {("meta", torch.bfloat16)}
    assert len(crossed) >= len(sent) and set(crossed) == {(torch.float32, True)}


def test_a_generation_config_that_transformers_would_not_write_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    (source / "generation_config.json").write_bytes(SAMPLING_WITHOUT_DO_SAMPLE)
    (source / "preprocessor_config.json").write_bytes(b'{"image_size":  28}')
    with pytest.raises(ValueError, match="Fix these issues"):
        GenerationConfig.from_pretrained(source).save_pretrained(tmp_path / "strict")
    exported = export(source, tmp_path / "hf")
    for name in ("generation_config.json", "preprocessor_config.json"):
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    assert not list(exported.glob("*.py")), "only a folder whose configuration names code brings any"


def test_a_config_with_odd_fields_is_exported_and_loads_again(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    fields = json.loads((source / "config.json").read_text())
    odd = {"temperature": 0.6, "do_sample": True, "own_field": [1, 2]}
    (source / "config.json").write_text(json.dumps(fields | odd | {"transformers_weights": "model.safetensors"}))
    policy = policy_of(source)
    policy.engine.source_config.top_k = 5  # as a class of its own would leave it in the configuration
    with pytest.raises(ValueError, match="generation parameters"):
        policy.engine.source_config.save_pretrained(tmp_path / "strict")
    policy.engine.export_hf(tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["own_field"] == [1, 2] and "transformers_weights" not in written
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert again.dtype == torch.float32 and again.config.architectures == fields["architectures"]


def test_code_that_the_configuration_names_comes_along(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"auto_map": {"AutoConfig": "own.OwnConfig"}}))
    (source / "own.py").write_text("OwnConfig = None\n")
    assert (export(source, tmp_path / "hf") / "own.py").read_text() == "OwnConfig = None\n"
