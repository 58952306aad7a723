"""The processes that hold models: roles as workers, the training engine, the rollout engines and the weight sync."""
