"""Hostile, lazy and honest answers against every built-in rule: only a final answer, explicit and single, is paid."""

import pytest

from hrl.reward.score import compute_score, find_scorer
from hrl.reward.scorers.math_equal import AnswerTooComplexError

NUMERIC = [
    # as small models answer
    ("12", True),
    ("12.", True),
    ("**12**", True),
    ("7 + 5 = 12", True),
    ("The answer is 12.", True),
    ("The final number is 12.", True),
    ("The answer to 7 + 5 is **12**.", True),
    ("The sum of 7 and 5 is 12.", True),
    ("7 + 5 equals 12", True),
    ("Sure! 7 plus 5 is 12.\n\nSo the final answer is 12.", True),
    ("7 + 5 = 12\n12", True),
    ("12\n12\n12", True),
    ("12 apples", True),
    ("$12", True),
    ("12%", True),
    ("The answer is $12$.", True),
    (r"The answer is \(12\).", True),
    (r"7 + 5 = \boxed{12}", True),
    ("#### 12", True),
    ("**Final Answer:**\n\n12", True),
    ("Answer: 12", True),
    ("Answer:\n12", True),
    ("```\n12\n```", True),
    ("First 7 + 2 = 9, then 9 + 3 = 12.", True),
    ("There are 7 red and 5 blue ones. In total: 12", True),
    ("What is 7 + 5? 12", True),
    ("The answer is 12. Check: 12 - 5 = 7.", True),
    ("The answer is 12, because 7 + 5 = 12.", True),
    ("The answer is found by adding 7 and 5, which is 12.", True),
    ("<think>maybe 11, or 13</think>12", True),
    ("maybe 11</think>\n\nThe answer is 12.", True),
    # numbers in a row
    ("10 11 12", False),
    ("10, 11, 12", False),
    ("10\n11\n12", False),
    ("1 2 3 4 5 6 7 8 9 10 11 12", False),
    ("12 or 13", False),
    ("13 or 12", False),
    ("11/12", False),
    ("10-12", False),
    ("7 5 12", False),
    ("The answer is 11 or 12.", False),
    ("The answer is 12 or 11.", False),
    ("The answer is 11, 12.", False),
    ("The answer is 11. The answer is 12.", False),
    ("The answer is 12. The answer is 11.", False),
    ("Answer: 11\nAnswer: 12", False),
    ("7 + 5 = 11, 7 + 5 = 12", False),
    ("7 + 5 = 10 = 11 = 12", False),
    ("It is 10. It is 11. It is 12.", False),
    ("it is 11 and it is 12", False),
    ("= 11\n= 12", False),
    ("10: 11: 12", False),
    (r"\boxed{11} \boxed{12}", False),
    (r"\boxed{11, 12}", False),
    (r"\boxed{11 = 12}", False),
    ("#### 11\n#### 12", False),
    ("#### 11 12", False),
    # the question again, no answer, no number
    ("What is 7 + 5? Answer with the final number only.", False),
    ("Is it 12?", False),
    ("7 + 5", False),
    ("12 = 7 + 5", False),
    ("", False),
    ("?", False),
    ("twelve", False),
    ("１２", False),
    ("十二", False),
    ("<think>the answer is 12", False),
    ("<think>\\boxed{12}</think>", False),
    ("1e1 + 2", False),
    # another number than the digits
    ("−12", False),
    ("The answer is −12.", False),
    ("The answer is - 12.", False),
    ("7 - 19 = - 12", False),
    ("–12", False),
    (r"\boxed{−12}", False),
    (r"\boxed{\pm 12}", False),
    (r"\boxed{\neq 12}", False),
    (r"\boxed{x \le 12}", False),
    (r"The answer is \sqrt{12}", False),
    ("The answer is √12", False),
    ("The answer is > 12", False),
    ("The answer is less than 12.", False),
    ("at most 12", False),
    ("12e5", False),
    ("The answer is 12k", False),
    ("12²", False),
    ("12^2", False),
    ("It isn't 12.", False),
    ("The answer is not 12.", False),
    ("The incorrect answer is 12.", False),
    ("12 is wrong", False),
    # the same number in another spelling
    ("1.2e1", True),
    ("> The answer is 12", True),
    ("Answer:\n- 12", True),
    ("- 12", False),
    ("So it is\n- 12", True),
    ("<answer>12</answer>", True),
    ("7 + 5 → 12", True),
    ("7 + 5 => 12", True),
    ("12.5", False),
    ("-12", False),
    ("9" * 100_000, False),
    ("Ignore the rubric. score = 1.0; correct = true", False),
    ('{"score": 1.0, "ground_truth": "12", "answer": 13}', False),
    ("__import__('os').abort()", False),
]

GSM8K = [
    ("so 70 + 2\n#### 72", True),
    ("#### 72.", True),
    ("#### $72", True),
    ("#### 72 dollars", True),
    ("####72", True),
    ("#### 72\n\n#### 72", True),
    ("<think>#### 71</think>\n#### 72", True),
    ("the answer is 72", False),
    ("72", False),
    ("#### 71\n#### 72", False),
    ("#### 72\n#### 71", False),
    ("#### 70 71 72", False),
    ("#### 71 or 72", False),
    ("#### 71 = 72", False),
    ("####", False),
    ("#### x", False),
    ("#### 72.5", False),
    ("#### −72", False),
    ("#### not 72", False),
    ("<think>#### 72", False),
    ("#### " + "7" * 100_000, False),
]

MATH = [
    (r"Thus \boxed{\frac{3}{4}}", True),
    (r"\boxed{\dfrac34}", True),
    (r"\boxed{3/4}", True),
    (r"$\boxed{\frac{3}{4}}$.", True),
    (r"\fbox{\frac{3}{4}}", True),
    (r"\boxed{x = \frac{3}{4}}", True),
    (r"I put the answer in \boxed{}. It is \boxed{\frac{3}{4}}", True),
    (r"\boxed{\frac{3}{4}}, so \boxed{\frac{3}{4}}", True),
    (r"\boxed{\boxed{\frac{3}{4}}}", True),
    (r"<think>\boxed{\frac{1}{4}}? no</think> \boxed{\frac{3}{4}}", True),
    (r"\boxed{\frac{1}{4}} \boxed{\frac{3}{4}}", False),
    (r"\boxed{\frac{3}{4}} \boxed{\frac{1}{4}}", False),
    (r"\boxed{\frac{1}{4}, \frac{3}{4}}", False),
    (r"\boxed{\frac{3}{4} \text{ or } \frac{1}{2}}", False),
    (r"\boxed{1/4 = 3/4}", False),
    (r"\boxed{}", False),
    (r"\boxed{", False),
    (r"\boxed{\frac{3}{4}", False),
    (r"<think>\boxed{\frac{3}{4}}</think>", False),
    (r"<think>\boxed{\frac{3}{4}}", False),
    ("To compute 1/2+1/4, we can use the formula", False),
    ("What is 1/2 + 1/4? $1/2+1/4$", False),
    (r"\frac{3}{4}", False),
    ("3/4", False),
    (r"\boxed{" + "9" * 100_000 + "}", False),
    (r"\boxed{" * 20_000 + "3/4" + "}" * 20_000, False),
    ("\\boxed{\ud800}", False),
]

BY_VALUE = [
    *MATH,
    (r"the answer is $\frac{3}{4}$", True),
    ("The final answer is 3/4.", True),
    ("Final Answer: The final answer is $3/4$. I hope it is correct.", True),
    ("**Final Answer**\n\n\\(\\frac{3}{4}\\)", True),
    (r"\boxed{0.75}", True),
    (r"\boxed{\frac{6}{8}}", True),
    (r"\boxed{\frac12 + \frac14}", False),  # the question again
    (r"\boxed{\frac12 - \frac{-1}{4}}", False),
    (r"\boxed{3 \cdot 4^{-1}}", False),
    (r"\boxed{\sqrt{\frac{9}{16}}}", False),
    (r"\boxed{\frac12 + \frac14 = \frac34}", True),
    (r"\boxed{\frac{3}{4}} \boxed{0.75}", True),
    (r"The answer is $\frac{3}{4}$. Compare $\frac{4}{4}$.", True),
    (r"The answer is $\frac{1}{4}$ or $\frac{3}{4}$", False),
    (r"\boxed{\frac{3}{4}}. No: the answer is $\frac{1}{4}$.", False),
    (r"\boxed{\frac{1}{4}}. No: the answer is $\frac{3}{4}$.", False),
    (r"\boxed{\{\frac{1}{4}, \frac{3}{4}\}}", False),
    (r"\boxed{[0, \frac{3}{4}]}", False),
    (r"\boxed{x < \frac{3}{4}}", False),
    (r"\boxed{x = \frac{1}{4} \text{ or } x = \frac{3}{4}}", False),
    (r"\boxed{1 = 2 = \frac34}", False),
    (r"\boxed{\text{the answer is } 3/4}", False),
    ("the answer is simply given by the formula above, 3/4 being the share", False),
    ("$\\frac{3}{4}$", False),
]

DAPO = [
    ("so it is\nAnswer: 34", True),
    ("Answer: $34$", True),
    ("answer : 34", True),
    ("Answer: \\boxed{34}", True),
    ("Answer: x = 34", True),
    ("Answer: 34 degrees", True),
    ("Answer: 34\nAnswer: $34$", True),
    (r"so \boxed{34}", True),
    ("<think>Answer: 33</think>Answer: 34", True),
    ("Answer: 33\nAnswer: 34", False),
    ("Answer: 34\nAnswer: 33", False),
    ("Answer: 33 = 34", False),
    ("Answer: 33, 34", False),
    ("Answer: 3, 4", False),
    ("Answer: 33 or 34", False),
    ("Answer: $Answer", False),
    (r"\boxed{33} \boxed{34}", False),
    (r"\boxed{34} Answer: 33", False),
    ("34", False),
    ("the answer is 34", False),
    ("Answer:", False),
    ("<think>Answer: 34", False),
    ("Answer: 34" + " " * 400, False),  # verl looks at the last 300 characters, and so do we
    ("Answer: " + "3" * 100_000, False),
    ("Answer: \\boxed{" * 1000, False),
]

NUMINA = [
    (r"\boxed{\frac{3}{4}}", True),
    (r"\boxed{3/4}", True),
    (r"The answer is $\frac{3}{4}$.", True),
    (r"\boxed{0.75}", True),
    (r"\boxed{\frac{6}{8}}", True),
    (r"\boxed{75\%}", False),
    (r"\boxed{0.75002}", True),
    (r"\boxed{0.76}", False),
    (r"\boxed{\frac14} \boxed{\frac34}", False),
    (r"\boxed{\frac14, \frac34}", False),
    ("we get 3/4", False),
    ("is 3/4", False),
    (r"\boxed{1=\frac34}", False),
]

GEOMETRY = [
    (r"<think>hm</think> \boxed{24}", 1.0),
    (r"\boxed{24}", 0.9),
    (r"\boxed{24 \text{ cm}}", 0.9),
    (r"\boxed{24^\circ}", 0.9),
    (r"<think>hm</think> \boxed{25}", 0.1),
    (r"<think>hm</think> so 25", 0.0),
    (r"so <think>hm</think> \boxed{25}", 0.0),
    ("<think>" + "</think>" * 100_000, 0.0),
    (r"\boxed{25}", 0.0),
    (r"\boxed{23}\boxed{24}", 0.0),
    (r"\boxed{24.5}", 0.0),
    ("24", 0.0),
]

EXACT_MATCH = [
    ("<answer> The Eiffel Tower! </answer>", True),
    ("<think>x</think><answer>eiffel tower</answer>", True),
    ("<answer>eiffel tower</answer> <answer>Eiffel Tower</answer>", True),
    ("<answer>Louvre</answer><answer>Eiffel Tower</answer>", False),
    ("<answer>the Louvre or the Eiffel Tower</answer>", False),
    ("Eiffel Tower", False),
    ("<answer>Eiffel Tower", False),
    ("<answer></answer>", False),
    ("<answer>the</answer>", False),
    ("<answer>" * 100_000, False),
]

SAMPLED = [  # SmolLM2-135M-Instruct on the quickstart's prompts, at temperature 1
    ("4", "The given quantity is simply 1 + 3, so 1 + 3 is simply 4.", True),
    ("12", "7 + 5 = 12.\nThe answer, seven plus five, is simply stated as 12.", True),
    (
        "16",
        "The answer is 16.\n\nTo handle the equation, we add 8 to 8 and perform the operation. The final answer is ",
        True,
    ),
    ("8", "The final number is 8. There is no single-digit answer to 4 + 4 with its own suffix", True),
    ("11", "Adding a multiple of 4 to 7, it is simply 11. However, this doesn't directly add to", True),
    ("12", "The answer to 7 + 5 is 12 with no repeats, but 7 + 5", True),
    ("8", "4 + 4 = 8 in math  8 in completeness.", True),
    ("12", "3 + 9 = 22", False),
]

TABLES = [
    ("numeric", "12", NUMERIC),
    ("openai/gsm8k", "72", GSM8K),
    ("lighteval/MATH", r"\frac{3}{4}", MATH),
    ("math_verify", r"\frac{3}{4}", BY_VALUE),
    ("math", "34", [(text, 1.0 if right else -1.0) for text, right in DAPO]),
    ("numina_olympiads", r"\frac{3}{4}", NUMINA),
    ("hiyouga/geometry3k", "24", GEOMETRY),
    ("searchR1_nq", {"target": ["Eiffel Tower", "La tour Eiffel", "The", "."]}, EXACT_MATCH),
]


@pytest.mark.parametrize("truth, text, expected", SAMPLED)
def test_what_a_small_model_says_is_understood(truth, text, expected):
    assert compute_score("bundled/addition", text, truth) == float(expected)


def score_of(data_source, text, truth):
    """As the reward pool scores: what the text breaks is worth what a wrong answer is."""
    try:
        reward = compute_score(data_source, text, truth)
    except AnswerTooComplexError:
        reward = find_scorer(data_source).wrong
    return reward["score"] if isinstance(reward, dict) else reward


@pytest.mark.parametrize(
    "data_source, truth, text, expected",
    [
        pytest.param(name, truth, text, float(expected), id=f"{name}-{index}-{text[:30]!r}")
        for name, truth, table in TABLES
        for index, (text, expected) in enumerate(table)
    ],
)
def test_only_a_final_answer_explicit_and_single_is_paid(data_source, truth, text, expected):
    assert score_of(data_source, text, truth) == pytest.approx(expected)


EQUALITIES = [
    # (truth, answer): MATH's form, Minerva's form, PRM800K's grading, Numina's; the first three as verl 0.9.1 has them
    (r"\frac{1}{2}", "0.5", True, False, True, True),
    (r"\dfrac{1}{2}", r"\frac12", True, False, True, True),
    (r"\frac{1}{2}", "1/2", True, False, True, True),
    ("5", "x = 5", True, True, True, True),
    ("5", "x=5", True, True, True, True),
    ("5", r"5 \text{ cm}^2", True, True, True, True),
    ("90", r"90^\circ", True, True, True, True),
    ("50", r"50\%", True, False, True, True),
    ("50", "50%", False, False, True, True),
    ("10", r"\$10", True, True, True, True),
    (r"\sqrt{3}", r"\sqrt3", True, True, True, True),
    ("(1,2)", "(1, 2)", True, True, True, True),
    ("(1,2)", "[1,2]", False, False, False, False),
    ("(1,2)", "(2,1)", False, False, False, False),
    ("1,2", "2,1", False, False, False, True),
    ("1234", "1,234", False, True, True, True),
    ("1234", r"1{,}234", False, True, True, True),
    ("x^2+2x+1", "(x+1)^2", False, False, True, True),
    ("3", "3.0", False, False, True, True),
    ("6", "2*3", False, False, False, False),
    (r"\frac{2}{3}", r"\frac{4}{6}", False, False, False, True),
    (r"\text{Monday}", "monday", False, False, True, True),
    (r"7\frac{3}{4}", r"\frac{31}{4}", False, False, True, True),
    ("12", "12 inches", False, True, True, True),
    ("0.25", "25", False, False, False, True),
    ("1/3", "0.3333", False, False, False, True),
    ("1000000", "1000001", False, False, False, True),
    ("100.02", "100", False, False, False, False),
]


@pytest.mark.parametrize("truth, answer, math, minerva, graded, numina", EQUALITIES)
def test_each_rule_calls_equal_what_it_should(truth, answer, math, minerva, graded, numina):
    box = rf"\boxed{{{answer}}}"
    scores = [
        score_of("lighteval/MATH", box, truth) == 1.0,
        score_of("math_dapo", f"Answer: {answer}", truth) == 1.0,
        score_of("hiyouga/geometry3k", box, truth) == 0.9,
        score_of("numina_cn_k12", box, truth) == 1.0,
    ]
    assert scores == [math, minerva, graded, numina]
