"""An answer as it grows: what is done for a token does not depend on how many there were before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hrl.serve.answers import Form
from hrl.serve.policy import Context, GrowingChoice
from hrl.serve.sessions import Conversation
from tests.serve.doors import tokenizer_with_merges


class _Looked(list[Any]):
    """Counts the items that are looked at."""

    count = 0

    def __iter__(self) -> Any:
        self.count += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.count += len(found) if isinstance(place, slice) else 1
        return found


class _Decoding(PreTrainedTokenizerFast):
    """Counts the tokens that become text."""

    count = 0

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        type(self).count += len(token_ids)
        return str(super().decode(token_ids, **kwargs))


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_of_twice_the_tokens_is_twice_the_work(is_chat: bool):
    tokenizer = tokenizer_with_merges()
    tokenizer.__class__ = _Decoding
    form = Form("tiny", is_chat, log_probs=True, token_ids=True)

    def work(count: int) -> tuple[int, int]:
        growing = GrowingChoice(tokenizer, Context([1], Conversation()), log_probs=True)
        growing._pieces = pieces = _Looked()
        growing.choice = replace(growing.choice, pieces=pieces)
        _Decoding.count = shown = 0
        for token in range(count):
            can_show = growing.add([40 + token % 20], [-0.5])
            form.piece(0, growing.choice, shown, can_show)
            shown = can_show
        assert shown == count
        return pieces.count, _Decoding.count

    once, twice = work(100), work(200)
    assert twice[0] == 2 * once[0] and twice[1] <= 2 * once[1] + 2
