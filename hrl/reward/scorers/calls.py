"""What runs in the sandboxes of a trial: a program of the policy's, and in another process the tests that call it.

Its text is sent there, so it imports little, and nothing of hrl. The two processes share one line each way: the tests
send calls, and the program's process answers with plain data (numbers, texts, lists and their like), or with the number
of an object that it keeps. So no code of the program runs where results are compared, and it never sees what is
expected: it can say what it likes, and only the right answer is right.
"""

from __future__ import annotations

import _ast
import builtins
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`, which takes a while
    from collections.abc import Callable, Iterator
    from typing import IO, Any

MODULES = (
    *("typing", "json", "sys", "io", "operator", "functools", "itertools", "statistics", "random", "math", "copy"),
    *("bisect", "heapq", "collections", "datetime", "re", "string"),
)
"""Modules that a program finds by name, and whose names it finds, the first one's before others': as data sets of
programs expect. `List[int]` stands in many answers, and its import in few."""
_LONGEST_LINE = 16 << 20
_MOST_ITEMS = 1_000_000
_SMALL = 1 << 60
_SHOWN = 120


class GoneError(BaseException):
    """The program's process has ended, or does not speak as it should; no test that awaits an exception awaits this."""


# ---- plain data --------------------------------------------------------------------------------------------------


def pack(value: Any, keep: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a value as JSON can hold it; every object of that JSON has one name, which says what it stands for.

    Args:
        value: Anything.
        keep: Returns what stands for a value that is no plain data.
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if -_SMALL < value < _SMALL else {"int": f"{int(value):x}"}
    if isinstance(value, list):
        return [pack(one, keep) for one in value]
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(one, keep)] for key, one in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(one, keep) for one in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return keep(value)


def unpack(packed: Any, find: Callable[[str, Any], Any]) -> Any:
    """Return the value that was packed.

    Args:
        packed: Of `pack`.
        find: Returns what stands for something that was no plain data.
    """
    if isinstance(packed, list):
        return [unpack(one, find) for one in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind == "int":
        return int(held, 16)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "complex":
        return complex(*held)
    if kind == "dict":
        return {unpack(key, find): unpack(one, find) for key, one in held}
    if kind in ("tuple", "set", "frozenset"):
        return getattr(builtins, kind)(unpack(one, find) for one in held)
    return find(kind, held)


# ---- code --------------------------------------------------------------------------------------------------------


def nodes_of(tree: Any) -> Iterator[Any]:
    """Yield all nodes of a syntax tree."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for field in node._fields:
            held = getattr(node, field, None)
            todo.extend(one for one in (held if isinstance(held, list) else [held]) if isinstance(one, _ast.AST))


def names_used(tree: Any) -> set[str]:
    """Return the names that are read in a piece of code, and are none of Python's own."""
    read = {node.id for node in nodes_of(tree) if isinstance(node, _ast.Name) and isinstance(node.ctx, _ast.Load)}
    return read - vars(builtins).keys()


def parsed(code: str, title: str) -> Any:
    """Return the syntax tree of a piece of code."""
    return compile(code, title, "exec", _ast.PyCF_ONLY_AST)


def execute(program: str, name: str) -> dict[str, Any]:
    """Run a program, and return its names.

    Args:
        program: Its text.
        name: What it finds as `__name__`.
    """
    tree = parsed(program, "<program>")
    sys.modules[name] = module = type(sys)(name)
    names = vars(module)
    lacking = names_used(tree)
    for node in nodes_of(tree):
        made = (getattr(node, field, None) for field in ("name", "asname", "arg"))
        lacking.difference_update(one for one in made if isinstance(one, str))
        if isinstance(node, _ast.Name) and not isinstance(node.ctx, _ast.Load):
            lacking.discard(node.id)
    for known in MODULES:
        if not lacking:
            break
        offered = {known: __import__(known)}
        offered |= {one: value for one, value in vars(offered[known]).items() if not one.startswith("_")}
        found = {one: offered[one] for one in lacking & offered.keys()}
        names.update(found)
        lacking -= found.keys()
    exec(compile(tree, "<program>", "exec"), names)  # noqa: S102  (in the process that is its sandbox)
    return names


def play(program: str) -> None:
    """Run a program that reads its input and prints."""
    execute(program, "__main__")


def _lines() -> tuple[IO[str], IO[str]]:
    """Return what the other process says and what it hears, where no `print` or `input` of anybody's gets."""
    heard, said = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return heard, said


# ---- the program's process ---------------------------------------------------------------------------------------


def answer(program: str) -> None:
    """Run a program, then do what is asked of it until nobody asks any more."""
    heard, said = _lines()
    objects: list[Any] = []
    names: dict[str, Any] = {}
    broken = None

    def keep(value: Any) -> dict[str, Any]:
        objects.append(value)
        return {"object": len(objects) - 1}

    def find(kind: str, held: Any) -> Any:
        if kind == "object":
            return objects[held]
        if held not in names and hasattr(names.get("Solution"), held):
            return getattr(names["Solution"](), held)
        if held not in names:
            raise NameError(f"the program has no {held}")
        return names[held]

    try:
        names = execute(program, "solution")
    except BaseException as error:  # noqa: BLE001  (a program may raise anything)
        broken = _described(error)
    for line in heard:
        try:
            done = broken or _done(json.loads(line), keep, find)
        except BaseException as error:  # noqa: BLE001
            done = _described(error)
        said.write(json.dumps(done) + "\n")
        said.flush()


def _described(error: BaseException) -> dict[str, Any]:
    own = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"), "Exception")
    return {"error": own, "says": f"{error}"[:_SHOWN]}


def _done(asked: dict[str, Any], keep: Callable[[Any], Any], find: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Do what is asked; return its value, and the arguments of a call that has changed them."""
    of, *given = (unpack(one, find) for one in (asked["of"], *asked["given"]))
    what = asked["do"]
    done: dict[str, Any] = {}
    if what == "call":
        value = of(*given[0], **given[1])
        # Who returns something must not change what it may be compared with.
        if value is None and (now := pack(given[0], keep)) != asked["given"][0]:
            done["changed"] = now
    elif what == "items":
        value = [one for one, _ in zip(of, range(_MOST_ITEMS), strict=False)]
    elif what == "set":
        setattr(of, *given)
        value = None
    elif what == "item":
        value = of[given[0]]
    else:
        value = len(of) if what == "len" else getattr(of, *given)
    return {**done, "value": pack(value, keep)}


# ---- the tests' process ------------------------------------------------------------------------------------------


class Remote:
    """Something of the program's: what is done with it is done there. It equals nothing."""

    def __init__(self, ask: Callable[..., Any], at: dict[str, Any]) -> None:
        self.__dict__.update(_ask=ask, _at=at)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._ask("call", self._at, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self._at, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self._ask("set", self._at, name, value)

    def __getitem__(self, key: Any) -> Any:
        """Return an item."""
        return self._ask("item", self._at, key)

    def __iter__(self) -> Iterator[Any]:
        """Go through its items."""
        return iter(self._ask("items", self._at))

    def __len__(self) -> int:
        """Return its length."""
        return int(self._ask("len", self._at))

    def __bool__(self) -> bool:
        """Be true, as objects are."""
        return True

    def __repr__(self) -> str:
        """Say what it is."""
        return "<an object of the program's>"


class Asker:
    """The tests' end of the line.

    Attributes:
        gone: Why the program answers no more; empty while it does.
    """

    def __init__(self) -> None:
        self._heard, self._said = _lines()
        self.gone = ""

    def name(self, name: str) -> Remote:
        """Return what the program calls by a name."""
        return Remote(self.ask, {"name": name})

    def ask(self, what: str, at: dict[str, Any], *given: Any) -> Any:
        """Let the program's process do something, and return its value or raise its exception."""
        asked = {"do": what, "of": at, "given": [pack(one, self._sent) for one in given]}
        try:
            self._said.write(json.dumps(asked) + "\n")
            self._said.flush()
            line = self._heard.readline(_LONGEST_LINE)
        except OSError:
            line = ""
        if not line.endswith("\n"):
            self.gone = "its process has ended" if len(line) < _LONGEST_LINE else "it returned too much"
            raise GoneError(self.gone)
        done = json.loads(line)
        if "error" in done:
            kind: Any = getattr(builtins, str(done["error"]), None)
            is_one = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_one else RuntimeError)(str(done.get("says")))
        if "changed" in done:
            for one, now in zip(given[0], unpack(done["changed"], self._got), strict=True):
                _change(one, now)
        return unpack(done["value"], self._got)

    def _sent(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return value.__dict__["_at"]  # type: ignore[no-any-return]
        raise TypeError(f"the tests give the program a {type(value).__name__}, which can't be handed over")

    def _got(self, kind: str, held: Any) -> Remote:
        return Remote(self.ask, {"object": int(held)})


def _change(given: Any, now: Any) -> None:
    """Make of an argument what the program has made of it."""
    if isinstance(given, list) and isinstance(now, list):
        given[:] = now
    elif isinstance(given, dict | set) and type(given) is type(now):
        given.clear()
        given.update(now)


def ask(tests: dict[str, Any]) -> None:
    """Try the tests, and tell on the standard error what came of each, a line of JSON for one.

    Args:
        tests: `calls`, lists of a function's name, its arguments and what it has to return; or `code`, pieces of Python
            with asserts.
    """
    told = os.fdopen(os.dup(2), "w")
    asker = Asker()
    os.dup2(1, 2)
    try:
        for said in _calls(tests["calls"], asker) if "calls" in tests else _asserts(tests["code"], asker):
            told.write(json.dumps(said) + "\n")
            told.flush()
    except GoneError as error:
        told.write(json.dumps({"gone": str(error)}) + "\n")
    told.close()


def _calls(calls: list[Any], asker: Asker) -> Iterator[dict[str, Any]]:
    yield {"tests": len(calls)}
    for name, given, expected in calls:
        shown = f"{name}({', '.join(map(repr, given))})"[:_SHOWN]
        try:
            value = asker.name(name)(*given)
        except GoneError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever the program raised)
            yield {"passed": False, "error": True, "why": f"{shown}: {type(error).__name__}: {error}"}
            continue
        is_right = same(value, expected)
        why = "" if is_right else f"{shown} is {value!r:.{_SHOWN}}, and should be {expected!r:.{_SHOWN}}"
        yield {"passed": is_right, "why": why}


def same(value: Any, expected: Any) -> bool:
    """Return whether a value is the expected one, which was JSON: tuples are lists there, and keys texts.

    Some data sets write what is expected as a list of the one value.
    """
    value, expected = as_json(value), as_json(expected)
    return _equal(value, expected) or (isinstance(expected, list) and len(expected) == 1 and _equal(value, expected[0]))


def as_json(value: Any) -> Any:
    """Return a value without tuples, and with keys that are texts."""
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return {str(key): as_json(one) for key, one in value.items()} if isinstance(value, dict) else value


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, int | float):
        return bool(abs(value - expected) <= 1e-9 * max(1.0, abs(expected)) or value == expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in expected)
    return bool(value == expected)


def _asserts(code: list[str], asker: Asker) -> Iterator[dict[str, Any]]:
    """Run pieces of code; several are a test each. Of one, each assert outside of functions is, and each test function.

    A name that is not Python's own is the program's, unless the tests give it another meaning; that of a module with a
    point behind it is the module.
    """
    try:
        trees = [parsed(one, "<tests>") for one in code]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield {"row": f"the tests can't be read: {type(error).__name__}: {error}"}
        return
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    for tree in trees:
        pointed = {
            node.value.id
            for node in nodes_of(tree)
            if isinstance(node, _ast.Attribute) and isinstance(node.value, _ast.Name)
        }
        for name in names_used(tree) - names.keys():
            is_module = name in MODULES and name in pointed
            names[name] = __import__(name) if is_module else asker.name(name)
    solution: Any = type(sys)("solution")
    solution.__getattr__ = asker.name
    sys.modules["solution"] = solution
    if len(trees) > 1:
        yield {"tests": len(trees)}
        for text, tree in zip(code, trees, strict=True):
            yield _tried(asker, text, _exec, tree.body, names)
        return
    (text,), (tree,) = code, trees
    functions = [
        node.name
        for node in tree.body
        if isinstance(node, _ast.FunctionDef) and node.name.startswith("test") and not node.args.args
    ]
    count = sum(isinstance(node, _ast.Assert) for node in tree.body) + len(functions)
    yield {"tests": max(1, count)}
    lines = text.splitlines()
    for node in tree.body:
        shown = lines[node.lineno - 1].strip()
        said = _tried(asker, shown, _exec, [node], names)
        if isinstance(node, _ast.Assert):
            yield said
        elif not said["passed"]:  # what comes behind it rests on it
            is_import = isinstance(node, _ast.Import | _ast.ImportFrom)
            yield {"row": f"the tests can't be run: {said['why']}"} if is_import else said
            return
    for function in functions:
        yield _tried(asker, function, names[function])
    if not count:
        yield {"passed": True, "why": ""}


def _exec(body: list[Any], names: dict[str, Any]) -> None:
    exec(compile(_ast.Module(body, []), "<tests>", "exec"), names)  # noqa: S102  (in a process that is a sandbox)


def _tried(asker: Asker, shown: str, test: Callable[..., Any], *given: Any) -> dict[str, Any]:
    why, is_error = "", False
    try:
        test(*given)
    except AssertionError as error:
        why = f"{shown}{f': {error}' if str(error) else ''}"
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever the program or the tests raised)
        why, is_error = f"{shown}: {type(error).__name__}: {error}", True
    if asker.gone:  # and the test did not mind
        raise GoneError(asker.gone)
    return {"passed": not why, "error": is_error, "why": why[: 2 * _SHOWN]}
