"""A model of 135M parameters learns to have a calculator do what it can't do: `python examples/calculator.py`.

It does not know how a call is written, and its chat template shows no tools: the prompt and demonstrations do.
"""

import hrl

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{} * {}"}}}}</tool_call>'
SYSTEM = {"role": "system", "content": f"Use the calculator: {CALL.format('a', 'b')}"}
ROLES = ("user", "assistant", "tool", "assistant")
PAIRS = [(a, b) for a in range(10, 100) for b in range(10, 99)]
KEYS = {"environment.tool_parser": "hermes", "environment.max_turns": 3, "environment.max_turn_tokens": 48}
KEYS |= {"actor_rollout_ref.rollout.val_kwargs.temperature": 1.0}  # held-out accuracy as the policy plays


def calculator(expression: str) -> int:
    """Return the product of two numbers, written as `3 * 4`."""
    left, right = expression.split("*")
    return int(left) * int(right)


def _shown(a, b):
    said = zip(ROLES, (f"What is {a} * {b}?", CALL.format(a, b), f"{a * b}", f"It is {a * b}."), strict=True)
    return {"messages": [SYSTEM, *({"role": role, "content": content} for role, content in said)]}


if __name__ == "__main__":
    lessons = {"data": [_shown(*pair) for pair in PAIRS[::250]], "steps": 4, "batch_size": 8, "lr": 5e-5}
    model = hrl.SFT(max_length=160, **lessons, name="calculator_shown").train().model_path
    rows = [{"prompt": _shown(*pair)["messages"][:2], "answer": pair[0] * pair[1]} for pair in PAIRS]
    data = {"data": rows[1::25], "val_data": rows[2::100], "max_prompt_length": 96, "max_response_length": 128}
    length = {"steps": 20, "test_freq": 5, "batch_size": 8}
    run = hrl.GRPO(model, "numeric", environment=[calculator], config=KEYS, name="calculator", **data, **length).train()
    print([step["val/python/mean@1"] for step in run.metrics if "val/python/mean@1" in step])
