"""A task of reasoning-gym: adding and subtracting, with answers in a box. `hrl tasks` lists more than a hundred others.

Run it with `python examples/chain_sum.py`.
"""

import hrl

if __name__ == "__main__":
    run = hrl.GRPO(
        data="reasoning_gym:chain_sum?answer=boxed",
        val_data="reasoning_gym:chain_sum?answer=boxed&seed=2&size=32",
        steps=30,
        test_freq=10,
        max_prompt_length=192,
        max_response_length=24,
        name="chain_sum",
    ).train()
    print(run.report)
