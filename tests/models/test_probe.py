"""Which families pass the comparison, which are refused and why, and that a broken model is caught."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.models.llama import modeling_llama

from hrl.models import cut, probe
from hrl.models.loading import ModelSource
from hrl.models.ops.attention import packed_attention
from hrl.models.ops.layout import Reach
from hrl.models.probe import (
    GRADIENT_TOLERANCE,
    LOG_PROB_TOLERANCE,
    ProbeError,
    probe_config,
    require_right,
)
from tests.models.tiny import SHAPE, save_llama

SIZES = SHAPE | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONG_RUN = 1 << 20
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
PHI3 = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
RIGHT = {
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1, "head_dim": 8},
    "starcoder2": {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    "phi3": PHI3 | {"resid_pdrop": 0.1},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen2_moe": MOE | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    "phimoe": {"sliding_window": 16, "num_local_experts": 4, "router_jitter_noise": 0.5},
}
RECURRENT = {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64}


def config_of(family: str, **changes):
    return CONFIG_MAPPING[family](**(SIZES | changes))


@pytest.mark.parametrize("family", RIGHT)
def test_families_that_were_silently_wrong_are_right(family):
    result = probe_config(config_of(family, **RIGHT[family]), LONG_RUN)
    assert result.is_right
    assert result.difference < LOG_PROB_TOLERANCE and result.packing_difference < LOG_PROB_TOLERANCE
    assert result.gradient_difference < GRADIENT_TOLERANCE


def test_recurrent_state_crosses_packed_rows_and_not_padded_ones():
    config = config_of("recurrent_gemma", **RECURRENT)
    packed = probe_config(config, LONG_RUN, packs_rows=True)
    assert not packed.is_right and "crosses rows" in packed.cause
    assert packed.packing_difference > 0.01
    chosen = probe_config(config, LONG_RUN)
    assert chosen.is_right and not chosen.packs_rows and chosen.why_not_packed == packed.cause
    assert max(chosen.difference, chosen.packing_difference) < LOG_PROB_TOLERANCE


def test_padded_rows_are_refused_to_what_reads_the_padding(monkeypatch):
    """A backbone that looks at all of a row, and packed rows that it would mix."""
    forward = LlamaModel.forward

    def looks_at_all(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    monkeypatch.setattr(LlamaModel, "forward", looks_at_all)
    padded = probe_config(config_of("llama"), LONG_RUN, packs_rows=False)
    assert "padded on the right" in padded.cause and padded.packing_difference > 0.01
    both = probe_config(config_of("llama"), LONG_RUN)
    assert not both.is_right and both.packs_rows, "of two that are wrong the packed one is told of"


def test_a_mask_that_is_computed_is_refused():
    with pytest.raises(ProbeError, match="doge computes with its attention mask"):
        probe_config(config_of("doge"), LONG_RUN)


def test_the_same_rows_give_the_same_numbers_again():
    config = config_of("llama")
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, second = (probe_config(config, LONG_RUN) for _ in range(2))
    assert (first.difference, first.gradient_difference) == (second.difference, second.gradient_difference)
    assert torch.equal(torch.random.get_rng_state(), before), "the run's own generator is drawn from"


def break_attention(monkeypatch, change):
    """Lets transformers' own Llama do to its attention what packed attention is not told of."""
    plain = modeling_llama.eager_attention_forward

    def broken(module, query, key, value, attention_mask, scaling, **kwargs):
        return plain(module, *change(query, key, value, attention_mask), scaling, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", broken)


def only_recent(query, key, value, mask):
    """Nothing further back than the window that the comparison crosses."""
    tokens = query.shape[2]
    far = torch.ones(tokens, tokens).tril(-cut.CROSSED_TOKENS).bool()
    return query, key, value, mask.masked_fill(far, torch.finfo(mask.dtype).min)


def with_bias(query, key, value, mask):
    """A bias that favours the first token."""
    return query, key, value, mask + torch.eye(1, mask.shape[-1])


@pytest.mark.parametrize(
    ("change", "cause"), [(only_recent, "changes after some tokens"), (with_bias, "a mask, a bias")]
)
def test_attention_of_another_kind_is_caught(monkeypatch, change, cause):
    break_attention(monkeypatch, change)
    result = probe_config(config_of("llama"), LONG_RUN)
    assert cause in result.cause and result.difference > 1e-3


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_head_that_does_more_is_caught(monkeypatch, is_hidden):
    """When its way from hidden states to logits is measured; and where it hides from that, in the log-probs."""
    forward = LlamaForCausalLM.forward

    def changed(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        is_measured = bool(output.logits.abs().max() > 1e3)
        if not (is_hidden and is_measured):
            output.logits = output.logits + output.logits.sin()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    if is_hidden:
        assert "its head does something" in probe_config(config_of("llama"), LONG_RUN).cause
    else:
        with pytest.raises(ProbeError, match="neither a factor nor a soft-cap"):
            probe_config(config_of("llama"), LONG_RUN)


def test_a_row_that_reads_its_neighbours_is_caught(monkeypatch):
    """Packed attention that forgets where a row begins."""

    def leaky(query, key, value, layout, **kwargs):
        return packed_attention(query, key.cumsum(0) / 8, value, layout, **kwargs)

    monkeypatch.setattr("hrl.models.ops.attention.packed_attention", leaky)
    assert "other rows of its micro-batch" in probe_config(config_of("llama"), LONG_RUN, packs_rows=True).cause


def test_a_gradient_that_is_lost_is_caught(monkeypatch):
    def without_gradient(query, key, value, layout, **kwargs):
        return packed_attention(query, key.detach(), value, layout, **kwargs)

    monkeypatch.setattr("hrl.models.ops.attention.packed_attention", without_gradient)
    assert "gradients" in probe_config(config_of("llama"), LONG_RUN, packs_rows=True).cause


def test_what_changes_only_beyond_the_runs_longest_sequence_does_not_count(monkeypatch):
    """A window that packed attention would not see matters only to a run that reaches it."""
    monkeypatch.setattr("hrl.models.ops.attention._reach", lambda mask, window: Reach(None))
    windowed = config_of("qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=0)
    assert probe_config(windowed, 4096, packs_rows=True).is_right
    assert not probe_config(windowed, 4097, packs_rows=True).is_right


def test_a_model_that_amplifies_rounding_is_not_refused_for_it(monkeypatch):
    monkeypatch.setattr(probe, "LOG_PROB_TOLERANCE", 1e-9)
    monkeypatch.setattr(probe, "GRADIENT_TOLERANCE", 1e-8)
    result = probe_config(config_of("llama"), LONG_RUN)
    assert result.is_right and result.difference > 1e-9
    monkeypatch.setattr(probe, "SPREADS", 0.0)
    assert not probe_config(config_of("llama"), LONG_RUN).is_right


def test_a_classifier_is_compared_as_a_classifier():
    result = probe_config(config_of("llama", num_labels=1), LONG_RUN, AutoModelForSequenceClassification)
    assert result.is_right and result.family == "LlamaForSequenceClassification"


def source_of(folder, **override) -> ModelSource:
    return ModelSource(str(folder), override, False, True, False, 64)


def test_the_refusal_names_family_figures_cause_and_way_out(tmp_path):
    config_of("recurrent_gemma", **RECURRENT).save_pretrained(tmp_path)
    with pytest.raises(
        ProbeError,
        match=r"recurrent_gemma at .*wrongly packed.*differ by \d.*: .*docs/models.md.*model.probe=false",
    ):
        require_right(source_of(tmp_path), scalar=False, packs_rows=True)


def test_a_family_without_a_classifier_is_no_critic(tmp_path):
    config_of("olmoe", num_experts=4).save_pretrained(tmp_path)
    with pytest.raises(ProbeError, match="olmoe at .*OlmoeConfig"):
        require_right(source_of(tmp_path), scalar=True)


def test_a_folder_is_compared_once_in_a_process(tmp_path, monkeypatch):
    folder = save_llama(tmp_path)
    first = require_right(source_of(folder), scalar=False)
    monkeypatch.setattr(probe, "probe_config", None)
    assert require_right(source_of(folder), scalar=False) is first


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("llama", {"num_hidden_layers": 40}, 2),
        ("gemma3_text", {"num_hidden_layers": 26, "head_dim": 8}, 6),
        ("qwen2", {"num_hidden_layers": 10, "use_sliding_window": True, "max_window_layers": 5}, 6),
        ("qwen3_moe", MOE | {"num_hidden_layers": 8, "mlp_only_layers": [4], "head_dim": 8}, 5),
    ],
)
def test_a_cut_has_the_first_layers_of_every_kind(family, changes, layers):
    config = config_of(family, **changes)
    smallest = next(cut.cuts(config, LONG_RUN, _build))
    assert smallest.num_hidden_layers == layers


def _build(config):
    return AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()))


def test_a_cut_keeps_what_decides_and_drops_what_costs():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 150_000}
    large = AutoConfig.for_model("qwen3", **sizes, head_dim=128, intermediate_size=12288, rope_parameters=rope)
    small = next(cut.cuts(large, 40_000, _build))
    assert (small.head_dim, small.num_attention_heads, small.num_key_value_heads) == (128, 4, 2)
    assert (small.hidden_size, small.intermediate_size, small.vocab_size) == (512, 16, 128)
    assert small.rope_parameters["original_max_position_embeddings"] == cut.CROSSED_TOKENS
    unreached = next(cut.cuts(large, 4096, _build))
    assert unreached.rope_parameters["original_max_position_embeddings"] == cut.UNREACHED_TOKENS


def test_a_cut_crosses_the_rates_at_which_keys_are_compressed():
    """One heavily compressed entry stands for 128 tokens: a sequence of the comparison would never have one."""
    config = CONFIG_MAPPING["deepseek_v4"](num_hidden_layers=3, pad_token_id=0)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": cut.CROSSED_TOKENS}
    fields = config.to_dict()
    cut._shorten(fields, config, LONG_RUN)
    assert fields["compress_rates"] == rates


def test_longrope_that_ignores_its_long_factors_is_refused_where_vllm_takes_them():
    """PhiMoE's own forward takes short factors at any length; beyond the pre-training length vLLM takes long ones."""
    rope = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 32}
    config = config_of("phimoe", num_local_experts=4, max_position_embeddings=128, rope_parameters=rope)
    with pytest.raises(ProbeError, match="PhimoeRotaryEmbedding keeps LongRoPE's short factors"):
        probe_config(config, 33)
    assert probe_config(config, 32).is_right


def test_what_counts_positions_over_the_row_is_caught_although_no_sequence_is_so_long():
    """Llama 4 scales its queries by the position in the row from `floor_scale` on."""
    config = config_of("llama4_text", num_local_experts=2, intermediate_size_mlp=16, head_dim=8, num_hidden_layers=4)
    assert config.floor_scale == 8192
    assert "other rows of its micro-batch" in probe_config(config, 4096, packs_rows=True).cause
    assert not probe_config(config, 4096).packs_rows


def test_the_packed_row_crosses_what_none_of_its_sequences_reaches():
    answers = probe.ANSWER_LENGTHS
    longest = max(p + max(a) for p, a in zip(probe.PROMPT_LENGTHS, answers, strict=True))
    in_a_row = sum(probe.PROMPT_LENGTHS) + sum(map(sum, answers))
    assert cut.CROSSED_TOKENS < longest < cut.UNREACHED_TOKENS < in_a_row


def test_a_window_that_is_made_and_not_used_is_no_reason():
    assert probe_config(config_of("qwen2_moe", **MOE), LONG_RUN).is_right
