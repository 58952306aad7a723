"""Which keys of a configuration the code reads, found by following its sections through the source.

A small abstract interpreter: the value of an expression is the set of things that it can be, of the configuration's
sections and of the package's own functions, classes and objects; everything else is nothing. Sections enter where a
parameter is annotated with their class. From there they go through variables, arguments, results, fields and properties
of all files, until nothing new is found. A key is read where its name is taken from something that can be its section;
the same word beside anything else is no read. The code is parsed and never run.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hrl.config.section import Section

Scope = tuple[str, ...]
"""Where something stands: file, then classes and functions around it."""

_PASS_ON = {"model_copy", "items", "values", "get", "zip", "enumerate", "list", "tuple", "dict", "sorted", "reversed"}
"""Calls that give on what they get: the receiver, or the arguments."""


@dataclass(frozen=True)
class Thing:
    """What an expression can be.

    Attributes:
        kind: a section of the configuration, or something that the package defines.
        name: the section's dotted path, or the scope of the definition.
    """

    kind: Literal["section", "function", "class", "object"]
    name: str | Scope


Things = frozenset[Thing]
NOTHING: Things = frozenset()
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Arguments:
    """What a call is given, and where it stands."""

    positional: Sequence[ast.expr]
    keywords: Sequence[ast.keyword]
    scope: Scope


def below(path: str, name: str) -> str:
    """The dotted path of a name in a section."""
    return f"{path}.{name}".lstrip(".")


def section_types(root: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The sections of a configuration as (dotted path, class), `root` itself first, under the empty path."""
    yield path, root
    for name, field in root.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from section_types(field.annotation, below(path, name))


class ConfigReads:
    """Follows the sections of a configuration through source files.

    Args:
        root: class of the whole configuration.
        package: folder of the package.
        leave_out: files and folders of it that nothing is followed into.

    Attributes:
        places: the places that read a key, as (file, line), by key.
    """

    def __init__(self, root: type[Section], package: Path, leave_out: Sequence[Path] = ()) -> None:
        self.places: dict[str, set[tuple[Path, int]]] = defaultdict(set)
        self._sections = dict(section_types(root))
        self._definitions: dict[Scope, Definition] = {}
        self._by_name: dict[str, list[Scope]] = defaultdict(list)
        self._known: dict[tuple[Scope, str], Things] = defaultdict(frozenset)
        self._annotations: dict[ast.expr | None, Things] = {}
        self._texts: dict[str, set[str]] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        files = [file for file in package.rglob("*.py") if not any(file.is_relative_to(part) for part in leave_out)]
        trees = {str(file): ast.parse(file.read_text()) for file in files}
        self._modules = {_module_name(package, Path(file)): file for file in trees}
        for file, tree in trees.items():
            self._define(tree, (file,))
            self._texts[file] = {node.value for node in ast.walk(tree) if _is_text(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    self._imports[file] |= {
                        name.asname or name.name: (node.module or "", name.name) for name in node.names
                    }
        self._subclasses: dict[Scope, list[Scope]] = defaultdict(list)
        for scope, node in self._definitions.items():
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                for above in self._named(base):
                    self._subclasses[above].append(scope)
        self._follow([(statement, (file,)) for file, tree in trees.items() for statement in tree.body])

    def _follow(self, statements: list[tuple[ast.stmt, Scope]]) -> None:
        """Visits every statement, and again whenever something changed that it looked at."""
        looked_at: dict[ast.stmt, set[tuple[Scope, str]]] = {}
        stale = statements
        while stale:
            self._changed: set[tuple[Scope, str]] = set()
            for statement, scope in stale:
                self._seen: dict[ast.expr, Things] = {}
                self._looked_at: set[tuple[Scope, str]] = set()
                self._visit(statement, scope)
                looked_at[statement] = self._looked_at
            stale = [(each, scope) for each, scope in statements if looked_at[each] & self._changed]

    def _learn(self, scope: Scope, name: str, things: Things) -> None:
        if things - self._known[scope, name]:
            self._known[scope, name] |= things
            self._changed.add((scope, name))

    def _know(self, scope: Scope, name: str) -> Things:
        self._looked_at.add((scope, name))
        return self._known.get((scope, name), NOTHING)

    # ------------------------------------------------------------------ definitions

    def _define(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Definition):
                inner = (*scope, child.name)
                self._definitions[inner] = child
                if len(scope) == 1 or isinstance(child, ast.ClassDef):
                    self._by_name[child.name].append(inner)
            self._define(child, inner)

    def _named(self, annotation: ast.AST) -> list[Scope]:
        """The package's classes that an annotation or a base names."""
        found = [scope for name in _names_in(annotation) for scope in self._by_name.get(name, ())]
        return [scope for scope in found if self._is_class(scope)]

    def _annotated(self, annotation: ast.expr | None) -> Things:
        if annotation not in self._annotations:
            self._annotations[annotation] = self._in_annotation(annotation)
        return self._annotations[annotation]

    def _in_annotation(self, annotation: ast.expr | None) -> Things:
        if annotation is None:
            return NOTHING
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "type":
            return frozenset(Thing("class", scope) for scope in self._named(annotation.slice))
        names = {*_names_in(annotation)} - {Section.__name__}
        sections = {path for path, kind in self._sections.items() if names & {above.__name__ for above in kind.__mro__}}
        others = [scope for scope in self._named(annotation) if not self._is_section(scope)]
        return frozenset([Thing("section", path) for path in sections] + [Thing("object", scope) for scope in others])

    def _is_section(self, scope: Scope) -> bool:
        return Section.__name__ in {above[-1] for above in self._lineage(scope)}

    def _class_around(self, scope: Scope) -> Scope | None:
        while len(scope) > 1 and not self._is_class(scope):
            scope = scope[:-1]
        return scope if len(scope) > 1 else None

    def _lineage(self, of: Scope) -> Iterator[Scope]:
        """A class and those above it."""
        yield of
        for base in self._definitions[of].bases:
            for above in self._named(base):
                yield from self._lineage(above)

    def _heirs(self, of: Scope) -> Iterator[Scope]:
        """Those below a class."""
        for scope in self._subclasses[of]:
            yield scope
            yield from self._heirs(scope)

    # ------------------------------------------------------------------ statements

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.ClassDef():
                self._each_child(node, (*scope, node.name))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = (*scope, node.name)
                for parameter in _parameters(node):
                    self._learn(inner, parameter.arg, self._annotated(parameter.annotation))
                for decorator in node.decorator_list:
                    self._decorate(inner, self._value(decorator, scope))
                self._each_child(node, inner)
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value, scope)
            case ast.AnnAssign():
                things = self._annotated(node.annotation)
                self._assign(node.target, things | (self._value(node.value, scope) if node.value else NOTHING), scope)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                items = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else [node.iter]
                for item in items:
                    self._bind(node.target, item, scope)
                self._each_child(node, scope)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, node.context_expr, scope)
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                self._learn(scope, "return", self._value(value, scope))
            case ast.expr():
                self._value(node, scope)
            case _:
                self._each_child(node, scope)

    def _decorate(self, function: Scope, decorators: Things) -> None:
        for decorator in decorators:
            if decorator.kind == "function":
                first = _parameters(self._definitions[decorator.name])[0]
                self._learn(decorator.name, first.arg, self._defined(function))

    def _each_child(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def _bind(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        """An assignment, part by part where both sides are tuples."""
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for part, its_value in zip(targets, values, strict=True):
                    self._bind(part, its_value, scope)
            case _:
                self._assign(target, self._value(value, scope), scope)

    def _assign(self, target: ast.expr, things: Things, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                self._learn(scope, name, things)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self._learn(self._class_around(scope) or scope, name, things)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._assign(part, things, scope)
            case ast.Starred(value=part):
                self._assign(part, things, scope)
            case ast.Subscript(value=container):  # an entry stands for the whole, which may be the module's
                self._assign(container, things, scope)
                self._assign(container, things, scope[:1])

    # ------------------------------------------------------------------ expressions

    def _value(self, node: ast.expr, scope: Scope) -> Things:
        if node not in self._seen:
            self._seen[node] = NOTHING
            self._seen[node] = self._evaluate(node, scope)
        return self._seen[node]

    def _evaluate(self, node: ast.expr, scope: Scope) -> Things:
        match node:
            case ast.Name(id=name):
                return self._variable(name, scope)
            case ast.Attribute(value=of, attr=name):
                return self._attribute(self._value(of, scope), name, node, scope)
            case ast.Call(func=ast.Name(id="super")):
                return frozenset(Thing("object", above) for above in self._above(scope))
            case ast.Call():
                return self._call(node, scope)
            case ast.Tuple(elts=[first, *rest]):
                self._partial(first, Arguments(rest, [], scope))
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value, scope)
        self._each_child(node, scope)
        return NOTHING.union(*(self._value(part, scope) for part in _parts(node)))

    def _partial(self, first: ast.expr, arguments: Arguments) -> None:
        """A function or class beside what it will be called with."""
        callables = self._value(first, arguments.scope)
        if len(callables) == 1:
            self._hand_over(callables, arguments)

    def _above(self, scope: Scope) -> list[Scope]:
        """The classes directly above the one that this stands in."""
        around = self._class_around(scope)
        bases = self._definitions[around].bases if around is not None else []
        return [above for base in bases for above in self._named(base)]

    def _variable(self, name: str, scope: Scope) -> Things:
        around = self._class_around(scope)
        if name in ("self", "cls") and around is not None:
            return frozenset({Thing("object" if name == "self" else "class", around)})
        outwards = [scope[:depth] for depth in range(len(scope), 0, -1)]
        for place in (scope, *(place for place in outwards[1:] if not self._is_class(place))):
            if found := self._know(place, name):
                return found
            if (*place, name) in self._definitions:
                return self._defined((*place, name))
        return self._imported(*self._imports[scope[0]][name]) if name in self._imports[scope[0]] else NOTHING

    def _imported(self, module: str, name: str) -> Things:
        file = self._modules.get(module, "")
        if (file, name) in self._definitions:
            return self._defined((file, name))
        # a variable, or what a package hands on from its modules
        return self._know((file,), name) or NOTHING.union(*map(self._defined, self._by_name.get(name, ())))

    def _defined(self, scope: Scope) -> Things:
        return frozenset({Thing("class" if self._is_class(scope) else "function", scope)})

    def _is_class(self, scope: Scope) -> bool:
        return isinstance(self._definitions.get(scope), ast.ClassDef)

    def _attribute(self, of: Things, name: str, node: ast.expr, scope: Scope) -> Things:
        found = NOTHING
        for thing in of:
            if isinstance(thing.name, str):
                found |= self._key(thing.name, name, Path(scope[0]), node.lineno)
            elif thing.kind in ("object", "class"):
                for owner in (*self._lineage(thing.name), *self._heirs(thing.name)):
                    found |= self._know(owner, name)
                    method = self._definitions.get((*owner, name))
                    if method is not None:
                        found |= self._member(method, (*owner, name))
        return found

    def _member(self, method: Definition, scope: Scope) -> Things:
        is_property = any("property" in ast.unparse(decorator) for decorator in method.decorator_list)
        return self._know(scope, "return") if is_property else self._defined(scope)

    def _key(self, path: str, name: str, file: Path, line: int) -> Things:
        key = below(path, name)
        if key in self._sections:
            return frozenset({Thing("section", key)})
        if name in self._sections[path].model_fields:
            self.places[key].add((file, line))
        found = NOTHING  # what a property of the section gives
        for kind in self._sections[path].__mro__:
            for scope in self._by_name.get(kind.__name__, ()):
                if (*scope, name) in self._definitions:
                    found |= self._member(self._definitions[*scope, name], (*scope, name))
        return found

    def _call(self, node: ast.Call, scope: Scope) -> Things:
        function = self._value(node.func, scope)
        receiver = self._value(node.func.value, scope) if isinstance(node.func, ast.Attribute) else NOTHING
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        given = NOTHING.union(*(self._value(value, scope) for value in values))
        match node.func:
            case ast.Name(id="getattr"):
                return self._getattr(node, scope)
            case ast.Attribute(attr="model_dump"):
                for path in (thing.name for thing in receiver if thing.kind == "section" and thing.name):
                    for name in self._sections[path].model_fields:
                        self._key(path, name, Path(scope[0]), node.lineno)
                return NOTHING
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _PASS_ON:
                return receiver | given
        if node.args:
            self._partial(node.args[0], Arguments(node.args[1:], node.keywords, scope))
        return self._hand_over(function, Arguments(node.args, node.keywords, scope))

    def _getattr(self, node: ast.Call, scope: Scope) -> Things:
        of, name = node.args[:2]
        names = [name.value] if _is_text(name) else self._texts[scope[0]]
        return NOTHING.union(*(self._attribute(self._value(of, scope), each, node, scope) for each in names))

    def _hand_over(self, to: Things, arguments: Arguments) -> Things:
        """Binds arguments to parameters, or to the fields of a data class; returns what the call can give."""
        found = NOTHING
        for thing in to:
            if thing.kind == "function":
                self._bind_parameters(thing.name, arguments)
                found |= self._know(thing.name, "return") | self._annotated(self._definitions[thing.name].returns)
            elif thing.kind == "object":
                called = [owner for owner in self._lineage(thing.name) if (*owner, "__call__") in self._definitions]
                for owner in called[:1]:
                    self._bind_parameters((*owner, "__call__"), arguments)
            elif thing.kind == "class":
                self._construct(thing.name, arguments)
                found |= {Thing("object", thing.name)}
        return found

    def _construct(self, of: Scope, arguments: Arguments) -> None:
        for owner in self._lineage(of):
            if (*owner, "__init__") in self._definitions:
                return self._bind_parameters((*owner, "__init__"), arguments)
            body = self._definitions[owner].body
            names = [f.target.id for f in body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
            if names:
                return self._bind_names(owner, names, names, arguments)
        return None

    def _bind_parameters(self, function: Scope, arguments: Arguments) -> None:
        node = self._definitions[function]
        positional = [parameter.arg for parameter in [*node.args.posonlyargs, *node.args.args]]
        if positional[:1] in (["self"], ["cls"]):
            positional = positional[1:]
        self._bind_names(function, positional, [parameter.arg for parameter in _parameters(node)], arguments)

    def _bind_names(
        self, owner: Scope, positional: Sequence[str], by_name: Sequence[str], arguments: Arguments
    ) -> None:
        for number, value in enumerate(arguments.positional):
            names = positional[number:] if isinstance(value, ast.Starred) else positional[number : number + 1]
            for name in names:
                self._learn(owner, name, self._value(value, arguments.scope))
        for keyword in arguments.keywords:
            if keyword.arg in by_name:
                self._learn(owner, keyword.arg, self._value(keyword.value, arguments.scope))


def _module_name(package: Path, file: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names_in(annotation: ast.AST) -> list[str]:
    """The class names of an annotation, which may be quoted, optional, or have parameters."""
    text = annotation.value if _is_text(annotation) else ast.unparse(annotation)
    return [part.strip().rpartition(".")[2] for part in text.partition("[")[0].split("|")]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _parts(node: ast.expr) -> list[ast.expr]:
    """The parts of an expression that its value is made of."""
    match node:
        case ast.IfExp(body=one, orelse=other):
            return [one, other]
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return parts
        case ast.Dict(values=parts):
            return parts
        case ast.DictComp(value=part) | ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part):
            return [part]
        case ast.Starred(value=part) | ast.Subscript(value=part) | ast.NamedExpr(value=part) | ast.Await(value=part):
            return [part]
        case ast.BinOp(left=one, op=ast.BitOr(), right=other):
            return [one, other]
    return []


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
