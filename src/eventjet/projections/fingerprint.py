"""The fingerprint of the code that makes a projection's rows, to notice code that changed without a new revision."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

from sqlalchemy import MetaData, Table

from eventjet.domain.aggregate import is_aggregate, is_event

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a compound statement that contain statements."""
_OMITTED = frozenset({"type_comment", "kind", "type_params", "ctx", "module"})
"""Fields of a syntax tree that depend on the version of Python, repeat what the place of a name says, or say from
which module a name is imported."""


def fingerprint(roots: tuple[Any, ...]) -> str:
    """Return sixteen hex digits for the code of a projection; empty where Python cannot read its source.

    `roots` are the functions that the projection is declared with and its row class. The fingerprint covers whatever
    they name in their own modules: helper functions, classes and constants, and what those name in turn. Comments,
    docstrings, layout and the order of definitions do not count, nor does the code of another module, nor do the
    decisions of an aggregate. Tables and fields of events are left out too, since their changes are noticed elsewhere
    (the schema of the database, the shapes of events).

    The source is read from its file, so call this when the code is imported: a deploy may replace the file while the
    process runs. A resolved projection keeps the fingerprint as `code`.
    """
    digest = hashlib.sha256()
    for root in roots:
        root = inspect.unwrap(root) if callable(root) else root
        module = sys.modules.get(getattr(root, "__module__", ""))
        by_name = _definitions_of(module)
        path = str(getattr(root, "__qualname__", "")).split(".")
        if path[0] not in by_name:
            return ""
        for name, definitions in sorted(_reached(path[0], by_name, vars(module)).items()):
            digest.update(f"{name}\0".encode())
            for definition in definitions:
                digest.update(_digest_and_names(definition)[0])
    return digest.hexdigest()[:16]


def _definitions_of(module: ModuleType | None) -> Mapping[str, Sequence[ast.stmt]]:
    """Return the top-level statements of a module by the name they define; none where its source cannot be read."""
    try:
        return {} if module is None else _definitions(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError, RecursionError):
        return {}


@lru_cache(maxsize=16)
def _definitions(source: str) -> Mapping[str, Sequence[ast.stmt]]:
    """Parse a module's source, once for all its projections, into top-level statements by the name they define."""
    by_name: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(source).body:
        for name in dict.fromkeys(_concerned(statement)):
            by_name.setdefault(name, []).append(statement)
    return by_name


def _concerned(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement, or one in its blocks, binds, or whose objects it may change.

    It may change them as in `RATES["a"] = 2`, `RATES.update(…)`, `fill(RATES)` and `@rate.register`. An import binds
    the names that it gives itself; the others are of another module, whose code does not count.
    """
    is_definition, is_call = isinstance(statement, _DEFINITIONS), isinstance(statement, ast.Expr)
    trees = list(ast.iter_child_nodes(statement))
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
        trees = statement.decorator_list
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname for alias in statement.names if alias.asname is not None)
    else:
        blocks = [child for block in _BLOCKS for child in getattr(statement, block, ())]
        for child in blocks:
            yield from _concerned(child)
        trees = [tree for tree in trees if tree not in blocks]
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute | ast.Subscript):
            if is_definition or is_call or not isinstance(node.ctx, ast.Load):
                yield from _owner(node)
        elif is_call and isinstance(node, ast.Call):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield from _owner(argument)


def _owner(node: ast.expr) -> Iterator[str]:
    """Yield the name that an expression begins with: RATES of `RATES["a"].update(…)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id


@lru_cache(maxsize=10_000)
def _digest_and_names(definition: ast.stmt) -> tuple[bytes, frozenset[str]]:
    """Return the digest of a definition and the names in it; cached, since many projections may share it."""
    digest = hashlib.sha256("\0".join(_tokens(definition)).encode()).digest()
    return digest, frozenset(node.id for node in ast.walk(definition) if isinstance(node, ast.Name)) - {"_"}


def _counted(statements: Sequence[ast.stmt], value: Any) -> Sequence[ast.stmt]:
    """Return the statements that count: none of a table, the methods of an event, the assignments of a module."""
    if isinstance(value, Table | MetaData):
        return []
    if isinstance(value, ModuleType):
        return [statement for statement in statements if not isinstance(statement, (*_DEFINITIONS, ast.Expr))]
    if isinstance(value, type) and is_aggregate(value):
        return _folding(statements)
    if isinstance(value, type) and is_event(value):
        bodies = [statement.body for statement in statements if isinstance(statement, ast.ClassDef)]
        return [statement for body in bodies for statement in body if isinstance(statement, _FUNCTIONS)]
    return statements


def _folding(statements: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """Return the fields of an aggregate and its `evolve` with the methods that it names; decisions do not count."""
    body = [statement for cls in statements if isinstance(cls, ast.ClassDef) for statement in cls.body]
    methods = {statement.name: statement for statement in body if isinstance(statement, _FUNCTIONS)}
    named: dict[str, ast.stmt] = {}
    pending = ["evolve"]
    while pending:
        name = pending.pop()
        if name in methods and name not in named:
            named[name] = methods[name]
            pending += [node.attr for node in ast.walk(methods[name]) if isinstance(node, ast.Attribute)]
    return [statement for statement in body if isinstance(statement, ast.AnnAssign) or statement in named.values()]


def _reached(
    name: str, by_name: Mapping[str, Sequence[ast.stmt]], values: Mapping[str, Any]
) -> dict[str, Sequence[ast.stmt]]:
    """Return the definitions of a name and of everything in the module that they name, directly or indirectly."""
    reached: dict[str, Sequence[ast.stmt]] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        if name in reached or name not in by_name:
            continue
        reached[name] = _counted(by_name[name], values.get(name))
        for definition in reached[name]:
            pending += _digest_and_names(definition)[1]
    return reached


def _tokens(tree: ast.AST) -> Iterator[str]:
    """Yield a syntax tree of any depth, without docstrings, as the same tokens in every version of Python."""
    pending: list[Any] = [tree]
    while pending:
        node: Any = pending.pop()
        children: list[Any] = []
        if isinstance(node, list):
            children = cast("list[Any]", node)
            yield f"{len(children)} of"
        elif isinstance(node, ast.AST):
            fields = dict(ast.iter_fields(node))
            if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
                fields["body"] = node.body[1:]
            fields = {name: value for name, value in fields.items() if name not in _OMITTED and value not in (None, [])}
            children = list(fields.values())
            yield f"{type(node).__name__} {' '.join(fields)}"
        else:
            yield repr(node)
        pending += reversed(children)
