"""A model of 135M parameters learns one-digit sums, from rows and a reward function of your own.

Run it with `python examples/arithmetic.py`.
"""

import hrl

QUESTION = "What is {} + {}? Answer with the final number only."
sums = [{"prompt": QUESTION.format(a, b), "answer": a + b} for a in range(1, 10) for b in range(1, 10)]
held_out = [row for row in sums if row["answer"] == 9]


def correct(response, answer):
    """Pay for the right number as the last word."""
    return float(response.strip(" .").split(" ")[-1] == str(answer))


trainer = hrl.GRPO(
    reward=correct,
    data=[row for row in sums if row not in held_out],
    val_data=held_out,
    steps=30,
    max_response_length=32,
    name="arithmetic",
)
run = trainer.train()
first, *_, last = [step["val/python/mean@1"] for step in run.metrics if "val/python/mean@1" in step]
print(f"right on held-out sums: {first:.2f} before, {last:.2f} after. {run.report}")
