"""Every reader passes over a skipped position, and the history continues after it."""

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
    """A log that other programs write to, too."""

    def publish(self, subject: str, headers: bytes, body: bytes) -> int:
        position = len(self._records) + 1
        self._records.append((position, 1, f"tower.{subject}".encode(), headers, body))
        self._last[f"tower.{subject}"] = position
        return position

    def skip(self, position: int, reason: str = "no event") -> int:
        subject = skip_subject("tower", position).removeprefix("tower.")
        return self.publish(subject, block("eventjet.voided", version=1), skip_body(position, reason))

    @property
    def records_now(self) -> list[RawRecord]:
        return self._records


def repository(log: Log) -> Repository[Bell, Rung]:
    return Repository("tower", log, APP.catalog.of_log(), Bell)


@pytest.mark.parametrize(("bad", "versions"), [(GARBAGE, [1, 2, 3]), (BAD_BODY, [1, 3, 4])])
@pytest.mark.parametrize("before", [True, False])
async def test_an_aggregate_continues_after_a_skipped_record(
    bad: tuple[bytes, bytes], versions: list[int], before: bool
) -> None:
    log = Log("tower")
    bells = repository(log)
    execution = await bells.execute("a", Bell.ring, 1) if before else None
    if bad is BAD_BODY and not before:
        bad = (block("bell.rung", version=1), b"{")
        versions = [2, 3, 4]
    skipped = log.publish("bell.a", *bad)
    for reader in (bells, repository(log)):
        with pytest.raises((CodecError, HistoryBroken)):
            await reader.load("a")
    log.skip(skipped)
    for reader in (bells, repository(log)):
        assert await reader.load("a") == Bell(times=1 if before else 0)
        assert (await reader.execute("a", Bell.rest)).position == skipped
    for times in (10, 100) if before else (1, 10, 100):
        execution = await bells.execute("a", Bell.ring, times)
    assert execution is not None
    assert execution.state == Bell(times=111)
    fresh_bells = repository(log)
    assert await fresh_bells.load("a") == Bell(times=111)
    expected = versions if before or bad is GARBAGE else [2, 3, 4]
    assert [event.version for event in await repository(log).history("a")] == expected
    assert execution.version == expected[-1]
    assert await repository(log).load("a", position=execution.position) == Bell(times=111)
    assert await repository(log).load("a", position=execution.position - 1) == Bell(times=11)
    assert await repository(log).load("a", version=execution.version) == Bell(times=111)
    with pytest.raises(UsageError):
        await repository(log).load("a", version=execution.version + 1)


async def test_a_repeated_command_is_recognised_after_a_skipped_record() -> None:
    log = Log("tower")
    skipped = log.publish("bell.a", *GARBAGE)
    log.skip(skipped)
    first = await repository(log).command("c-1").execute("a", Bell.ring, 5)
    repeated = await repository(log).command("c-1").execute("a", Bell.ring, 5)
    assert (first.position, first.version) == (repeated.position, repeated.version) == (3, 1)


async def test_a_skip_marker_covers_only_its_own_position() -> None:
    log = Log("tower")
    log.publish("bell.a", *GARBAGE)
    log.skip(log.publish("bell.a", *GARBAGE))
    with pytest.raises(CodecError):
        await repository(log).load("a")


async def test_a_reader_in_log_order_learns_of_skip_markers_as_it_reads() -> None:
    log = Log("tower")
    skipped = log.publish("bell.a", *GARBAGE)
    log.skip(skipped, "a stray answer")
    await repository(log).execute("a", Bell.ring, 5)
    for only in (None, (Rung,)):
        known = Decoder(APP.catalog.of_log(await log.skip_markers()), only)
        assert [event if event is None else event.version for event in map(known, log.records_now)] == [None, None, 1]
    catalog = APP.catalog.of_log()
    assert Decoder(catalog)(log.records_now[1]) is None
    assert catalog.skipped == {skipped: "a stray answer"}
    assert APP.catalog.skipped == {}
    assert Decoder(catalog)(log.records_now[0]) is None


async def test_an_audit_counts_skipped_records_and_finds_no_other_fault() -> None:
    log = Log("tower")
    bells = repository(log)
    await bells.execute("a", Bell.ring, 1)
    for bad in (GARBAGE, BAD_BODY):
        log.skip(log.publish("bell.a", *bad))
    await bells.execute("a", Bell.ring, 1)
    audit = LogAudit(APP, last=len(log.records_now), skipped=await log.skip_markers())
    for record in log.records_now:
        audit.take(record)
    findings = audit.finish()
    assert {finding.kind: finding.positions for finding in findings if finding.kind is not Kind.TIME} == {
        Kind.SKIPPED: 2
    }


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
def test_the_subject_of_a_skip_marker_has_its_position(subject: bytes, position: int | None) -> None:
    assert skipped_by(subject) == position


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'"x"', b"\xff"])
def test_a_skip_marker_is_valid_without_a_readable_reason(body: bytes) -> None:
    assert reason_in(body) == ""
    assert header_block([])  # the headers of a skip marker have no needed field
