"""Twins: small, of the same family and vocabulary, with heads that the same number of processes can share."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hrl.models.cut import Heads
from hrl.models.loading import ModelSource
from hrl.models.picture_probe import require_sight
from hrl.models.pictures import PictureProcessor
from hrl.models.scalar_head import check_scores, find_head
from hrl.models.twin import Sharing, TwinError, write_twin
from tests.models.tiny import save_gemma3, save_llama
from tests.models.tiny_pictures import FAMILIES, config_of, save_processors
from tests.plan.models import EXPERTS, SEVEN, SEVENTY, folder_of

OPTIONS = {"override_config": {}, "trust_remote_code": False, "seed": 1}


@pytest.mark.parametrize(
    ("heads", "sharing", "expected"),
    [
        (Heads(28, 4, 128), Sharing(), Heads(4, 2, 32)),
        (Heads(40, 8, 128), Sharing((2, 2)), Heads(4, 2, 32)),
        (Heads(64, 8, 128), Sharing((4,)), Heads(8, 4, 32)),
        (Heads(28, 4, 128), Sharing((2,), scarce=True), Heads(2, 1, 32)),
        (Heads(28, 4, 128), Sharing((4,), scarce=True), Heads(4, 1, 32)),
        (Heads(8, 1, 256), Sharing((2,)), Heads(2, 1, 32)),
        (Heads(12, 12, 64), Sharing((2,)), Heads(2, 2, 32)),
        (Heads(12, None, 16), Sharing((4,)), Heads(4, None, 16)),
    ],
)
def test_heads_are_the_fewest_that_are_shared_in_the_same_way(heads, sharing, expected):
    assert sharing.heads(heads) == expected


def test_whatever_the_heads_processes_can_share_them():
    draw = random.Random(7)
    for _ in range(500):
        keys, ratio = draw.choice((1, 2, 4, 8, 16)), draw.choice((1, 2, 3, 4, 5, 7, 8))
        degree = draw.choice([size for size in (1, 2, 4) if keys * ratio % size == 0])
        found = Sharing((degree,)).heads(Heads(keys * ratio, keys, 128))
        assert found.queries % degree == 0 and found.queries % found.keys == 0
        assert found.keys % degree == 0 or degree % found.keys == 0
        assert (found.queries > found.keys) == (ratio > 1)  # grouped, or not, as before
        assert found.queries <= keys * ratio


@pytest.mark.parametrize("config", [SEVEN, SEVENTY, EXPERTS], ids=["qwen2", "llama", "qwen3_moe"])
def test_a_twin_is_made_from_a_config_alone_and_is_small(config, tmp_path):
    twin = write_twin(folder_of(config, tmp_path / "model"), tmp_path / "twin", Sharing((2,)), **OPTIONS)
    made = AutoConfig.from_pretrained(tmp_path / "twin")
    assert made.architectures == config["architectures"]
    assert made.vocab_size == config["vocab_size"]
    assert made.max_position_embeddings == config["max_position_embeddings"]
    assert made.num_hidden_layers == 2 and twin.layers == (2, config["num_hidden_layers"])
    assert made.hidden_size == twin.hidden[0] <= 128
    assert twin.parameters < 60e6
    assert getattr(made, "num_local_experts", None) == config.get("num_experts")
    assert f"2 of {config['num_hidden_layers']} layers" in twin.in_words()


def test_a_twin_keeps_a_layer_of_every_kind_and_loads_with_the_same_tokenizer(tmp_path):
    source = save_gemma3(tmp_path / "model")
    whole = AutoConfig.from_pretrained(source).get_text_config()
    for weights in source.glob("*.safetensors"):
        weights.unlink()  # they are not read
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    twin = write_twin(source, tmp_path / "twin", Sharing(), **OPTIONS)
    kinds = AutoConfig.from_pretrained(twin.folder).get_text_config().layer_types
    assert set(kinds) == set(whole.layer_types) and kinds == whole.layer_types[: len(kinds)]
    logits = AutoModelForCausalLM.from_pretrained(twin.folder)(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape[-1] == whole.vocab_size and bool(logits.isfinite().all())
    assert (twin.folder / "generation_config.json").read_text() == '{"eos_token_id": [1, 5]}'


def test_overrides_are_in_the_config_and_the_same_seed_gives_the_same_weights(tmp_path):
    source = save_llama(tmp_path / "model")
    options = OPTIONS | {"override_config": {"rope_theta": 5e5, "max_position_embeddings": 4096}}
    first, second = (write_twin(source, tmp_path / name, Sharing(), **options) for name in ("first", "second"))
    made = AutoConfig.from_pretrained(first.folder)
    assert made.max_position_embeddings == 4096 and made.rope_parameters["rope_theta"] == 5e5
    one, other = (AutoModelForCausalLM.from_pretrained(twin.folder).state_dict() for twin in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_twin_of_a_classifier_scores(tmp_path):
    config = SEVEN | {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    twin = write_twin(folder_of(config, tmp_path / "model"), tmp_path / "twin", Sharing(), **OPTIONS)
    assert AutoModelForSequenceClassification.from_pretrained(twin.folder).score.weight.shape[0] == 1


@pytest.mark.parametrize(
    ("architecture", "scores", "labels"),
    [
        ("Qwen2ForCausalLM", "answers", 1),  # a head in a file beside the weights
        ("Qwen2ForRewardModel", "answers", 1),
        ("Qwen2ForTokenClassification", None, 2),
        ("Qwen2ForProcessRewardModel", "steps", 2),
    ],
)
def test_the_twin_of_a_reward_model_has_a_head_whatever_its_config_says(tmp_path, architecture, scores, labels):
    source = folder_of(SEVEN | {"architectures": [architecture]}, tmp_path / "model")
    twin = write_twin(source, tmp_path / "twin", Sharing(), scores=scores, **OPTIONS)
    check_scores(twin.folder, of_steps=labels == 2)
    head = find_head(twin.folder)
    assert head is not None and head.num_labels == labels


@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_of_a_model_that_sees_shows_pictures_as_the_family_does(family, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
    rope |= {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    whole = config_of(family, hidden_size=256, num_attention_heads=4, num_hidden_layers=6, rope_parameters=rope)
    whole.vision_config.depth = 6
    whole.save_pretrained(tmp_path / "model")
    save_processors(tmp_path / "model", family)
    twin = write_twin(tmp_path / "model", tmp_path / "twin", Sharing(), **OPTIONS)
    made = AutoConfig.from_pretrained(twin.folder)
    assert (twin.layers, made.vision_config.depth, made.image_token_id) == ((2, 6), 2, whole.image_token_id)
    sections = made.get_text_config().rope_parameters["mrope_section"]
    assert (sum(sections), len(sections)) == (16, 3) and min(sections) >= 5  # half of a head of 32, shared as before
    assert PictureProcessor(twin.folder).num_tokens(60, 56) == PictureProcessor(tmp_path / "model").num_tokens(60, 56)
    source = ModelSource.to_look_at(twin.folder, {}, trust_remote_code=False, max_model_len=64, adapter=None)
    assert require_sight(source) < 1e-4
    scorer = write_twin(tmp_path / "model", tmp_path / "scorer", Sharing(), scores="answers", **OPTIONS)
    check_scores(scorer.folder, of_steps=False)


def test_the_axes_of_a_twin_share_the_part_of_a_head_that_turns(tmp_path):
    whole = config_of("qwen3_5")
    whole.text_config.head_dim = 64
    whole.text_config.rope_parameters |= {"mrope_section": [3, 3, 2]}
    whole.save_pretrained(tmp_path / "model")
    save_processors(tmp_path / "model", "qwen3_5")
    twin = write_twin(tmp_path / "model", tmp_path / "twin", Sharing(), **OPTIONS)
    text = AutoConfig.from_pretrained(twin.folder).get_text_config()
    # A quarter of 32, and half of that is frequencies.
    assert (text.head_dim, text.rope_parameters["mrope_section"]) == (32, [2, 1, 1])
    source = ModelSource.to_look_at(twin.folder, {}, trust_remote_code=False, max_model_len=64, adapter=None)
    assert max(require_sight(source, packs_rows=False, scalar=scalar) for scalar in (False, True)) < 1e-4


def test_a_family_whose_sizes_are_not_known_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("hrl.models.twin.changed", lambda *_: None)
    with pytest.raises(TwinError, match="odd: qwen2 has no valid config"):
        write_twin(folder_of(SEVEN, tmp_path / "odd"), tmp_path / "twin", Sharing(), **OPTIONS)
