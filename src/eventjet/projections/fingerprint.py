"""A fingerprint of the code that makes a projection's rows, to tell that it was changed without a new revision."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
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
    order of definitions have no part in it, nor has what is imported from another module; tables and events are left
    out too, since their changes are noticed elsewhere (the schema of the database, the shapes of events).

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
            digest.update(repr((name, [_shape(node) for node in names[name]])).encode())
    return digest.hexdigest()[:16]


def _definitions(module: ModuleType) -> dict[str, list[ast.AST]] | None:
    """What a module defines or assigns at its top level, by name; None where its source cannot be read."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None
    named: dict[str, list[ast.AST]] = {}
    for statement in _statements(tree.body):
        if isinstance(statement, _DEFINITIONS):
            named.setdefault(statement.name, []).append(statement)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                named.setdefault(node.id, []).append(statement)
    values = vars(module)
    return {name: statements for name, statements in named.items() if not _is_noticed_elsewhere(values.get(name))}


def _is_noticed_elsewhere(value: Any) -> bool:
    return isinstance(value, Table | MetaData) or (isinstance(value, type) and is_event(value))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that bind names of the module, also below an `if` or a `try`."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            caught = [each for handler in statement.handlers for each in handler.body]
            yield from _statements([*statement.body, *caught, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, (*_DEFINITIONS, ast.Assign, ast.AnnAssign, ast.AugAssign)):
            yield statement


def _reached(name: str, named: dict[str, list[ast.AST]]) -> set[str]:
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


def _shape(node: Any) -> Any:
    """A syntax tree as nested tuples that are the same in every version of Python, without docstrings."""
    if isinstance(node, list):
        return tuple(map(_shape, cast("list[Any]", node)))
    if not isinstance(node, ast.AST):
        return repr(node)
    parts: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if name not in _OMITTED and value is not None and value != []:
            parts.append((name, _shape(value)))
    return tuple(parts)
