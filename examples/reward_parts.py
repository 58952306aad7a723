"""A reward of parts: right answers first, and of these the brief ones. Each part has its own curve in the report.

Run it with `python examples/reward_parts.py`.
"""

import hrl


def brief(response):
    """1 for a bare number, less with every word."""
    return 1 / max(len(response.split()), 1)


if __name__ == "__main__":
    run = hrl.GRPO(
        reward=["numeric", (brief, 0.3)],
        data="bundled:addition/train",
        val_data="bundled:addition/val",
        steps=12,
        test_freq=4,
        max_prompt_length=64,
        max_response_length=32,
        name="reward_parts",
    ).train()
    print({name: value for name, value in run.metrics[-1].items() if name.startswith("reward/")})
