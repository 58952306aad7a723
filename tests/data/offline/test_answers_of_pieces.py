"""However texts are cut and encoded, the tokens before a border are those that a sampler would be given."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.data.offline.answers import encode_pieces, passages_of_chat
from tests.data.conftest import make_tokenizer

PARTS = [*"a:(é🙂", " ", "  ", "\n", "\n\n", " b", "12", "<|start|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
TEXTS = st.lists(st.lists(st.sampled_from(PARTS), max_size=5).map("".join), min_size=1, max_size=5)


class Counting:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self, tokenizer, is_fast=True):
        self._tokenizer, self.is_fast, self.characters = tokenizer, is_fast, 0

    def __call__(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self._tokenizer(texts, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def merging():
    """Tokens with flags that move borders: one takes the spaces behind it, one those before it, one is no special."""
    from tokenizers import AddedToken

    tokenizer = make_tokenizer()
    tokenizer.add_tokens([":(", AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True)])
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False, lstrip=True)])
    return tokenizer


@pytest.mark.parametrize("name", ["tokenizer", "bundled", "merging"])
def test_one_encoding_gives_the_pieces_of_one_per_border(name, request):
    tokenizer = request.getfixturevalue(name)
    slow = Counting(tokenizer, is_fast=False)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=3))
    def check(rows):
        assert encode_pieces(tokenizer, rows) == encode_pieces(slow, rows)

    check()


@pytest.mark.parametrize("text", ["a \n\n", "a  ", "a ", "12", "é"])
def test_a_prompt_has_the_tokens_of_itself_alone_whatever_follows(bundled, text):
    for answer in ("b", " b", "\nb", "3"):
        ((prompt, _),) = encode_pieces(bundled, [[text, answer]])
        assert prompt == bundled(text)["input_ids"]


def test_special_tokens_that_a_tokenizer_adds_are_before_the_first_text():
    from tokenizers.processors import TemplateProcessing

    base = make_tokenizer(None)
    base.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 256)]
    )
    ids = base("ab", add_special_tokens=False)["input_ids"]
    assert encode_pieces(base, [["a", "b"], ["", "a"]]) == [[[256, ids[0]], [ids[1]]], [[256], [ids[0]]]]
    assert encode_pieces(base, []) == encode_pieces(make_tokenizer(), []) == []


def test_the_text_of_a_long_conversation_is_encoded_once(bundled):
    turn = [{"role": "user", "content": "why? " * 20}, {"role": "assistant", "content": "so " * 30}]
    texts = [passage.text for passage in passages_of_chat(bundled, turn * 20, 0, {})]
    counting = Counting(bundled)
    (pieces,) = encode_pieces(counting, [texts])
    whole, longest = "".join(texts), len(texts[0])
    assert counting.characters <= len(whole) + longest + len("<|im_start|>assistant\n")
    assert [token for piece in pieces for token in piece] == bundled(whole)["input_ids"]
    assert [bundled.decode(tokens) for tokens in pieces] == texts


def test_a_tokenizer_that_does_not_say_where_its_tokens_stand_is_asked_once_per_border(tokenizer):
    slow = Counting(tokenizer, is_fast=False)
    texts = ["<|start|>a", "b<|end|>", "c"]
    assert encode_pieces(slow, [texts]) == encode_pieces(tokenizer, [texts])
    assert slow.characters == sum(map(len, accumulate(texts)))
