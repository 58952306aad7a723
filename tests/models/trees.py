"""Rows that leave each other anywhere, as the branches and samples of episodes do."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from hrl.models.packed_model import TokenRows
from hrl.protocol import DataProto

#: Tokens that rows draw from: few, so that rows also begin alike by chance.
ALPHABET = np.arange(5, 9)


def grow_tree(seed: int, num_rows: int, longest: int = 12) -> list[np.ndarray]:
    """Sequences of at least two tokens: each begins with a part of an earlier one, all of it, or nothing of it."""
    rng = np.random.default_rng(seed)
    sequences: list[np.ndarray] = []
    for _ in range(num_rows):
        before = sequences[rng.integers(len(sequences))] if sequences else ALPHABET[:0]
        kept = before[: rng.choice([0, len(before), rng.integers(len(before) + 1)])]
        most = max(longest - len(kept), 0)
        least = min(max(2 - len(kept), 0), most)
        tail = rng.choice(ALPHABET, rng.integers(least, most + 1))
        sequences.append(np.concatenate([kept, tail]).astype(np.int64))
    return sequences


def tree_batch(seed: int, num_rows: int, longest: int = 12) -> DataProto:
    """A batch of one group, whose prompts end anywhere; some rows train nothing, some a token of another row's too."""
    rng, sequences = np.random.default_rng([seed, 1]), grow_tree(seed, num_rows, longest)
    prompt_lens = [int(rng.integers(1, len(tokens))) for tokens in sequences]
    width = (max(prompt_lens), max(len(t) - p for t, p in zip(sequences, prompt_lens, strict=True)))
    prompts, responses = np.zeros((num_rows, width[0]), np.int64), np.zeros((num_rows, width[1]), np.int64)
    attention, trained = np.zeros((num_rows, sum(width)), np.int64), np.zeros((num_rows, width[1]), np.int64)
    for row, (tokens, length) in enumerate(zip(sequences, prompt_lens, strict=True)):
        size = len(tokens) - length
        prompts[row, width[0] - length :], responses[row, :size] = tokens[:length], tokens[length:]
        attention[row, width[0] - length : width[0] + size] = 1
        trained[row, :size] = rng.random(size) < rng.choice([0.0, 0.5, 1.0], p=[0.1, 0.6, 0.3])
    columns = {"prompts": prompts, "responses": responses, "attention_mask": attention, "response_mask": trained}
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(column) for name, column in columns.items()},
        non_tensors={
            "uid": np.array(["one"] * num_rows, object),
            "sample_index": np.arange(num_rows),
            "branch": np.zeros(num_rows, np.int64),
            "num_turns": np.full(num_rows, 2),
        },
        meta_info={"temperature": 0.7},
    )


def sequences_of(batch: DataProto) -> list[np.ndarray]:
    """The tokens of every row."""
    rows = TokenRows.of(batch)
    return [
        np.concatenate([prompt, response[:length]])
        for prompt, response, length in zip(rows.prompts, rows.responses, rows.response_lengths, strict=True)
    ]


def num_nodes(sequences: list[np.ndarray]) -> int:
    """Tokens of their trie: as many as there are beginnings that differ."""
    return len({tuple(tokens[: end + 1].tolist()) for tokens in sequences for end in range(len(tokens))})


TREE_BATCHES = st.builds(tree_batch, st.integers(0, 10**6), st.integers(1, 9))
