"""What `override_config` makes of a model's configuration, for the trainer and for an engine that sets attributes."""

from __future__ import annotations

import json

import pytest
from transformers import Gemma3TextConfig, GPT2Config, MambaConfig, Qwen2Config

from hrl.models.hf_config import (
    ModelConfigError,
    engine_overrides,
    load_config,
    merge_config,
    model_differences,
    plain_fields,
)
from hrl.models.source import model_facts

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
RESOLVED_YARN = YARN | {"rope_type": "yarn", "rope_theta": 1e6}


@pytest.fixture(scope="module", params=["as transformers 5 writes it", "as a model card of 2024 has it"])
def qwen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).save_pretrained(folder)
    if "2024" in request.param:
        written = json.loads((folder / "config.json").read_text())
        del written["rope_parameters"]
        written |= {"rope_theta": 1e6, "rope_scaling": None}
        (folder / "config.json").write_text(json.dumps(written))
    return folder


def loaded(folder, override):
    return load_config(folder, override, trust_remote_code=False)


def as_the_engine_sees_it(folder, override):
    """vLLM builds the configuration from the folder and then sets attributes."""
    config = loaded(folder, {})
    config.update(engine_overrides(folder, override, trust_remote_code=False))
    return config


@pytest.mark.parametrize("view", [loaded, as_the_engine_sees_it])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"rope_scaling": YARN | {"rope_type": "yarn"}}, RESOLVED_YARN),
        ({"rope_scaling": YARN | {"type": "yarn"}}, RESOLVED_YARN | {"type": "yarn"}),
        ({"rope_parameters": YARN | {"rope_type": "yarn"}}, RESOLVED_YARN),
        ({"rope_scaling": YARN | {"rope_type": "yarn"}, "rope_theta": 5.0}, RESOLVED_YARN | {"rope_theta": 5.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
        ({"rms_norm_eps": 1e-4}, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_rope_is_overridden_in_every_form_that_model_cards_show(qwen, override, expected, view):
    assert view(qwen, override).rope_parameters == expected


def test_the_engine_gets_what_other_fields_derive_from_an_override(qwen):
    """A window that is not used is none in the trainer; as an attribute it would be one."""
    override = {"sliding_window": 8, "use_sliding_window": False}
    assert loaded(qwen, override).sliding_window is None
    assert as_the_engine_sees_it(qwen, override).sliding_window is None
    assert engine_overrides(qwen, {}, trust_remote_code=False) == {}


def test_a_field_that_stands_only_in_the_folders_file_can_be_overridden(qwen):
    written = model_facts(qwen)
    (qwen / "config.json").write_text(json.dumps(written | {"own_field": 1}))
    assert loaded(qwen, {"own_field": 2}).own_field == 2


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ({"max_positions": 3}, "'max_positions'.*did you mean 'max_position_embeddings'"),
        ({"hidden_sise": 3}, "did you mean 'hidden_size'"),
        ({"zzz": 3}, "neither in config.json nor in Qwen2Config$"),
        ({"hidden_size": "wide"}, "does not fit Qwen2Config.*hidden_size"),
    ],
)
def test_what_fits_no_field_is_refused_with_the_nearest_name(qwen, override, complaint):
    with pytest.raises(ModelConfigError, match=r"(?s)" + complaint):
        loaded(qwen, override)


def test_one_rope_for_a_model_that_has_one_for_each_kind_of_layer_is_refused(tmp_path):
    Gemma3TextConfig(num_hidden_layers=6).save_pretrained(tmp_path)
    for override in ({"rope_theta": 5.0}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}):
        with pytest.raises(ModelConfigError, match=r"full_attention.*sliding_attention"):
            loaded(tmp_path, override)
    both = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    rope = loaded(tmp_path, {"rope_parameters": both}).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert rope["sliding_attention"]["rope_theta"] == 1e4


def test_sections_are_merged_and_everything_else_replaced():
    written = {"text_config": {"a": 1, "b": 2}, "listed": [1, 2]}
    override = {"text_config": {"b": 3}, "listed": [4]}
    assert merge_config(written, override) == {"text_config": {"a": 1, "b": 3}, "listed": [4]}


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_act": "gelu"},
        {"layer_types": ["sliding_attention"] * 32},
        {"num_key_value_heads": 2},
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": RESOLVED_YARN},
    ],
)
def test_another_value_of_any_field_that_changes_logits_is_a_difference(changed):
    found = {name: (ours, theirs) for name, ours, theirs in model_differences(Qwen2Config(), as_sent(**changed))}
    assert found == {name: (plain_fields(Qwen2Config())[name], value) for name, value in changed.items()}


def test_one_model_in_two_programs_differs_in_nothing():
    """Under another name of the folder, in another dtype, with fields of one program alone."""
    own, other = Qwen2Config(sliding_window=0), Qwen2Config(sliding_window=None, eos_token_id=7, dtype="bfloat16")
    other.name_or_path, other.head_dtype, other.of_this_program = "/elsewhere", "float32", 3
    assert list(model_differences(own, sent(other))) == []
    assert list(model_differences(MambaConfig(), sent(MambaConfig()))) == []  # has an infinity, which JSON has not
    assert list(model_differences(GPT2Config(), {"hidden_size": 768})) == []  # by the class's other name
    assert [name for name, *_ in model_differences(GPT2Config(), {"hidden_size": 96})] == ["hidden_size"]


def as_sent(**changed):
    return sent(Qwen2Config(**changed))


def sent(config):
    return json.loads(json.dumps(plain_fields(config), allow_nan=False))
