"""Checks that stand in one place only: which database it is, and which worker is deposed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import ROOT

SOURCE = ROOT / "src" / "eventjet"
DIALECT_FILE = re.compile(r"(sql|rebuild)/(database|dialect|workspace|(\w+_)?(postgres|sqlite)(_\w+)?)\.py")
"""Where a database may be named: the port and its implementations."""
NAMES = {"postgresql", "sqlite"}
CONSTANTS = {"POSTGRES", "POSTGRESQL", "SQLITE", "Postgres", "Sqlite"}


def test_only_dialects_check_which_database_it_is() -> None:
    places = [
        f"{path}:{node.lineno}"
        for path, tree in sources()
        if not DIALECT_FILE.fullmatch(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.ImportFrom) and names_database(node)
    ]
    assert places == []


def test_only_the_checkpoint_increments_epochs() -> None:
    deposing = re.compile(r"\bepoch\s*\+\s*1\b")
    paths = [path for path, _ in sources() if deposing.search((SOURCE / path).read_text(encoding="utf-8"))]
    assert paths == ["sql/checkpoint.py"]


def names_database(node: ast.Compare | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in CONSTANTS for alias in node.names)
    return any(
        isinstance(operand, ast.Constant) and operand.value in NAMES for operand in [node.left, *node.comparators]
    )


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield relative(path), ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()
