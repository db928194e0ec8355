"""The fingerprint of a projection's code: which changes alter it, and which do not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from eventjet import App
from eventjet.rebuild.shadow import Shadow
from eventjet.sql.database import Database

SOURCE = '''
from dataclasses import dataclass, replace

from sqlalchemy import Column, Integer, MetaData, String, Table
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import App, Recorded, SqlProjection, aggregate, entries, event, projection

RATE = 2
UNUSED = 1


@event("shop.sold")
class Sold:
    pieces: int

    def whole(self) -> int:
        return self.pieces


@event("shop.closed")
class Closed:
    pass


Happened = Sold | Closed


@aggregate("shop")
class Shop:
    sold: int = 0

    def evolve(self, event: Happened) -> "Shop":
        return self


@dataclass(frozen=True)
class Row:
    id: str
    pieces: int = 0

    def plus(self, pieces: int) -> "Row":
        return replace(self, pieces=self.pieces + pieces)


metadata = MetaData()
table = Table("sales", metadata, Column("id", String(20), primary_key=True), Column("pieces", Integer, nullable=False))
other = Table("other", metadata, Column("id", String(20), primary_key=True), Column("pieces", Integer, nullable=False))


def weighed(pieces: int) -> int:
    """Pieces at their rate."""
    return doubled(pieces)


def doubled(pieces: int) -> int:
    return pieces * RATE


def unused() -> int:
    return 1


@projection("sales", table=table)
def sales(row: Row | None, event: Recorded[Happened]) -> Row:
    # A comment.
    row = row or Row(event.aggregate_id)
    return row.plus(weighed(event.data.whole())) if isinstance(event.data, Sold) else row


by_hand = SqlProjection("by_hand", tables=[other])


@by_hand.handler
async def sell(event: Recorded[Sold], connection: AsyncConnection) -> None:
    await connection.execute(other.insert().values(id=str(event.position), pieces=doubled(event.data.pieces)))


app = App("shop", aggregates=[Shop], projections=[sales, by_hand])
'''

Load = Callable[[str], App]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that imports a source as a new module and returns its app."""
    monkeypatch.syspath_prepend(str(tmp_path))
    count = 0

    def load_app(source: str) -> App:
        nonlocal count
        count += 1
        name = f"fingerprinted_{count}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name).app

    return load_app


SAME = {
    "a comment": ("# A comment.", "# Another one."),
    "layout": ("return doubled(pieces)", "return doubled(\n        pieces\n    )"),
    "a docstring": ('"""Pieces at their rate."""', '"""As the rate has it."""'),
    "a helper that it does not use": ("def unused() -> int:\n    return 1", "def unused() -> int:\n    return 2"),
    "a constant that it does not use": ("UNUSED = 1", "UNUSED = 2"),
    "a table": ("String(20)", "String(30)"),
    "a field of an event": ("    pieces: int\n\n    def", "    pieces: int\n    price: int = 0\n\n    def"),
    "an aggregate": ("    sold: int = 0", "    sold: int = 1"),
}
OTHER = {
    "the fold": ("row = row or Row(event.aggregate_id)", 'row = row or Row("x")'),
    "the row class": ("pieces=self.pieces + pieces)", "pieces=self.pieces - pieces)"),
    "a helper": ("return doubled(pieces)", "return doubled(pieces) + 1"),
    "a helper's helper": ("return pieces * RATE", "return pieces * RATE * RATE"),
    "a constant of a helper": ("RATE = 2", "RATE = 3"),
    "a method of an event": ("return self.pieces\n", "return self.pieces + 1\n"),
    "which events it takes": ("Happened = Sold | Closed", "Happened = Closed | Sold"),
}


def test_the_same_code_has_the_same_fingerprint(load: Load) -> None:
    first, second = load(SOURCE), load(SOURCE)
    for name in ("sales", "by_hand"):
        assert first.projections[name].code == second.projections[name].code != ""


@pytest.mark.parametrize("change", SAME)
def test_a_change_that_makes_the_same_rows_keeps_the_fingerprint(load: Load, change: str) -> None:
    before, after = SAME[change]
    assert before in SOURCE
    first, second = load(SOURCE), load(SOURCE.replace(before, after))
    for name in ("sales", "by_hand"):
        assert first.projections[name].code == second.projections[name].code


@pytest.mark.parametrize("change", OTHER)
def test_a_change_that_may_make_other_rows_changes_the_fingerprint(load: Load, change: str) -> None:
    before, after = OTHER[change]
    assert before in SOURCE
    first, second = load(SOURCE), load(SOURCE.replace(before, after))
    assert first.projections["sales"].code != second.projections["sales"].code


def test_an_sql_handler_is_part_of_the_fingerprint(load: Load) -> None:
    first = load(SOURCE)
    for before, after in (("id=str(event.position)", 'id="x"'), ("return pieces * RATE", "return pieces")):
        second = load(SOURCE.replace(before, after))
        assert first.projections["by_hand"].code != second.projections["by_hand"].code


def test_code_nested_beyond_the_recursion_limit_has_a_fingerprint(load: Load) -> None:
    first, second = (
        load(SOURCE.replace("return doubled(pieces)", f"return doubled(pieces){' + 1' * count}"))
        for count in (999, 1_000)
    )
    assert "" != first.projections["sales"].code != second.projections["sales"].code != ""


STATE = (
    SOURCE.replace("import App,", "import App, by_state,")
    .replace("    sold: int = 0\n", "    sold: int = 0\n\n    def close(self) -> Closed:\n        return Closed()\n")
    .replace(
        '-> "Shop":\n        return self',
        '-> "Shop":\n        return self.after()\n\n    def after(self):\n        return self',
    )
    .replace(
        '@projection("sales", table=table)',
        '@projection("sales", table=table, key=by_state(Shop, lambda shop: str(shop.sold), on_change="keep"))',
    )
)


@pytest.mark.parametrize(
    ("before", "after", "is_seen"),
    [
        ("return Closed()", "return None", False),
        ("def after(self):\n        return self", "def after(self):\n        return Shop()", True),
        ("    sold: int = 0", "    sold: int = 1", True),
        ("str(shop.sold)", "str(shop.sold + 1)", True),
        ('on_change="keep"', 'on_change="both"', True),
    ],
    ids=["a decision", "what evolve calls", "a field", "the key", "what a change of it means"],
)
def test_the_fold_of_a_state_for_keys_is_part_of_the_fingerprint(
    load: Load, before: str, after: str, is_seen: bool
) -> None:
    source = STATE.replace("event: Recorded[Happened]) -> Row:", "event: Recorded[Happened], key: str) -> Row:")
    assert before in source
    first, second = (load(text).projections["sales"].code for text in (source, source.replace(before, after)))
    assert first
    assert second
    assert (first != second) is is_seen


@pytest.mark.parametrize("block", ["if RATE", "with suppress(ImportError)", "for _ in range(1)"])
def test_a_helper_within_a_block_is_part_of_the_fingerprint(load: Load, block: str) -> None:
    helper = "def doubled(pieces: int) -> int:\n    return pieces * RATE"
    below = f"from contextlib import suppress\n\n{block}:\n    {helper.replace('    ', ' ' * 8)}"
    first = SOURCE.replace(helper, below)
    second = first.replace("pieces * RATE", "pieces")
    assert load(first).projections["sales"].code != load(second).projections["sales"].code


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from decimal import ROUND_UP as RATE", "from decimal import ROUND_DOWN as RATE"),
        ("if (RATE := 2) > 1:\n    pass", "if (RATE := 3) > 1:\n    pass"),
        ("for RATE in (1, 2):\n    pass", "for RATE in (1, 3):\n    pass"),
    ],
)
def test_each_binding_of_a_name_is_part_of_the_fingerprint(load: Load, before: str, after: str) -> None:
    first, second = (load(SOURCE.replace("RATE = 2", text)).projections["sales"].code for text in (before, after))
    assert "" != first != second != ""


def test_the_module_of_an_imported_name_is_no_part_of_the_fingerprint(load: Load) -> None:
    first = load(SOURCE.replace("RATE = 2", "from math import inf as RATE"))
    second = load(SOURCE.replace("RATE = 2", "from cmath import inf as RATE"))
    assert first.projections["sales"].code == second.projections["sales"].code


def test_a_source_that_changes_after_its_import_keeps_the_fingerprint(load: Load, tmp_path: Path) -> None:
    app, other = load(SOURCE), load(SOURCE.replace("RATE = 2", "RATE = 3"))
    imported = {name: app.projections[name].code for name in ("sales", "by_hand")}
    source = Path(str(sys.modules[app.projections["sales"].row_type.__module__].__file__))
    source.write_text(SOURCE.replace("RATE = 2", "RATE = 3"), encoding="utf-8")
    database = Database(f"sqlite:///{tmp_path}/models.db")
    for name in ("sales", "by_hand"):
        code = Shadow(
            database, app.projections[name], ""
        ).resolved.code  # as a rebuild in a console that keeps running does
        assert code == imported[name] == load(SOURCE).projections[name].code
        assert code != other.projections[name].code


CHANGES = [
    'RATES["a"] = 2',
    "RATES.update(a=2)",
    "RATES.known = 2",
    "RATES |= {1: 2}",
    "del RATES[2]",
    "fill(RATES, 2)",
]
"""Statements of a module that change the value of a name in it."""


@pytest.mark.parametrize(
    ("statement", "block"),
    [
        *((statement, "") for statement in CHANGES),
        ("RATES.update(a=2)", "if __name__:\n    "),
        ('RATES["a"] = 2', "for _ in range(1):\n    "),
    ],
)
def test_a_statement_that_changes_a_value_of_a_helper_is_part_of_the_fingerprint(
    load: Load, statement: str, block: str
) -> None:
    rates = f"""
class Rates(dict):
    pass

def fill(rates: Rates, rate: int) -> None:
    rates["a"] = rate

RATES = Rates({{2: 1}}, a=1)
OTHERS = Rates({{2: 1, 3: 1}})
{block}{statement}
"""
    first = SOURCE.replace("RATE = 2\n", f"RATE = 2\n{rates}").replace("pieces * RATE", 'pieces * RATES["a"]')
    changed = first.replace(statement, statement.replace("2", "3") if "del" not in statement else "pass")
    other = first.replace(statement, f"{statement}\n{block}{statement.replace('RATES', 'OTHERS')}")
    before, after, beside = (load(source).projections["sales"].code for source in (first, changed, other))
    assert before != after
    assert before == beside


def test_a_function_registered_with_a_helper_is_part_of_the_fingerprint(load: Load) -> None:
    first = SOURCE.replace("def doubled(", "@singledispatch\ndef doubled(").replace(
        "def unused(", "@doubled.register\ndef _(pieces: int) -> int:\n    return 5\n\n\ndef unused("
    )
    first = f"from functools import singledispatch\n{first}"
    assert (
        load(first).projections["sales"].code != load(first.replace("return 5", "return 6")).projections["sales"].code
    )


def test_code_without_a_source_has_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("typed_into_a_console")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(module))
    assert module.app.projections["sales"].code == ""
