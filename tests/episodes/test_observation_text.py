import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.episodes.observation_text import with_whole_characters, without_middle
from tests.episodes.families import FAMILIES, slow_tokenizer

TOKENIZERS = ["qwen2_5", "gemma2", "llama2", "mistral", "smollm2"]


def length(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("value", "whole"),
    [
        ("abc", "abc"),
        ("äöü🦊", "äöü🦊"),
        ("a\ud83d", "a\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),  # two halves are one
        ({"\ud83d": ["\ud83d", {"a": ("\udc00", 1, None)}]}, {"\ufffd": ["\ufffd", {"a": ["\ufffd", 1, None]}]}),
        (3.5, 3.5),
    ],
)
def test_lone_surrogates_are_replaced_at_any_depth(value, whole):
    assert with_whole_characters(value) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_cut_to_its_tokens_and_says_how_much_is_missing(name):
    tokenizer = FAMILIES[name].tokenizer

    @settings(max_examples=20)
    @given(
        text=st.text(st.characters(codec="utf-8"), max_size=300) | st.sampled_from(["🦊" * 99, "a b " * 99, "\n" * 99])
    )
    def check(text: str) -> None:
        for most in (1, 3, 20, 60):
            cut = without_middle(tokenizer, text, most)
            if length(tokenizer, text) <= most:
                assert cut == text
                continue
            assert length(tokenizer, cut) <= most
            before, found, rest = cut.partition("\n[… ")
            assert text.startswith(before)
            if found:
                count, _, after = rest.partition(" characters left out …]\n")
                assert text.endswith(after)
                assert int(count.replace(",", "")) == len(text) - len(before) - len(after) > 0

    check()


def test_both_ends_of_a_long_text_are_kept_in_equal_parts():
    tokenizer = FAMILIES["smollm2"].tokenizer
    words = [f"w{i}" for i in range(10_000)]
    cut = without_middle(tokenizer, " ".join(words), 200)
    before, after = cut.split("\n[…")[0], cut.split("…]\n")[1]
    assert before.startswith("w0 w1 ") and after.endswith(" w9998 w9999")
    assert abs(length(tokenizer, before) - length(tokenizer, after)) <= 4
    assert 190 <= length(tokenizer, cut) <= 200


def test_a_megabyte_is_cut_before_it_is_tokenised(monkeypatch):
    tokenizer = FAMILIES["smollm2"].tokenizer
    longest = 0
    plain = type(tokenizer).__call__

    def call(self, text, **kwargs):
        nonlocal longest
        longest = max(longest, len(text))
        return plain(self, text, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    cut = without_middle(tokenizer, "word " * 1_000_000, 100)
    assert length(tokenizer, cut) <= 100
    assert longest < 10_000


def test_a_text_that_fits_is_the_same_object():
    tokenizer = FAMILIES["smollm2"].tokenizer
    text = "a" * 50
    assert without_middle(tokenizer, text, 60) is text
    assert without_middle(tokenizer, text, 50) is text


def test_a_tokenizer_that_tells_no_places_cuts_too():
    tokenizer = slow_tokenizer("")
    cut = without_middle(tokenizer, "abcdefgh" * 100, 70)
    assert cut.startswith("abcdefgh") and cut.endswith("abcdefgh") and "left out" in cut
    assert 60 <= length(tokenizer, cut) <= 70
