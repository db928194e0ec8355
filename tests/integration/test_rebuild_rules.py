"""A rebuild whose rows break a rule of the database names the rule, the row and the way out."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from eventjet.errors import RowsRefused
from eventjet.rebuild import rebuild
from tests.integration.rebuild_log import Book, remains

CHECK = ('CheckConstraint("events >= 0")', 'CheckConstraint("events < 3", name="few")')
INDEX = ('Index("ix_balances_owner", "owner")', 'Index("ix_balances_owner", "owner", unique=True)')
UNIQUE = ('Index("ix_balances_owner", "owner")', 'UniqueConstraint("owner", name="one_each")')
IMPORT = ("import String, Table", "import String, Table, UniqueConstraint")


@pytest.mark.parametrize(
    ("change", "rule", "row"),
    [
        ([CHECK], "few|events < 3", "account_id = 'a-busy'|'a-busy'"),
        ([INDEX], "ix_balances_owner|balances.owner", r"\(owner\)=\(ada\)|owner = 'ada'"),
        ([UNIQUE, IMPORT], "one_each|balances.owner", r"\(owner\)=\(ada\)|'ada'"),
    ],
    ids=["check", "unique index", "unique constraint"],
)
async def test_a_rule_that_rows_break_is_named_with_a_row(
    book: Book, change: list[tuple[str, str]], rule: str, row: str
) -> None:
    types = {event_type.__name__: event_type for event_type in book.projections["balances"].events}
    book.append([(name, types["Opened"](owner="ada")) for name in ("a-1", "a-2")])
    book.append([("a-busy", types["Deposited"](amount=Decimal(1)))] * 3)
    with pytest.raises(RowsRefused) as caught:
        await rebuild(book.altered(*change), ["balances"], book.settings, engine="local")
    problem = str(caught.value)
    assert re.search(rule, problem), problem
    assert re.search(row, problem), problem
    assert "The live table is untouched." in problem
    assert "Traceback" not in problem
    assert remains(book.where) == []
