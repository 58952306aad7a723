"""A model of 135M parameters learns to multiply with a calculator, which it calls as a tool.

It can't multiply two-digit numbers, and does not know how a call is written: a few demonstrations show it that, and
the rest is learnt by reward. Run it with `python examples/calculator.py`.
"""

import random

import hrl

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
SYSTEM = {"role": "system", "content": f"Use the calculator: {CALL.format('...')}"}
PAIRS = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(1).shuffle(PAIRS)
SHOWN, HELD_OUT, TRAINED = PAIRS[:40], PAIRS[40:72], PAIRS[72:]


class Calculator(hrl.ToolEnvironment):
    """Multiplication with a calculator at hand."""

    def reset(self, row):
        """Show the question, and how the calculator is called: this model's chat template does not show tools."""
        self.answer = row["answer"]
        return [SYSTEM, *row["prompt"]]

    @hrl.tool
    def calculator(self, expression: str) -> int:
        """Return the product of two numbers, written as `3 * 4`."""
        left, right = expression.split("*")
        return int(left) * int(right)

    def answered(self, action):
        """Pay for the right number as the last word."""
        return float(action.text.strip(" .").split(" ")[-1] == str(self.answer))


def question(a, b):
    """Return a row of the data set."""
    return {"prompt": f"What is {a} * {b}?", "answer": a * b}


def demonstration(a, b):
    """Return a conversation to imitate."""
    contents = [("user", f"What is {a} * {b}?"), ("assistant", CALL.format(f"{a} * {b}")), ("tool", f"{a * b}")]
    contents.append(("assistant", f"{a} * {b} = {a * b}"))
    return {"messages": [SYSTEM, *({"role": role, "content": content} for role, content in contents)]}


if __name__ == "__main__":
    shown = hrl.SFT(
        data=[demonstration(*pair) for pair in SHOWN],
        steps=4,
        batch_size=8,
        max_length=160,
        lr=5e-5,
        name="calculator_shown",
    ).train()
    trainer = hrl.GRPO(
        model=shown.model_path,
        environment=Calculator,
        data=[question(*pair) for pair in TRAINED],
        val_data=[question(*pair) for pair in HELD_OUT],
        steps=20,
        test_freq=5,
        batch_size=8,
        max_prompt_length=96,
        max_response_length=128,
        config={"environment": {"tool_parser": "hermes", "max_turns": 3, "max_turn_tokens": 48}},
        name="calculator",
    )
    run = trainer.train()
    first, *_, last = [step["val/python/mean@1"] for step in run.metrics if "val/python/mean@1" in step]
    print(f"right on held-out products: {first:.2f} before, {last:.2f} after. {run.report}")
