"""Load a user's own code from a Python file: a reward function, a data set class, an estimator, a loss."""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from hrl.errors import RefusedError
from hrl.files import expanded
from hrl.nearest import did_you_mean, listing, way_to


class UserFileError(RefusedError, ValueError):
    """There is no such Python file, or it is not valid Python."""


class RunWhileReadError(UserFileError):
    """A Python file starts a run at its top level, and is read for what else is in it."""


_reading = threading.local()


@contextmanager
def reading() -> Iterator[None]:
    """Mark that user code is imported for what it defines, so that it must start no run."""
    before: int = getattr(_reading, "depth", 0)
    _reading.depth = before + 1
    try:
        yield
    finally:
        _reading.depth = before


def refuse_while_reading() -> None:
    """Refuse to start a run in code that is only read.

    Raises:
        RunWhileReadError: This thread imports user code; names the line at its top level that leads here.
    """
    if not getattr(_reading, "depth", 0):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    where = "its top level" if frame is None else f"{_from_here(frame.f_code.co_filename)}:{frame.f_lineno}"
    raise RunWhileReadError(f'{where} starts a run while hrl reads it: put it under `if __name__ == "__main__":`')


def _from_here(file: str) -> str:
    """Return a file by its shortest way: from the present folder, if it is in it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def load_user_file(path: str | Path) -> ModuleType:
    """Import a Python file as if it were run: with your rights, and with the modules beside it importable.

    Raises:
        UserFileError: There is no such file, or Python can't import it. Exceptions of the file itself are passed on.
    """
    file = _python_file(path)
    spec = importlib.util.spec_from_file_location(f"hrl_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{file} can't be imported as a Python module")
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up by name
    with reading():
        spec.loader.exec_module(module)
    return module


def member_of(module: ModuleType, name: str, kind: str) -> Any:
    """Return what a module has by a name.

    Args:
        module: A module with the user's code.
        name: In it.
        kind: What is looked for, such as `function`.

    Raises:
        UserFileError: It has nothing of this name.
    """
    found = vars(module)
    if name in found:
        return found[name]
    names = [other for other, value in found.items() if callable(value) and not other.startswith("_")]
    meant = did_you_mean(name, names)
    where = module.__file__ or module.__name__
    there = f"{where} has no {kind} {name!r}; it has: {listing(names)}"
    raise UserFileError(f"{there}. {meant}" if meant else there)


def names_in_user_file(path: str | Path) -> set[str] | None:
    """Return the names that a Python file defines or imports at its top level, without running it.

    Returns:
        The names, or None if the file imports `*`.

    Raises:
        UserFileError: No such file, or its syntax is wrong.
    """
    names = set(_top_level_names(_parsed(path)))
    return None if "*" in names else names


def functions_in_user_file(path: str | Path) -> list[str]:
    """Return the names of the public functions that a Python file defines at its top level, in file order.

    Raises:
        UserFileError: No such file, or its syntax is wrong.
    """
    functions = (one for one in _parsed(path).body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return [one.name for one in functions if not one.name.startswith("_")]


def names_taken_in_user_file(path: str | Path, name: str) -> frozenset[str] | None:
    """Return the names of what a function of a Python file takes, without running it; None if that can't be read there.

    It can't for what takes anything (`**columns`), is decorated, or is no function that stands at the top level.

    Raises:
        UserFileError: No such file, or its syntax is wrong.
    """
    functions = (one for one in _parsed(path).body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    for one in functions:
        if one.name == name and not one.decorator_list and one.args.kwarg is None:
            return frozenset(argument.arg for argument in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs))
    return None


def imported_files(path: str | Path) -> list[Path]:
    """Return the files below its folder that a Python file imports, anywhere in it, and those that these import.

    They are found without running anything; a file that is not valid Python imports nothing.

    Raises:
        UserFileError: There is no such file.
    """
    file = _python_file(path)
    found, left = {file}, [file]
    while left:
        for place in _imported_places(left.pop(), file.parent):
            for other in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if other not in found and other.is_relative_to(file.parent) and other.is_file():
                    found.add(other)
                    left.append(other)
    return sorted(found - {file})


def _imported_places(file: Path, folder: Path) -> Iterator[Path]:
    """Yield where the modules that a file imports lie if they are in a folder, without suffix."""
    try:
        nodes = [*ast.walk(_parsed(file))]
    except UserFileError:
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            names, start = [alias.name for alias in node.names], folder
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]  # a function, or a module
            start = Path(*file.parts[: -node.level]) if node.level else folder
        else:
            continue
        for name in names:
            parts = [part for part in name.split(".") if part]
            yield from (start.joinpath(*parts[: depth + 1]) for depth in range(len(parts)))


def _parsed(path: str | Path) -> ast.Module:
    file = _python_file(path)
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise UserFileError(f"{file} is not valid Python: {error}") from error


def _python_file(path: str | Path) -> Path:
    named = expanded(path)
    file = named.resolve()
    if file.is_dir():
        found = sorted(other.name for other in file.glob("*.py"))
        raise UserFileError(f"{file} is a folder; name a .py file. It holds {listing(found)}")
    if not file.is_file():
        raise UserFileError(f"{file} does not exist. {way_to(named, _is_python)}")
    if file.suffix != ".py":
        raise UserFileError(f"{file} is not a .py file")
    return file


def _is_python(path: Path) -> bool:
    return path.suffix == ".py"


def _top_level_names(node: ast.AST) -> Iterator[str]:
    """Yield the names bound outside of functions and classes, including those in conditions and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name.partition(".")[0]
        elif isinstance(child, ast.Name):
            if isinstance(child.ctx, ast.Store):
                yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from _top_level_names(child)
