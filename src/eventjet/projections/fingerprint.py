"""A fingerprint of the code that makes a projection's rows, to tell that it was changed without a new revision."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import Any, cast

from sqlalchemy import MetaData, Table

from eventjet.domain.aggregate import is_event
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_OMITTED = frozenset({"type_comment", "kind", "type_params", "ctx"})
"""Fields of a syntax tree that change with the version of Python, or say what the place of a name says."""


def fingerprint(projection: AnyResolved) -> str:
    """Sixteen hex digits for the code of a projection; empty where Python cannot read its source.

    It covers the functions that the projection is declared with and its row class, and whatever they name in their own
    modules: helper functions, classes and constants, and what those name in turn. Comments, docstrings, layout and the
    order of definitions have no part in it, nor has what is imported from another module; tables and fields of events
    are left out too, since their changes are noticed elsewhere (the schema of the database, the shapes of events).

    ```python
    assert fingerprint(bank.projections["balances"]) == fingerprint(bank.projections["balances"])
    ```
    """
    if isinstance(projection, ResolvedSql):
        return _fingerprint(tuple(dict.fromkeys(projection.handlers.values())))
    declared: Any = projection.declared
    functions = (getattr(declared, name, None) for name in ("fold", "rows", "key", "keys"))
    return _fingerprint((*(each for each in functions if each is not None), projection.row_type))


@lru_cache(maxsize=1_000)
def _fingerprint(roots: tuple[Any, ...]) -> str:
    digest = hashlib.sha256()
    for root in roots:
        root = inspect.unwrap(root) if callable(root) else root
        module = sys.modules.get(getattr(root, "__module__", ""))
        names = None if module is None else _definitions(module)
        path = str(getattr(root, "__qualname__", "")).split(".")
        if names is None or path[0] not in names:
            return ""
        for name in sorted(_reached(path[0], names)):
            digest.update(f"{name}\0".encode())
            for token in chain.from_iterable(map(_tokens, names[name])):
                digest.update(f"{token}\0".encode())
    return digest.hexdigest()[:16]


def _definitions(module: ModuleType) -> dict[str, list[ast.stmt]] | None:
    """What a module defines or assigns at its top level, by name; None where its source cannot be read."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError, RecursionError):
        return None
    named: dict[str, list[ast.stmt]] = {}
    for statement in _statements(tree.body):
        if isinstance(statement, _DEFINITIONS):
            named.setdefault(statement.name, []).append(statement)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                named.setdefault(node.id, []).append(statement)
    values = vars(module)
    return {name: _counted(statements, values.get(name)) for name, statements in named.items()}


def _counted(statements: list[ast.stmt], value: Any) -> list[ast.stmt]:
    """What counts of a definition: of a table nothing, of an event its methods."""
    if isinstance(value, Table | MetaData):
        return []
    if isinstance(value, type) and is_event(value):
        bodies = [each.body for each in statements if isinstance(each, ast.ClassDef)]
        return [each for body in bodies for each in body if isinstance(each, _FUNCTIONS)]
    return statements


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Statements that bind names of the module, also below an `if`, a `try` or a `with`."""
    for statement in body:
        if isinstance(statement, (*_DEFINITIONS, ast.Assign, ast.AnnAssign, ast.AugAssign)):
            yield statement
        else:
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, ()))


def _reached(name: str, named: dict[str, list[ast.stmt]]) -> set[str]:
    """This name and all that its definition names in its module, and what those name."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for definition in named[name]:
            waiting += [node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id in named]
    return reached


def _tokens(tree: ast.AST) -> Iterator[str]:
    """A syntax tree, without docstrings, as the same tokens in every version of Python, however deep it is."""
    waiting: list[Any] = [tree]
    while waiting:
        node: Any = waiting.pop()
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
        waiting += reversed(children)
