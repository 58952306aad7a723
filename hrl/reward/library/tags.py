"""The format of reasoning models: `<think>…</think><answer>…</answer>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hrl.reward.library.base import require, visible


class Tags:
    """Pays 1 for a response that is nothing but these tags, once each, in order, with something in them.

    The format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2). With `partial`, k of n tags in order (once each,
    with something in them) give k / (n + 1), and the rest is for nothing standing outside of them: a small model that
    never writes the whole format by itself finds its way there. Empty tags, and tags written twice, pay nothing.

    Args:
        tags: Names of the tags, in order.
        partial: Whether a part of the format is paid for.
        opened: Whether the prompt ends with the first opening tag, as some chat templates do.
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), partial: bool = False, opened: bool = False) -> None:
        names = [tags] if isinstance(tags, str) else list(tags)
        require(bool(names), "tags is empty")
        for name in names:
            require(re.fullmatch(r"[A-Za-z][\w-]*", name) is not None, f"tag {name!r} is not a name")
        require(len(set(names)) == len(names), f"tags has a name twice: {names}")
        self._names, self._partial, self._opened = names, partial, opened

    def __call__(self, response: str) -> float:
        """Return 0 to 1."""
        text = f"<{self._names[0]}>{response}" if self._opened else response
        marks = [mark for name in self._names for mark in (f"<{name}>", f"</{name}>")]
        good, outside, position = 0, [], 0
        for start, end in zip(marks[::2], marks[1::2], strict=True):
            first, last = text.find(start, position), text.find(end, position)
            once = text.count(start) == 1 == text.count(end)
            inside = text[first + len(start) : last] if once and 0 <= first < last else ""
            if not visible(inside) or any(mark in inside for mark in marks):
                continue
            good += 1
            outside.append(text[position:first])
            position = last + len(end)
        outside.append(text[position:])
        is_whole = good == len(self._names) and not any(part.strip() for part in outside)
        if not self._partial:
            return float(is_whole)
        return (good + is_whole) / (len(self._names) + 1)
