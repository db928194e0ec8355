"""Every promise of the page on durability is tested by a scenario or a test that exists."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

from tests.faults.trials.running import MODULES
from tests.faults.trials.trial import SCENARIOS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/durability.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and "promise" not in line]


def is_there(named: str) -> bool:
    """Return whether a scenario or a test has this name."""
    if "::" not in named:
        return named in SCENARIOS
    path, _, name = named.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in tree.body)


def test_each_promise_names_its_scenarios_and_tests() -> None:
    for module in MODULES:
        import_module(f"tests.faults.trials.{module}")
    named = {promise.strip(): re.findall(r"`([^`]+)`", tried) for promise, tried in ROWS}
    assert len(named) == len(ROWS) > 15
    assert [promise for promise, tried in named.items() if not tried] == []
    assert [name for tried in named.values() for name in tried if not is_there(name)] == []


def test_each_scenario_of_the_machine_is_named_on_the_page() -> None:
    own = [name for name in SCENARIOS if not name.startswith("test_")]
    assert [name for name in own if f"`{name}`" not in PAGE] == []
