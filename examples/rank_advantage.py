"""An advantage estimator of your own: a response is as good as the share of its group that it beats.

Only the order of the rewards counts, so a reward of 1000 has no more effect than one of 2. A response's advantage is
the share of the others in its group that it beats, minus the share that beats it: from −1 to 1, summing to 0 per group.

Run it with `python examples/rank_advantage.py`.
"""

import hrl
from hrl.algos.advantages import AdvantageInput, register_adv_est


@register_adv_est("group_rank", min_group_size=2)
def group_rank_advantage(inp: AdvantageInput, config):
    """Return wins minus losses against the other responses to the same prompt, divided by their number."""
    scores, groups = inp.scores(), inp.need("group_ids")
    answered = inp.response_mask.bool().any(dim=-1)
    rivals = (groups[:, None] == groups[None, :]) & answered[:, None] & answered[None, :]
    wins = ((scores[:, None] > scores[None, :]) & rivals).sum(dim=-1)
    losses = ((scores[:, None] < scores[None, :]) & rivals).sum(dim=-1)
    advantages = inp.spread((wins - losses) / (rivals.sum(dim=-1) - 1).clamp(min=1))
    return advantages, advantages


if __name__ == "__main__":
    run = hrl.GRPO(steps=12, name="rank_advantage", config={"algorithm.adv_estimator": "group_rank"}).train()
    print(run.report)
