"""The public names of `import eventjet`, and the cost of the import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eventjet

HEAVY = {"nats", "pandas", "psycopg", "pyarrow", "pydantic", "pyspark", "sqlalchemy"}
KEEPS_OUT = {
    "import eventjet": HEAVY,
    "import eventjet.cli.main": HEAVY,
    "import eventjet.dev": HEAVY,
    "import eventjet.testing.plugin": HEAVY,
    "from eventjet import aggregate, event": HEAVY - {"pydantic"},
    "from eventjet.examples.bank.app import bank": {"pyspark", "pyarrow", "pandas"},
}
"""Statement → packages that it must not import."""


def modules_after(statement: str) -> set[str]:
    """Return the top-level packages in memory once a fresh interpreter has run the statement."""
    script = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    return set(run.stdout.split())


def test_the_public_names_are_sorted_and_complete() -> None:
    assert list(eventjet.__all__) == sorted(set(eventjet.__all__))
    assert set(eventjet.__all__) <= set(dir(eventjet))
    assert [name for name in eventjet.__all__ if getattr(eventjet, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = eventjet.nonsense


def test_importing_loads_nothing_heavy() -> None:
    loaded = {statement: modules_after(statement) & excluded for statement, excluded in KEEPS_OUT.items()}
    assert {statement: packages for statement, packages in loaded.items() if packages} == {}
