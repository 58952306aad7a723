"""The residual stream in float32: where it is, what it changes, and whom it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hrl.models.ops.residual import add_and_norm, widen_residual
from hrl.models.ops.rms_norm import rms_norm, use_fused_rms_norms

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
IDS = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(0))


def low_precision(model, *, widen: bool):
    model = copy.deepcopy(model).bfloat16()
    use_fused_rms_norms(model)
    if widen:
        assert widen_residual(model)
    return model


@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)])
def test_the_stream_is_wide_the_products_are_narrow_and_the_result_is_nearer_to_the_truth(kind):
    torch.manual_seed(1)
    config, model_class = kind
    model = model_class(config(**SIZES)).bfloat16().float().eval()
    narrow, wide = low_precision(model, widen=False), low_precision(model, widen=True)
    seen = {}
    layer = wide.model.layers[5]
    layer.register_forward_hook(lambda module, args, out: seen.update(stream=out.dtype))
    layer.mlp.register_forward_pre_hook(lambda module, args: seen.update(products=args[0].dtype))
    with torch.no_grad():
        truth, far, near = (m.model(IDS).last_hidden_state for m in (model, narrow, wide))
    assert seen == {"stream": torch.float32, "products": torch.bfloat16}
    assert near.dtype == torch.bfloat16
    assert (near - truth).abs().mean() < 0.8 * (far - truth).abs().mean()


def test_gradients_pass_the_wide_stream():
    model = low_precision(LlamaForCausalLM(LlamaConfig(**SIZES)), widen=True)
    model(IDS).logits.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_model_in_float32_or_float64_computes_what_it_did():
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    before = model(IDS).logits
    assert widen_residual(model)
    assert torch.equal(model(IDS).logits, before)


def test_a_family_that_treats_its_stream_otherwise_keeps_it():
    model = GemmaForCausalLM(GemmaConfig(**SIZES)).bfloat16()
    assert not widen_residual(model)
    assert model.get_input_embeddings()(IDS).dtype == torch.bfloat16


def test_add_and_norm_is_the_norm_of_the_sum():
    hidden, residual, weight = torch.randn(3, 8).bfloat16(), torch.randn(3, 8), torch.randn(8).bfloat16()
    normal, stream = add_and_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(stream, residual + hidden.float())
    assert normal.dtype == torch.bfloat16
    torch.testing.assert_close(normal, rms_norm(stream, weight, 1e-5), rtol=1e-2, atol=1e-2)


def test_on_another_device_the_stream_is_as_narrow_as_the_samplers():
    """A GPU's sampler rounds the stream to bfloat16 after each sum. The meta device stands for any that is no CPU."""
    model = low_precision(LlamaForCausalLM(LlamaConfig(**SIZES)), widen=True).to("meta")
    seen = {}
    model.model.layers[5].register_forward_hook(lambda module, args, out: seen.update(stream=out.dtype))
    model(IDS.to("meta")).logits.sum().backward()
    assert seen == {"stream": torch.bfloat16}
