"""What `import eventjet` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eventjet

HEAVY = {"nats", "pandas", "psycopg", "pyarrow", "pydantic", "pyspark", "sqlalchemy"}


def modules_after(statement: str) -> set[str]:
    """Top-level packages in memory once a fresh interpreter has run the statement."""
    script = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.split())


def test_the_names_are_sorted_and_each_stands_once() -> None:
    assert list(eventjet.__all__) == sorted(set(eventjet.__all__))


@pytest.mark.parametrize("name", eventjet.__all__)
def test_every_name_leads_somewhere(name: str) -> None:
    assert getattr(eventjet, name) is not None


def test_the_names_are_offered_and_no_others_are_made_up() -> None:
    assert set(eventjet.__all__) <= set(dir(eventjet))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = eventjet.nonsense


@pytest.mark.parametrize("statement", ["import eventjet", "import eventjet.dev", "import eventjet.testing.plugin"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert not modules_after(statement) & HEAVY


def test_declaring_events_and_aggregates_loads_no_driver() -> None:
    assert not modules_after("from eventjet import aggregate, event") & (HEAVY - {"pydantic"})


def test_an_application_loads_nothing_of_spark() -> None:
    assert not modules_after("from examples.bank.app import bank") & {"pyspark", "pyarrow", "pandas"}
