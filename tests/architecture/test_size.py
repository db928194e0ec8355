"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parents[2]
LINES_MAX = 400
FUNCTION_LINES_MAX = 60
MEDIAN_LINES_MAX = 200
FUNCTION_LINES_P95_MAX = 30

LONGER_FILES: dict[str, str] = {}
"""Path → why it is longer than it should be."""
LONGER_FUNCTIONS: dict[str, str] = {}
"""`path::name` → why it is longer than it should be."""

SOURCES = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> dict[str, int]:
    """Names and lengths, decorators and docstring included."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[f"{named(path)}::{node.name}"] = (node.end_lineno or first) - first + 1
    return found


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_file_can_be_read_at_once(path: Path) -> None:
    if named(path) not in LONGER_FILES:
        assert lines(path) <= LINES_MAX, f"{named(path)} has {lines(path)} lines; split it"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = {name: n for name, n in functions(path).items() if n > FUNCTION_LINES_MAX and name not in LONGER_FUNCTIONS}
    assert not long


def test_most_of_the_source_is_smaller_still() -> None:
    source = [path for path in SOURCES if named(path).startswith("src/")]
    assert median(map(lines, source)) <= MEDIAN_LINES_MAX
    lengths = [length for path in source for length in functions(path).values()]
    assert quantiles(lengths, n=20)[-1] <= FUNCTION_LINES_P95_MAX


def test_every_exception_is_still_needed() -> None:
    for name in LONGER_FILES:
        assert lines(ROOT / name) > LINES_MAX, f"{name} is short now: take it off the list"
    for name in LONGER_FUNCTIONS:
        path, _, _ = name.partition("::")
        assert functions(ROOT / path).get(name, 0) > FUNCTION_LINES_MAX, f"{name} is short now: take it off the list"
