"""Find the final answer in a response: a box, `#### …`, a sentence such as "The answer is …", or an answer tag.

Text in a closed thinking block is ignored, and a response whose thinking never ends has no final answer. All explicit
answers are returned, because scorers give a reward only if every one is right: boxing or naming several candidates
earns nothing, while the same answer twice counts as one.
"""

from __future__ import annotations

import re

_THINKING = re.compile(r"<(/?)(?:think|thinking)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|[ \t]+(?=[-\\\d]))")
_HASHES = re.compile(r"####[ \t]*([^\n#]*)")
_MARKER = re.compile(
    r"(?<!\bwrong\s)(?<!\bincorrect\s)\b(?:final\s+(?:answer|result|number|value)|(?:correct\s+|right\s+)?answer|solution\s+is(?=\s*[:$\d\\-]))\b"
    r"[^.:=?!\n]{0,80}?(?:\bis(?:\s+equal\s+to)?\b|\bequals\b|:|=)",
    re.IGNORECASE,
)
_HEADING = re.compile(r"^[ \t#*_>]*(?:final\s+)?answer[ \t*_]*$", re.IGNORECASE | re.MULTILINE)
_DECORATION = " \t\r\n*_`>\"'"
_MINUS_SIGNS = str.maketrans(dict.fromkeys("−﹣－", "-"))
_FREE_EN_DASH = re.compile(r"(?<![0-9A-Za-z)])–(?=[0-9])")
_BULLET = re.compile(r"[ \t]*\n\s*[-•][ \t]+(?=\S)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_ANOTHER = re.compile(r"[\s*_]*(?:,|;|/|\bor\b|\band\b)[\s*_]*(?:or\b|and\b)?[\s*_]*(?=\$|\\\(|\\\[|[-+]?\d)")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*|\")|;\s|\n|,\s+(?=[a-zA-Z])|\s(?=because|since|so that|\()")
_VALUE = re.compile(
    r"[-+(\[{|√π∞$€£¥]*[-+]?\.?\d|[-+(\[{|]*\\[a-zA-Z({\[]|(?!(?:the|my|our|a|so|thus)\Z)\S{1,40}\Z|[a-zA-Z](?:\([a-zA-Z]\))?\s*(?:[-+*/^=<>]|\\)",
    re.IGNORECASE,
)
"""The beginning of a value: a number, LaTeX, one word, or a variable in a formula, unlike that of a sentence."""
_LONGEST_TEXT = 50_000
_LONGEST_STATEMENT = 300
_MOST_ANSWERS = 8
"""Number of different answers that are enough to look at; several are wrong unless all are right."""


def after_thinking(text: str) -> str:
    """Return the text after the last closed thinking block, at most its last `_LONGEST_TEXT` characters.

    Empty if a thinking block is still open.
    """
    start, is_open = 0, False
    for tag in _THINKING.finditer(text):
        is_open = not tag.group(1)
        if not is_open:
            start = tag.end()
    return "" if is_open else text[max(start, len(text) - _LONGEST_TEXT) :]


def boxed_answers(text: str) -> tuple[str, ...]:
    r"""Return the contents of `\boxed{…}` and `\fbox{…}`, without duplicates; an empty one only if all are empty.

    A box inside a box counts once. A brace that never closes makes no box.
    """
    found: list[str] = []
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        position = match.end()
        if not match.group().endswith("{"):  # `\boxed 12$`
            content = re.split(r"[$\s]", text[position : position + _LONGEST_STATEMENT], maxsplit=1)[0]
        else:
            end = _closing_brace(text, position)
            if end is None:
                break  # everything after it is inside the open brace
            content, position = text[match.end() : end], end + 1
            inner = _BOX.match(content.strip())
            if inner is not None and content.strip().endswith("}"):
                content = content.strip()[inner.end() : -1]
        found.append(content.strip())
    return _distinct([content for content in found if content] or found)


def hashed_answers(text: str) -> tuple[str, ...]:
    """Return the texts after `####` on their lines, without duplicates."""
    return _distinct([match.group(1).strip(_DECORATION) for match in _HASHES.finditer(text)])


def tagged_answers(text: str) -> tuple[str, ...]:
    """Return the contents of `<answer>…</answer>`, without duplicates."""
    parts = text.split("<answer>")[1:]
    return _distinct([part.partition("</answer>")[0].strip() for part in parts if "</answer>" in part])


def stated_answers(text: str) -> tuple[str, ...]:
    """Return the answers stated in sentences and headings: "The final answer is $12$.", "**Answer:** 12", not "= 12".

    Several values named as one answer, "12 or 13", are returned as one text, which equals neither.
    """
    markers = sorted(
        [(match.start(), match.end()) for match in _MARKER.finditer(text)]
        + [(match.start(), match.end()) for match in _HEADING.finditer(text)]
    )
    ends = [*(start for start, _ in markers[1:]), len(text)]
    stated = (
        _first_value(text[start : max(start, min(end, start + _LONGEST_STATEMENT))])
        for (_, start), end in zip(markers, ends, strict=False)
    )
    return _distinct([value for value in stated if value])


def explicit_answers(text: str) -> tuple[str, ...]:
    """Return all explicit answers of `text`: boxes, and statements after the last box."""
    boxes = boxed_answers(text)
    if not boxes:
        return stated_answers(text)
    behind = text[max(text.rfind("\\boxed"), text.rfind("\\fbox")) :]
    return _distinct([*boxes, *stated_answers(behind)])


def sides_of(answer: str) -> tuple[str, ...]:
    """Return the sides of a chain of equations that claim to be the answer: `x = 1 + 2 = 3` gives `1 + 2` and `3`.

    A first side with a name in it is not an answer but tells what the answer stands for.
    """
    sides = [side.strip() for side in re.split(r"(?<![<>!\\])=", answer)]
    if len(sides) > 1 and re.search(r"[A-Za-z]", re.sub(r"\\(?:d|t)?frac|\\sqrt|\\left|\\right", "", sides[0])):
        sides = sides[1:]
    return tuple(sides)


def ascii_minus(text: str) -> str:
    """Return a text in which every sign for minus is a hyphen; an en dash is one in front of a number that stands free.

    Without this, `−12` would be read as the number 12 behind some sign.
    """
    return _FREE_EN_DASH.sub("-", text.translate(_MINUS_SIGNS))


def _closing_brace(text: str, position: int) -> int | None:
    depth = 1
    for match in _BRACE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _first_value(statement: str) -> str:
    """Return the value at the beginning of a statement; empty if it begins with words."""
    statement = _BULLET.sub("\n", statement, count=1) if _BULLET.match(statement) else statement
    leading = statement[: len(statement) - len(statement.lstrip(_DECORATION + ":="))]
    relation = leading.rfind(">") if "\n" not in leading else -1  # behind a line's end it is Markdown's quotation mark
    statement = statement[max(relation, 0) :] if relation >= 0 else statement[len(leading) :]
    statement = re.sub(r"^(?:equal to|approximately|about|indeed|simply|just|therefore)\s+", "", statement)
    if statement.startswith(("\\boxed", "\\fbox")):
        return ""
    math = _MATH.match(statement)
    if math is not None and not re.match(r"\$\s?\d[\d,.]*\s", statement):
        inside = next(group for group in math.groups() if group is not None)
        if boxed_answers(inside):
            return ""
        if _ANOTHER.match(statement, math.end()):
            return statement.split("\n", 1)[0]
        return inside.strip()
    end = _SENTENCE_END.search(statement)
    value = (statement if end is None else statement[: end.start()]).rstrip(_DECORATION)
    return value if _VALUE.match(value) else ""


def _distinct(values: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))[:_MOST_ANSWERS]


def sentences(text: str) -> list[str]:
    """Return the sentences and lines of `text`, each with its own end mark."""
    return [part for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]
