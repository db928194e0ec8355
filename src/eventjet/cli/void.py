"""`eventjet void`: the way out for a record that nobody can read, kept in the log itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.history import line
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import ANSWER_IS_NO, Answer, note
from eventjet.errors import Refused, UndecodableEvent, UnknownEvent, UsageError

if TYPE_CHECKING:
    from eventjet.codec.headers import RawRecord


@on_app(database=False)
def void(
    at: AppTarget,
    position: Annotated[int, typer.Argument(metavar="POSITION", min=1, help="Of the record that cannot be decoded.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the log.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> Answer:
    """Declare a record that cannot be decoded void for good: every load, worker, rebuild and verification skips it."""
    return asyncio.run(_void(at, position, reason, yes=yes))


async def _void(at: AppTarget, position: int, reason: str, *, yes: bool) -> Answer:
    from eventjet.codec.headers import voided_by
    from eventjet.jetstream.api import message_at
    from eventjet.log.voids import record_void
    from eventjet.operations.events import shown

    async with at.app().connect(at.settings) as jet:
        await jet.log()  # says that `init` is missing, where it is
        assert jet.client is not None
        voids = await jet.voids()
        record = await jet.client.ask(message_at(jet.name, position))
        if record is None:
            raise UsageError(f"The log has nothing at position {position}. `eventjet tail` shows what it has.")
        if position not in voids:
            if voided_by(record[2]) is not None:
                raise UsageError(f"The record at position {position} declares another one void, and stays.")
            await asyncio.to_thread(_check, at, voids, record)
            if not yes:
                note(line(shown(jet, record), named=True))
                if not typer.confirm("Have everybody pass over this for good?", err=True):
                    note("Nothing was recorded.")
                    raise typer.Exit(ANSWER_IS_NO)
        is_new = position not in voids and await record_void(jet.client, jet.name, position, reason)
    value = {"position": position, "void": True, "recorded": is_new}
    if not is_new:
        return Answer(value, f"Position {position} was void already.")
    return Answer(
        value,
        f"Position {position} is void. Start the workers of projections that it stopped once more, and where it is "
        f"parked, `eventjet quarantine retry PROJECTION {position}` frees what waits behind it.",
    )


def _check(at: AppTarget, voids: Mapping[int, str], record: RawRecord) -> None:
    """Raise `Refused` unless nobody can read the record. Blocks."""
    from eventjet.codec.records import chained
    from eventjet.log.earlier import EarlierRecords
    from eventjet.nats.endpoint import Endpoint

    app = at.app()
    what = f"The void of position {record[0]}"
    try:
        with EarlierRecords(Endpoint.of(at.settings), app.name) as earlier:
            chained(app.catalog.of_log(voids), None, earlier)(record)
    except UndecodableEvent:
        return
    except UnknownEvent as error:
        raise Refused(
            what, str(error).split(". ")[0], "A deploy that declares it reads it; that is no garbage."
        ) from None
    raise Refused(what, "it is an event that can be read", "Record another event that puts right what it says.")
