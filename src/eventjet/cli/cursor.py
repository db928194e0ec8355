"""`eventjet cursor`: put what follows the log at another position, and remove what the app no longer declares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import ANSWER_IS_NO, Answer, note, say
from eventjet.codec.subjects import declared_name
from eventjet.errors import CursorFenced, EventjetError, UsageError
from eventjet.shown import counted
from eventjet.spelling import listed, meant

if TYPE_CHECKING:
    from eventjet.subscriptions.declarations import Declaration
    from eventjet.subscriptions.status import CursorSeen

cursor = typer.Typer(name="cursor", help="How far reactors and processes have come.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Undeclared:
    """Cursors of a name that the app does not declare."""

    name: str
    position: int
    """Where the one that is furthest behind stands."""

    def __str__(self) -> str:
        return (
            f"{self.name} is no longer declared and stands at {self.position}: `eventjet cursor set NEW "
            f"{self.position}` lets another go on there, `eventjet cursor drop {self.name}` removes it"
        )


@cursor.command("set")
@on_app(database=False)
def set_(
    at: AppTarget,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of a reactor or a process.", autocompletion=names_of("work"))
    ],
    position: Annotated[int, typer.Argument(metavar="POSITION", min=0, help="The last that counts as done.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> Answer:
    """Put a cursor at a position of the log: after a restore, or to have effects again, or to leave some out."""
    declared = at.work([name]).followers
    if not declared:
        raise UsageError(f"{name!r} is a projection, and has a checkpoint. Rebuild it instead.")
    before, _ = asyncio.run(_set(at, declared, position, write=False))
    told = _what_that_means(before, position)
    if not yes and not typer.confirm(f"Put {name} at position {position:,}? Now {told}.", err=True):
        note("Nothing was changed.")
        raise typer.Exit(ANSWER_IS_NO)
    _, lost = asyncio.run(_set(at, declared, position, write=True))
    if lost:
        say(f"{counted(len(lost), 'parked event')} of a log that is gone: given up (`quarantine list {name} --all`).")
    if declared[0].kind == "process":
        say(f"Run `eventjet process sync {name}`, too: it wakes the processes that are there.")
    return Answer(
        {"name": name, "position": position, "before": before and before[0], "dropped": lost},
        f"{name} goes on after position {position:,}",
    )


async def _set(
    at: AppTarget, declared: Sequence[Declaration], position: int, *, write: bool
) -> tuple[tuple[int, int] | None, list[int]]:
    """Between where its partitions stood, and what was parked of another log."""
    from eventjet.commands.repository import open_repositories
    from eventjet.subscriptions.cursor_control import cursor_at, put, records_of, where
    from eventjet.subscriptions.cursor_store import Cursors

    async with open_repositories(at.app(), at.settings) as (repositories, client):
        wanted = await cursor_at(repositories.store, client, declared[0], position)
        cursors = Cursors(client, at.app().name)
        before = await where(cursors, declared)
        record_at = records_of(repositories.store, client, declared[0])
        return before, await put(cursors, client, declared, wanted, record_at) if write else []


def _what_that_means(before: tuple[int, int] | None, position: int) -> str:
    if before is None:
        return "it has no cursor yet"
    behind, ahead = before
    stands = f"at {behind:,}" if behind == ahead else f"between {behind:,} and {ahead:,}"
    means = ["what was handled after it is handled again"] if position < ahead else []
    means += ["what was not handled before it is left out"] if position > behind else []
    return f"it stands {stands}; {' and '.join(means) or 'nothing changes'}"


@cursor.command()
@on_app(database=False)
def drop(
    at: AppTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of what the app no longer declares.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> Answer:
    """Remove the cursor of what the app no longer declares, and what is parked there; nothing leads on from it.

    Refused for what is declared, and while a worker of another release is at it.
    """
    if _is_declared(at, name):
        raise UsageError(f"The app declares {name!r}. Take it out of the App, end its workers, then drop its cursor.")
    found = [one for one in _seen(at) if name in (one.cursor.name, declared_name(one.cursor.name))]
    if not found:
        left = [one.name for one in undeclared_cursors(at)]
        raise UsageError(
            f"There is no cursor {name!r}. {meant(name, left)}Those that the app no longer declares: {listed(left)}."
        )
    for one in found:
        if one.cursor.owner is not None and not one.has_lost_owner:
            raise UsageError(
                f"The worker {one.cursor.owner} is at {one.cursor.name!r}, and was seen {one.silent_s:.0f} s ago. End "
                "it, then try again."
            )
    stands = min(one.cursor.position for one in found)
    if not yes and not typer.confirm(
        f"Remove the cursor of {name}, which stands at position {stands:,}, and what is parked there?", err=True
    ):
        note("Nothing was removed.")
        raise typer.Exit(ANSWER_IS_NO)
    parked = asyncio.run(_drop(at, found))
    _forget_durables(at, found)
    told = f"removed the cursor of {name}, which stood at position {stands:,}, and {counted(parked, 'parked event')}"
    return Answer({"name": name, "position": stands, "parked": parked}, told)


def undeclared_cursors(at: AppTarget) -> list[Undeclared]:
    """What has a cursor and is declared no more, by name."""
    stands: dict[str, int] = {}
    for one in _seen(at):
        name = declared_name(one.cursor.name)
        if not _is_declared(at, name):
            stands[name] = min(one.cursor.position, stands.get(name, one.cursor.position))
    return [Undeclared(name, position) for name, position in sorted(stands.items())]


async def _drop(at: AppTarget, found: Sequence[CursorSeen]) -> int:
    """How many parked or blocked events went with them; raises `UsageError` where somebody was quicker."""
    from eventjet.subscriptions.cursor_store import StoredCursor

    parked = 0
    async with at.cursors() as cursors:
        for one in found:
            entries = await cursors.parked(one.cursor.name, resolved=True)
            try:
                await cursors.drop(StoredCursor(one.cursor, one.sequence), entries)
            except CursorFenced:
                raise UsageError(
                    f"Somebody wrote the cursor {one.cursor.name!r} just now. Look, and try again."
                ) from None
            parked += sum(entry.is_open for entry in entries)
    return parked


def _forget_durables(at: AppTarget, found: Sequence[CursorSeen]) -> None:
    """Delete their consumers of the log; nothing names the stream any more that an inbox followed."""
    from eventjet.jetstream.api import delete_consumer
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.nats.endpoint import Endpoint
    from eventjet.subscriptions.declarations import INBOX

    for one in found:
        if one.cursor.kind == INBOX:
            note(
                f"Its durable {at.app().name}-{one.cursor.name} stays in the stream that it followed; delete it there."
            )
    names = [one.cursor.name for one in found if one.cursor.kind != INBOX]
    if not names:
        return
    try:
        with NatsConnection.open(Endpoint.of(at.settings).with_name("eventjet cursor")) as link:
            for name in names:
                link.ask(delete_consumer(at.app().name, name))
    except (EventjetError, OSError) as error:
        note(f"The durable {', '.join(names)} may stay on the server, where it costs next to nothing: {error}")


def _seen(at: AppTarget) -> list[CursorSeen]:
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.nats.endpoint import Endpoint
    from eventjet.subscriptions.status import cursors_seen

    with NatsConnection.open(Endpoint.of(at.settings).with_name("eventjet cursor")) as link:
        return cursors_seen(link, at.app())


def _is_declared(at: AppTarget, name: str) -> bool:
    from eventjet.subscriptions.declarations import declarations_of

    return any(one.declared_as == declared_name(name) for one in declarations_of(at.app()).values())
