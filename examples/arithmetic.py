"""A model of 135M parameters learns one-digit sums, from rows and a reward function of your own.

Run it with `python examples/arithmetic.py`.
"""

import hrl

QUESTION = "What is {} + {}? Answer with the final number only."
SUMS = [{"prompt": QUESTION.format(a, b), "answer": a + b} for a in range(1, 10) for b in range(1, 10)]
HELD_OUT = SUMS[::5]  # those whose two numbers are equal or differ by 5, so with 1 + 6 also 6 + 1


def correct(response, answer):
    """Pay for the right number as the last word."""
    return float(response.strip(" .").split(" ")[-1] == str(answer))


if __name__ == "__main__":
    trainer = hrl.GRPO(
        reward=correct,
        data=[row for row in SUMS if row not in HELD_OUT],
        val_data=HELD_OUT,
        steps=15,
        test_freq=5,
        max_prompt_length=64,
        max_response_length=32,
        name="arithmetic",
    )
    run = trainer.train()
    first, *_, last = [step["val/python/mean@1"] for step in run.metrics if "val/python/mean@1" in step]
    print(f"right on held-out sums: {first:.2f} before, {last:.2f} after. {run.report}")
