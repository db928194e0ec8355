"""A quarantining fold gives the same rows and quarantine for any batches, and loses no event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Column, Integer, MetaData, Numeric, String, Table

from eventjet import App, aggregate
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord, header_block
from eventjet.codec.reasons import TRACEBACK_MAX
from eventjet.domain.aggregate import event
from eventjet.domain.quarantined import Quarantined
from eventjet.domain.recorded import Recorded
from eventjet.errors import DefinitionError, UnknownEvent
from eventjet.projections.fold import (
    BlockedAggregates,
    Offered,
    Offering,
    QuarantiningFold,
    Rows,
    aggregate_key_of,
    quarantined_for,
)
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec


@event("account.added")
class Added:
    amount: Decimal


@event("account.closed")
class Closed:
    pass


@event("account.noted")
class Noted:
    """An event that no projection takes."""


CATALOG = Catalog([Added, Closed, Noted])


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    amount: Decimal = Decimal(0)
    seen: int = 0


TABLE = Table(
    "balances",
    MetaData(),
    Column("account_id", String(10), primary_key=True),
    Column("amount", Numeric(6, 2), nullable=False),
    Column("seen", Integer, nullable=False),
)


def by_account(row: Balance | None, event: Recorded[Added | Closed]) -> Balance | None:
    match event.data:
        case Added(amount=amount):
            if amount == 666:
                raise ArithmeticError("poison")
            row = row or Balance(event.aggregate_id)
            return replace(row, amount=row.amount + amount, seen=row.seen + 1)
        case Closed():
            return None


def mended(row: Balance | None, event: Recorded[Added | Closed]) -> Balance | None:
    if event.data == Added(amount=Decimal(666)):
        return row
    return by_account(row, event)


declared = projection("balances", table=TABLE, on_error="quarantine")(by_account)
BOUND = resolve(declared, CATALOG)
MENDED = resolve(projection("balances", table=TABLE, on_error="quarantine")(mended), CATALOG)
CODEC = RowCodec(TABLE, Balance)

BODIES = {
    "good": ("account.added", "1", b'{"amount":"1"}'),
    "closed": ("account.closed", "1", b"{}"),
    "nobody's": ("account.noted", "1", b"{}"),
    "poison": ("account.added", "1", b'{"amount":"666"}'),
    "wide": ("account.added", "1", b'{"amount":"0.005"}'),
    "unknown": ("account.stranger", "1", b"{}"),
    "json": ("account.added", "1", b"{"),
    "utf-8": ("account.added", "1", b'{"amount":"\xff"}'),
    "version": ("account.added", "one", b'{"amount":"1"}'),
}
TAKEN = ("good", "closed", "nobody's")


def record(position: int, kind: str = "good", subject: str = "bank.account.a-1") -> RawRecord:
    type_name, version, body = BODIES[kind]
    pairs = [("Nats-Msg-Id", f"id-{position}"), ("Ej-Type", type_name), ("Ej-Schema", "1"), ("Ej-Version", version)]
    return position, 10**18 + position, subject.encode(), header_block(pairs), body


@st.composite
def logs(draw: st.DrawFn) -> list[RawRecord]:
    """Draw a log of good and bad events of a few aggregates."""
    subjects = st.sampled_from(["bank.account.a-1", "bank.account.a-2", "bank.other.a-3", "bank.account.a=zz"])
    kinds = st.sampled_from([*TAKEN, *TAKEN, *BODIES])
    drawn = draw(st.lists(st.tuples(subjects, kinds), max_size=40))
    return [record(position, kind, subject) for position, (subject, kind) in enumerate(drawn, 1)]


class Model:
    """A read model in memory and its quarantine, as a worker keeps them batch by batch."""

    def __init__(self, resolved: Any = BOUND, blocked: BlockedAggregates | None = None) -> None:
        self.fold = QuarantiningFold(resolved, CODEC)
        self.blocked = blocked or BlockedAggregates()
        self.rows: Rows = {}
        self.quarantined: dict[int, Quarantined] = {}
        self.offer = Offering(CATALOG, resolved.events, self.blocked.resolutions)

    def take(self, records: Iterable[RawRecord]) -> None:
        offers = [offer for raw in records if (offer := self.offer(raw)) is not None]
        result = self.fold({key: self.rows.get(key) for key in self.fold.keys(offers)}, offers, self.blocked)
        self.blocked.aggregates.update(result.blocked)
        self.rows.update(result.changed)
        self.quarantined.update({quarantined.position: quarantined for quarantined in result.quarantined})

    @property
    def live(self) -> Rows:
        return {key: row for key, row in self.rows.items() if row is not None}

    @property
    def resolutions(self) -> dict[int, str]:
        return {position: quarantined.resolution for position, quarantined in self.quarantined.items()}


def by_hand(records: Sequence[RawRecord]) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the rows and the quarantine of a fold of one event at a time, from the kinds alone."""
    rows: dict[str, Any] = {}
    blocked: set[bytes] = set()
    resolutions: dict[int, str] = {}
    for position, _, subject, block, body in records:
        kind = next(k for k, (t, v, b) in BODIES.items() if b == body and f": {t}\r".encode() in block
                    and f"Version: {v}\r".encode() in block)  # fmt: skip
        key = subject.decode().rpartition(".")[2]
        if kind == "nobody's":
            continue
        if subject in blocked:
            resolutions[position] = "blocked"
        elif kind not in TAKEN or "=" in key:
            resolutions[position] = "quarantined"
            blocked.add(subject)
        elif kind == "closed":
            rows.pop(key, None)
        else:
            row = rows.get(key, Balance(key, Decimal("0.00")))
            rows[key] = replace(row, amount=row.amount + 1, seen=row.seen + 1)
    return rows, resolutions


def cut(records: Sequence[RawRecord], sizes: Sequence[int]) -> Iterable[Sequence[RawRecord]]:
    start = 0
    for size in sizes:
        yield records[start : start + size]
        start += size
    yield records[start:]


@given(logs(), st.lists(st.integers(1, 9), max_size=20))
def test_batches_of_any_size_give_the_same_as_one_event_at_a_time(log: list[RawRecord], sizes: list[int]) -> None:
    model = Model()
    for batch in cut(log, sizes):
        model.take(batch)
    rows, resolutions = by_hand(log)
    assert {key[0]: row for key, row in model.live.items()} == rows
    assert model.resolutions == resolutions
    assert list(model.quarantined) == sorted(model.quarantined)


@given(logs())
def test_every_event_is_either_folded_or_quarantined(log: list[RawRecord]) -> None:
    tried: list[int] = []

    def watched(row: Any, event: Any) -> Any:
        after = by_account(row, event)
        CODEC.normalise(after) if after is not None else None
        tried.append(event.position)
        return after

    model = Model(replace(BOUND, declared=replace(declared, fold=watched)))  # type: ignore[arg-type]
    model.take(log)
    subscribed = [raw[0] for raw in log if b"account.noted" not in raw[3]]
    assert sorted([*tried, *model.quarantined]) == subscribed


@given(logs(), st.integers(0, 40))
def test_a_fold_from_the_beginning_with_the_quarantine_gives_the_same_rows(log: list[RawRecord], pinned: int) -> None:
    live = Model()
    live.take(log[:pinned])
    rebuilt = Model(blocked=BlockedAggregates(resolutions=dict(live.resolutions)))
    rebuilt.take(log)
    live.take(log[pinned:])
    assert rebuilt.live == live.live
    assert {**dict.fromkeys(rebuilt.blocked.resolutions, ""), **rebuilt.resolutions}.keys() == live.quarantined.keys()


@given(logs(), st.data())
def test_a_dropped_event_has_the_effect_of_a_missing_event(log: list[RawRecord], data: st.DataObject) -> None:
    complete = Model()
    complete.take(log)
    dropped = data.draw(st.sets(st.sampled_from(sorted(complete.quarantined) or [0])))
    without = Model()
    without.take([raw for raw in log if raw[0] not in dropped])
    knowing = Model(blocked=BlockedAggregates(resolutions=dict.fromkeys(dropped, "dropped")))
    knowing.take(log)
    assert (knowing.live, knowing.resolutions) == (without.live, without.resolutions)


@given(logs())
def test_retrying_quarantined_events_gives_the_same_as_a_corrected_fold_from_the_start(log: list[RawRecord]) -> None:
    model = Model()
    model.take(log)
    at_once = Model(MENDED)
    at_once.take(log)
    retried = Model(MENDED)
    retried.rows = dict(model.rows)
    retried.take([raw for raw in log if raw[0] in model.quarantined])
    assert retried.live == at_once.live
    assert retried.resolutions == at_once.resolutions


def test_a_newer_schema_of_a_known_event_is_an_unknown_event() -> None:
    newer = header_block([("Ej-Type", "account.added"), ("Ej-Schema", "2"), ("Ej-Version", "1")])
    with pytest.raises(UnknownEvent):
        Offering(CATALOG, BOUND.events)((1, 1, b"bank.account.a-1", newer, b"{}"))


@pytest.mark.parametrize(
    ("subject", "place"),
    [
        (b"bank.account.a-1", ("account", "a-1")),
        (b"bank.account.=C3=A9", ("account", "é")),
        (b"bank.account.=00", ("?", "bank.account.=00")),
        (b"bank.account.=zz", ("?", "bank.account.=zz")),
        (b"bank", ("?", "bank")),
        (b"bank.a.b.c", ("?", "bank.a.b.c")),
        (b"bank.\xff.a", ("?", "bank.\\xff.a")),
        (b"", ("?", "")),
    ],
)
def test_every_subject_has_an_aggregate_key_that_a_database_accepts(subject: bytes, place: tuple[str, str]) -> None:
    assert aggregate_key_of(subject) == place


@given(st.binary(max_size=3_000))
def test_no_subject_gives_an_aggregate_key_that_is_too_long(subject: bytes) -> None:
    for text in aggregate_key_of(subject):
        assert "\0" not in text
        assert len(text.encode()) <= 900


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (ValueError(""), "ValueError"),
        (ValueError("x" * 100_000), "ValueError: " + "x" * 488 + "… (100,012 characters)"),
        (ValueError("nul \0 and \ud800"), "ValueError: nul \\x00 and \\ud800"),
        (Unprintable(), "Unprintable: it cannot be printed"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
)
def test_a_reason_is_a_short_line_and_a_traceback_has_a_limit(error: Exception, reason: str) -> None:
    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        raise error

    try:
        deep(200)
    except Exception as raised:  # noqa: BLE001 - it is what is quarantined
        quarantined = quarantined_for(Offered(record(7), None), raised, private=False)
    assert (quarantined.reason, quarantined.resolution, quarantined.payload) == (
        reason,
        "quarantined",
        b'{"amount":"1"}',
    )
    assert (quarantined.event_id, quarantined.event_type, quarantined.aggregate_id) == ("id-7", "account.added", "a-1")
    assert 0 < len(quarantined.traceback) <= TRACEBACK_MAX
    quarantined.traceback.encode()


def test_only_a_projection_by_aggregate_can_quarantine() -> None:
    def key(event: Recorded[Added | Closed]) -> str:
        return event.aggregate_id

    def keys(event: Recorded[Added | Closed]) -> list[str]:
        return [event.aggregate_id]

    def rows(event: Recorded[Added]) -> Balance | None:
        return None

    any_projection: Any = projection
    any_entries: Any = entries
    for refused in (
        any_projection("balances", table=TABLE, key=key, on_error="quarantine")(by_account),
        any_projection("balances", table=TABLE, keys=keys, on_error="quarantine")(by_account),
        any_entries("balances", table=TABLE, on_error="quarantine")(rows),
    ):
        with pytest.raises(DefinitionError, match="the order after a quarantined event can only be kept by"):
            resolve(refused, CATALOG)
    with pytest.raises(DefinitionError, match="on_error is 'skip'"):
        resolve(any_projection("balances", table=TABLE, on_error="skip")(by_account), CATALOG)
    assert resolve(any_projection("balances", table=TABLE)(by_account), CATALOG).on_error == "stop"


@aggregate("account")
class Account:
    def evolve(self, event: Added | Closed) -> Account:
        return self


@event("customer.moved")
class Moved:
    pass


@aggregate("customer")
class Customer:
    def evolve(self, event: Moved) -> Customer:
        return self


def test_a_quarantining_projection_of_two_aggregates_is_refused() -> None:
    def both(row: Balance | None, event: Recorded[Added | Moved]) -> Balance | None:
        return row

    with pytest.raises(DefinitionError, match="takes those of account, customer"):
        App(
            "bank",
            aggregates=[Account, Customer],
            projections=[projection("balances", table=TABLE, on_error="quarantine")(both)],
        )
    App("bank", aggregates=[Account, Customer], projections=[declared])
