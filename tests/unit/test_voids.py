"""What the log declares void is passed over by every reader, and the history goes on behind it."""

from __future__ import annotations

import pytest

from eventjet import App, aggregate, event
from eventjet.codec.headers import RawRecord, header_block, reason_in, skip_body, skip_subject, skipped_by
from eventjet.codec.records import Decoder
from eventjet.commands import Repository
from eventjet.errors import CodecError, HistoryBroken, UsageError
from eventjet.log.memory import MemoryStore
from eventjet.rebuild.log_audit import Kind, LogAudit
from tests.logs import block


@event("bell.rung")
class Rung:
    times: int


@aggregate("bell")
class Bell:
    times: int = 0

    def ring(self, times: int) -> Rung:
        return Rung(times=times)

    def rest(self) -> None:
        return None

    def evolve(self, event: Rung) -> Bell:
        return Bell(times=self.times + event.times)


APP = App("tower", aggregates=[Bell])
GARBAGE = (b"", b"+ACK")
BAD_BODY = (block("bell.rung", version=2), b"{")


class Log(MemoryStore):
    """A log that others write to as well."""

    def publish(self, subject: str, headers: bytes, body: bytes) -> int:
        position = len(self._records) + 1
        self._records.append((position, 1, f"tower.{subject}".encode(), headers, body))
        self._last[f"tower.{subject}"] = position
        return position

    def void(self, position: int, reason: str = "no event") -> int:
        subject = skip_subject("tower", position).removeprefix("tower.")
        return self.publish(subject, block("eventjet.voided", version=1), skip_body(position, reason))

    @property
    def records_now(self) -> list[RawRecord]:
        return self._records


def repository(log: Log) -> Repository[Bell, Rung]:
    return Repository("tower", log, APP.catalog.of_log(), Bell)


@pytest.mark.parametrize(("bad", "versions"), [(GARBAGE, [1, 2, 3]), (BAD_BODY, [1, 3, 4])])
@pytest.mark.parametrize("before", [True, False])
async def test_an_aggregate_lives_on_behind_a_void(bad: tuple[bytes, bytes], versions: list[int], before: bool) -> None:
    log = Log("tower")
    bells = repository(log)
    done = await bells.execute("a", Bell.ring, 1) if before else None
    if bad is BAD_BODY and not before:
        bad = (block("bell.rung", version=1), b"{")
        versions = [2, 3, 4]
    voided = log.publish("bell.a", *bad)
    for fresh in (bells, repository(log)):
        with pytest.raises((CodecError, HistoryBroken)):
            await fresh.load("a")
    log.void(voided)
    for fresh in (bells, repository(log)):
        assert await fresh.load("a") == Bell(times=1 if before else 0)
        assert (await fresh.execute("a", Bell.rest)).position == voided
    for times in (10, 100) if before else (1, 10, 100):
        done = await bells.execute("a", Bell.ring, times)
    assert done is not None
    assert done.state == Bell(times=111)
    again = repository(log)
    assert await again.load("a") == Bell(times=111)
    expected = versions if before or bad is GARBAGE else [2, 3, 4]
    assert [one.version for one in await repository(log).history("a")] == expected
    assert done.version == expected[-1]
    assert await repository(log).load("a", position=done.position) == Bell(times=111)
    assert await repository(log).load("a", position=done.position - 1) == Bell(times=11)
    assert await repository(log).load("a", version=done.version) == Bell(times=111)
    with pytest.raises(UsageError):
        await repository(log).load("a", version=done.version + 1)


async def test_a_retried_command_is_found_behind_a_void() -> None:
    log = Log("tower")
    voided = log.publish("bell.a", *GARBAGE)
    log.void(voided)
    first = await repository(log).command("c-1").execute("a", Bell.ring, 5)
    again = await repository(log).command("c-1").execute("a", Bell.ring, 5)
    assert (first.position, first.version) == (again.position, again.version) == (3, 1)


async def test_a_void_does_not_heal_what_it_does_not_name() -> None:
    log = Log("tower")
    log.publish("bell.a", *GARBAGE)
    log.void(log.publish("bell.a", *GARBAGE))
    with pytest.raises(CodecError):
        await repository(log).load("a")


async def test_a_reader_in_the_order_of_the_log_learns_of_voids_on_its_way() -> None:
    log = Log("tower")
    voided = log.publish("bell.a", *GARBAGE)
    log.void(voided, "a stray answer")
    await repository(log).execute("a", Bell.ring, 5)
    for only in (None, (Rung,)):
        known = Decoder(APP.catalog.of_log(await log.skip_markers()), only)
        assert [one if one is None else one.version for one in map(known, log.records_now)] == [None, None, 1]
    catalog = APP.catalog.of_log()
    assert Decoder(catalog)(log.records_now[1]) is None
    assert catalog.skipped == {voided: "a stray answer"}
    assert APP.catalog.skipped == {}
    assert Decoder(catalog)(log.records_now[0]) is None


async def test_an_audit_tells_what_is_void_and_calls_the_rest_sound() -> None:
    log = Log("tower")
    bells = repository(log)
    await bells.execute("a", Bell.ring, 1)
    for bad in (GARBAGE, BAD_BODY):
        log.void(log.publish("bell.a", *bad))
    await bells.execute("a", Bell.ring, 1)
    audit = LogAudit(APP, last=len(log.records_now), skipped=await log.skip_markers())
    for record in log.records_now:
        audit.take(record)
    found = audit.finish()
    assert {one.kind: one.positions for one in found if one.kind is not Kind.TIME} == {Kind.SKIPPED: 2}


@pytest.mark.parametrize(
    ("subject", "position"),
    [
        (b"tower._void.17", 17),
        (b"tower._void.x", None),
        (b"tower._void.", None),
        (b"tower._void.-1", None),
        (b"tower._void." + b"9" * 19, None),
        (b"tower.bell.17", None),
        (b"tower._void", None),
    ],
)
def test_a_void_says_which_position_it_is_of_by_its_subject(subject: bytes, position: int | None) -> None:
    assert skipped_by(subject) == position


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'"x"', b"\xff"])
def test_a_void_needs_no_reason_that_can_be_read(body: bytes) -> None:
    assert reason_in(body) == ""
    assert header_block([])  # and its headers say nothing that is needed
