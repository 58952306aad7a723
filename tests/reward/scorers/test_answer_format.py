import pytest

from hrl.data.tasks.answer_format import BOXED, FORMATS, PLAIN, TAGS
from hrl.reward.score import compute_score
from hrl.reward.scorers.answer_format import read_answer


def test_a_single_answer_counts_and_only_outside_of_the_reasoning():
    text = "<think><answer>1</answer></think> <answer> 2 </answer><answer>2</answer>"
    assert read_answer(text, TAGS, "2") == "2"
    assert read_answer("<answer>1</answer> no <answer> 2 </answer>", TAGS, "2") is None
    assert read_answer("<think><answer>2</answer>", TAGS, "2") is None
    assert read_answer("2", TAGS, "2") is None
    assert read_answer(r"so \boxed{2}", BOXED, "2") == "2"
    assert read_answer(r"\boxed{1} or \boxed{2}", BOXED, "2") is None


@pytest.mark.parametrize(("form", "text"), [("boxed", r"\boxed{ }"), ("tags", "<answer>\n</answer>")])
def test_an_empty_answer_has_no_credit_for_its_format(form, text):
    info = {"answer_format": form, "format_credit": 0.1}
    assert compute_score("bundled/addition", text, "12", info) == {"score": 0.0, "correct": 0.0, "format": 0.0}
    assert read_answer(text, FORMATS[form], "") == "", "unless nothing is what is right"


@pytest.mark.parametrize(
    ("text", "right", "answer"),
    [
        ("3 + 4 = 7", "7", "7"),
        ("It is 7, or maybe 8.", "7", None),
        ("I do not know", "7", None),
        ("007", "007", "007"),  # no number that reads back as it is written
        ("Friday.", "Friday", "Friday"),
        ("The answer is Friday.", "Friday", "Friday"),
        ("**Friday**", "Friday", "Friday"),
        ("a b\nc d", "a b\nc d", "a b\nc d"),
        ("It ends here.", "It ends here.", "It ends here."),
        ("", "Friday", None),
    ],
)
def test_a_plain_answer_is_what_the_text_says_it_is(text, right, answer):
    assert read_answer(text, PLAIN, right) == answer


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_written_answer_is_read_back(form):
    for answer in ("7", "-4", "Friday", "1 0\n0 1"):
        assert read_answer(form.write(answer), form, answer) == answer


def test_sums_in_tags_are_scored_in_tags():
    info = {"answer_format": "tags", "format_credit": 0.1}
    scored = [compute_score("bundled/addition", text, "12", info) for text in ("<answer>12</answer>", "12")]
    assert scored[0] == {"score": 1.0, "correct": 1.0, "format": 1.0}
    assert scored[1] == {"score": 0.0, "correct": 0.0, "format": 0.0}
    assert compute_score("bundled/addition", "12", "12", {}) == 1.0
    with pytest.raises(ValueError, match="answer_format is 'xml'; there are plain, tags, boxed"):
        compute_score("bundled/addition", "12", "12", {"answer_format": "xml"})
