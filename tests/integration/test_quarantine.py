"""A projection that quarantines: it quarantines a bad event once, blocks its aggregate, and goes on with the others."""

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
from eventjet.operations.quarantine import CommandConnections, Quarantine
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
from tests.integration.quarantined import BAD, MENDED, QUARANTINING, bad_records, expected, mixed, resolutions, state_of
from tests.logs import block, stored
from tests.tables import reading

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)
T = TypeVar("T")


@pytest.fixture(params=["postgresql", "sqlite"])
def ledger(request: pytest.FixtureRequest, eventjet_nats: NatsServer, tmp_path: Path) -> Ledger:
    """Return an app over an empty log, with its tables in a database of each kind."""
    url = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        url = str(request.getfixturevalue("eventjet_database"))
    database_with(url, QUARANTINING, MOVEMENTS)
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=url), projections={"balances": QUARANTINING})
    ledger.create()
    return ledger


def deployed_with(ledger: Ledger, resolved: ResolvedProjection, catalog: Catalog = CATALOG) -> Ledger:
    """Return the same app, deployed with another handler."""
    return replace(ledger, projections={"balances": resolved}, catalog=catalog)


def in_transaction(ledger: Ledger, change: Callable[[Connection], T]) -> T:
    engine = Database(ledger.settings.database).sync_engine()
    try:
        with engine.begin() as connection:
            return change(connection)
    finally:
        engine.dispose()


def retry(ledger: Ledger, positions: Sequence[int] | None = None) -> list[int]:
    return in_transaction(ledger, lambda connection: verdict.retry(connection, "balances", 1, positions))


def drop(ledger: Ledger, *positions: int) -> list[int]:
    return in_transaction(ledger, lambda connection: verdict.drop(connection, "balances", 1, positions))


def epoch_of(ledger: Ledger) -> int:
    with reading(ledger.settings.database) as connection:
        checkpoint = read(connection, "balances", 1)
    assert checkpoint is not None
    return checkpoint.epoch


async def wait_settled(ledger: Ledger) -> None:
    """Wait until a worker has carried out every resolution."""

    async def is_settled() -> bool:
        return "retry" not in resolutions((await asyncio.to_thread(state_of, ledger))[1]).values()

    await eventually(is_settled, "the verdicts to be carried out")


def assert_as_by_hand(ledger: Ledger, last: int, **options: Any) -> None:
    """Assert that rows and quarantine equal those of a fold of one event at a time."""
    rows, quarantine = state_of(ledger)
    by_hand, quarantined = expected(ledger, last, **options)
    assert rows == by_hand
    assert {
        event.position: event.resolution for event in quarantine if event.resolution in ("quarantined", "blocked")
    } == quarantined


async def test_bad_events_of_every_kind_are_quarantined_and_the_others_are_projected(ledger: Ledger) -> None:
    last = ledger.append_raw(mixed(900))
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        assert_as_by_hand(ledger, last)
        status = await ledger.status()
        assert status.reason is None
        assert status.state in ("active", "building")
        assert status.quarantined == sum(event.resolution == "quarantined" for event in state_of(ledger)[1]) > 10
        epoch = epoch_of(ledger)
        last = ledger.append_raw(mixed(300, seed=6))
        await ledger.caught_up(last)
        assert_as_by_hand(ledger, last)
        assert epoch_of(ledger) == epoch


async def test_the_quarantine_keeps_reason_traceback_and_payload(ledger: Ledger) -> None:
    bad = bad_records()
    positions = {kind: ledger.append_raw([(f"b-{index}", *bad[kind])]) for index, kind in enumerate(bad)}
    last = ledger.append([("b-0", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    quarantine = {event.position: event for event in state_of(ledger)[1]}
    assert {kind: quarantine[position].payload for kind, position in positions.items()} == {k: bad[k][1] for k in bad}
    reasons = {kind: quarantine[position].reason for kind, position in positions.items()}
    assert reasons["poison"] == "Poisoned: no 666"
    assert reasons["unknown"] == "'ledger.stranger' schema 1 is not declared"
    assert reasons["headers"] == "it cannot be decoded: it lacks Ej-Type, Ej-Schema or Ej-Version"
    assert reasons["column"].startswith("balances.owner cannot hold 'xxx")
    assert "ValueError" in reasons["version"]
    assert all(
        event.reason and "\n" not in event.reason for event in quarantine.values() if event.resolution == "quarantined"
    )
    details = in_transaction(ledger, lambda connection: verdict.shown(connection, "balances", 1, positions["poison"]))
    assert details is not None
    assert "in wary" in details.traceback
    assert details.traceback.rstrip().endswith("please")
    assert (details.event.blocked, details.event.event_type) == (1, "ledger.added")
    assert (quarantine[last].resolution, quarantine[last].payload, quarantine[last].reason) == ("blocked", None, "")

    def with_text(text: str) -> list[int]:
        events = in_transaction(ledger, lambda connection: verdict.listed(connection, ["balances"], text=text))
        return [event.position for event in events]

    assert with_text("POISONED: no 666") == [positions["poison"]]
    assert with_text("b-0") == [
        position for position in positions.values() if quarantine[position].aggregate_id == "b-0"
    ]
    assert with_text("no_66%") == []


def test_a_search_finds_letters_in_upper_or_lower_case_beyond_ascii(ledger: Ledger) -> None:
    def listed(connection: Connection, text: str, limit: int | None = None) -> list[int]:
        return [event.position for event in verdict.listed(connection, ["balances"], text=text, limit=limit)]

    def search(connection: Connection) -> None:
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

    in_transaction(ledger, search)


def quarantined(*positions: int) -> list[Quarantined]:
    """Events that each block an aggregate of their own."""
    return [
        Quarantined(position, "ledger", f"b-{position}", "id", "ledger.added", QUARANTINED, "no", "", None)
        for position in positions
    ]


async def test_pages_leave_out_no_event_that_another_revision_quarantined(ledger: Ledger) -> None:
    def insert(connection: Connection) -> None:
        verdict.insert_events(connection, "balances", 1, quarantined(10, 20, 30, 40))
        verdict.insert_events(connection, "balances", 2, quarantined(5, 20, 35))

    in_transaction(ledger, insert)
    quarantine = Quarantine(CommandConnections(ledger, ledger.settings), "balances")  # type: ignore[arg-type]
    pages: list[list[tuple[int, int]]] = []
    after, is_cut = 0, True
    while is_cut:
        events, is_cut = await quarantine.listed(after=after, limit=2)
        pages.append([(event.position, event.revision) for event in events])
        after = events[-1].position
    assert pages == [[(5, 2), (10, 1)], [(20, 1), (20, 2)], [(30, 1), (35, 2)], [(40, 1)]]
    events, is_cut = await quarantine.listed(after=5, limit=2)
    assert ([event.position for event in events], is_cut) == ([10], True)


def test_the_outcomes_of_more_events_than_a_statement_has_parameters(ledger: Ledger) -> None:
    def decide(connection: Connection) -> None:
        ensure(connection, "balances", 1)
        verdict.insert_events(connection, "balances", 1, quarantined(3, 5, 9))
        assert verdict.retry(connection, "balances", 1, None) == [3, 5, 9]
        verdict.drop(connection, "balances", 1, [5])
        outcomes = verdict.outcomes(connection, "balances", 1, range(70_000))
        assert [(outcome.position, outcome.resolution) for outcome in outcomes] == [
            (3, "retry"), (5, "dropped"), (9, "retry")
        ]  # fmt: skip

    in_transaction(ledger, decide)


@pytest.mark.parametrize("rule", ["none", "of the database"])
async def test_batches_of_any_size_give_the_same_rows_and_the_same_quarantine(ledger: Ledger, rule: str) -> None:
    records = mixed(250)
    if rule == "of the database":
        # Opened twice with one owner: the second is refused by the database, not by the codec.
        in_transaction(
            ledger, lambda connection: connection.execute(text("create unique index one on balances (owner)"))
        )
        twice = CATALOG.encode(Opened(owner="o-twice")).body
        records += [(f"t-{index}", block("ledger.opened"), twice) for index in range(3)]
        records += [("t-1", block("ledger.opened"), CATALOG.encode(Opened(owner="free")).body)]
    last = ledger.append_raw(records)
    states: list[Any] = []
    for size in (1, 7, 1000):
        async with ledger.working(options=replace(QUICK, batch_max=size)):
            await ledger.caught_up(last)
        states.append(state_of(ledger))
        for table in ("balances", "eventjet_quarantine", "eventjet_projection"):
            in_transaction(ledger, lambda connection, table=table: connection.execute(text(f"delete from {table}")))
    assert states[0] == states[1] == states[2]
    quarantined = {
        event.aggregate_id: event.resolution for event in states[0][1] if event.aggregate_id.startswith("t-")
    }
    assert quarantined == ({"t-1": "blocked", "t-2": "quarantined"} if rule == "of the database" else {})


async def test_an_event_on_a_foreign_subject_is_quarantined_under_its_subject(ledger: Ledger) -> None:
    body = CATALOG.encode(Added(amount=Decimal(1))).body
    subjects = [f"{ledger.name}.ledger.a=zz", f"{ledger.name}.ledger.=00", f"{ledger.name}.l\u00e4dger.a!",
                f"{ledger.name}.{'x' * 1_800}.a-1", f"{ledger.name}.ledger.{'y' * 1_800}"]  # fmt: skip
    with NatsConnection.open(ledger.endpoint) as link:
        reply = f"{link.inbox}.acks"
        acks = link.subscribe(reply)
        frames = [
            publish_frame(subject, body, reply=reply.encode(), headers=block("ledger.added", version=1))
            for subject in subjects * 2
        ]
        stored(link, acks, frames)
    last = ledger.append([("a-1", Opened(owner="ada"))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    rows, quarantine = state_of(ledger)
    assert [row.account_id for row in rows] == ["a-1"]
    assert rows[0].events == 1
    assert [event.resolution for event in quarantine] == ["quarantined"] * 5 + ["blocked"] * 5
    assert [event.aggregate_id for event in quarantine[:3]] == subjects[:3]
    assert {event.aggregate for event in quarantine} == {"?"}


async def test_an_event_of_a_newer_schema_waits_for_a_newer_deploy_and_is_not_quarantined(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="ada"))])
    ledger.append_raw([("a-1", block("ledger.added", schema=2), b"{}")])

    async def waits() -> bool:
        return (await ledger.status()).reason is not None

    async with ledger.working(options=replace(QUICK, backoff_s=(0.1, 60.0))):
        await eventually(waits, "a reason")
    status = await ledger.status()
    assert (status.position, status.owner, status.quarantined) == (1, None, 0)
    assert status.state in ("building", "active")
    assert "schema 2" in str(status.reason)


async def test_a_quarantined_event_is_tried_once(ledger: Ledger, tmp_path: Path) -> None:
    tries: list[int] = []

    def count_tries(row: Any, event: Any) -> Any:
        if isinstance(event.data, Added) and event.data.amount == BAD:
            tries.append(event.position)
        return QUARANTINING.declared.fold(row, event)  # type: ignore[union-attr]

    counting = deployed_with(ledger, replace(QUARANTINING, declared=replace(QUARANTINING.declared, fold=count_tries)))  # type: ignore[arg-type]
    bad = [counting.append([(f"a-{number}", Added(amount=BAD))]) for number in range(20)]
    for seed in range(3):
        last = counting.append(history(30, seed=seed))
        async with counting.working(options=QUICK):
            await counting.caught_up(last)
    assert tries == bad


async def test_a_restarted_worker_still_blocks_quarantined_aggregates(ledger: Ledger) -> None:
    ledger.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=BAD))])
    last = ledger.append([("a-1", Added(amount=Decimal(1))), ("a-2", Opened(owner="bob"))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    last = ledger.append([("a-1", Added(amount=Decimal(2))), ("a-2", Added(amount=Decimal(2)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    assert_as_by_hand(ledger, last)
    assert resolutions(state_of(ledger)[1]) == {2: "quarantined", 3: "blocked", 5: "blocked"}


async def test_a_corrected_handler_takes_the_quarantined_event_and_those_behind_it(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=BAD))])
    last = ledger.append([("a-1", Added(amount=Decimal(1)))] * 25 + history(50))
    async with ledger.working(options=replace(QUICK, batch_max=7)):
        await ledger.caught_up(last)
    mended = deployed_with(ledger, MENDED)
    async with mended.working(options=replace(QUICK, batch_max=7)):
        assert retry(ledger) == [2]
        await wait_settled(ledger)
        last = ledger.append([("a-1", Closed()), ("a-1", Opened(owner="eve"))])
        await ledger.caught_up(last)
    rows, quarantine = state_of(ledger)
    assert rows == expected(ledger, last, MENDED.declared.fold)[0]  # type: ignore[union-attr]
    assert set(resolutions(quarantine).values()) == {"retried"}
    assert resolutions(quarantine)[2] == "retried"


async def test_a_retry_that_fails_is_quarantined_again_with_its_new_reason(ledger: Ledger) -> None:
    last = ledger.append_raw([("a-1", block("ledger.added"), b"{"), ("a-2", *bad_records()["poison"])])
    last = ledger.append([("a-1", Added(amount=Decimal(1))), ("a-2", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)

    def fail_otherwise(row: Any, event: Any) -> Any:
        raise LookupError("not yet")

    other = deployed_with(ledger, replace(QUARANTINING, declared=replace(QUARANTINING.declared, fold=fail_otherwise)))  # type: ignore[arg-type]
    before = state_of(ledger)[1]
    async with other.working(options=QUICK):
        retry(ledger)
        await wait_settled(ledger)
    after = state_of(ledger)[1]
    assert resolutions(after) == resolutions(before) == {1: "quarantined", 2: "quarantined", 3: "blocked", 4: "blocked"}
    assert after[0] == before[0]
    assert (after[1].reason, after[1].payload) == ("LookupError: not yet", bad_records()["poison"][1])


async def test_a_quarantined_event_is_logged_with_the_first_line_of_its_reason(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def logged_lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "is quarantined" in record.getMessage()]

    async def has_logged() -> bool:
        return bool(logged_lines())

    last = ledger.append([("a", Opened(owner="ada")), ("a", Added(amount=BAD)), ("a", Added(amount=Decimal(3)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        # The line is logged after the commit: a reader may see the rows before it.
        await eventually(has_logged, "the line of what was quarantined")
        assert logged_lines() == ["balances: the event at position 2 is quarantined: Poisoned: no 666"]
        caplog.clear()
        retry(ledger)
        await wait_settled(ledger)
    assert logged_lines() == ["balances: the event at position 2 is quarantined again: Poisoned: no 666"]


async def test_a_later_event_that_fails_in_a_retry_is_quarantined_and_earlier_ones_are_applied(ledger: Ledger) -> None:
    ledger.append_raw([("a-1", block("ledger.stranger"), b"{}")])
    last = ledger.append([("a-1", Added(amount=Decimal(1))), ("a-1", Added(amount=BAD)), ("a-1", Opened(owner="ada"))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    newer = deployed_with(ledger, QUARANTINING, Catalog([Opened, Added, Closed, Noted], retired=["ledger.stranger"]))
    async with newer.working(options=QUICK):
        retry(ledger, [1])
        await wait_settled(ledger)
    rows, quarantine = state_of(ledger)
    assert rows == [Balance("a-1", None, Decimal("1.00"), 1, 2)]
    assert resolutions(quarantine) == {1: "retried", 3: "quarantined", 4: "blocked"}


async def test_a_retry_that_the_database_refuses_is_quarantined_again(ledger: Ledger) -> None:
    in_transaction(ledger, lambda connection: connection.execute(text("create unique index one on balances (owner)")))
    last = ledger.append([("a-1", Opened(owner="ada")), ("a-2", Added(amount=BAD))])
    last = ledger.append([("a-2", Added(amount=Decimal(1))), ("a-2", Opened(owner="ada"))])
    last = ledger.append([("a-2", Added(amount=Decimal(1)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    mended = deployed_with(ledger, MENDED)
    async with mended.working(options=QUICK):
        retry(ledger)
        await wait_settled(ledger)
    rows, quarantine = state_of(ledger)
    assert [(row.account_id, row.amount) for row in rows] == [("a-1", 0), ("a-2", BAD + 1)]
    assert resolutions(quarantine) == {2: "retried", 4: "quarantined", 5: "blocked"}
    assert quarantine[1].reason.startswith(("UniqueViolation", "IntegrityError"))


async def test_a_dropped_event_is_skipped_and_the_rest_is_applied(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Opened(owner="ada")), ("a-1", Added(amount=BAD)), ("a-1", Added(amount=Decimal(3)))])
    last = ledger.append([("a-2", Added(amount=BAD)), ("a-1", Added(amount=BAD)), ("a-1", Added(amount=Decimal(4)))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        drop(ledger, 2, 4)
        await wait_settled(ledger)
        assert resolutions(state_of(ledger)[1]) == {2: "dropped", 4: "dropped", 5: "quarantined", 6: "blocked"}
        drop(ledger, 5)
        await wait_settled(ledger)
        last = ledger.append([("a-2", Added(amount=Decimal(5)))])
        await ledger.caught_up(last)
    assert_as_by_hand(ledger, last, dropped={2, 4, 5})
    assert resolutions(state_of(ledger)[1]) == {2: "dropped", 4: "dropped", 5: "dropped"}


async def test_a_resolution_ends_the_lease_session_of_the_worker(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Added(amount=BAD))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        epoch = epoch_of(ledger)
        retry(ledger)
        await wait_settled(ledger)
        assert epoch_of(ledger) >= epoch + 2


async def test_a_projection_that_stops_on_errors_refuses_a_blocking_quarantine(ledger: Ledger) -> None:
    last = ledger.append([("a-1", Added(amount=BAD))])
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
    ledger.append([("a-1", Added(amount=Decimal(1)))])
    stopping = deployed_with(ledger, BALANCES)

    async def is_failed() -> bool:
        return (await ledger.status()).state == "failed"

    async with stopping.working(options=QUICK):
        await eventually(is_failed, "the projection to fail")
    assert "its quarantine still blocks" in str((await ledger.status()).reason)
    assert (await ledger.status()).position == last


def offered(*events: Any) -> list[Any]:
    """Return offers as the consumer makes them, at positions 1, 2 …."""
    offering = Offering(CATALOG, QUARANTINING.events)
    pairs = [(aggregate_id, CATALOG.encode(data)) for aggregate_id, data in events]
    return [
        offering((number, 1, f"app.ledger.{aggregate_id}".encode(), block(encoded.type_name, version=1), encoded.body))
        for number, (aggregate_id, encoded) in enumerate(pairs, 1)
    ]


def test_a_fenced_writer_quarantines_nothing_and_the_next_writer_does_so_once(ledger: Ledger) -> None:
    writers = [FoldWriter(QUARANTINING, Database(ledger.settings.database).dialect, lease_s=9) for _ in range(2)]
    events = offered(("a-1", Added(amount=BAD)), ("a-2", Added(amount=Decimal(1))), ("a-1", Added(amount=Decimal(1))))
    batch = Batch(0, 3, "id-3", events)

    def take_lease(connection: Connection, owner: str) -> Checkpoint:
        ensure(connection, "balances", 1)
        checkpoint = take(connection, "balances", 1, owner, ttl_s=-1)
        assert checkpoint is not None
        return checkpoint

    zombie = in_transaction(ledger, lambda connection: take_lease(connection, "zombie"))
    prepared = in_transaction(ledger, lambda connection: writers[0].prepare(connection, batch))
    assert prepared.changes.quarantine is not None
    owner = in_transaction(ledger, lambda connection: take_lease(connection, "owner"))
    with pytest.raises(CheckpointFenced):
        in_transaction(ledger, lambda connection: writers[0].commit(connection, zombie, prepared))
    assert state_of(ledger) == ([], [])
    in_transaction(ledger, lambda connection: writers[1].write(connection, owner, batch))
    rows, quarantine = state_of(ledger)
    assert [row.account_id for row in rows] == ["a-2"]
    assert resolutions(quarantine) == {1: "quarantined", 3: "blocked"}
    with pytest.raises(CheckpointFenced):
        in_transaction(ledger, lambda connection: writers[1].write(connection, owner, batch))
    assert state_of(ledger) == (rows, quarantine)
