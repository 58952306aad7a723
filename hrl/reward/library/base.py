"""What every function of the library has in common: checked arguments, readable text, an entry in the catalogue."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hrl.errors import HrlError

FAILURE = "failure"
"""Part with the reason why a function, such as a judge that got no answer, has no score. With a score of None beside it
the sample is left out, also where the function is one of a sum: a sum without one of its parts is another reward."""

Function = Callable[..., Any]
_ARGUMENT = re.compile(r"^(\w+): ", re.MULTILINE)


class ArgumentError(HrlError, ValueError):
    """A function of the library can't be made with these arguments."""


@dataclass(frozen=True)
class Argument:
    """A keyword argument of a function of the library.

    Attributes:
        name: Its name.
        default: Its default; `inspect.Parameter.empty` if it must be given.
        meaning: What it means, in a sentence or two.
    """

    name: str
    default: Any
    meaning: str

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Example:
    """One call of a function.

    Attributes:
        response: What the policy said.
        score: What it is worth; None if a sample like it is left out.
        row: The prompt's row: `prompt`, `answer`, and other columns.
        arguments: What the function is made with.
    """

    response: str
    score: float | None
    row: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CatalogueEntry:
    """A function of the library.

    Attributes:
        name: What it is called in `reward.functions`.
        rewards: What it rewards, in one sentence.
        make: Takes the arguments and returns the function.
        example: A call that shows it.
        scores: Its range, e.g. `0 or 1`.
        needs_answer: Compares with the row's answer.
        wrong: The reward of a response that it failed on.
        needs: Package that it imports, with the extra that installs it; empty if none.
    """

    name: str
    rewards: str
    make: Callable[..., Function]
    example: Example
    scores: str = "0 or 1"
    needs_answer: bool = False
    wrong: Any = 0.0
    needs: str = ""

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What it can be made with, read from the signature and the docstring of `make`."""
        meanings = _meanings(inspect.getdoc(self.make) or "")
        parameters = inspect.signature(self.make).parameters.values()
        return tuple(
            Argument(one.name, one.default, meanings[one.name]) for one in parameters if not one.name.startswith("_")
        )


def _meanings(docstring: str) -> dict[str, str]:
    """Return argument → meaning from the section `Args:` of a docstring."""
    _, _, after = docstring.partition("Args:\n")
    section = inspect.cleandoc(re.split(r"\n\s*\n", after, maxsplit=1)[0])
    pieces = _ARGUMENT.split(section)[1:]
    return {name: " ".join(text.split()) for name, text in zip(pieces[::2], pieces[1::2], strict=True)}


def text_of_turn(turn: Mapping[str, Any]) -> str:
    """Return the text of a message of a chat, with `<image>` and `<video>` where it shows one; other content as JSON.

    `hrl.data.chat.text_of` is stricter, and imports what most functions never need.
    """
    content = turn.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and {"text", "type"} & {*part} for part in content):
        return "".join(str(part["text"]) if "text" in part else f"<{part['type']}>" for part in content)
    return json.dumps({name: value for name, value in turn.items() if name != "role"}, default=str)


def readable(text: str) -> str:
    """Return a text with whatever UTF-8 can't hold (lone surrogates) replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """Return a text without space around it and without characters that nobody sees, such as spaces of no width."""
    return "".join(sign for sign in text if sign.isprintable() or sign.isspace()).strip()


def require(holds: bool, message: str) -> None:
    """Refuse arguments.

    Raises:
        ArgumentError: The condition doesn't hold.
    """
    if not holds:
        raise ArgumentError(message)
