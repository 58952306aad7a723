"""PPO with a critic, and a reward model trained from pairs in place of a reward function.

Run it with `python examples/ppo_with_reward_model.py`.
"""

import hrl

if __name__ == "__main__":
    judge = hrl.RewardModel(
        data="bundled:addition_pairs/train",
        val_data="bundled:addition_pairs/val",
        steps=32,
        test_freq=8,
        save_freq=32,
        max_length=96,
        name="judge",
    ).train()

    run = hrl.PPO(
        reward=[("numeric", 0.0)],  # only shows which answers are right
        data="bundled:addition/train",
        val_data="bundled:addition/val",
        steps=12,
        test_freq=4,
        max_prompt_length=64,
        max_response_length=16,
        name="ppo_with_reward_model",
        config={"reward.reward_model": {"enable": True, "model_path": str(judge.model_path)}},
    ).train()
    print(run.report)
