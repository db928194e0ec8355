"""Declarations of SQL projections: all faults are reported at once when the App is built."""

from __future__ import annotations

from collections.abc import Sequence as Many
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Column, ForeignKey, Integer, MetaData, Sequence, Table, Text
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import App, DefinitionError, Recorded, SqlProjection, aggregate, event
from eventjet.rebuild.plan import Route, make_plan, route_of
from eventjet.testing import on, projected
from tests.integration import by_hand
from tests.integration.projecting import BALANCES, MOVEMENTS, Added, Opened


@event("x.begun")
class Begun:
    n: int


@event("x.stranger")
class Stranger:
    pass


@aggregate("x")
class X:
    def evolve(self, event: Begun) -> X:
        return self


def table(name: str, *columns: Any, **options: Any) -> Table:
    return Table(
        name, options.pop("metadata", MetaData()), Column("id", Integer, primary_key=True), *columns, **options
    )


async def begun(event: Recorded[Begun], connection: AsyncConnection) -> None:
    """A correct handler."""


async def begun_too(event: Recorded[Begun], connection: AsyncConnection) -> None: ...


async def stranger(event: Recorded[Stranger], connection: AsyncConnection) -> None: ...


async def unannotated(event, connection) -> None: ...  # type: ignore[no-untyped-def]


async def alone(event: Recorded[Begun]) -> None: ...


def not_async(event: Recorded[Begun], connection: AsyncConnection) -> None: ...


async def in_a_list(events: list[Recorded[Begun]], connection: AsyncConnection) -> None: ...


async def bare(events: Many[Begun], connection: AsyncConnection) -> None: ...


async def many(events: Many[Recorded[Begun]], connection: AsyncConnection) -> None: ...


def faults(*handlers: Any, tables: Any = None, name: str = "ledger", revision: int = 1, others: Any = ()) -> str:
    declared = SqlProjection(name, tables=[table("t")] if tables is None else tables, revision=revision)
    for handler in handlers:
        declared.handler(handler)
    with pytest.raises(DefinitionError) as raised:
        App("a", aggregates=[X], projections=[declared, *others])
    return str(raised.value)


@pytest.mark.parametrize(
    ("handlers", "options", "message"),
    [
        ((), {}, "it has no handler"),
        ((begun, begun_too), {}, "Begun is taken by begun and by begun_too"),
        ((stranger,), {}, "stranger takes Stranger, which no aggregate of the app folds"),
        ((unannotated,), {}, "`event` has no annotation"),
        ((alone,), {}, "alone takes (event) instead of (event, connection)"),
        ((not_async,), {}, "not_async is not an `async def`"),
        ((in_a_list,), {}, "in_a_list is given a sequence of `Recorded`: write `events: Sequence[Recorded[…]]`"),
        ((bare,), {}, "bare is given a sequence of `Recorded`"),
        ((begun, many), {}, "Begun is taken by begun and by many"),
        ((begun,), {"tables": []}, "it has no tables"),
        ((begun,), {"name": "Ledger"}, "its name is not"),
        ((begun,), {"revision": 0}, "its revision is 0"),
        ((begun,), {"tables": [table("t"), table("t")]}, "it lists the table 't' twice"),
        ((begun,), {"tables": [table("t", schema="s")]}, "the table 's.t' names its schema"),
        ((begun,), {"tables": [table("eventjet_projection")]}, "is eventjet's own"),
        ((begun,), {"tables": [Table("t", MetaData(), Column("a", Text))]}, "has no primary key"),
        ((begun,), {"tables": [table("t", Column("other", ForeignKey("nowhere.id")))]}, "that cannot be found"),
        ((begun,), {"tables": [table("t", Column("n", Integer, Sequence("s")))]}, "use Identity()"),
    ],
)
def test_each_fault_of_a_declaration_is_named(handlers: Any, options: Any, message: str) -> None:
    assert message in faults(*handlers, **options)


def test_all_faults_are_named_at_once() -> None:
    message = faults(begun, begun_too, not_async, unannotated, tables=[table("t", schema="s")], revision=0)
    for fault in ("its revision", "begun_too", "not_async is not", "`event` has no annotation", "names its schema"):
        assert fault in message


def test_foreign_keys_must_lead_to_declared_tables_without_a_cycle() -> None:
    metadata = MetaData()
    parent = table("parent", metadata=metadata)
    child = table("child", Column("parent", ForeignKey("parent.id")), metadata=metadata)
    assert "a foreign key to 'parent', which the projection does not declare" in faults(begun, tables=[child])
    around = MetaData()
    first = table("one", Column("two", ForeignKey("two.id")), metadata=around)
    second = table("two", Column("one", ForeignKey("one.id")), metadata=around)
    assert "form a circle" in faults(begun, tables=[first, second])
    own = table("own", Column("above", ForeignKey("own.id")))
    declared = SqlProjection("ledger", tables=[child, parent, own])
    declared.handler(begun)
    resolved = App("a", aggregates=[X], projections=[declared]).projections["ledger"]
    assert [resolved_table.name for resolved_table in resolved.tables] == ["parent", "own", "child"]
    assert (resolved.events, resolved.durable) == ((Begun,), "ledger-r1")


def test_a_handler_declared_after_the_app_was_built_is_refused() -> None:
    declared = SqlProjection("ledger", tables=[table("t")])
    assert declared.handler(begun) is begun
    App("a", aggregates=[X], projections=[declared])
    with pytest.raises(DefinitionError, match="begun_too is declared after the App was built"):
        declared.handler(begun_too)


def test_a_plan_runs_sql_projections_sequentially_after_the_folded_ones() -> None:
    assert route_of(by_hand.LEDGER) is Route.SEQUENTIAL
    for engine in ("spark", "local"):
        resolved = [by_hand.LEDGER, BALANCES, MOVEMENTS]
        plan = make_plan("s", 1, 10, resolved, keys=5, engine=engine, cores=2)
        assert plan.passes[-1].route is Route.SEQUENTIAL
        assert plan.passes[-1].projections == ("ledger",)
        assert [name for plan_pass in plan.folded().passes for name in plan_pass.projections] == [
            "balances",
            "movements",
        ]
        only_sql = make_plan("s", 1, 10, [by_hand.LEDGER], keys=5, engine=engine, cores=2)
        assert only_sql.folded().passes == ()


def test_handlers_can_be_tried_without_a_server() -> None:
    tables = projected(
        by_hand.ledger, on("a", Opened(owner="ada"), Added(amount=Decimal(1))), on("b", Opened(owner="bob"))
    )
    tables.rows(by_hand.accounts_table, {"account_id": "a", "owner": "ada"}, {"account_id": "b", "owner": "bob"})
    tables.rows(by_hand.totals_table, {"name": "opened", "n": 2}, {"name": "added", "n": 1})
    with pytest.raises(AssertionError, match="the rows are"):
        tables.rows(by_hand.totals_table, {"name": "opened", "n": 2})
    projected(by_hand.ledger).rows(by_hand.accounts_table)


async def test_handlers_can_be_tried_within_a_coroutine() -> None:
    projected(by_hand.ledger, on("a", Opened(owner="ada"))).rows(by_hand.totals_table, {"name": "opened", "n": 1})
