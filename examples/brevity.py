"""A GRPO variant by subclassing: of two right answers, the shorter one is worth more.

A wrong answer gains nothing by being short, so it does not pay to say nothing. Only one hook is overridden; `fit()` and
everything else is inherited.

    python examples/brevity.py trainer.total_training_steps=10
"""

import sys

from hrl.algos.reward_placement import place_scores
from hrl.protocol import DataProto
from hrl.trainer.main_ppo import main
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer


class BrevityTrainer(RayPPOTrainer):
    """Reduces a positive score by up to half, in proportion to the response's length."""

    def on_batch_scored(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        mask = batch.batch["response_mask"]
        scores = batch.batch["token_level_scores"].sum(-1)
        discount = 0.5 * mask.sum(-1) / mask.shape[-1] * (scores > 0)
        batch.batch["token_level_scores"] = place_scores(scores * (1 - discount), mask)
        metrics["reward/brevity_discount"] = float(discount.mean())
        return batch


if __name__ == "__main__":
    sys.exit(main(["trainer.experiment_name=brevity", *sys.argv[1:]], trainer_cls=BrevityTrainer))
