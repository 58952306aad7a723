"""A batch of episodes as the driver has it, for tests of what shows them."""

import numpy as np
import torch

from hrl.protocol import DataProto

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "multiply", "arguments": {"a": 12, "b": 34}},
}


class Words:
    """A tokenizer whose token `7` is the word `w7`."""

    def batch_decode(self, rows):
        return ["".join(f"w{token} " for token in row) for row in rows]


def objects(values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def conversation_with_a_tool(result="408"):
    return [
        {"role": "user", "content": "What is 12 * 34?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "content": result, "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 408."},
    ]


def episode_batch(messages=None):
    """Two episodes in three rows, P=2, R=5.

    The first calls a tool and has two branches: its second row begins anew after turn 0, as the template drops what was
    thought there. The second failed in its first turn, and trains nothing.
    """
    talked = messages or conversation_with_a_tool()
    places = [place for place, message in enumerate(talked) if message["role"] == "assistant"][-2:]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[3, 4], [3, 4], [0, 5]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]]),
            "responses": torch.tensor([[10, 11, 20, 21, 0], [11, 20, 21, 30, 31], [40, 0, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]),
            "rollout_versions": torch.tensor([[6, 6, -1, -1, -1], [-1, -1, -1, 7, 7], [7, -1, -1, -1, -1]]),
            "turn_index": torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.25, 0, 0, 0], [0, 0, 0, 0, 1.0], [0.0, 0, 0, 0, 0]]),
            "advantages": torch.tensor([[1.0, 1.0, 9, 9, 9], [9, 9, 9, 4.0, 4.0], [9.0, 9, 9, 9, 9]]),
        },
        non_tensors={
            "uid": objects(["a", "a", "a"]),
            "sample_index": objects([0, 0, 1]),
            "episode_id": objects(["a/0", "a/0", "a/1"]),
            "branch": objects([0, 1, 0]),
            "num_turns": objects([2, 2, 1]),
            "tool_calls": objects([1, 1, 0]),
            "turn_rewards": objects([[0.25, 1.0], [0.25, 1.0], [None]]),
            "env_metrics": objects([{"solved": 1.0}, {"solved": 1.0}, {}]),
            "messages": objects([talked, talked, [{"role": "user", "content": "And 5 * 6?"}]]),
            "turn_places": objects([places, places, []]),
            "end": objects(["done", "done", "failed"]),
            "finish_reason": objects(["stop", "stop", "abort"]),
            "reward_parts": objects([{"exact": 1.0}, {"exact": 1.0}, {}]),
            "reward_model": objects([{"ground_truth": "408"}] * 2 + [{"ground_truth": "30"}]),
        },
    )
