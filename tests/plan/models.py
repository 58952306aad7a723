"""Configurations of public models, as their `config.json` has them, for tests of the plan."""

import json
from pathlib import Path

_COMMON = {"tie_word_embeddings": False, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
SEVEN = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
THIRTY_TWO = SEVEN | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
SEVENTY = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
EXPERTS = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
}  # fmt: skip
NAMED = {
    "Qwen/Qwen2.5-7B-Instruct": SEVEN,
    "Qwen/Qwen2.5-32B-Instruct": THIRTY_TWO,
    "meta-llama/Llama-3.3-70B-Instruct": SEVENTY,
    "Qwen/Qwen3-30B-A3B": EXPERTS,
}
"""Name on the hub → configuration, of the models that `configs/size` names."""


def folder_of(config: dict, place: Path) -> Path:
    """Write a folder that has a model's configuration and nothing else."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return place
