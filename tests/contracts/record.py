"""Writes `signatures.json`: what torch, vLLM, flash-attn and transformers offer of what hrl asks, version by version.

Usage: unpack each version's wheel or source distribution into ``SOURCES/<distribution>-<version>`` and run::

    python -m tests.contracts.record SOURCES

Sources are parsed, never executed, and only the Python files (with stubs) of a distribution are read.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.contracts.calls import all_of_hrl

SIGNATURES = Path(__file__).with_name("signatures.json")
ABSENT, MODULE, VALUE = "absent", "module", "value"
_FOLDER = re.compile(r"(?P<package>.+?)-(?P<version>\d[\w.]*)")
_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")

#: Functions that pass everything on, and the one whose parameters count.
_FORWARDS = {
    "vllm.model_executor.model_loader.reload.finalize_layerwise_reload": (
        "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_processing"
    ),
}


@dataclass(frozen=True)
class Found:
    """A definition and the module it stands in."""

    node: ast.AST
    module: str


class Sources:
    """One unpacked distribution."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.module = cache(self._module)
        self.find = cache(self._find)

    def form(self, name: str) -> str:
        """What stands behind a qualified name, in one line: see `describe` for the words."""
        if name in _IN_CPP:
            return _handed_over(self, _IN_CPP[name])
        if name.startswith(_OPERATORS):
            operator = name.removeprefix(_OPERATORS).strip(".")
            return _operator(self, operator) if operator else MODULE
        found = self.find(_FORWARDS.get(name, name))
        return ABSENT if found is None else self._describe(found, name)

    def _file(self, module: str) -> Path | None:
        base = self._root.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py"), base / "__init__.pyi", base.with_suffix(".pyi")):
            if path.is_file():
                return path
        return None

    def _module(self, module: str) -> ast.Module | None:
        path = self._file(module)
        return None if path is None else ast.parse(path.read_text())

    def _find(self, name: str) -> Found | None:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if self._file(module) is None:
                continue
            found: Found | None = Found(self.module(module), module)
            for part in parts[length:]:
                found = None if found is None else self._member(found, part)
            if found is not None:
                return found
        return None

    def _member(self, owner: Found, name: str) -> Found | None:
        if isinstance(owner.node, ast.Module):
            return self._in_module(owner, name)
        if isinstance(owner.node, ast.ClassDef):
            return next((found for cls in self._lineage(owner) for found in _in_class(cls, name)), None)
        if isinstance(owner.node, ast.Assign | ast.AnnAssign):  # an instance: its class's members
            made = owner.node.value
            cls = None
            if isinstance(made, ast.Call):
                cls = self._named(made.func, owner.module)
            elif isinstance(owner.node, ast.AnnAssign):
                cls = self._named(owner.node.annotation, owner.module)
            return None if cls is None else self._member(cls, name)
        return None

    def _in_module(self, owner: Found, name: str) -> Found | None:
        found = None
        stars = []
        for node in _statements(owner.node):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                if not _is_overload(node) or self._is_stub(owner.module):
                    return Found(node, owner.module)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    alias = node.value if isinstance(node.value, ast.Name | ast.Attribute) else None
                    named = None if alias is None else self._named(alias, owner.module)
                    found = found or named or Found(node, owner.module)
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node, owner.module)
                for alias in node.names:
                    if (alias.asname or alias.name) == name and f"{module}.{alias.name}" != f"{owner.module}.{name}":
                        own = self._file(module.partition(".")[0]) is not None
                        found = (self.find(f"{module}.{alias.name}") if own else Found(node, owner.module)) or found
                    if alias.name == "*":
                        stars.append(module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == name or alias.name == name:
                        found = found or self.find(alias.name)
        if found is not None:
            return found
        lazy = _lazy_target(owner.node, name)
        if lazy is not None:
            return self.find(f"{owner.module}{lazy.replace(':', '.')}")
        starred = (self._in_module(Found(self.module(star), star), name) for star in stars if self._file(star))
        return next((star for star in starred if star is not None), None)

    def _named(self, expression: ast.expr, module: str) -> Found | None:
        """What a dotted expression of a module means."""
        first, *rest = ast.unparse(expression).split(".")
        if not first.isidentifier():
            return None
        found = self._in_module(Found(self.module(module), module), first) or self.find(first)
        for part in rest:
            found = None if found is None else self._member(found, part)
        return found

    def _lineage(self, cls: Found) -> Iterator[Found]:
        """The class and its bases, as far as this distribution has them."""
        yield cls
        for base in cls.node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            found = self._named(named, cls.module)
            if found is not None and isinstance(found.node, ast.ClassDef) and found != cls:
                yield from self._lineage(found)

    def _absolute(self, node: ast.ImportFrom, module: str) -> str:
        if not node.level:
            return node.module or ""
        path = self._file(module)
        parts = module.split(".")
        keep = len(parts) - node.level + (path is not None and path.stem == "__init__")
        return ".".join(filter(None, [*parts[:keep], node.module]))

    def _is_stub(self, module: str) -> bool:
        path = self._file(module)
        return path is not None and path.suffix == ".pyi"

    def _describe(self, found: Found, name: str) -> str:
        """``module``, ``value``, ``one of`` a ``Literal``'s words, ``def(…)`` or ``class(…)`` with parameters."""
        if isinstance(found.node, ast.Module):
            return MODULE
        if isinstance(found.node, ast.ClassDef):
            return f"class{self._constructor(found)}"
        if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            if _has_decorator(found.node, "property", "cached_property"):
                return VALUE
            owner = self.find(name.rpartition(".")[0])
            bound = owner is not None and not isinstance(owner.node, ast.Module)
            bound = bound and not _has_decorator(found.node, "staticmethod")
            return f"def{_parameters(found.node.args, skip=int(bound))}"
        words = sorted(self._words(found))
        return f"one of {', '.join(words)}" if words else VALUE

    def _words(self, found: Found | None) -> Iterator[str]:
        """The strings of a ``Literal[…]`` that a name stands for, those of others that it names included."""
        value = found.node.value if found is not None and isinstance(found.node, ast.Assign) else None
        if isinstance(value, ast.Subscript) and ast.unparse(value.value).rpartition(".")[2] == "Literal":
            for item in value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield item.value
                else:
                    yield from self._words(self._named(item, found.module))

    def _constructor(self, cls: Found) -> str:
        lineage = list(self._lineage(cls))
        if _makes_init(cls.node) or any("Struct" in ast.unparse(base) for c in lineage for base in c.node.bases):
            return self._fields(lineage)
        for one in lineage:
            inits = [n for n in one.node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            inits = [n for n in inits if not _is_overload(n) or self._is_stub(one.module)]
            if inits:
                return " | ".join(_parameters(init.args, skip=1) for init in inits)
        if any(_has_decorator(one.node, "dataclass", "strict", "dataclass_transform") for one in lineage):
            return "(*args, **kwargs)"  # a constructor that a base class makes
        known = {ast.unparse(base) for one in lineage for base in one.node.bases}
        return "()" if not known or len(lineage) > len(known) else "(*args, **kwargs)"

    def _fields(self, lineage: list[Found]) -> str:
        fields: dict[str, str] = {}
        for one in reversed(lineage):
            for node in one.node.body:
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                if "ClassVar" in ast.unparse(node.annotation) or "init=False" in ast.unparse(node.value or node.target):
                    continue
                fields[node.target.id] = node.target.id if node.value is None else f"{node.target.id}=..."
        # An optional field may come before a required one of a derived class; such fields go by keyword anyway.
        ordered = sorted(fields.values(), key=lambda field: field.endswith("=..."))
        return f"({', '.join(ordered)})"


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, those under ``if`` and ``try`` included."""
    for part in _PARTS:
        for child in getattr(node, part, ()):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(child)


def _in_class(cls: Found, name: str) -> Iterator[Found]:
    for node in _statements(cls.node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            yield Found(node, cls.module)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield Found(node, cls.module)
    for method in cls.node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(method):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if f"self.{name}" in map(ast.unparse, targets):
                        yield Found(node, cls.module)


def _lazy_target(module: ast.AST, name: str) -> str | None:
    """Where a module with ``{"Name": ".module:Name"}`` takes a name from."""
    for node in ast.walk(module):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    return value.value if isinstance(value.value, str) and ":" in value.value else None
    return None


def _has_decorator(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, *names: str) -> bool:
    plain = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(decorator).rpartition(".")[2] in names for decorator in plain)


def _makes_init(cls: ast.ClassDef) -> bool:
    if any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in cls.body):
        return False
    named_tuple = any(ast.unparse(base).rpartition(".")[2] == "NamedTuple" for base in cls.bases)
    return named_tuple or _has_decorator(cls, "dataclass", "config")


def _is_overload(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _has_decorator(node, "overload")


def _parameters(arguments: ast.arguments, skip: int) -> str:
    """``(a, /, b, *, c=...)``: names, kinds and which have a default, without annotations."""
    bare = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(a.arg) for a in arguments.args],
        vararg=arguments.vararg and ast.arg(arguments.vararg.arg),
        kwonlyargs=[ast.arg(a.arg) for a in arguments.kwonlyargs],
        kw_defaults=[default and ast.Constant(...) for default in arguments.kw_defaults],
        kwarg=arguments.kwarg and ast.arg(arguments.kwarg.arg),
        defaults=[ast.Constant(...) for _ in arguments.defaults],
    )
    for group in (bare.posonlyargs, bare.args):
        while skip and group:
            group.pop(0)
            skip -= 1
    return f"({ast.unparse(bare)})"


def _handed_over(sources: Sources, method: str) -> str:
    """How torch's own reductions call a storage's method that is written in C++: its results and its arguments."""
    tree = sources.module("torch.multiprocessing.reductions")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value
            if isinstance(called.func, ast.Attribute) and called.func.attr == method:
                results = len(node.targets[0].elts) if isinstance(node.targets[0], ast.Tuple) else 1
                return f"def{_positional(len(called.args))} -> {results}"
    return ABSENT


def _operator(sources: Sources, operator: str) -> str:
    """The parameters of an operator of torch's, as its function for tensors without storage has them."""
    for node in _statements(sources.module("torch._meta_registrations")):
        if isinstance(node, ast.FunctionDef) and _has_decorator(node, "register_meta"):
            registered = {n.attr for d in node.decorator_list for n in ast.walk(d) if isinstance(n, ast.Attribute)}
            if operator in registered and not registered & {"quantized", "low_p"}:  # another operator of that name
                return f"def{_parameters(node.args, skip=0)}"
    return ABSENT


def _positional(count: int) -> str:
    return f"({', '.join(f'_{index}' for index in range(count))}{', /' if count else ''})"


_OPERATORS = "torch.ops.aten"
#: Methods written in C++ whose stubs say nothing; torch calls them itself.
_IN_CPP = {
    "torch.UntypedStorage._new_shared_cuda": "_new_shared_cuda",
    "torch.UntypedStorage._share_cuda_": "_share_cuda_",
}


def record(root: Path, names: set[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Package → name → form → the versions that have the name in this form, in order."""
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    folders = [(folder, match) for folder in sorted(root.iterdir()) if (match := _FOLDER.fullmatch(folder.name))]
    for folder, match in sorted(folders, key=lambda pair: (pair[1]["package"], _order(pair[1]["version"]))):
        package = match["package"].replace("-", "_")
        sources = Sources(folder)
        for name in sorted(name for name in names if name.partition(".")[0] == package):
            forms = table.setdefault(package, {}).setdefault(name, {})
            forms.setdefault(sources.form(name), []).append(match["version"])
    return {
        package: {name: {form: " ".join(versions) for form, versions in forms.items()} for name, forms in found.items()}
        for package, found in table.items()
    }


def _order(version: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in version.split(".")]


def main() -> None:
    """Writes the file anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    calls, names = all_of_hrl()
    wanted = {call.name for call in calls} | {name.name for name in names}
    table = record(parser.parse_args().sources, wanted)
    SIGNATURES.write_text(json.dumps(table, indent=1, sort_keys=False) + "\n")


if __name__ == "__main__":
    main()
