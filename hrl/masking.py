"""What is a secret, by its name or by its value, and what stands in its place where something is written.

Everything that leaves the process goes through here: a configuration through `masked`, a text through `masked_text`.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any
from urllib.parse import quote

from hrl.secret_names import in_small_words, may_name_a_secret, names_a_secret

MASK = "<masked>"
"""What is written in place of a secret. A configuration that has it is refused: it was saved, and lacks what it had."""

_VARIABLE_NAMED = "env:"
_VARIABLES = "env_vars"
_VARIABLE = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|PRIVATE|SESSION|SIGNATURE|BEARER|WEBHOOK|JWT|APIKEY|ACCESSKEY|"
    r"CONNECTION_?STRING|(^|_)(AUTH|KEYS?|PAT|PASS|PWD|DSN)(_|$)",
    re.IGNORECASE,
)
_LOGIN = r"(?<=://)(?:[^/\s@'\"]+|[^/\s@:'\"\[]*:(?!\d+[/,])[^\s@'\"]{1,200})(?=@)"
"""Before the host of an address; a password may have a slash, which a port (`host:80/a@b`) has behind its digits."""
_WELL_KNOWN = (
    r"(?P<vague>\b(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,})|\bhf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{16,}|\bgithub_pat_\w+"
    r"|\bnpm_[A-Za-z0-9]{36}|\bglpat-[\w-]+|\bxox[a-z]-[\w-]+|\bAKIA[A-Z0-9]{12,}|\bAIza[A-Za-z0-9_-]{20,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[\w.-]*"
    r"|(?<=\bBearer )(?=\S*\d)[\w.~+/-]{8,}=*"
    r"|-----BEGIN (?:[\s\S]*?-----END [A-Z ]+-----|[\s\S]*)"
)
"""Forms of keys that services give out. A vague one begins as names of files and runs do, and counts where the rest
looks drawn by lot."""
_RUN = re.compile(r"[A-Za-z0-9]{16,}")
_LONG = 24
_RESTLESS = 0.4
"""Share of neighbours that are not of one kind (small letter, capital, digit). Among drawn characters it is 0.6, among
words and numbers below 0.2."""
_WRITTEN_OUT = re.compile(
    r"(?:password|passwd|pwd|token|secret|apikey|api_key|accountkey|sharedaccesskey|sig)=[^\s;&]", re.IGNORECASE
)
_PLACE_OR_LABEL = re.compile(r"(^|_)(path|dir|folder|files?|(experiment|project)_name)$", re.IGNORECASE)
"""Keys whose values are masked for a login alone: without them nothing is found again."""
_SECRET_ITSELF = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|SIGNATURE|BEARER|WEBHOOK(_URL)?|JWT|"
    r"CONNECTION_?STRING|(API|ACCESS|PRIVATE|SECRET|ACCOUNT)_?KEY|(^|_)(PAT|PASS|PWD|DSN))$",
    re.IGNORECASE,
)
"""Variables that hold a secret, rather than say where one is or how it is used (`VAULT_AUTH_METHOD`)."""
_WORDS_ALONE = re.compile(r"[A-Za-z]+(?:[-_. ][A-Za-z]+)*|\d+")
_PASSPHRASE = 16
"""Words of fewer characters than this are not replaced wherever they stand: `production` is part of many paths."""
_DRAWN_BY_LOT = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/=]{20,}|(?P<parted>[\w+/=.:~-]{20,})", re.ASCII)
_RESTLESS_UNDER_A_NAME = 0.3
"""The same share, where the name says already that the value may be a key."""
_FORMS = re.compile(rf"{_LOGIN}|{_WELL_KNOWN}")
_IN_ADDRESS = re.compile(
    r"([?&;](?:[\w.-]{0,60}(?:token|secret|passw(?:or)?d|signature|credential|api_?key|access_?key)|accountkey|sig|key|pwd)=)[^&\s'\"#;]+",
    re.IGNORECASE,
)
_NO_SECRETS = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})
_NAMED = re.compile(
    r"(?<![\w.-])(?P<option>--?)?(?P<name>[A-Za-z_][\w.-]{0,200})(?:\\?['\"]?\s?[=:]\s?|(?(option)[ \t](?!-)|(?!)))"
)
"""What stands before a value: `name=`, `name: `, `"name": `, `--name `."""
_VALUE = re.compile(
    r"[bru]?(?P<quote>\\?['\"])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\\\n]))+)"
    r"|(?P<several>[\[{(][^\]})\n]+)"
    r"|(?P<word>(?:(?:Bearer|Basic|Token|ApiKey)\s+)?(?![\[{(])[^\s'\",;&}\])]+)",
    re.IGNORECASE,
)
"""What stands behind a name: in quotes or brackets to their end, else a word, or two where the first is a scheme of
HTTP."""
_GLANCE = 64
"""Characters of a value that show whether it is a secret. Only of a secret all is read: texts are long."""
_SHORTEST = 8
"""A shorter text than this is not replaced wherever it stands: it would be found in words that say something else."""


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether an environment variable looks like a secret.

    It does by its name (token, key, password, …) or by its value (an address with a login, a key in one of the
    well-known forms).
    """
    return name not in _NO_SECRETS and bool(_VARIABLE.search(name) or _shows_a_secret(value))


def is_written_secret(name: str, value: object) -> bool:
    """Return whether an argument of a function has a secret for its value, rather than `env:NAME`.

    Args:
        name: Of the argument.
        value: Its value; only a text can be one.
    """
    if not isinstance(value, str) or not value or value.startswith(_VARIABLE_NAMED):
        return False
    return _is_secret_under(name, value) or _shows_a_secret(value)


def masked(tree: Any, names: Collection[str] = ()) -> Any:
    """Return nested plain data with `MASK` in place of every secret, and remember these for `masked_text`.

    A value is a secret by its name (`api_key`, `bot_token`, `password`, …; also `key` and `token` if the value looks
    drawn by lot; below `env_vars` as the environment's variables are), by its form (keys of well-known services), or
    because a pattern names it. Of an address with a login only the login is masked, and of paths and labels (`*_dir`,
    `*_files`, `experiment_name`, …) nothing else. `env:NAME` is no secret; the value of the variable that it names is
    one in texts.

    Args:
        tree: A dict of dicts and lists.
        names: Patterns such as `*webhook*` or `reward.*.customer`, for the last part of a key or for all of it.
    """
    return _masked(tree, (), tuple(pattern.lower() for pattern in names))


def _masked(value: Any, path: tuple[str, ...], patterns: tuple[str, ...]) -> Any:
    is_variable = bool(path) and isinstance(value, str) and _is_variable(path)
    if path and (_is_named(path, patterns) or (not is_variable and names_a_secret(".".join(path)))):
        return _all_masked(value)
    if isinstance(value, Mapping):
        return {name: _masked(item, (*path, str(name)), patterns) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, path, patterns) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(_VARIABLE_NAMED):
        remember(os.environ.get(value.removeprefix(_VARIABLE_NAMED), ""))
        return value
    if is_variable and is_secret_variable(path[-1], value):
        # An ordinary word says something else elsewhere.
        return _all_masked(value) if _is_found_by_itself(path[-1], value) else MASK
    if path and not is_variable and _is_secret_under(".".join(path), value):
        return MASK if _is_word(value) else _all_masked(value)
    if path and _PLACE_OR_LABEL.search(in_small_words(path[-1])):
        return _without_keys_of_addresses(re.sub(_LOGIN, MASK, value))
    return _without_known_forms(value)


def _all_masked(value: Any) -> Any:
    """Return a value whose every text and number is a secret: by name it is, whatever its form."""
    if isinstance(value, Mapping):
        return {name: _all_masked(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_all_masked(item) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if isinstance(value, str) and value.startswith(_VARIABLE_NAMED):
        remember(os.environ.get(value.removeprefix(_VARIABLE_NAMED), ""))
        return value
    remember(str(value))
    return MASK


def _is_named(path: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    whole, last = ".".join(path).lower(), path[-1].lower().rpartition(".")[2]
    return any(fnmatch.fnmatchcase(whole, pattern) or fnmatch.fnmatchcase(last, pattern) for pattern in patterns)


def _is_variable(path: tuple[str, ...]) -> bool:
    """Return whether a key is that of a variable of an environment, as in Ray's `runtime_env`."""
    return path[-1].isupper() or _VARIABLES in path[:-1]


def _is_secret_under(name: str, value: str) -> bool:
    return names_a_secret(name, value) or (may_name_a_secret(name) and _is_drawn(value))


def _shows_a_secret(value: str) -> bool:
    return _WRITTEN_OUT.search(value) is not None or any(map(_is_key, _FORMS.finditer(value)))


def _is_key(found: re.Match[str]) -> bool:
    return found["vague"] is None or _looks_drawn(found["vague"])


def _is_drawn(value: str) -> bool:
    """Return whether a whole value looks drawn by lot; `secrets.token_urlsafe` draws `-` and `_` too."""
    found = _DRAWN_BY_LOT.fullmatch(value)
    return found is not None and (found["parted"] is None or _restlessness(value) >= _RESTLESS_UNDER_A_NAME)


def _looks_drawn(text: str) -> bool:
    """Return whether a text was drawn by lot, rather than put together from words and numbers."""
    if any(not run.isalpha() and not run.isdigit() for run in _RUN.findall(text)):
        return True
    return sum(map(str.isalnum, text)) >= _LONG and _restlessness(text) >= _RESTLESS


def _restlessness(text: str) -> float:
    kinds = [(each.isdigit(), each.isupper()) for each in text if each.isalnum()]
    return sum(one != other for one, other in pairwise(kinds)) / max(1, len(kinds) - 1)


def is_masked(value: object) -> bool:
    """Return whether a text is one that `masked` has changed."""
    return isinstance(value, str) and MASK in value


# ---------------------------------------------------------------------- texts

_remembered: set[str] = set()


def remember(*values: str) -> None:
    """Have `masked_text` replace these texts too, in this process, wherever they stand and however they are quoted."""
    for value in values:
        if len(value) >= _SHORTEST and value != MASK:
            _remembered.update((value, json.dumps(value)[1:-1], repr(value)[1:-1], _in_address(value)))
            _pattern.cache_clear()


def _in_address(value: str) -> str:
    """Return a text as an address has it; one that was no UTF-8 with the bytes that it had."""
    try:
        return quote(value, safe="", errors="surrogateescape")
    except UnicodeEncodeError:  # half a pair, as JSON can write one
        return quote(value, safe="", errors="surrogatepass")


def remember_environment(environ: Mapping[str, str] | None = None) -> None:
    """Have `masked_text` replace the values of variables that look like secrets, but not ordinary words and paths."""
    remember(*_secret_values(os.environ if environ is None else environ))


def _secret_values(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if is_secret_variable(name, value):
            logins = re.findall(_LOGIN, value)
            yield from logins or ([value] if _is_found_by_itself(name, value) else [])


def _is_found_by_itself(name: str, value: str) -> bool:
    """Return whether a variable's value is a secret wherever it stands.

    A profile, a method, or a socket for logins has a name like a secret, and a value that is a word or a path.
    """
    if value.startswith(("/", "~", "./")):
        return False
    if _looks_drawn(value) or _shows_a_secret(value):
        return True
    if not _SECRET_ITSELF.search(name):
        return False
    return not _is_word(value)


def _is_word(value: str) -> bool:
    return _WORDS_ALONE.fullmatch(value) is not None and (len(value) < _PASSPHRASE or "." in value)


def remember_arguments(arguments: Iterable[str]) -> None:
    """Have `masked_text` replace the secrets among `key=value` arguments, which messages may repeat."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        _masked(value, tuple(key.lstrip("+").split(".")), ())
        remember(*(value[begin:end] for begin, end in _assigned_secrets(value)))


def _assigned_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of every value in a text that stands behind the name of a secret."""
    at = 0
    while named := _NAMED.search(text, at):
        at = named.end()
        glance = _VALUE.match(text, at, at + _GLANCE)
        if glance and _is_secret_under(named["name"], glance[str(glance.lastgroup)]):
            found = _VALUE.match(text, at) or glance
            begin, at = found.span(str(found.lastgroup))
            if not text.startswith((_VARIABLE_NAMED, MASK), begin):
                yield begin, at


def begin_masking(arguments: Iterable[str]) -> None:
    """Know the secrets of this process's environment and command line, and mask them in tracebacks that end it.

    Args:
        arguments: Of the command line.
    """
    remember_environment()
    remember_arguments(arguments)
    if sys.excepthook is sys.__excepthook__:  # Ray's calls the one that it finds
        sys.excepthook = _show_masked
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _show_masked_of_thread


def _show_masked(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    sys.stderr.write(masked_text("".join(traceback.format_exception(kind, error, where))))


def _show_masked_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit and ended.exc_value is not None:
        name = ended.thread.name if ended.thread else ended.exc_type.__name__
        sys.stderr.write(f"Exception in thread {name}:\n")
        _show_masked(ended.exc_type, ended.exc_value, ended.exc_traceback)


def masked_text(text: str) -> str:
    """Return a text with `MASK` in place of what looks like a secret, or is remembered as one."""
    text, parts, done = _without_known_forms(text), [], 0
    for begin, end in _assigned_secrets(text):
        parts += [text[done:begin], MASK]
        done = end
    return "".join([*parts, text[done:]])


def _without_known_forms(text: str) -> str:
    if _remembered:
        text = _pattern().sub(MASK, text)
    return _without_keys_of_addresses(_FORMS.sub(lambda found: MASK if _is_key(found) else found[0], text))


def _without_keys_of_addresses(text: str) -> str:
    return _IN_ADDRESS.sub(rf"\1{MASK}", text)


@functools.cache
def _pattern() -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(_remembered, key=len, reverse=True))))
