"""Whether a response is in the language that is wanted."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hrl.reward.library.base import readable, require
from hrl.reward.scorers.final_answer import sentences

_NOT_WORDS = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$[^$\n]*\$|\\[A-Za-z]+|<[^<>\n]*>|https?://\S+", re.DOTALL)
_CJK_END = re.compile("[。！？]")
_LONGEST_TEXT = 20_000
_MOST_SENTENCES = 200


class Language:
    """Pays the share of a response that is in a language, counted in letters.

    The language consistency reward of DeepSeek-R1 (arXiv:2501.12948, section 2.3.2), with the language of each sentence
    told by py3langid (Lui and Baldwin 2012). Code, formulas, tags and addresses don't count; of a response without
    words nothing is in any language, so it gets 0. A sentence of two or three words may be taken for one of a related
    language: `among` leaves fewer to confuse.

    Args:
        language: The language wanted, as a two-letter code (ISO 639-1), e.g. `de`.
        among: The languages that may occur, with the one wanted; all 97 that py3langid knows if None.
    """

    def __init__(self, language: str = "en", among: Sequence[str] | None = None) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
        known = sorted(self._identifier.labels)
        wanted = [language, *(among or ())]
        for code in wanted:
            require(code in known, f"language {code!r} is not known; there are {', '.join(known)}")
        if among is not None:
            require(len(set(wanted)) > 1, "among names no other language")
            self._identifier.set_languages(sorted(set(wanted)))
        self._language = language

    def __call__(self, response: str) -> float:
        """Return 0 to 1."""
        text = _NOT_WORDS.sub(" ", readable(response[:_LONGEST_TEXT]))
        letters = right = 0
        for sentence in sentences(_CJK_END.sub(r"\g<0> ", text))[:_MOST_SENTENCES]:
            number = sum(sign.isalpha() for sign in sentence)
            if number:
                letters += number
                right += number * (self._identifier.classify(sentence)[0] == self._language)
        return right / letters if letters else 0.0
