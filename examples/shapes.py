"""A tiny model of random weights learns to count shapes in pictures: `python examples/shapes.py`.

Demonstrations teach it to look and to answer with a number, rewards to be right more often. Who does not look is right
once in five times, and so has to be a model that does, where pictures are blank or those of other rows.
"""

from PIL import Image
from tiny_vl import save

import hrl
from hrl.data.tasks import bundled_rows

TRAIN, HELD_OUT = "bundled:shapes/train?size=2048&side=64", "bundled:shapes/val?size=256&side=64"
ONE_THREAD = {"trainer.cpu_threads_per_worker": 1}  # a second gains nothing with a model so small
SHOWN = {"data.map": {"completion": "reward_model.ground_truth"}, "optim.lr_warmup_steps": 20, **ONE_THREAD}
SHOWN |= {"model.fsdp_config.dtype": "float32", "optim.betas": [0.9, 0.98]}
PAID = {"actor_rollout_ref.actor.fsdp_config.dtype": "float32", "actor_rollout_ref.rollout.dtype": "float32"}
PAID |= {"actor_rollout_ref.rollout.name": "hf", **ONE_THREAD}


def with_other_pictures(rows):
    """Yield the rows as they are, with pictures that show nothing, and each with the picture of the row before."""
    pictures = [row["images"] for row in rows]
    blank, before = [[Image.new("RGB", (64, 64), "white")]] * len(rows), pictures[-1:] + pictures[:-1]
    for name, shown in {"own": pictures, "blank": blank, "of another row": before}.items():
        yield name, [row | {"images": images} for row, images in zip(rows, shown, strict=True)]


if __name__ == "__main__":
    lessons = {"data": TRAIN, "steps": 360, "batch_size": 32, "lr": 2e-3, "max_length": 64}
    shown = hrl.SFT(save("outputs/tiny_vl"), config=SHOWN, **lessons, name="shapes_shown").train()
    data = {"data": TRAIN, "val_data": HELD_OUT, "max_prompt_length": 64, "max_response_length": 4, "batch_size": 16}
    with hrl.GRPO(shown.model_path, steps=24, test_freq=12, lr=3e-4, config=PAID, name="shapes", **data) as trainer:
        trainer.train()
        for name, rows in with_other_pictures(list(bundled_rows(HELD_OUT.removeprefix("bundled:")))):
            print(name, trainer.evaluate(rows)["val/bundled/shapes/mean@1"])
