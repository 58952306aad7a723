"""Whether a chat template writes a turn as the policy wrote it, or drops and rewrites what was said."""

from __future__ import annotations

import json

_DECODER = json.JSONDecoder()
_MOST_ATTEMPTS = 200
"""Braces of a text that are tried as the beginning of JSON; what is nested deeply is read anew for each."""


def says_the_same(sampled: str, rendered: str) -> bool:
    """Return whether two texts of a turn differ in white space and in the layout of JSON objects at most.

    Templates trim what they are given, and write the arguments of a tool call anew: with other spaces, escapes or order
    of keys. A model that reads either reads the same turn. Anything else that differs, such as reasoning that is left
    out, is another turn.
    """
    if _squashed(sampled) == _squashed(rendered):
        return True
    if "{" not in sampled or "{" not in rendered:
        return False
    return _squashed(_with_plain_json(sampled)) == _squashed(_with_plain_json(rendered))


def _squashed(text: str) -> str:
    return "".join(text.split())


def _with_plain_json(text: str) -> str:
    """Return a text with every JSON object in it laid out in one way."""
    pieces = []
    done = 0
    at = text.find("{")
    for _ in range(_MOST_ATTEMPTS):
        if at < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, at)
            plain = json.dumps(value, ensure_ascii=False, sort_keys=True)
        except (ValueError, RecursionError):  # also of a number of thousands of digits
            at = text.find("{", at + 1)
            continue
        pieces += [text[done:at], plain]
        done = end
        at = text.find("{", end)
    return "".join([*pieces, text[done:]])
