"""Keys that are written while they are read one after the other."""

from __future__ import annotations

from typing import Any

from eventjet.cursors.kv import Cursors, ParkedEntry
from eventjet.domain.parked import PARKED, RETRY, Parked


class Busy:
    """A client of a stream in which each key that was read is written again at once, a few times in all."""

    def __init__(self, *values: tuple[bytes, bytes], again: tuple[bytes, bytes]) -> None:
        self.records = [(at, 0, subject, b"", body) for at, (subject, body) in enumerate(values, 1)]
        self.again = [again]

    async def ask(self, request: Any) -> Any:
        if not self.records:
            return None
        record = self.records.pop(0)
        if self.again:
            subject, body = self.again.pop()
            self.records.append((9, 0, subject, b"", body))
        return record

    async def request(self, *_: Any, **__: Any) -> Any:
        return b"1", b"", b"", b"", b'{"seq": 5}'


def cursors_over(client: Any) -> Cursors:
    return Cursors(client, "app")


async def test_a_worker_that_tells_of_itself_meanwhile_is_counted_once() -> None:
    client = Busy((b"w.echo.a", b"4"), (b"w.echo.b", b"4"), (b"w.echo.c", b"2"), again=(b"w.echo.a", b"4"))
    assert await cursors_over(client).beat("echo", "a", 4, 3.5) == 2


async def test_an_entry_that_is_decided_about_meanwhile_is_read_once() -> None:
    parked, retried = (
        ParkedEntry(Parked(7, "thing", "one", "", "", resolution)).encoded() for resolution in (PARKED, RETRY)
    )
    found = await cursors_over(Busy((b"q.echo.7", parked), again=(b"q.echo.7", retried))).parked("echo")
    assert [(one.parked.resolution, one.sequence) for one in found] == [(RETRY, 9)]
