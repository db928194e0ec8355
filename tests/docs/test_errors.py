"""Every error is in `eventjet.errors`, and in the tree and the table of docs/reference/errors.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from eventjet import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
DRAWN = re.findall(r"^([│├└─ ]*)([A-Z]\w+)$", PAGE.split("```")[1], re.MULTILINE)
TREE = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.EventjetError)
}


def test_the_page_draws_the_tree() -> None:
    drawn: list[tuple[str, str]] = []
    above: list[str] = []
    for indent, name in DRAWN:
        depth = len(indent) // 4
        del above[depth:]
        drawn.append((name, above[-1] if above else "Exception"))
        above.append(name)
    assert dict(drawn) == {name: error.__bases__[0].__name__ for name, error in TREE.items()}
    assert len(drawn) == len(TREE)


def test_the_page_lists_every_error_in_the_order_of_the_tree() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert listed == [name for _, name in DRAWN if name != "EventjetError"]


def test_the_package_has_each_error_of_its_modules() -> None:
    written = {
        node.name
        for path in (ROOT / "src/eventjet/errors").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] != ["Protocol"]
    }
    assert written == set(TREE)


def test_no_error_that_can_reach_a_user_lives_elsewhere() -> None:
    strays = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if "errors" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & set(TREE)
    ]
    assert strays == []
