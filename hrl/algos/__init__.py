"""The maths of reinforcement learning for language models: pure functions over torch tensors.

Shapes: `B` rows (responses), `R` response columns. `response_mask (B, R)` is 1 on tokens that the policy produced and
that are trained on. Nothing here depends on processes, models or configuration files.
"""
