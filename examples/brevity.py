"""A hook of your own: of two right answers, the shorter one is worth more.

A wrong answer gains nothing by being short, so it does not pay to say nothing. Only one hook is overridden; `fit()` and
everything else is inherited.

Run it with `python examples/brevity.py`.
"""

import hrl
from hrl.algos.reward_placement import place_scores
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer


class BrevityTrainer(RayPPOTrainer):
    """Reduces a positive score by up to half, in proportion to the response's length."""

    def on_batch_scored(self, batch, metrics):
        mask = batch.batch["response_mask"]
        scores = batch.batch["token_level_scores"].sum(-1)
        discount = 0.5 * mask.sum(-1) / mask.shape[-1] * (scores > 0)
        batch.batch["token_level_scores"] = place_scores(scores * (1 - discount), mask)
        metrics["reward/brevity_discount"] = float(discount.mean())
        return batch


if __name__ == "__main__":
    run = hrl.GRPO(steps=12, name="brevity", trainer_cls=BrevityTrainer).train()
    print(run.report)
