"""The files of a run as far as a preflight reads them: a model of whole words, rows, a reward function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROMPT = "what is one plus two"
SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
CONFIG = {
    "model_type": "llama",
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,  # the narrowest that vLLM's attention on CPUs has kernels for
    "intermediate_size": 64,
}
ROW = {"data_source": "x", "prompt": PROMPT, "reward_model": {"ground_truth": "3"}}


def save_model(folder: Path, words: str = PROMPT, positions: int = 64) -> Path:
    """A configuration, a header of weights, and a tokenizer of whole words."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": positions}))
    save_file({"score.weight": np.zeros((1, 64), np.float32)}, folder / "model.safetensors")
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<end>", *words.split()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


def write_rows(file: Path, rows: Sequence[object] = (ROW,) * 4) -> Path:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def small_run(folder: Path) -> list[str]:
    """A command line that passes the preflight, over files in a folder."""
    save_model(folder / "policy")
    (folder / "reward.py").write_text(SCORE)
    rows = write_rows(folder / "rows.jsonl")
    return [
        f"actor_rollout_ref.model.path={folder / 'policy'}",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.default_local_dir={folder / 'run'}",
        "data.train_batch_size=2",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
    ]
