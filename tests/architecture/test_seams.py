"""What is asked or done in one place only: which database it is, and who is deposed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import ROOT

SOURCE = ROOT / "src" / "eventjet"
DIALECT_FILE = re.compile(r"(sql|rebuild)/(database|dialect|workspace|(\w+_)?(postgres|sqlite)(_\w+)?)\.py")
"""Where a database may be named: the port and what stands behind it."""
NAMES = {"postgresql", "sqlite"}
CONSTANTS = {"POSTGRES", "POSTGRESQL", "SQLITE", "Postgres", "Sqlite"}


def test_no_module_but_the_dialects_asks_which_database_it_is() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in sources()
        if not DIALECT_FILE.fullmatch(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.ImportFrom) and names_database(node)
    ]
    assert found == []


def test_only_the_transitions_of_the_checkpoint_depose() -> None:
    deposing = re.compile(r"\bepoch\s*\+\s*1\b")
    found = [path for path, _ in sources() if deposing.search((SOURCE / path).read_text(encoding="utf-8"))]
    assert found == ["sql/checkpoint.py"]


def names_database(node: ast.Compare | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in CONSTANTS for alias in node.names)
    return any(isinstance(one, ast.Constant) and one.value in NAMES for one in [node.left, *node.comparators])


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield relative(path), ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()
