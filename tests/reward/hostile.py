"""Texts that a policy could write to stop, crash, cheat or take over whoever reads them, and a process that tries them.

`python -m tests.reward.hostile FOLDER` gives every one to every built-in function, in the form that the function looks
for an answer in, and writes a line of JSON for each call: before it, what is called, and after it, what came of it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

CANARY = "canary-of-code-that-ran"
_LONG = 100_000

TEXTS: dict[str, str] = {
    "tower of powers": "9**9**9**9",
    "tower of powers in LaTeX": "10^{10^{10}}",
    "tall tower": "9^" * 2000 + "9",
    "power of a power": "((9**9)**9)**9**9",
    "huge factorial": "((9!)!)!",
    "factorial of a number of eleven digits": "99999999999!",
    "huge binomial": r"\binom{10^{9}}{10^{8}}",
    "huge sum": r"\sum_{i=1}^{10^{12}} i^i",
    "huge product": r"\prod_{i=1}^{10^{9}} (x+i)",
    "huge expansion": "(x+y+z+w)^{500}-(x+y)^{499}",
    "huge exponent": "1e999999999",
    "small exponent": "1e-999999999",
    "number of 100,000 digits": "9" * _LONG,
    "number of five thousand digits": "9" * 5000,
    "fraction with 100,000 digits": "0." + "3" * _LONG,
    "thousands upon thousands": "1,000" * 4_000,
    "division by zero": "1/0",
    "fraction of zeros": r"\frac{0}{0}",
    "not a number": "NaN",
    "infinity": r"-\infty",
    "an imaginary number": "12i",
    "deep fractions": r"\frac{1}{1+" * 5000 + "1" + "}" * 5000,
    "deep braces": "{" * 20_000 + "12" + "}" * 20_000,
    "deep brackets": "[" * 20_000 + "]" * 20_000,
    "open brackets": "(" * _LONG,
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "deep roots": r"\sqrt" * 5_000 + "2",
    "deep boxes": r"\boxed{" * 5_000 + "12" + "}" * 5_000,
    "boxes in a row": r"\boxed{12}" * 5_000,
    "answers in a row": "<answer>12</answer>" * 5_000,
    "the answer over and over": "The answer is 12. " * 5_000,
    "open tags": "<answer>" * 20_000,
    "open think tags": "<think>" * 20_000,
    "fences": "```json\n" * 20_000,
    "for backtracking": "a" * 2_000 + "!",
    "for backtracking over spaces": " " * 100_000 + "x",
    "for backtracking over lines": "\n" * 100_000 + "x",
    "for backtracking over signs": "=-" * 20_000,
    "one letter": "x" * _LONG,
    "three words": "so it is " * (_LONG // 9),
    "zeros": "\x00" * 20_000,
    "a zero in the answer": "1\x002",
    "lone surrogates": "\ud800\udfff" * 10_000,
    "a lone surrogate in the answer": "12\ud800",
    "from right to left": "\u202e21\u202c",
    "marks upon marks": "1" + "\u0301" * 20_000,
    "letters of no width": "1\u200b2\ufeff",
    "digits of other scripts": "١٢ １２ 𝟏𝟐 ¹²",
    "escapes of a terminal": "\x1b[2J\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x9b31m",
    "markup": "<script>alert(1)</script><img src=x onerror=alert(1)>[bold]{{ 7 * 7 }}</textarea>",
    "format characters": "%s%n%x {0.__class__} {} ${7*7} #{7*7} $(id) `id`",
    "paths": "../../../../../../etc/passwd file:///etc/passwd \\input{/etc/passwd} C:\\con",
    "a program": f"__import__('pathlib').Path({CANARY!r}).touch()",
    "a program in a class": f"().__class__.__base__.__subclasses__()[0] or open({CANARY!r}, 'w')",
    "a program in brackets": f"[open({CANARY!r}, 'w') for _ in (1,)]",
    "a program in a function": f"exec(\"open('{CANARY}', 'w')\") or eval(\"open('{CANARY}', 'w')\")",
    "a program for a shell": f"$(touch {CANARY}); `touch {CANARY}`; | touch {CANARY}",
    "a program in YAML": f"!!python/object/apply:os.system ['touch {CANARY}']",
    "a program in LaTeX": f"\\immediate\\write18{{touch {CANARY}}}",
    "a program in sympy": f"Integer(1).__class__.__init__.__globals__['sys'].modules['os'].system('touch {CANARY}')",
    "a program in JSON": f'{{"py/object": "posix.system", "__reduce__": ["os.system", ["touch {CANARY}"]]}}',
    "a pickle": "gASVIwAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAh0b3VjaCAvdJSFlFKULg==",
    "a schema that fetches": '{"$ref": "http://127.0.0.1:9/x", "name": 5}',
    "numbers that are no JSON": '{"name": NaN, "name": 1e999}',
}
"""What it is → the text."""

#: How each function is shown an answer; those that are not here read the text as it is.
_FORMS = {
    "tags": "<answer>{}</answer>",
    "hashes": "#### {}",
    "box": "So it is \\boxed{{{}}}.",
    "line": "Answer: {}",
    "words": "The answer is {}.",
    "fence": "```json\n{}\n```",
}
_FORM_OF = {
    "exact_match": "tags",
    "searchR1_nq": "tags",
    "gsm8k": "hashes",
    "gsm8k_flexible": "words",
    "numeric": "words",
    "bundled/addition": "words",
    "multiple_choice": "words",
    "math_dapo": "line",
    "json_schema": "fence",
}


def calls() -> Iterator[tuple[str, Callable[..., Any], Mapping[str, Any], str]]:
    """Yield name, function, row and form of every built-in function: the library's, and each data source's."""
    from hrl.data.tasks.reasoning_gym import create_dataset
    from hrl.reward.library.answer import Answer
    from hrl.reward.library.catalogue import CATALOGUE, make
    from hrl.reward.score import PROGRAMS, SCORERS
    from hrl.reward.scorers.reasoning_gym import GRAMMARS, SAME_WORD

    for name, entry in CATALOGUE.items():
        if name in ("judge", "remote") or entry.needs_answer:  # an endpoint's model; and those below
            continue
        yield name, make(name, entry.example.arguments), entry.example.row, _FORM_OF.get(name, "box")
    yield "regex that explodes", make("regex", {"pattern": r"(a+)+$|(\s+)+y"}), {"prompt": "?"}, "words"
    told = Answer(None)
    seen: list[Any] = []
    for source, scorer in SCORERS.items():
        if scorer not in seen and source not in PROGRAMS:  # those run what they are given, see scorers/test_programs.py
            seen.append(scorer)
            truth = {"target": ["x"]} if source.startswith("searchR1") else "B" if source == "multiple_choice" else "12"
            yield source, told, {"prompt": "?", "answer": truth, "data_source": source}, _FORM_OF.get(source, "box")
    for task in (*GRAMMARS, *SAME_WORD, "chain_sum"):
        parameters = {"size": 1, "seed": 1}
        row = {
            "prompt": "?",
            "data_source": f"reasoning_gym/{task}",
            "answer": create_dataset(task, parameters)[0],
            "extra_info": {"parameters": parameters},
        }
        yield f"reasoning_gym/{task}", told, row, "tags"


def main() -> None:
    """Try every text with every function in the present folder."""
    from hrl.reward.function import names_taken, read_reward
    from hrl.reward.weighted import BLAME

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # as a reward process has one
    for name, function, row, form in calls():
        for title, text in TEXTS.items():
            for response in (text, _FORMS[form].format(text)):
                blamed: list[bool] = []
                sample = {"data_source": "s", "extra_info": {}, **row, "response": response, "solution_str": response}
                sample |= {"ground_truth": row.get("answer"), BLAME: blamed.append}
                taken = names_taken(function)
                call = {"function": name, "text": title, "plain": response is text}
                sys.stdout.write(json.dumps(call) + "\n")
                sys.stdout.flush()
                begun = time.process_time()
                result: dict[str, Any]
                try:
                    score, parts = read_reward(
                        function(**{key: value for key, value in sample.items() if taken is None or key in taken})
                    )
                    result = {"score": score, "unscorable": parts.get("unscorable")}
                except Exception as error:  # noqa: BLE001  what it is, is told
                    result = {"error": f"{type(error).__name__}: {error}"[:300], "blamed": bool(blamed and blamed[-1])}
                sys.stdout.write(json.dumps({**result, "seconds": time.process_time() - begun}) + "\n")
    sys.stdout.write(json.dumps({"canary": [str(file) for file in Path.cwd().rglob("*")]}) + "\n")


if __name__ == "__main__":
    main()
