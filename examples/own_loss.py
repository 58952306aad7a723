"""A policy loss of your own: the policy gradient without a clip, which stops where the ratio has moved too far.

PPO flattens its loss beyond 1 ± ε. This one counts a token fully while its ratio is inside, and not at all outside.
Ratios move in the second pass over a batch.

Run it with `python examples/own_loss.py`.
"""

import torch

import hrl
from hrl.algos.policy_losses import PolicyLossInput, PolicyLossOutput, register_policy_loss


@register_policy_loss("inside_only", zero_at_zero_advantage=True)
def inside_only(inp: PolicyLossInput, config) -> PolicyLossOutput:
    """Return `-A r` for every token whose ratio is within the bounds; one place sums and divides."""
    ratio = inp.ratio()
    inside = (ratio.detach() - 1).abs() <= config.clip_ratio
    loss = torch.where(inside, -inp.advantages * ratio, 0.0)
    return PolicyLossOutput(loss, {"actor/outside": ~inside})


if __name__ == "__main__":
    actor = {"policy_loss.loss_mode": "inside_only", "ppo_epochs": 2}
    run = hrl.GRPO(steps=12, name="own_loss", config={"actor_rollout_ref.actor": actor}).train()
    print(run.report)
