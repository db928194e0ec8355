"""A projection that quarantines: a bad event is parked once, its aggregate waits behind it, the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, text

from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.domain.quarantined import QUARANTINED, Quarantined
from eventjet.errors import CheckpointFenced
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.protocol import publish_frame
from eventjet.projections.fold import Offering
from eventjet.projections.resolve import ResolvedProjection
from eventjet.settings import Settings
from eventjet.sql import quarantine as verdict
from eventjet.sql.checkpoint import Checkpoint, ensure, read, take
from eventjet.sql.database import Database
from eventjet.subscriptions.context import WorkerOptions
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import FoldWriter
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import (
    BALANCES,
    CATALOG,
    MOVEMENTS,
    Added,
    Balance,
    Closed,
    Noted,
    Opened,
    database_with,
)
from tests.integration.quarantined import BAD, MENDED, PARKING, bad_records, expected, mixed, resolutions, state_of
from tests.logs import block, stored
from tests.tables import reading

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)
T = TypeVar("T")


@pytest.fixture(params=["postgresql", "sqlite"])
def ledger(request: pytest.FixtureRequest, eventjet_nats: NatsServer, tmp_path: Path) -> Ledger:
    """An app over an empty log, with its tables in a database of each kind."""
    url = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        url = str(request.getfixturevalue("eventjet_database"))
    database_with(url, PARKING, MOVEMENTS)
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=url), projections={"balances": PARKING})
    ledger.create()
    return ledger


def with_(ledger: Ledger, resolved: ResolvedProjection, catalog: Catalog = CATALOG) -> Ledger:
    """The same app deployed with another function."""
    return replace(ledger, projections={"balances": resolved}, catalog=catalog)


def changed(ledger: Ledger, change: Callable[[Connection], T]) -> T:
    engine = Database(ledger.settings.database).sync_engine()
    try:
        with engine.begin() as connection:
            return change(connection)
    finally:
        engine.dispose()


def retry(ledger: Ledger, positions: Sequence[int] | None = None) -> list[int]:
    return changed(ledger, lambda connection: verdict.retry(connection, "balances", 1, positions))


def drop(ledger: Ledger, *positions: int) -> list[int]:
    return changed(ledger, lambda connection: verdict.drop(connection, "balances", 1, positions))


def epoch_of(ledger: Ledger) -> int:
    with reading(ledger.settings.database) as connection:
        found = read(connection, "balances", 1)
    assert found is not None
    return found.epoch


async def settled(ledger: Ledger) -> None:
    """Until a worker has carried out what was decided."""

    async def is_settled() -> bool:
        return "retry" not in resolutions((await asyncio.to_thread(state_of, ledger))[1]).values()

    await eventually(is_settled, "the verdicts to be carried out")


def assert_as_by_hand(ledger: Ledger, last: int, **how: Any) -> None:
    """Rows and quarantine are those of one event at a time, and no event is in both or in neither."""
    rows, kept = state_of(ledger)
    by_hand, parked = expected(ledger, last, **how)
    assert rows == by_hand
    assert {one.position: one.resolution for one in kept if one.resolution in ("parked", "blocked")} == parked


async def test_bad_events_of_every_kind_are_parked_and_the_others_go_on(ledger: Ledger) -> None:
    last = ledger.append_raw(mixed(900))
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        assert_as_by_hand(ledger, last)
        now = await ledger.status()
        assert now.reason is None
        assert now.state in ("active", "building")
        assert now.parked == sum(one.resolution == "parked" for one in state_of(ledger)[1]) > 10
        epoch = epoch_of(ledger)
        last = ledger.append_raw(mixed(300, seed=6))
        await ledger.caught_up(last)
        assert_as_by_hand(ledger, last)
        assert epoch_of(ledger) == epoch


async def test_the_reason_the_traceback_and_the_bytes_are_kept(ledger: Ledger) -> None:
    bad = bad_records()
    positions = {kind: ledger.append_raw([(f"b-{index}", *bad[kind])]) for index, kind in enumerate(bad)}
    last = ledger.append([("b-0", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    kept = {one.position: one for one in state_of(ledger)[1]}
    assert {kind: kept[position].payload for kind, position in positions.items()} == {k: bad[k][1] for k in bad}
    reasons = {kind: kept[position].reason for kind, position in positions.items()}
    assert reasons["poison"] == "Poisoned: no 666"
    assert reasons["unknown"] == "'ledger.stranger' schema 1 is not declared"
    assert reasons["headers"] == "it cannot be decoded: it lacks Ej-Type, Ej-Schema or Ej-Version"
    assert reasons["column"].startswith("balances.owner cannot hold 'xxx")
    assert "ValueError" in reasons["version"]
    assert all(one.reason and "\n" not in one.reason for one in kept.values() if one.resolution == "parked")
    shown = changed(ledger, lambda connection: verdict.shown(connection, "balances", 1, positions["poison"]))
    assert shown is not None
    assert "in wary" in shown.traceback
    assert shown.traceback.rstrip().endswith("please")
    assert (shown.event.blocked, shown.event.event_type) == (1, "ledger.added")
    assert (kept[last].resolution, kept[last].payload, kept[last].reason) == ("blocked", None, "")

    def with_text(text: str) -> list[int]:
        listed = changed(ledger, lambda connection: verdict.listed(connection, ["balances"], text=text))
        return [event.position for event in listed]

    assert with_text("POISONED: no 666") == [positions["poison"]]
    assert with_text("b-0") == [position for position in positions.values() if kept[position].aggregate_id == "b-0"]
    assert with_text("no_66%") == []


def test_a_search_finds_letters_in_upper_or_lower_case_beyond_ascii(ledger: Ledger) -> None:
    def listed(connection: Connection, text: str, limit: int | None = None) -> list[int]:
        return [each.position for each in verdict.listed(connection, ["balances"], text=text, limit=limit)]

    def searched(connection: Connection) -> None:
        reasons = ("ÄRGER mit 5 %", "kein ärger", "other")
        verdict.insert_events(
            connection,
            "balances",
            1,
            [
                Quarantined(position, "ledger", f"b-{position}", "id", "ledger.added", QUARANTINED, reason, "", None)
                for position, reason in enumerate(reasons, 1)
            ],
        )
        assert listed(connection, "ärger") == listed(connection, "ÄRGER") == [1, 2]
        assert listed(connection, "ärger", limit=1) == [1]
        assert (listed(connection, "%"), listed(connection, "B-3"), listed(connection, "_")) == ([1], [3], [])

    changed(ledger, searched)


@pytest.mark.parametrize("rule", ["none", "of the database"])
async def test_batches_of_any_size_give_the_same_rows_and_the_same_quarantine(ledger: Ledger, rule: str) -> None:
    records = mixed(250)
    if rule == "of the database":
        # Opened twice with one owner: the second is refused by the database, not by the codec.
        changed(ledger, lambda connection: connection.execute(text("create unique index one on balances (owner)")))
        twice = CATALOG.encode(Opened(owner="o-twice")).body
        records += [(f"t-{index}", block("ledger.opened"), twice) for index in range(3)]
        records += [("t-1", block("ledger.opened"), CATALOG.encode(Opened(owner="free")).body)]
    last = ledger.append_raw(records)
    found: list[Any] = []
    for size in (1, 7, 1000):
        async with ledger.working(options=replace(QUICK, batch_max=size)):
            await ledger.caught_up(last)
        found.append(state_of(ledger))
        for table in ("balances", "eventjet_quarantine", "eventjet_projection"):
            changed(ledger, lambda connection, table=table: connection.execute(text(f"delete from {table}")))
    assert found[0] == found[1] == found[2]
    parked = {one.aggregate_id: one.resolution for one in found[0][1] if one.aggregate_id.startswith("t-")}
    assert parked == ({"t-1": "blocked", "t-2": "parked"} if rule == "of the database" else {})


async def test_an_event_on_a_subject_that_is_not_ours_is_parked_under_its_subject(ledger: Ledger) -> None:
    body = CATALOG.encode(Added(amount=Decimal(1))).body
    subjects = [f"{ledger.name}.ledger.a=zz", f"{ledger.name}.ledger.=00", f"{ledger.name}.l\u00e4dger.a!",
                f"{ledger.name}.{'x' * 1_800}.a-1", f"{ledger.name}.ledger.{'y' * 1_800}"]  # fmt: skip
    with NatsConnection.open(ledger.endpoint) as link:
        reply = f"{link.inbox}.acks"
        acks = link.subscribe(reply)
        frames = [
            publish_frame(one, body, reply=reply.encode(), headers=block("ledger.added", version=1))
            for one in subjects * 2
        ]
        stored(link, acks, frames)
    last = ledger.append([("a-1", Opened(owner="ada"))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    rows, kept = state_of(ledger)
    assert [row.account_id for row in rows] == ["a-1"]
    assert rows[0].events == 1
    assert [one.resolution for one in kept] == ["parked"] * 5 + ["blocked"] * 5
    assert [one.aggregate_id for one in kept[:3]] == subjects[:3]
    assert {one.aggregate for one in kept} == {"?"}


async def test_a_newer_schema_is_left_to_a_newer_deploy_and_not_parked(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="ada"))])
    ledger.append_raw([("a-1", block("ledger.added", schema=2), b"{}")])

    async def waits() -> bool:
        return (await ledger.status()).reason is not None

    async with ledger.working(options=replace(QUICK, backoff_s=(0.1, 60.0))):
        await eventually(waits, "a reason")
    now = await ledger.status()
    assert (now.position, now.owner, now.parked) == (1, None, 0)
    assert now.state in ("building", "active")
    assert "schema 2" in str(now.reason)


async def test_a_parked_event_is_tried_once(ledger: Ledger, tmp_path: Path) -> None:
    tries: list[int] = []

    def counting(row: Any, event: Any) -> Any:
        if isinstance(event.data, Added) and event.data.amount == BAD:
            tries.append(event.position)
        return PARKING.declared.fold(row, event)  # type: ignore[union-attr]

    counted = with_(ledger, replace(PARKING, declared=replace(PARKING.declared, fold=counting)))  # type: ignore[arg-type]
    bad = [counted.append([(f"a-{number}", Added(amount=BAD))]) for number in range(20)]
    for seed in range(3):
        last = counted.append(history(30, seed=seed))
        async with counted.working(options=QUICK):
            await counted.caught_up(last)
    assert tries == bad


async def test_a_worker_that_starts_again_keeps_holding_back(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=BAD))])
    last = ledger.append([("a-1", Added(amount=Decimal(1))), ("a-2", Opened(owner="bob"))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    last = ledger.append([("a-1", Added(amount=Decimal(2))), ("a-2", Added(amount=Decimal(2)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    assert_as_by_hand(ledger, last)
    assert resolutions(state_of(ledger)[1]) == {2: "parked", 3: "blocked", 5: "blocked"}


async def test_a_mended_function_takes_what_was_parked_and_all_that_waited_behind_it(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=BAD))])
    last = ledger.append([("a-1", Added(amount=Decimal(1)))] * 25 + history(50))
    async with ledger.working(options=replace(QUICK, batch_max=7)):
        await ledger.caught_up(last)
    mended = with_(ledger, MENDED)
    async with mended.working(options=replace(QUICK, batch_max=7)):
        assert retry(ledger) == [2]
        await settled(ledger)
        last = ledger.append([("a-1", Closed()), ("a-1", Opened(owner="eve"))])
        await ledger.caught_up(last)
    rows, kept = state_of(ledger)
    assert rows == expected(ledger, last, MENDED.declared.fold)[0]  # type: ignore[union-attr]
    assert set(resolutions(kept).values()) == {"retried"}
    assert resolutions(kept)[2] == "retried"


async def test_a_retry_that_fails_again_is_parked_anew_with_its_new_reason(ledger: Ledger) -> None:
    last = ledger.append_raw([("a-1", block("ledger.added"), b"{"), ("a-2", *bad_records()["poison"])])
    last = ledger.append([("a-1", Added(amount=Decimal(1))), ("a-2", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)

    def otherwise(row: Any, event: Any) -> Any:
        raise LookupError("not yet")

    other = with_(ledger, replace(PARKING, declared=replace(PARKING.declared, fold=otherwise)))  # type: ignore[arg-type]
    before = state_of(ledger)[1]
    async with other.working(options=QUICK):
        retry(ledger)
        await settled(ledger)
    after = state_of(ledger)[1]
    assert resolutions(after) == resolutions(before) == {1: "parked", 2: "parked", 3: "blocked", 4: "blocked"}
    assert after[0] == before[0]
    assert (after[1].reason, after[1].payload) == ("LookupError: not yet", bad_records()["poison"][1])


async def test_what_is_parked_is_logged_with_the_first_line_of_its_reason(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [one.getMessage() for one in caplog.records if "is quarantined" in one.getMessage()]

    async def has_logged() -> bool:
        return bool(logged())

    last = ledger.append([("a", Opened(owner="ada")), ("a", Added(amount=BAD)), ("a", Added(amount=Decimal(3)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        # What is logged is committed: a reader may see the rows before the line is written.
        await eventually(has_logged, "the line of what was parked")
        assert logged() == ["balances: the event at position 2 is quarantined: Poisoned: no 666"]
        caplog.clear()
        retry(ledger)
        await settled(ledger)
    assert logged() == ["balances: the event at position 2 is quarantined again: Poisoned: no 666"]


async def test_a_later_event_that_fails_in_a_retry_is_parked_and_what_precedes_it_is_taken(ledger: Ledger) -> None:
    ledger.append_raw([("a-1", block("ledger.stranger"), b"{}")])
    last = ledger.append([("a-1", Added(amount=Decimal(1))), ("a-1", Added(amount=BAD)), ("a-1", Opened(owner="ada"))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    newer = with_(ledger, PARKING, Catalog([Opened, Added, Closed, Noted], retired=["ledger.stranger"]))
    async with newer.working(options=QUICK):
        retry(ledger, [1])
        await settled(ledger)
    rows, kept = state_of(ledger)
    assert rows == [Balance("a-1", None, Decimal("1.00"), 1, 2)]
    assert resolutions(kept) == {1: "retried", 3: "parked", 4: "blocked"}


async def test_a_retry_that_the_database_refuses_is_parked_anew(ledger: Ledger) -> None:
    changed(ledger, lambda connection: connection.execute(text("create unique index one on balances (owner)")))
    last = ledger.append([("a-1", Opened(owner="ada")), ("a-2", Added(amount=BAD))])
    last = ledger.append([("a-2", Added(amount=Decimal(1))), ("a-2", Opened(owner="ada"))])
    last = ledger.append([("a-2", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    mended = with_(ledger, MENDED)
    async with mended.working(options=QUICK):
        retry(ledger)
        await settled(ledger)
    rows, kept = state_of(ledger)
    assert [(row.account_id, row.amount) for row in rows] == [("a-1", 0), ("a-2", BAD + 1)]
    assert resolutions(kept) == {2: "retried", 4: "parked", 5: "blocked"}
    assert kept[1].reason.startswith(("UniqueViolation", "IntegrityError"))


async def test_a_dropped_event_is_passed_over_and_the_rest_is_taken(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=BAD)), ("a-1", Added(amount=Decimal(3)))])
    last = ledger.append([("a-2", Added(amount=BAD)), ("a-1", Added(amount=BAD)), ("a-1", Added(amount=Decimal(4)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        drop(ledger, 2, 4)
        await settled(ledger)
        assert resolutions(state_of(ledger)[1]) == {2: "dropped", 4: "dropped", 5: "parked", 6: "blocked"}
        drop(ledger, 5)
        await settled(ledger)
        last = ledger.append([("a-2", Added(amount=Decimal(5)))])
        await ledger.caught_up(last)
    assert_as_by_hand(ledger, last, dropped={2, 4, 5})
    assert resolutions(state_of(ledger)[1]) == {2: "dropped", 4: "dropped", 5: "dropped"}


async def test_a_verdict_ends_the_term_of_the_worker_that_holds_the_lease(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Added(amount=BAD))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        epoch = epoch_of(ledger)
        retry(ledger)
        await settled(ledger)
        assert epoch_of(ledger) >= epoch + 2


async def test_a_projection_that_stops_does_not_build_upon_one_that_held_back(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Added(amount=BAD))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    ledger.append([("a-1", Added(amount=Decimal(1)))])
    stopping = with_(ledger, BALANCES)

    async def is_failed() -> bool:
        return (await ledger.status()).state == "failed"

    async with stopping.working(options=QUICK):
        await eventually(is_failed, "the projection to fail")
    assert "its quarantine still blocks" in str((await ledger.status()).reason)
    assert (await ledger.status()).position == last


def offered(*events: Any) -> list[Any]:
    """Offers as the consumer makes them, at positions 1, 2 …."""
    made = Offering(CATALOG, PARKING.events)
    pairs = [(aggregate_id, CATALOG.encode(data)) for aggregate_id, data in events]
    return [
        made((number, 1, f"app.ledger.{one}".encode(), block(encoded.type_name, version=1), encoded.body))
        for number, (one, encoded) in enumerate(pairs, 1)
    ]


def test_a_writer_that_is_fenced_parks_nothing_and_the_next_one_parks_once(ledger: Ledger) -> None:
    writers = [FoldWriter(PARKING, Database(ledger.settings.database).dialect, lease_s=9) for _ in range(2)]
    events = offered(("a-1", Added(amount=BAD)), ("a-2", Added(amount=Decimal(1))), ("a-1", Added(amount=Decimal(1))))
    batch = Batch(0, 3, "id-3", events)

    def taken(connection: Connection, owner: str) -> Checkpoint:
        ensure(connection, "balances", 1)
        held = take(connection, "balances", 1, owner, ttl_s=-1)
        assert held is not None
        return held

    zombie = changed(ledger, lambda connection: taken(connection, "zombie"))
    prepared = changed(ledger, lambda connection: writers[0].prepare(connection, batch))
    assert prepared.changes.quarantine is not None
    owner = changed(ledger, lambda connection: taken(connection, "owner"))
    with pytest.raises(CheckpointFenced):
        changed(ledger, lambda connection: writers[0].commit(connection, zombie, prepared))
    assert state_of(ledger) == ([], [])
    changed(ledger, lambda connection: writers[1].write(connection, owner, batch))
    rows, kept = state_of(ledger)
    assert [row.account_id for row in rows] == ["a-2"]
    assert resolutions(kept) == {1: "parked", 3: "blocked"}
    with pytest.raises(CheckpointFenced):
        changed(ledger, lambda connection: writers[1].write(connection, owner, batch))
    assert state_of(ledger) == (rows, kept)
