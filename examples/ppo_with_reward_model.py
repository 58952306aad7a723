"""PPO with a critic, and a reward model trained from pairs in place of a reward function.

Run it with `python examples/ppo_with_reward_model.py`.
"""

import hrl

judge = hrl.RewardModel(
    data="bundled:addition_pairs/train",
    val_data="bundled:addition_pairs/val",
    steps=16,
    batch_size=16,
    max_length=96,
    lr=1e-4,
    name="judge",
).train()

run = hrl.PPO(
    data="bundled:addition/train",
    val_data="bundled:addition/val",
    steps=30,
    max_prompt_length=64,
    max_response_length=16,
    name="ppo_with_reward_model",
    config={"reward.reward_model": {"enable": True, "model_path": str(judge.model_path)}},
).train()
print(run.report)
