"""The check whether a release can read a log: faults by event, schema, position, field and reason."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import uuid4

from eventjet import App, aggregate, event, upcaster
from eventjet.codec.headers import MSG_ID, SCHEMA, TYPE, VERSION, RawRecord, header_block
from eventjet.commands.log_check import ENDS, PLACES, LogCheck, check_log
from eventjet.log.memory import MemoryStore


@event("till.filled", schema=2)
class Filled:
    amount: Decimal


@event("till.emptied")
class Emptied:
    by: str


@event("till.closed")
class Closed:
    pass


@aggregate("till")
class Till:
    held: Decimal = Decimal(0)

    def evolve(self, event: Filled | Emptied | Closed) -> Till:
        match event:
            case Filled(amount=amount):
                return replace(self, held=self.held + amount)
            case Emptied():
                return replace(self, held=Decimal(0))
            case Closed():
                raise KeyError("evolve forgot this one")


@upcaster("till.filled", schema=1)
def in_text(body: dict[str, Any]) -> dict[str, Any]:
    return {"amount": str(body["amount"])}


APP = App("shop", aggregates=[Till], upcasters=[in_text])


class Written(MemoryStore):
    """A log in memory with records as other releases wrote them."""

    def __init__(self, *events: tuple[str, int, bytes], ids: int = 1) -> None:
        super().__init__("shop")
        self.reads = 0
        versions: dict[bytes, int] = {}
        for position, (name, schema, body) in enumerate(events, 1):
            subject = b"shop.till.t-%d" % (position % ids)
            versions[subject] = versions.get(subject, 0) + 1
            fields = ((MSG_ID, str(uuid4())), (TYPE, name), (SCHEMA, str(schema)), (VERSION, str(versions[subject])))
            self._records.append((position, 1, subject, header_block(fields), body))

    async def at(self, position: int) -> RawRecord | None:
        self.reads += 1
        return await super().at(position)


OLD, NEW, EMPTIED = ("till.filled", 1, b'{"amount":5}'), ("till.filled", 2, b'{"amount":"5"}'), ("till.emptied", 1)


def faults_of(check: LogCheck) -> list[tuple[str, int, int, str, int]]:
    return [(fault.type, fault.schema, fault.position, fault.reason, fault.count) for fault in check.faults]


async def test_a_log_of_every_schema_is_decoded_and_folded() -> None:
    check = await check_log(APP, Written(OLD, NEW, OLD, (*EMPTIED, b'{"by":"ada"}'), ids=2), 10)
    assert check.readable
    assert (check.events, check.is_whole, check.histories) == (4, True, 2)
    assert [
        (event_type.type, event_type.schema, event_type.first, event_type.last, event_type.events, event_type.folded)
        for event_type in check.event_types
    ] == [
        ("till.emptied", 1, 4, 4, 1, 1),
        ("till.filled", 1, 1, 3, 2, 1),
        ("till.filled", 2, 2, 2, 1, 1),
    ]


async def test_a_fault_names_event_schema_position_and_field_but_no_value() -> None:
    secret = (*EMPTIED, b'{"by":12345678}')
    check = await check_log(APP, Written(OLD, secret, ("till.filled", 1, b'{"sum":5}'), ("till.filled", 3, b"{}")), 10)
    assert not check.readable
    undecodable = "it cannot be decoded: ValidationError: by: Input should be a valid string"
    assert faults_of(check) == [
        ("till.emptied", 1, 2, undecodable, 1),
        ("till.filled", 1, 3, "it cannot be decoded: KeyError: 'amount'", 1),
        ("till.filled", 3, 4, "this app declares no such event and schema", 1),
    ]


async def test_a_failing_fold_is_reported_at_its_event() -> None:
    check = await check_log(APP, Written(NEW, NEW, ("till.closed", 1, b"{}")), 1)
    ((*where, reason, count),) = faults_of(check)
    assert (where, count) == (["till.closed", 1, 3], 1)
    assert "Till.evolve raised KeyError for Closed: 'evolve forgot this one'" in reason


async def test_a_long_log_is_sampled_and_the_report_says_so() -> None:
    events = [NEW] * 100_000
    events[0] = events[-1] = OLD
    store = Written(*events, ids=1_000)
    check = await check_log(APP, store, 3)
    assert check.readable
    assert not check.is_whole
    assert check.events == 2 * ENDS + PLACES
    assert store.reads == PLACES
    kinds = {
        (event_type.schema, event_type.events, event_type.first, event_type.last, event_type.folded)
        for event_type in check.event_types
    }
    assert kinds == {(1, 2, 1, 100_000, 2), (2, 2 * ENDS + PLACES - 2, 2, 99_999, 3)}


async def test_an_empty_log_can_be_read() -> None:
    check = await check_log(APP, Written(), 1)
    assert (check.readable, check.events, check.event_types) == (True, 0, [])
