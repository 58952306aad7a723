"""GRPO with TRL's own trainer on given prompts: `python -m bench.programs.trl_grpo '{…}'`.

Everything that TRL's configuration is to have beside the task is in the argument, in JSON. After each step it adds a
line with TRL's own metrics to `metrics.jsonl`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(asked: dict[str, Any]) -> None:
    """Train.

    Args:
        asked: `model`; `questions` and `answers`, in the order in which they are trained on; `steps`; `n`, the
            samples of each question; `folder`; and `config`, more members of `GRPOConfig`.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from hrl.reward.scorers.numbers import NUMERIC

    folder = Path(asked["folder"])
    sampled: dict[str, float] = {}

    class Clock(TrainerCallback):
        """Writes what TRL logs after a step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" in logs:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(logs | sampled) + "\n")

    class Trainer(GRPOTrainer):
        """Notes how long sampling takes, with rewards and advantages, and what the loss has to be before an update."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            mask = batch["completion_mask"]
            loss = -(batch["advantages"][:, None] * mask).sum() / mask.sum()
            sampled.update(sampling_s=time.perf_counter() - began, loss_before_update=loss.item())
            return batch

    def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = (chat[0]["content"] for chat in completions)
        truths = (NUMERIC.read_truth("", truth, {}) for truth in answer)
        return [float(NUMERIC.score(text, truth)) for text, truth in zip(texts, truths, strict=True)]  # type: ignore[arg-type]

    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in zip(asked["questions"], asked["answers"], strict=True)
    ]
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": asked["steps"],
        "per_device_train_batch_size": len(rows) // asked["steps"] * asked["n"],
        "num_generations": asked["n"],
        "max_completion_length": 32,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    trainer = Trainer(
        model=asked["model"],
        reward_funcs=correct,
        args=GRPOConfig(**arguments | asked["config"]),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
