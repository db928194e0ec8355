"""The Python files of the repository, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """A file: `name` is its path from the repository's root."""

    name: str
    text: str
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield `path::name` and node of every function and method."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield f"{self.name}::{node.name}", node

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Return the files of these folders, by name."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return tuple(Source(name, text, ast.parse(text)) for name, text in texts.items())
