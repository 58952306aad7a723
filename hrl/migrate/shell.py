"""Read a launch script of a shell without running it: quotes, continuations, variables, arrays, simple conditions.

Nothing is executed. What only a shell could find out stays as it is written: a variable that the script does not set
(`$HOME`), the output of a command (`$(date)`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_PLAIN = re.compile(rf"\$({_NAME})")
_BRACED = re.compile(rf"\$\{{({_NAME}|\d+)(\[[@*]\])?(?:(:?[-=+?])(.*))?\}}", re.DOTALL)
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")")
_KEYWORDS = {"then", "do", "else", "fi", "done", "{", "}", "!", "time"}
_CONDITIONS = ("if", "elif", "and", "or")
"""`and` and `or` stand for `[ … ] &&` and `[ … ] ||`."""
_DECLARE = {"export", "local", "readonly", "declare", "typeset"}
_CASE, _PATTERNS, _ESAC = "case", "of", "esac"
"""`case … in`; `of` stands for the patterns of a branch, `a|b)`."""
_PROBE = re.compile(r"[$(`]+[^|&]*\btorch_npu\b[^|&]*&&\s*echo\s+\S+\s*\|\|\s*echo\s+(\w+)[)`]")
"""A command that asks whether there is an Ascend NPU, and what it says if there is none: hrl runs on none."""


@dataclass(frozen=True)
class Command:
    """A command of a script.

    Attributes:
        words: Its words, with variables put in.
        environment: Names of the variables that are set for it alone (`X=1 run …`, `env X=1 run …`).
        arguments: Arguments of the script, such as `$1` and `$@`, that its words are made with. They stand for nothing,
            and an option or a key that has nothing else for its value is left out.
        exported: Names of the variables that the script has exported before it.
        reads: Names of variables of the script that commands within its words read, as `$(dirname $X)` does.
    """

    words: list[str]
    environment: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


@dataclass
class _Reader:
    """A script being read.

    Attributes:
        variables: Name → words; a plain variable has one.
        made_with: Name → arguments of the script that its words are made with.
        arguments: Arguments of the script that were asked for since it was last emptied.
        exported: Names of exported variables.
        skipping: One entry for each `if` and `case` around: whether its present branch is left out, and whether one was
            taken.
        cases: What each `case` around compares with its patterns.
    """

    variables: dict[str, list[str]] = field(default_factory=dict)
    made_with: dict[str, list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    skipping: list[tuple[bool, bool]] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)


def commands_of(text: str) -> list[Command]:
    """Return every command of a script, with its variables put in, in order.

    Of a `case` and of a condition that compares texts or numbers the branch that holds is read, of any other the first.
    """
    reader, commands = _Reader(), []
    for statement in _statements(text):
        command = _run(statement, reader)
        if command is not None and command.words:
            commands.append(command)
    return commands


# ---------------------------------------------------------------------------------------------- statements


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the raw words of every simple command: quotes and variables as written."""
    text = re.sub(r"\\\r?\n", " ", text)
    heredocs: list[tuple[list[str], str]] = []
    statement: list[str] = []
    closes = False  # the statement stands behind `[ … ] &&`
    awaits: list[bool] = []  # of each `case` around, whether the patterns of a branch come next
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\n":
            if statement and not _is_open_array(statement):
                yield from _with_heredoc(statement, heredocs)
                statement = []
                if closes:
                    yield ["fi"]
                    closes = False
            at += 1
            if heredocs:
                at = _skip_heredocs(text, at, heredocs)
                for owner, _ in heredocs:
                    yield owner
                heredocs = []
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = _end(text, at, "\n")
        elif (operator := next((op for op in _OPERATORS if text.startswith(op, at)), None)) is not None:
            at += len(operator)
            if _is_open_array(statement):
                if operator == ")":
                    statement.append(")")
                continue
            if awaits and awaits[-1] and operator in ("(", "|", ")"):
                if operator == ")":
                    yield [_PATTERNS, *statement]
                    statement, awaits[-1] = [], False
                continue
            if statement and operator in ("&&", "||") and statement[0] in ("[", "[[", "test"):
                yield ["and" if operator == "&&" else "or", *statement]
                statement, closes = [], True
                continue
            if statement:
                yield from _with_heredoc(statement, heredocs)
                statement = []
            if closes and operator not in ("&&", "||"):
                yield ["fi"]
                closes = False
            if awaits and operator == ";;":
                awaits[-1] = True
            if operator == "|":
                statement = ["|"]
        else:
            word, at = _word(text, at)
            redirect = re.fullmatch(r"(\d*)(>>?|<)(&?)(.*)", word)
            if word.startswith("<<") and not word.startswith("<<<"):
                tag = word[2:].lstrip("-") or ""
                if not tag:
                    while at < len(text) and text[at] in " \t":
                        at += 1
                    tag, at = _word(text, at)
                statement.append(f"<<{tag.strip(chr(39) + chr(34))}")
            elif redirect and not redirect[4]:
                while at < len(text) and text[at] in " \t":
                    at += 1
                if not redirect[3]:
                    _, at = _word(text, at)
            elif not redirect:
                statement.append(word)
                if statement[0] == _CASE and word == "in" and len(statement) == 3:
                    yield statement
                    statement = []
                    awaits.append(True)
                elif awaits and statement == [_ESAC]:
                    yield statement
                    statement = []
                    awaits.pop()
    if statement:
        yield statement


def _with_heredoc(statement: list[str], heredocs: list[tuple[list[str], str]]) -> Iterator[list[str]]:
    tag = next((word[2:] for word in statement if word.startswith("<<") and not word.startswith("<<<")), None)
    if tag is None:
        yield statement
    else:
        statement[:] = [word for word in statement if word != f"<<{tag}"]
        heredocs.append((statement, tag))


def _skip_heredocs(text: str, at: int, heredocs: list[tuple[list[str], str]]) -> int:
    """Read the texts that the heredocs of a line stand for; `read … NAME` gets its own as the last word."""
    for owner, tag in heredocs:
        found = re.compile(rf"^\t*{re.escape(tag)}[ \t]*$", re.MULTILINE).search(text, at)
        end = len(text) if found is None else found.start()
        owner.append(f"\0{text[at:end]}")
        at = len(text) if found is None else found.end()
    return at


def _is_open_array(statement: list[str]) -> bool:
    opened = [place for place, word in enumerate(statement) if re.fullmatch(rf"{_NAME}\+?=\(", word)]
    return bool(opened) and ")" not in statement[opened[-1] :]


def _word(text: str, at: int) -> tuple[str, int]:
    """Return the raw word at a place, with its quotes, and where it ends."""
    start = at
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            at = _end(text, at + 1, "'") + 1
        elif char == '"':
            at = _end_of_double(text, at + 1)
        elif text.startswith(("$((", "$("), at):
            at = _closing(text, at + 1, "(", ")")
        elif text.startswith("${", at):
            at = _closing(text, at + 1, "{", "}")
        elif char == "`":
            at = _end(text, at + 1, "`") + 1
        elif char == "(" and re.fullmatch(rf"{_NAME}\+?=", text[start:at]):
            return text[start : at + 1], at + 1
        elif char in " \t\r\n;|()" or (char == "&" and text[at - 1 : at] not in ("<", ">")):
            break
        else:
            at += 1
    return text[start:at], max(at, start + 1)


def _end(text: str, at: int, char: str) -> int:
    found = text.find(char, at)
    return len(text) if found < 0 else found


def _end_of_double(text: str, at: int) -> int:
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    depth = 0
    while at < len(text):
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            break
    return at


# ---------------------------------------------------------------------------------------------- what they do


def _run(statement: list[str], reader: _Reader) -> Command | None:
    """Take a statement's assignments and conditions, and return its command, if it has one."""
    words = list(statement)
    while words and words[0] in (*_KEYWORDS, *_CONDITIONS, "|"):
        keyword = words.pop(0)
        if keyword in _CONDITIONS:
            _condition(keyword, words, reader)
            return None
        if keyword == "else" and reader.skipping:
            _, taken = reader.skipping[-1]
            reader.skipping[-1] = (taken, True)
        elif keyword == "fi" and reader.skipping:
            reader.skipping.pop()
    if words and words[0] in (_CASE, _PATTERNS, _ESAC):
        _case(words, reader)
        return None
    if any(skips for skips, _ in reader.skipping) or not words:
        return None
    if words[0] == "read" and words[-1].startswith("\0"):
        name = next((word for word in reversed(words[:-1]) if re.fullmatch(_NAME, word)), None)
        if name is not None:
            reader.arguments = []
            reader.variables[name] = [_text(words[-1][1:].strip(), reader)]
            reader.made_with[name] = list(reader.arguments)
        return None
    if words[0] == "export":
        reader.exported += [found[1] for word in words if (found := _ASSIGNMENT.fullmatch(word))]
    if words[0] in _DECLARE:
        words = [word for word in words[1:] if not word.startswith("-")]
    environment = []
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        name, adds, raw = found.groups()
        environment.append(name)
        reader.arguments = list(reader.made_with.get(name, [])) if adds else []
        if raw == "(":
            end = words.index(")") if ")" in words else len(words)
            values = [value for word in words[1:end] for value in _expand(word, reader)]
            del words[: end + 1]
        else:
            values = [_text(raw, reader)]
            del words[0]
        before = reader.variables.get(name, [])
        plain = adds and len(before) == 1 and raw != "("
        reader.variables[name] = [before[0] + values[0]] if plain else [*before, *values] if adds else values
        reader.made_with[name] = list(reader.arguments)
    if statement[0] in _DECLARE or not words:
        return None
    if words[0] == "env":
        environment += [found[1] for word in words[1:] if (found := _ASSIGNMENT.fullmatch(word))]
    reader.arguments = []
    expanded: list[str] = []
    for word in words:
        asked = len(reader.arguments)
        values = _expand(word, reader)
        is_gone = any(argument[1:].isdigit() for argument in reader.arguments[asked:])
        if is_gone and not values and expanded and expanded[-1].startswith("--"):
            expanded.pop()  # `--flag $1` without its value
        expanded += [value for value in values if not (is_gone and value.endswith("="))]  # nor `key=$1`
    within = [name for word in expanded if "$(" in word for name in re.findall(rf"\$\{{?({_NAME})", word)]
    return Command(
        expanded,
        environment,
        list(dict.fromkeys(reader.arguments)),
        list(dict.fromkeys(reader.exported)),
        [name for name in dict.fromkeys(within) if name in reader.variables],
    )


def _case(words: list[str], reader: _Reader) -> None:
    """Begin a `case`, decide about the branch whose patterns these are, or end it."""
    if words[0] == _CASE:
        reader.cases.append(_text(words[1], reader))
        reader.skipping.append((True, False))
    elif words[0] == _ESAC and reader.cases:
        reader.cases.pop()
        reader.skipping.pop()
    elif words[0] == _PATTERNS and reader.cases:
        _, taken = reader.skipping.pop()
        subject = reader.cases[-1]
        is_known = "$(" not in subject and "`" not in subject  # else the first branch is read, as of an `if`
        fits = not is_known or any(fnmatchcase(subject, _text(word, reader)) for word in words[1:])
        holds = fits and not taken and not any(skips for skips, _ in reader.skipping)
        reader.skipping.append((not holds, holds or taken))


def _condition(keyword: str, words: list[str], reader: _Reader) -> None:
    """Decide about the branch that begins here."""
    around = any(skips for skips, _ in reader.skipping[: -1 if keyword == "elif" else None])
    taken = keyword == "elif" and reader.skipping != [] and reader.skipping[-1][1]
    decided = _holds([value for word in words for value in _expand(word, reader) or [""]])
    if keyword == "or" and decided is not None:
        decided = not decided
    # What only a shell can find out is taken for true in an `if`, whose branches exclude each other, else for false.
    holds = not around and not taken and (keyword in ("if", "elif") if decided is None else decided)
    entry = (not holds, holds or taken)
    if keyword == "elif" and reader.skipping:
        reader.skipping[-1] = entry
    else:
        reader.skipping.append(entry)


def _holds(test: list[str]) -> bool | None:
    """Return whether a simple test holds; None where only a shell can tell."""
    inner = test[1:-1] if test[:1] in (["["], ["[["]) else test[1:] if test[:1] == ["test"] else None
    if inner is None or any("$(" in word or "`" in word for word in inner):
        return None
    if inner[:1] == ["!"]:
        found = _holds(["[", *inner[1:], "]"])
        return None if found is None else not found
    if len(inner) == 2 and inner[0] in ("-z", "-n"):
        return (inner[1] == "" or inner[1].startswith("$")) == (
            inner[0] == "-z"
        )  # a variable that nobody sets is empty
    if len(inner) == 3:
        one, operator, other = inner
        if operator in ("=", "==", "!="):
            return (one == other) == (operator != "!=")
        if one.lstrip("-").isdigit() and other.lstrip("-").isdigit():
            a, b = int(one), int(other)
            known = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}
            return known.get(operator)
    return None


# ---------------------------------------------------------------------------------------------- expansion


def _text(raw: str, reader: _Reader) -> str:
    """Return what a raw text stands for, as one word."""
    return " ".join(_pieces(raw, reader, splits=False))


def _expand(raw: str, reader: _Reader) -> list[str]:
    """Return the words that a raw word stands for: none, one, or those of an array or an unquoted variable."""
    return _pieces(raw, reader, splits=True)


def _pieces(raw: str, reader: _Reader, *, splits: bool) -> list[str]:
    words: list[str] = []
    current: str | None = None
    at = 0

    def add(values: list[str]) -> None:
        nonlocal current
        for place, value in enumerate(values):
            if place and current is not None:
                words.append(current)
                current = None
            current = (current or "") + value

    while at < len(raw):
        char = raw[at]
        if char == "\\":
            add([raw[at + 1 : at + 2]])
            at += 2
        elif char == "'":
            end = _end(raw, at + 1, "'")
            add([raw[at + 1 : end]])
            at = end + 1
        elif raw.startswith("$'", at):
            end = _end(raw, at + 2, "'")
            add([raw[at + 2 : end].encode().decode("unicode_escape")])
            at = end + 1
        elif char == '"':
            end = _end_of_double(raw, at + 1)
            inner = raw[at + 1 : end - 1]
            array = _BRACED.fullmatch(inner)
            if inner in ("$@", "${@}") or (array and array[2]):
                add(_variable(inner, reader))
            else:
                add(["".join(_quoted(inner, reader))])
            at = end
        elif char == "$" or char == "`":
            found, at = _dollar(raw, at, reader)
            add([piece for value in found for piece in (value.split() if splits and "$(" not in value else [value])])
        else:
            add([char])
            at += 1
    return words if current is None else [*words, current]


def _quoted(inner: str, reader: _Reader) -> Iterator[str]:
    """Yield the pieces of a text in double quotes."""
    at = 0
    while at < len(inner):
        if inner[at] == "\\" and inner[at + 1 : at + 2] in ('"', "$", "`", "\\"):
            yield inner[at + 1]
            at += 2
        elif inner[at] in "$`":
            found, at = _dollar(inner, at, reader)
            yield " ".join(found)
        else:
            yield inner[at]
            at += 1


def _dollar(text: str, at: int, reader: _Reader) -> tuple[list[str], int]:
    """Return what begins with a dollar sign or a backtick stands for, and where it ends."""
    if text.startswith("$((", at):
        end = _closing(text, at + 1, "(", ")")
        return [_arithmetic(text[at + 3 : end - 2], reader)], end
    if text.startswith("$(", at):
        end = _closing(text, at + 1, "(", ")")
    elif text[at] == "`":
        end = _end(text, at + 1, "`") + 1
    elif text.startswith("${", at):
        end = _closing(text, at + 1, "{", "}")
        found = _variable(text[at:end], reader)
        is_apart = not re.match(r"\w", text[end:])
        # Hydra takes `${…}` for a reference to a key.
        return [re.sub(rf"^\$\{{({_NAME})\}}$", r"$\1", value) for value in found] if is_apart else found, end
    elif plain := _PLAIN.match(text, at):
        return _variable(plain[0], reader), plain.end()
    elif text[at + 1 : at + 2] in ("@", "*") or text[at + 1 : at + 2].isdigit():
        reader.arguments.append(text[at : at + 2])
        return [], at + 2
    else:
        return [text[at]], at + 1
    if probe := _PROBE.fullmatch(text[at:end]):
        return [probe[1]], end
    return [text[at:end]], end  # the output of a command


def _variable(written: str, reader: _Reader) -> list[str]:
    """Return the words of a variable; as it is written if the script does not set it."""
    if written in ("$@", "${@}", "$*", "${*}"):
        reader.arguments.append(f"${written.strip('${}')}")
        return []
    found = _BRACED.fullmatch(written)
    name, _, operator, other = found.groups() if found is not None else (written.strip("${}"), None, None, None)
    reader.arguments += reader.made_with.get(name, [])
    if found is None:
        return reader.variables.get(name, [written])
    if name.isdigit() and not operator:
        reader.arguments.append(f"${name}")
        return []
    values = reader.variables.get(name)
    is_set = values is not None and (values != [""] or not (operator or "").startswith(":"))
    if operator and operator[-1] in "-=" and not is_set:
        values = [_text_of_default(other, reader)]
        if operator[-1] == "=":
            reader.variables[name] = values
    elif operator and operator[-1] == "+":
        values = [_text_of_default(other, reader)] if is_set else []
    return [written] if values is None else values


def _text_of_default(raw: str | None, reader: _Reader) -> str:
    return _text(raw or "", reader)


def _arithmetic(text: str, reader: _Reader) -> str:
    """Return the value of whole numbers added, subtracted, multiplied and divided; else the text."""
    names = re.sub(rf"\$?\{{?({_NAME})\}}?", lambda found: " ".join(reader.variables.get(found[1], [found[0]])), text)
    tokens = re.findall(r"\d+|[-+*/%()]", names)
    if "".join(tokens) != re.sub(r"\s", "", names):
        return f"$(({text}))"
    value, rest = _sum(tokens)
    return str(value) if not rest and value is not None else f"$(({text}))"


def _sum(tokens: list[str]) -> tuple[int | None, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        operator, (other, rest) = rest[0], _product(rest[1:])
        if value is None or other is None:
            return None, rest
        value = value + other if operator == "+" else value - other
    return value, rest


def _product(tokens: list[str]) -> tuple[int | None, list[str]]:
    value, rest = _factor(tokens)
    while rest and rest[0] in "*/%":
        operator, (other, rest) = rest[0], _factor(rest[1:])
        if value is None or other is None or (operator in "/%" and other == 0):
            return None, rest
        value = value * other if operator == "*" else value // other if operator == "/" else value % other
    return value, rest


def _factor(tokens: list[str]) -> tuple[int | None, list[str]]:
    if not tokens:
        return None, []
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        return value, rest[1:]
    if tokens[0] == "-":
        value, rest = _factor(tokens[1:])
        return (None if value is None else -value), rest
    return (int(tokens[0]), tokens[1:]) if tokens[0].isdigit() else (None, tokens[1:])
