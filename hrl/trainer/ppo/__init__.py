"""PPO and its relatives (GRPO, RLOO, REINFORCE++, ReMax, ...)."""
