import ast
import inspect
import sys
import warnings

import pytest

from hrl.data.tasks.answer_format import FORMATS
from hrl.data.tasks.reasoning_gym import create_dataset, datasets, parameters_at, parse_address
from hrl.reward.library.answer import Answer
from hrl.reward.score import compute_score
from hrl.reward.scorers.base import RowError
from hrl.reward.scorers.reasoning_gym import (
    GRAMMARS,
    is_arithmetic,
    is_formula,
    is_literal_or_words,
)

warnings.filterwarnings("ignore", category=SyntaxWarning)
reasoning_gym = pytest.importorskip("reasoning_gym")

EVALUATES_ONLY_ITS_OWN = {
    "basic_arithmetic": "eval of the problem it made",
    "bitwise_arithmetic": "eval of the problem it made",
    "number_sorting": "eval of the right answer",
    "codeio": "exec of the program it asks about",
    "propositional_logic": "parse_expr is a parser of its own",
}
ATTACKS = [
    "__import__('os')._exit(3)",
    "().__class__",
    "exit()",
    "[print(1)]",
    "x.__class__",
    "lambda: 1",
    "open('/x')",
]


def test_every_scorer_that_could_evaluate_an_answer_is_behind_a_grammar():
    from reasoning_gym.factory import DATASETS

    evaluating = set()
    for name, (dataset, _) in DATASETS.items():
        tree = ast.parse(inspect.getsource(sys.modules[dataset.__module__]))
        called = {getattr(c.func, "id", getattr(c.func, "attr", "")) for c in ast.walk(tree) if isinstance(c, ast.Call)}
        if called & {"eval", "exec", "parse_expr", "sympify", "lambdify", "parse_latex", "__import__"}:
            evaluating.add(name)
    assert evaluating == set(GRAMMARS) | set(EVALUATES_ONLY_ITS_OWN)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_grammar_lets_code_through(attack):
    assert not any(grammar(attack) for grammar in (is_arithmetic, is_formula, is_literal_or_words))


@pytest.mark.parametrize("tower", ["9**9**9", "2**(3**99)", "x**100", "(9)**999"])
def test_tall_powers_are_no_answer(tower):
    assert not is_formula(tower)
    assert not is_arithmetic(tower)


@pytest.mark.parametrize("number", ["1e999999999", "2E-100", "x + 1 e+ 5000", "9" * 61])
def test_numbers_that_would_be_written_out_are_no_answer(number):
    assert not is_formula(number)


def test_ordinary_answers_pass():
    assert is_arithmetic("(3 + 5) * 2/8 - 1")
    assert is_formula("3*x**2/2 + sin(2*x)*exp(-x) - 0.5*sqrt(x) + C")
    assert is_literal_or_words('["A", "B"]')
    assert is_literal_or_words("0 1\n1 0")


def _entry(name):
    return reasoning_gym.create_dataset(name, size=1, seed=3)[0]


@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "spiral_matrix", "simple_integration", "prime_factorization"]
)
def test_the_right_answer_scores_1_and_nonsense_does_not(name):
    entry, info = _entry(name), {"parameters": {"size": 1, "seed": 3}}
    source = f"reasoning_gym/{name}"
    assert compute_score(source, f"<answer>{entry['answer']}</answer>", entry, info) == 1.0
    for nonsense in ("", entry["answer"], "<answer></answer>", "<answer>foo 12</answer>", "<answer>exit()</answer>"):
        assert compute_score(source, nonsense, entry, info) <= 0.05


def test_a_format_with_credit_pays_for_the_format_and_the_rest_for_the_answer():
    entry, info = _entry("chain_sum"), {"parameters": {"size": 1, "seed": 3}}
    info |= {"answer_format": "boxed", "format_credit": 0.2}
    source, right = "reasoning_gym/chain_sum", entry["answer"]
    scored = {text: compute_score(source, text, entry, info) for text in (rf"\boxed{{{right}}}", r"\boxed{x}", right)}
    assert list(scored.values()) == [
        {"score": 1.0, "correct": 1.0, "format": 1.0},
        {"score": 0.2, "correct": 0.0, "format": 1.0},
        {"score": 0.0, "correct": 0.0, "format": 0.0},
    ]


def test_a_plain_answer_is_a_number_or_a_sentence():
    entry = _entry("chain_sum")
    info = {"parameters": {"size": 1, "seed": 3}, "answer_format": "plain", "format_credit": 0.0}
    right = entry["answer"]
    for text in (right, f"The answer is {right}.", rf"\boxed{{{right}}}", f"<answer>{right}</answer>"):
        assert compute_score("reasoning_gym/chain_sum", text, entry, info) == 1.0
    for text in ("", "frog", f"{right} or {right}1", f"1{right}"):
        assert compute_score("reasoning_gym/chain_sum", text, entry, info) == 0.0


@pytest.fixture(scope="module")
def entries_of_each():
    """Dataset → its parameters and two entries."""
    found = {}
    for name in datasets():
        if name != "composite":  # needs the names of others
            parameters = parameters_at(parse_address(f"{name}?size=2&seed=4"))
            found[name] = parameters, list(create_dataset(name, parameters))
    return found


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_datasets_own_answer_scores_1_in_every_format(form, entries_of_each):
    for name, (parameters, (entry, _)) in entries_of_each.items():
        if entry["answer"] is None:
            continue
        info = {"parameters": parameters, "answer_format": form.name, "format_credit": 0.0}
        scored = compute_score(f"reasoning_gym/{name}", form.write(entry["answer"]), entry, info)
        assert scored == pytest.approx(1.0), name


def test_a_right_answer_among_others_is_not_paid_by_its_share_of_the_text():
    entry, info = _entry("chain_sum"), {"parameters": {"size": 1, "seed": 3}}
    right = entry["answer"]
    scored = {
        answer: compute_score("reasoning_gym/chain_sum", f"<answer>{answer}</answer>", entry, info)
        for answer in (right, f"{right}.0", f"1 {right}", f"{right}, {right}1")
    }
    assert scored == {right: 1.0, f"{right}.0": 1.0, f"1 {right}": 0.0, f"{right}, {right}1": 0.0}


def test_no_dataset_pays_for_any_text(entries_of_each):
    for name, (parameters, entries) in entries_of_each.items():
        for entry in entries:
            scored = compute_score(f"reasoning_gym/{name}", "<answer>zzqxj</answer>", entry, {"parameters": parameters})
            assert scored < 0.5, name


def test_rows_made_elsewhere_are_refused():
    with pytest.raises(ValueError, match="has no 'parameters'"):
        compute_score("reasoning_gym/chain_sum", "", {}, {})


def test_a_row_whose_own_answer_cannot_be_scored_is_the_datas_fault():
    entry, info, blamed = dict(_entry("chain_sum")), {"parameters": {"size": 1, "seed": 3}}, []
    del entry["answer"]
    with pytest.raises(RowError, match="the row's own answer can't be scored either: KeyError"):
        Answer()("<answer>1+1</answer>", entry, "reasoning_gym/chain_sum", info, blames_response=blamed.append)
    assert blamed == [True, False]
