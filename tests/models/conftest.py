"""The tokenizer that the tests of the data have."""

from tests.data.conftest import tokenizer, tokenizer_with

__all__ = ["tokenizer", "tokenizer_with"]
