"""Texts of strangers, made fit to be shown and stored."""

from __future__ import annotations


def without_middle(text: str, longest: int) -> str:
    """Return a text that is longer than so many characters without its middle, which it says."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def clean_text(text: str) -> str:
    """Return a text with U+FFFD for surrogates that stand alone, which are no characters and that nothing encodes."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
