"""A trained adapter against peft's own model: one unpadded row at a time, in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.models.adapter import AdapterError, AdapterSource
from hrl.workers.engine.checksum import WeightsDifferError
from hrl.workers.engine.engine import Engine
from hrl.workers.engine.weights import describe_classifier
from hrl.workers.requests import LogProbRequest
from tests.models.tiny import (
    actor_config,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    optim_config,
    plain_log_probs,
    plan_rows,
    run_ranks,
    save_gemma3,
    save_llama,
    save_mixture,
)
from tests.workers.asked import Actor, Critic, all_at_once
from tests.workers.engine.ranks import CPU, full, gradients

pytestmark = pytest.mark.usefixtures("world")

NEW = AdapterSource(
    rank=4,
    alpha=6.0,
    target_modules="all-linear",
    exclude_modules=None,
    use_rslora=False,
    path=None,
    seed=3,
    merge=True,
)


def actor_of(path: Path, dtype: str = "float64", adapter: AdapterSource = NEW, **fsdp: Any) -> Actor:
    config = actor_config(optim=optim_config(lr=3e-2))
    return Actor(
        model_config(path, adapter=adapter), config, fsdp_config(dtype, **fsdp), device=CPU, total_steps=8, seed=5
    )


def learnt(actor: Actor, times: int = 2) -> Actor:
    """The actor after some updates, which move both matrices: one of them begins at zero."""
    for seed in range(times):
        batch = make_batch(seed=seed)
        actor.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    return actor


def exported(engine: Engine, folder: Path) -> Path:
    engine.export_hf(folder)
    return folder


def of_peft(path: Path, folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    return PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False).to(torch.float64)


def kept(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: full(parameter.detach()) for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_log_probs_are_those_of_pefts_own_model(llama, tmp_path, use_rslora):
    actor, batch = learnt(actor_of(llama, adapter=replace(NEW, use_rslora=use_rslora))), make_batch(seed=7)
    model = of_peft(llama, exported(actor.engine, tmp_path / "hf"))

    with torch.no_grad():
        own = plain_log_probs(model, batch, 1.0)
        without = plain_log_probs(model.unload(), batch, 1.0)
    assert torch.allclose(actor.log_probs(batch).batch["old_log_probs"].double(), own, atol=2e-6)
    assert (own - without).abs().max() > 1e-2


def test_a_new_adapter_changes_nothing_and_is_the_same_for_a_seed(llama):
    actor, batch = actor_of(llama), make_batch()
    plain = Actor(model_config(llama), None, fsdp_config(), device=CPU, total_steps=None)

    assert torch.equal(actor.log_probs(batch).batch["old_log_probs"], plain.log_probs(batch).batch["old_log_probs"])
    again, other = kept(actor_of(llama).engine), kept(actor_of(llama, adapter=replace(NEW, seed=4)).engine)
    assert all(torch.equal(tensor, again[name]) for name, tensor in kept(actor.engine).items())
    assert any(not torch.equal(tensor, again[name]) for name, tensor in other.items())


def test_the_reference_is_the_model_with_its_adapter_off_bit_for_bit(llama):
    actor, batch = learnt(actor_of(llama, "bfloat16", model_dtype="float32")), make_batch(seed=9)
    frozen = Actor(model_config(llama), None, fsdp_config("bfloat16"), device=CPU, total_steps=None)
    request = LogProbRequest(plan=all_at_once(batch), temperature=1.0, without_adapter=True)

    reference = actor.compute_log_prob(batch, request).batch["old_log_probs"]
    assert torch.equal(reference, frozen.log_probs(batch).batch["old_log_probs"])
    assert not torch.equal(reference, actor.log_probs(batch).batch["old_log_probs"])


def test_only_adapters_have_gradients_moments_and_bytes_in_a_checkpoint(llama, tmp_path):
    actor = actor_of(llama, "bfloat16", model_dtype="float32")
    before, trained = kept(actor.engine), set(actor.engine.optimizer.names.values())
    found = gradients(actor, make_batch(), plan_rows(make_batch(), 1, 1).ranks[0])
    learnt(actor)

    assert trained == found.keys() == {name for name in before if ".lora_" in name}
    assert len(trained) == 2 * 7 * 2  # two matrices for each of seven layers, twice
    assert all(p.dtype == torch.float32 for p in actor.engine.optimizer.parameters)
    after = kept(actor.engine)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    assert {t.dtype for name, t in after.items() if name not in trained} == {torch.bfloat16}
    actor.engine.save(tmp_path)
    held = load_file(next(tmp_path.glob("shard-*")))
    assert held.keys() == {f"{part}.{name}" for name in trained for part in ("model", "exp_avg", "exp_avg_sq")}
    weights = sum(before[name].numel() for name in trained) * 4
    assert actor.engine.bytes_to_save() == {"model": weights, "optimizer": 2 * weights}
    assert actor.engine.bytes_to_export() == weights


def test_gradients_are_those_of_pefts_own_model(llama, tmp_path):
    actor, batch = learnt(actor_of(llama)), make_batch(seed=4)
    model = of_peft(llama, exported(actor.engine, tmp_path / "hf"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    found = gradients(actor, batch, plan_rows(batch, 1, 3).ranks[0])
    log_prob = plain_log_probs(model, batch, 1.0)
    mask = batch.batch["response_mask"].bool()
    inputs = PolicyLossInput(log_prob, batch.batch["old_log_probs"], batch.batch["advantages"], mask)
    (policy_loss("vanilla", inputs, actor.loss).loss_mat.sum() / mask.sum()).backward()
    own = {name.removeprefix("base_model."): p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert own.keys() == found.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, own[name], rtol=1e-4, atol=1e-7), name


def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(llama, tmp_path):
    actor = learnt(actor_of(llama, "bfloat16", model_dtype="float32"))
    actor.engine.save(tmp_path)
    expected = kept(learnt(actor).engine)
    resumed = actor_of(llama, "bfloat16", model_dtype="float32", adapter=replace(NEW, seed=99))
    resumed.engine.load(tmp_path)
    found = kept(learnt(resumed).engine)

    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_checkpoint_of_another_model_or_without_an_adapter_is_refused(llama, tmp_path):
    learnt(actor_of(llama)).engine.save(tmp_path / "saved")
    other = save_llama(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="an adapter of another model"):
        actor_of(other).engine.load(tmp_path / "saved")
    plain = Actor(model_config(llama), actor_config(), fsdp_config(), device=CPU, total_steps=8)
    with pytest.raises(ValueError, match="holds an adapter, and this run trains the model itself: set lora_rank"):
        plain.engine.load(tmp_path / "saved")
    plain.engine.save(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds the model itself, and this run trains an adapter"):
        actor_of(llama).engine.load(tmp_path / "plain")


def test_a_frozen_weight_that_changes_is_noticed_before_a_checkpoint_is_written(llama, tmp_path):
    actor = learnt(actor_of(llama))
    with torch.no_grad():
        next(p for name, p in actor.engine.module.named_parameters() if name.endswith("base_layer.weight")).add_(1.0)
    with pytest.raises(WeightsDifferError, match="the model beside the adapter"):
        actor.engine.save(tmp_path)


def test_a_run_goes_on_from_an_adapters_folder(llama, tmp_path):
    actor, batch = learnt(actor_of(llama, adapter=replace(NEW, use_rslora=True))), make_batch(seed=2)
    folder = str(exported(actor.engine, tmp_path / "hf"))
    again = actor_of(llama, adapter=replace(NEW, rank=0, path=folder))

    assert torch.equal(again.log_probs(batch).batch["old_log_probs"], actor.log_probs(batch).batch["old_log_probs"])
    plain = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64), plain)
    model.to(torch.float64).save_pretrained(tmp_path / "peft")
    theirs = actor_of(llama, adapter=replace(NEW, rank=2, path=str(tmp_path / "peft")))
    with torch.no_grad():
        own = plain_log_probs(model, batch, 1.0)
    assert torch.allclose(theirs.log_probs(batch).batch["old_log_probs"].double(), own, atol=2e-6)


def test_an_adapter_of_another_model_is_refused_by_its_checksum(llama, tmp_path, caplog):
    folder = str(exported(learnt(actor_of(llama)).engine, tmp_path / "hf"))
    goes_on = replace(NEW, rank=0, path=folder)
    other = save_llama(tmp_path / "other", seed=1)
    with pytest.raises(AdapterError, match=f"was trained beside other weights than those of {other}"):
        actor_of(other, adapter=goes_on)
    assert not caplog.messages
    actor_of(other, "float32", adapter=goes_on)
    assert "not compared with a checksum: another dtype" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target_modules": ("q_prj",)}, "target_modules has 'q_prj', .*Did you mean q_proj"),
        ({"target_modules": ("lm_head",)}, "names lm_head, the head, whose log-probs read its weight alone"),
        (
            {"target_modules": ("embed_tokens",)},
            "names model.embed_tokens, a Embedding: an adapter is for linear",
        ),
        ({"target_modules": ".*nothing.*"}, "leaves no linear layer of LlamaForCausalLM; it has down_proj"),
        ({"exclude_modules": ".*_proj"}, r"without exclude_modules=\.\*_proj leaves no linear layer"),
        ({"path": "/nowhere"}, "lora_adapter_path=/nowhere is no folder of an adapter"),
    ],
)
def test_an_adapter_that_fits_no_layer_is_refused(llama, change, told):
    with pytest.raises(AdapterError, match=told):
        actor_of(llama, adapter=replace(NEW, **change))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "use_dora=True, which vLLM's kernels don't compute"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save=.'embed_tokens'."),
        ({"r": 8}, "lora_rank=4, but the adapter in .* has rank 8: set lora_rank to that"),
        ({"peft_type": "IA3"}, "of the kind PeftType.IA3; only LoRA is trained"),
        ({"target_modules": ["q_proj"]}, r"has, and its configuration does not name, .*lora_A\.weight"),
    ],
)
def test_a_folder_whose_adapter_cannot_be_sampled_from_is_refused(llama, tmp_path, change, told):
    folder = exported(actor_of(llama).engine, tmp_path / "hf")
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | change
    if config["peft_type"] == "IA3":
        config = {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []}
    file.write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=told):
        actor_of(llama, adapter=replace(NEW, path=str(folder)))


def test_weights_of_another_shape_are_refused(llama, tmp_path):
    folder = exported(actor_of(llama).engine, tmp_path / "hf")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"lora_A.weight of shape \(4, 47\), and this model wants \(4, 48\)"):
        actor_of(llama, adapter=replace(NEW, path=str(folder)))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_a_sync_sends_merged_is_the_adapter_on_its_model(llama, tmp_path, family):
    path = llama if family == "llama" else save_mixture(tmp_path / "mixture", family)
    actor = learnt(actor_of(path, "float32"))  # torch has no grouped products in float64
    merged = of_peft(path, exported(actor.engine, tmp_path / "hf")).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    own = load_file(tmp_path / "merged" / "model.safetensors")

    sent = {name: tensor.clone() for name, tensor in actor.engine.iter_full_params(torch.float32)}
    assert [(s.name, s.shape) for s in actor.engine.param_specs(torch.float32)] == [
        (name, (*tensor.shape,)) for name, tensor in sent.items()
    ]
    assert sent.keys() - {"lm_head.weight"} == own.keys() - {"lm_head.weight"}
    for name, tensor in own.items():
        assert torch.allclose(sent[name].double(), tensor, rtol=0, atol=1e-6), name
    assert actor.engine.frozen_names() == []


def test_an_adapter_that_is_sent_alone_has_the_names_of_its_file(llama, tmp_path):
    actor = learnt(actor_of(llama, adapter=replace(NEW, merge=False)))
    held = load_file(exported(actor.engine, tmp_path / "hf") / "adapter_model.safetensors")
    sent = dict(actor.engine.iter_full_params(torch.float64))

    assert sent.keys() == held.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in held.items())
    base = AutoModelForCausalLM.from_pretrained(llama)
    assert set(actor.engine.frozen_names()) == {name for name, _ in base.named_parameters()}


def test_the_file_of_an_adapter_names_the_hubs_model_and_not_a_folder_of_the_cache(tmp_path):
    folder = save_llama(tmp_path / "models--some--llama" / "snapshots" / "abc123")
    config = json.loads((exported(actor_of(folder).engine, tmp_path / "hf") / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/llama", "abc123")


def test_a_tower_that_text_does_not_reach_gets_no_adapter(tmp_path):
    actor = learnt(actor_of(save_gemma3(tmp_path / "gemma3")))
    trained = set(actor.engine.optimizer.names.values())

    assert trained and not any("vision" in name for name in trained)
    assert any("vision" in name for name in actor.engine.frozen_names())


def test_a_critic_learns_its_head_and_its_adapter(llama, tmp_path):
    config = critic_config(optim=optim_config(lr=3e-2))
    critic = Critic(model_config(llama, adapter=NEW), config, fsdp_config(), device=CPU, total_steps=8)
    for seed in range(3):
        batch = make_batch(seed=seed)
        critic.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    trained = set(critic.engine.optimizer.names.values())
    assert "model.score.weight" in trained and len(trained) == 2 * 7 * 2 + 1
    describe_classifier(critic.engine.source_config, critic.engine.module.model, pad_token_id=0)
    folder = exported(critic.engine, tmp_path / "hf")
    base = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1, dtype=torch.float64)
    base.config.pad_token_id = 0
    own = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False).to(torch.float64)
    batch = make_batch(seed=8)
    rows = batch.batch["attention_mask"].bool()
    tokens = torch.cat([batch.batch["prompts"], batch.batch["responses"]], 1)[5][rows[5]][None]
    scores = critic.scores(batch).batch["rm_scores"]

    assert torch.allclose(own(tokens).logits[0, 0], scores[5].double(), atol=2e-6)
    again = Critic(
        model_config(llama, adapter=replace(NEW, path=str(folder))), config, fsdp_config(), device=CPU, total_steps=8
    )
    assert torch.equal(again.scores(batch).batch["rm_scores"], scores)


def sharded(rank: int, path: str, folder: str) -> dict[str, torch.Tensor]:
    """What two ranks have learnt, merged, and after a resume from one rank's checkpoint."""
    actor = actor_of(Path(path), "float32")
    for seed in range(2):
        batch = make_batch(seed=seed)
        plan = plan_rows(batch, 2, 2)
        actor.learn(batch[list(plan.rows[rank])], plan.ranks[rank])
    found = {f"merged {name}": tensor.clone() for name, tensor in actor.engine.iter_full_params(torch.float32)}
    actor.engine.load(Path(folder))
    return found | {f"loaded {name}": tensor for name, tensor in kept(actor.engine).items()}


@pytest.mark.cluster
def test_two_ranks_learn_what_one_does_and_load_what_it_saved(llama, tmp_path):
    one = actor_of(llama, "float32")
    for seed in range(2):
        batch = make_batch(seed=seed)
        one.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    one.engine.save(tmp_path / "saved")
    first, second = run_ranks(2, tmp_path / "ranks", sharded, str(llama), str(tmp_path / "saved"))

    for name, tensor in one.engine.iter_full_params(torch.float32):
        assert torch.allclose(first[f"merged {name}"], tensor, rtol=1e-4, atol=1e-5), name
        assert torch.equal(first[f"merged {name}"], second[f"merged {name}"])
    assert all(torch.equal(first[f"loaded {name}"], tensor) for name, tensor in kept(one.engine).items())
