import re

import pytest

from hrl.data.tasks import bundled_rows
from hrl.data.tasks.addition import held_out
from hrl.data.tasks.answer_format import FORMATS, PLAIN, TAGS, chat
from hrl.data.tasks.reasoning_gym import create_dataset, datasets, parameters_at, parse_address, reasoning_gym_rows
from hrl.errors import DatasetError


def _sums(split):
    return {
        row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in bundled_rows(f"addition/{split}")
    }


def test_train_and_val_share_no_sum_and_make_up_all_81():
    train, val = _sums("train"), _sums("val")
    assert (len(train), len(val)) == (65, 16)
    assert train | val == _sums("all")
    assert val["What is 7 + 8? Answer with the final number only."] == "15"


def test_a_held_out_sum_is_held_out_in_both_orders():
    assert held_out() == {(b, a) for a, b in held_out()}
    assert all(a != b for a, b in held_out())


def test_unknown_tasks_and_splits_are_named():
    with pytest.raises(DatasetError, match="unknown bundled task 'adition'.*Did you mean addition"):
        bundled_rows("adition/train")
    with pytest.raises(DatasetError, match="There is: addition, addition_answers"):
        bundled_rows("sorting/train")
    with pytest.raises(DatasetError, match="unknown split 'test'.*train, val, all"):
        bundled_rows("addition/test")


def test_an_address_holds_parameters_as_json():
    asked = parse_address("chain_sum?size=3&max_terms=4&flag=true&name=x&answer=tags&level=null")
    assert (asked.name, asked.form, asked.credit, asked.level) == ("chain_sum", TAGS, TAGS.credit, None)
    assert asked.parameters == {"size": 3, "seed": 1, "max_terms": 4, "flag": True, "name": "x"}
    assert parse_address("chain_sum").form is PLAIN


def test_generated_rows_are_the_same_in_every_process():
    """word_ladder walks through sets of words, whose order differs between processes."""
    first, second = (list(reasoning_gym_rows("word_ladder?size=2&seed=5")) for _ in range(2))
    assert first == second
    assert first[0]["data_source"] == "reasoning_gym/word_ladder"
    assert first[0]["reward_model"]["ground_truth"]["question"] in first[0]["prompt"][0]["content"]
    assert first[0]["extra_info"]["parameters"] | {"size": 2, "seed": 5} == first[1]["extra_info"]["parameters"]


def test_a_wrong_address_is_refused():
    with pytest.raises(DatasetError, match=r"make 'reasoning_gym:chain_sum\?siz=3': .*'siz'. Did you mean size\?"):
        reasoning_gym_rows("chain_sum?siz=3")
    with pytest.raises(DatasetError, match=r"does not end in \?name=value"):
        reasoning_gym_rows("chain_sum?=&&")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("answer=tag", "Did you mean tags"),
        ("answer=json", "There are plain, tags, boxed"),
        ("answer=tags&format_credit=1", "from 0 to below 1"),
        ("level=hard", "level=hard .* a number from 0, or null"),
        ("shots=-1", "from 0 to 8"),
    ],
)
def test_a_wrong_option_is_told_before_rows_are_made(wrong, told):
    with pytest.raises(DatasetError, match=told):
        parse_address(f"chain_sum?{wrong}")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("chain_sums", "no dataset 'chain_sums'. Did you mean chain_sum"),
        ("addition_of_frogs", "hrl tasks"),
        ("gsm_symbolic?level=0", "gsm_symbolic has no curriculum"),
        ("chain_sum?min_digits=3", "max_digits must be >= min_digits"),
    ],
)
def test_what_a_dataset_refuses_is_told(wrong, told):
    asked = parse_address(wrong)
    with pytest.raises(DatasetError, match=told):
        create_dataset(asked.name, parameters_at(asked))


def test_without_a_level_questions_are_those_of_the_first_one():
    easiest = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 1000, "seed": 1}
    assert parameters_at(parse_address("chain_sum")) == easiest
    assert parameters_at(parse_address("chain_sum?max_terms=3"))["max_terms"] == 3
    assert parameters_at(parse_address("chain_sum?level=1")) == {**easiest, "max_terms": 3, "max_digits": 2}
    assert parameters_at(parse_address("chain_sum?level=null")) == {"size": 1000, "seed": 1}
    assert parameters_at(parse_address("gsm_symbolic")) == {"size": 1000, "seed": 1}


def test_every_dataset_is_made_by_its_name_alone():
    for name in datasets():
        if name not in ("sokoban", "composite"):  # takes seconds; needs the names of others
            parameters = parameters_at(parse_address(f"{name}?size=1"))
            assert create_dataset(name, parameters)[0]["question"], name


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_prompts_ask_for_the_format_and_examples_show_it(form):
    *shown, asked = chat("1 + 2 =", form, [("2 + 2 =", 4)])
    assert [turn["role"] for turn in shown] == ["user", "assistant"]
    assert shown[1]["content"] == form.write(4)
    assert asked["content"] == f"1 + 2 =\n\n{form.instruction}"


def test_no_row_is_its_own_example():
    rows = list(reasoning_gym_rows("chain_sum?size=200&shots=2&answer=boxed"))
    for row in rows:
        *shown, asked = (turn["content"] for turn in row["prompt"])
        assert len(shown) == 4 and asked not in shown
    assert rows[0]["extra_info"]["answer_format"] == "boxed"
    assert rows[0]["answer"] == rows[0]["reward_model"]["ground_truth"]["answer"]


def test_sums_take_an_answer_format():
    (row, *_) = bundled_rows("addition/val?answer=tags")
    assert all(turn["content"].endswith(TAGS.instruction) for turn in row["prompt"] if turn["role"] == "user")
    assert row["extra_info"] == {"index": 0, "answer_format": "tags", "format_credit": TAGS.credit}
    with pytest.raises(DatasetError, match="no option 'answr'. Did you mean answer"):
        bundled_rows("addition/val?answr=tags")
    with pytest.raises(DatasetError, match="takes no options"):
        bundled_rows("addition_pairs/val?answer=tags")


@pytest.mark.parametrize(("query", "shots"), [("answer=tags", 2), ("answer=boxed&shots=1", 1), ("shots=0", 0)])
def test_sums_show_solved_examples_that_are_neither_held_out_nor_the_question(query, shots):
    kept_back = {f"What is {a} + {b}?" for a, b in held_out()}
    for row in bundled_rows(f"addition/all?{query}"):
        *shown, asked = row["prompt"]
        assert len(shown) == 2 * shots
        for question, answer in zip(shown[::2], shown[1::2], strict=True):
            sum_asked, a, b = re.match(r"(What is (\d) \+ (\d)\?)", question["content"]).groups()
            assert sum_asked not in kept_back and not asked["content"].startswith(sum_asked)
            assert str(int(a) + int(b)) in answer["content"] and answer["content"] != "12"
    with pytest.raises(DatasetError, match="shots=9 in 'bundled:addition/all.shots=9' must be a number from 0 to 8"):
        bundled_rows("addition/all?shots=9")


def test_the_rows_of_one_seed_are_not_those_of_the_next():
    first, second = (
        [row["prompt"] for row in reasoning_gym_rows(f"chain_sum?level=null&seed={seed}&size=200")] for seed in (1, 2)
    )
    assert first[1:] != second[:-1], "row i is drawn with seed + i"
    shared = sum(one == other for one in set(map(str, first)) for other in set(map(str, second)))
    assert shared < 10  # the same sum may come up twice
