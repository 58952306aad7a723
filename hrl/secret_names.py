"""Which names tell that a value is a secret: arguments of functions, keys of a configuration, parts of a text."""

from __future__ import annotations

import functools
import re

_WHATEVER_IT_IS = re.compile(
    r"(^|_)secrets?\d*(_|$)|passw(or)?d|passphrase|credential"
    r"|(api|access|private|account|auth|bearer|client|hf|hub|refresh|secret|session|signing)_?(key|token)s?\d*(_|$)"
    r"|(^|_)(authorization|bearer|jwt|webhook(_url)?)$"
)
_SAYS_WHERE_OR_HOW = re.compile(r"_(dir|env|files?|folder|header|length|method|name|path|profile|type|var|variable)$")
"""Endings of names such as `api_key_env` and `password_file`, under which no secret stands."""
_KIND = re.compile(r"(?:(?P<of>[a-z]+)\d*_)(?P<kind>key|token|pass|pwd)(_?\d+|_value|_string)*$")
_OF_DATA = re.compile(
    # columns and parts of rows
    "answer|audio|chosen|column|completion|context|data|dataset|example|extra|feature|field|fn|format|gold|ground|group|"
    "image|input|item|label|margin|messages?|meta|metadata|output|problem|prompt|question|reference|rejected|response|"
    "reward|row|sample|score|solution|source|target|teacher|text|truth|video|"
    # what a tokenizer calls its own
    "assistant|begin|bos|cls|decoder|end|eo[st]|first|last|mask|next|pad|padding|reasoning|sentinel|sep|special|start|"
    "step|stop|think|thinking|unk|unknown|vision|"
    # dictionaries and files
    "cache|config|dict|foreign|hash|hashing|index|join|json|lookup|map|model|new|old|order|partition|primary|public|"
    "sort|weight|"
    # how many, and which time
    "all|any|backward|by|each|every|forward|is|max|may|min|multi|no?|num|of|one|per|second|single|total|two"
)
"""What a `_key`, `_token` or `_pass` may be of without being a secret: `prompt_key`, `pad_token`, `per_token`."""
_COLUMN = re.compile(r"[a-z]+([_.][a-z]+)*")
_NO_TEXT = re.compile(r"[\d.,+-]*|none|null|true|false", re.IGNORECASE)
_IN_PART = re.compile(r"(^|_)(keys?|tokens?|secrets?|pass\w*|pwd|credentials?|auth|signature|cookie|pat|dsn)\d*(_|$)")
_PATTERNS_OF_NAMES = "trainer.secrets"
_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")


def names_a_secret(name: str, value: str | None = None) -> bool:
    """Return whether what stands under a name is a secret.

    Names with the words password, secret, credential, `api_key`, `auth_token` and their like say so whatever the value
    is. Names that end in key, token or pass (`openai_key`, `bot_token`, `db_pass`) say so of a text, unless it is of
    data (`prompt_key`, `pad_token`) or, under a key, the name of a column (`subject_key: topic`).

    Args:
        name: Such as `api_key`, `X-Api-Key` or `reward.kwargs.apiKey`.
        value: Under that name; None for one that is no text.
    """
    if name.endswith(_PATTERNS_OF_NAMES):
        return False
    words = in_small_words(name)
    if _WHATEVER_IT_IS.search(words):
        return _SAYS_WHERE_OR_HOW.search(words) is None
    ending = _KIND.search(words)
    if ending is None or value is None or _OF_DATA.fullmatch(ending["of"]) or _NO_TEXT.fullmatch(value):
        return False
    return ending["kind"] != "key" or _COLUMN.fullmatch(value) is None


def may_name_a_secret(name: str) -> bool:
    """Return whether a name has a word such as key or token, so that its value is a secret if it looks like one."""
    return _IN_PART.search(in_small_words(name)) is not None


@functools.lru_cache(4096)
def in_small_words(name: str) -> str:
    """Return the last part of a name such as `a.X-Api-Key` or `apiKey` as `api_key`."""
    return "_".join(part.lower() for part in _BETWEEN_WORDS.split(name.rpartition(".")[2]) if part)
