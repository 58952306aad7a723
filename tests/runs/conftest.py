"""Models small enough for whole runs on two cores."""

from __future__ import annotations

import pytest

from tests.runs.runner import Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs on a random two-layer Llama with the tokenizer of the bundled model, and a random classifier over it."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from hrl.models.source import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m-instruct"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        num_labels=1,
    )
    torch.manual_seed(0)
    folders = {}
    for name, architecture in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        folders[name] = tmp_path_factory.mktemp("models") / name
        architecture(config).to(torch.bfloat16).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    # A random model answers no sum, so that nothing would be learnt: different answers get different scores instead.
    reward = tmp_path_factory.mktemp("rewards") / "spread.py"
    signature = "data_source, solution_str, ground_truth, extra_info=None"
    reward.write_text(f"def compute_score({signature}):\n    return len(set(solution_str)) / 10\n")
    return Runner(folders["policy"], folders["reward"], reward)
