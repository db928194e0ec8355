"""The commands `eventjet process …`, `deadlines …` and `cursor …`: inspect and wake processes, move cursors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.output import Answer, Block, Fields, Note, Table, confirm, note
from eventjet.cli.target import AppTarget, YesOption, argument, on_app, option, switch
from eventjet.codec.subjects import declared_name
from eventjet.errors import CursorFenced, EventjetError, UsageError
from eventjet.runtime import run_async
from eventjet.text import counted, cut_values, listed, suggestion, utc_text

if TYPE_CHECKING:
    from eventjet.log.timers import TimerSet
    from eventjet.operations.instances import Instances
    from eventjet.operations.processes import ProcessView
    from eventjet.subscriptions.declarations import Declaration
    from eventjet.subscriptions.status import CursorSeen

process = typer.Typer(
    name="process", help="Processes by stage, and what one waits for; wake processes.", no_args_is_help=True
)
deadlines = typer.Typer(name="deadlines", help="The timers that will wake processes.", no_args_is_help=True)
cursor = typer.Typer(name="cursor", help="How far reactors and processes have come.", no_args_is_help=True)

ProcessArgument = Annotated[str, argument("PROCESS", "The name of the process type.", "processes")]


@process.command("show")
@on_app(database=False)
def show_process(
    at: AppTarget, name: ProcessArgument, process_id: Annotated[str, argument("ID", "Which one.")]
) -> Answer:
    """Show what a process is, what it does next, and until when it waits; exit status 1 when it has no events."""
    from eventjet.operations.processes import open_processes

    async def look() -> ProcessView:
        async with open_processes(at.app(), at.settings, name) as processes:
            return await processes.view(process_id)

    view = run_async(look())
    if not view.version:
        return Answer(view, Note(f"There are no events of {name} {process_id}."), ok=False)
    return Answer(view, Fields(list(process_fields(view))), ok=not view.faults)


def process_fields(view: ProcessView) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts that show one process."""
    yield "process", f"{view.process} {view.id}"
    yield "version", str(view.version)
    state: Any = view.state
    fields = cast("dict[str, Any]", state) if isinstance(state, dict) else {"value": state}
    for number, (key, value) in enumerate(fields.items()):
        yield "" if number else "state", f"{key}: {_text(value)}"
    yield "next", view.step or "–"
    if not view.deadlines:
        yield "deadline", "–"
    yield from (("deadline", f"{deadline['at']}  {deadline['decision']}") for deadline in view.deadlines)
    if view.quarantined is not None:
        position, reason = view.quarantined["position"], view.quarantined["reason"]
        see = f"eventjet quarantine show {view.process} {position}"
        yield "waits", f"behind the quarantined event at position {position}: {reason}; see `{see}`"
    if view.paused:
        yield "paused", f"nothing of {view.process} goes on until `eventjet resume {view.process}`"
    yield from (("fault", f"{view.process} {view.id!r}, {fault}") for fault in view.faults)


def _text(value: Any) -> str:
    from eventjet.operations.events import plain_json

    return json.dumps(cut_values(plain_json(value)), ensure_ascii=False)


@process.command("list")
@on_app(database=False)
def list_processes(
    at: AppTarget,
    name: ProcessArgument,
    stage: Annotated[
        str | None, option("--stage", "EVENT", "Only those whose last event is this: transfer.debited, or debited.")
    ] = None,
    older_than: Annotated[
        str | None, option("--older-than", "TIME", "Only those longer in their stage: 90s, 15m, 2h, 3d.")
    ] = None,
    everything: Annotated[bool, switch("--all", "Also those that wait for nothing of their own.")] = False,
    limit: Annotated[int, option("--limit", "N", "So many are listed at the most.", min=1)] = 50,
    look_at: Annotated[int, option("--look-at", "N", "So many are looked at, at the most.", min=1)] = 100_000,
) -> Answer:
    """Count the instances of a process by stage, and list them, those that are longest in their stage first.

    The stage is the type of the last event. Without --stage only those are listed that are open: they wait for a
    worker, a deadline, or a decision about a quarantined event. With --all also those that wait for nothing of their
    own: they have ended, or wait for an event of others. The counts by stage are of all.
    """
    from eventjet.operations import instances

    async def read() -> instances.Instances:
        async with at.client() as client:
            return await instances.instances_of(
                client,
                at.app(),
                name,
                stage=stage,
                older_than=None if older_than is None else instances.span_of(older_than),
                everything=everything,
                limit=limit,
                looked_max=look_at,
            )

    listing = run_async(read())
    blocks = [*instance_blocks(listing)]
    if listing.total and not listing.matching and (stage is not None or older_than is not None):
        which = "" if stage is not None or everything else " that is open"
        where = "its stage" if stage is None else f"the stage {stage!r}"
        blocks.append(
            f"None of them{which} is in {where}."
            if older_than is None
            else f"None of them{which} has been in {where} for {older_than} or longer."
        )
    return Answer(instances.instances_value(listing), blocks)


def instance_blocks(listing: Instances) -> Iterator[Block]:
    """Yield the blocks that show the instances of a process by stage, and those that were asked for."""
    from eventjet.operations.instances import age_text, remarks_on, waits_text

    if not listing.total:
        yield f"There are no instances of {listing.process}."
        return
    rows = [
        (each.stage, each.instances, each.open, age_text(each.oldest), age_text(each.oldest_open))
        for each in listing.stages
    ]
    yield Table(
        ("stage", "instances", "open", "oldest", "oldest open"),
        rows,
        right=("instances", "open", "oldest", "oldest open"),
    )
    yield from remarks_on(listing)
    if listing.instances:
        prefix = f"{listing.process}."
        listed_rows = [
            (each.id, each.stage.removeprefix(prefix), age_text(each.at), waits_text(each))
            for each in listing.instances
        ]
        yield Table(("id", "stage", "age", "waits for"), listed_rows)


@process.command()
@on_app(database=False)
def sync(
    at: AppTarget,
    name: ProcessArgument,
    ids: Annotated[list[str] | None, argument("ID", "Which ones; default: all there are.")] = None,
) -> Answer:
    """Wake processes: have them take the steps they should have taken, and set their timers.

    Safe at any time, beside workers too: what a process does follows from its state. For after a restore, and for lost
    timers. Those that cannot be woken are named, the others are; then the exit status is 1.
    """
    from eventjet.operations.processes import Woken, open_processes

    async def wake() -> Woken:
        async with open_processes(at.app(), at.settings, name) as processes:
            return await processes.wake(ids or [])

    done = run_async(wake())
    woke = f"woke {done.woken:,}, which took {counted(done.steps, 'step')}"
    lines = [f"{woke}; {done.failed:,} could not be woken" if done.failed else woke]
    lines += [f"{name} {example['id']!r}: {example['reason']}" for example in done.examples]
    if done.failed > len(done.examples):
        lines.append(f"and {done.failed - len(done.examples):,} more")
    return Answer(done, lines, ok=not done.failed)


@deadlines.command("list")
@on_app(database=False)
def list_deadlines(
    at: AppTarget,
    name: Annotated[str | None, argument("PROCESS", "Default: all of the app.", "processes")] = None,
) -> Answer:
    """List the timers that are set, the earliest first, and those that are due and wait for a worker."""
    from eventjet.operations.processes import deadlines_waiting

    async def read() -> list[tuple[str, TimerSet]]:
        async with at.client() as client:
            return await deadlines_waiting(client, at.app(), name)

    rows = [
        {"process": process_name, "id": timer.process_id, "until": utc_text(timer.at, "seconds"), "due": timer.due}
        for process_name, timer in run_async(read())
    ]
    return Answer(rows, deadline_table(rows) if rows else "No process waits for a deadline.")


def deadline_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of deadlines."""
    late = "due since {}, no worker has dealt with it"
    return Table(
        ("process", "id", "until"),
        [(row["process"], row["id"], late.format(row["until"]) if row["due"] else row["until"]) for row in rows],
    )


@dataclass(frozen=True, slots=True)
class UndeclaredCursor:
    """The cursors of a name that the app no longer declares."""

    name: str
    position: int
    """Position of the cursor that is furthest behind."""

    def __str__(self) -> str:
        return (
            f"{self.name} is no longer declared and stands at {self.position}: `eventjet cursor set NEW "
            f"{self.position}` lets another go on there, `eventjet cursor drop {self.name}` removes it"
        )


@cursor.command("set")
@on_app(database=False)
def set_cursor(
    at: AppTarget,
    name: Annotated[str, argument("NAME", "Of a reactor or a process.", "work")],
    position: Annotated[int, argument("POSITION", "The last that counts as done.", min=0)],
    yes: YesOption = False,
) -> Answer:
    """Put a cursor at a position of the log: after a restore, or to have effects again, or to leave some out."""
    declared = at.work([name]).followers
    if not declared:
        raise UsageError(f"{name!r} is a projection, and has a checkpoint. Rebuild it instead.")
    before, _ = run_async(_set(at, declared, position, write=False))
    question = f"Put {name} at position {position:,}? Now {_effect(before, position)}."
    confirm(question, yes=yes, otherwise="Nothing was changed.")
    _, lost = run_async(_set(at, declared, position, write=True))
    lines = [f"{name} goes on after position {position:,}"]
    if lost:
        events = counted(len(lost), "quarantined event")
        lines.append(f"{events} of a log that is gone: given up (`eventjet quarantine list {name} --all`).")
    if declared[0].kind == "process":
        lines.append(f"Run `eventjet process sync {name}`, too: it wakes the processes that are there.")
    value = {"name": name, "position": position, "before": before and before[0], "dropped": lost}
    return Answer(value, lines)


async def _set(
    at: AppTarget, declarations: Sequence[Declaration], position: int, *, write: bool
) -> tuple[tuple[int, int] | None, list[int]]:
    """Move the cursors of all partitions to a position, or with `write` False only look.

    Return the lowest and highest position before, None without a cursor, and the positions of quarantined events that
    were dropped because they belong to another log.
    """
    from eventjet.commands.repository import open_repositories
    from eventjet.subscriptions.cursor_control import cursor_at, move_cursors, position_range, records_of
    from eventjet.subscriptions.cursor_store import Cursors

    async with open_repositories(at.app(), at.settings) as (repositories, client):
        new_cursor = await cursor_at(repositories.store, client, declarations[0], position)
        cursors = Cursors(client, at.app().name)
        before = await position_range(cursors, declarations)
        record_at = records_of(repositories.store, client, declarations[0])
        return before, await move_cursors(cursors, client, declarations, new_cursor, record_at) if write else []


def _effect(before: tuple[int, int] | None, position: int) -> str:
    """Return a text that says what moving a cursor to a position causes."""
    if before is None:
        return "it has no cursor yet"
    behind, ahead = before
    stands = f"at {behind:,}" if behind == ahead else f"between {behind:,} and {ahead:,}"
    means = ["what was handled after it is handled again"] if position < ahead else []
    means += ["what was not handled before it is left out"] if position > behind else []
    return f"it stands {stands}; {' and '.join(means) or 'nothing changes'}"


@cursor.command("drop")
@on_app(database=False)
def drop_cursor(
    at: AppTarget,
    name: Annotated[str, argument("NAME", "Of what the app no longer declares.")],
    yes: YesOption = False,
) -> Answer:
    """Remove the cursor of what the app no longer declares, and its quarantine; nothing leads on from it.

    Refused for what is declared, and while a worker of another release is at it.
    """
    if _is_declared(at, name):
        raise UsageError(f"The app declares {name!r}. Take it out of the App, end its workers, then drop its cursor.")
    cursors = [stored for stored in _cursors(at) if name in (stored.cursor.name, declared_name(stored.cursor.name))]
    if not cursors:
        names = [undeclared.name for undeclared in undeclared_cursors(at)]
        raise UsageError(
            f"There is no cursor {name!r}. {suggestion(name, names)}"
            f"Those that the app no longer declares: {listed(names)}."
        )
    for stored in cursors:
        if stored.cursor.owner is not None and not stored.has_lost_owner:
            raise UsageError(
                f"The worker {stored.cursor.owner} is at {stored.cursor.name!r}, and was seen {stored.silent_s:.0f} s "
                "ago. End it, then try again."
            )
    position = min(stored.cursor.position for stored in cursors)
    question = f"Remove the cursor of {name}, which stands at position {position:,}, and what is quarantined there?"
    confirm(question, yes=yes, otherwise="Nothing was removed.")
    quarantined = run_async(_drop(at, cursors))
    _delete_durables(at, cursors)
    events = counted(quarantined, "quarantined event")
    done = f"removed the cursor of {name}, which stood at position {position:,}, and {events}"
    return Answer({"name": name, "position": position, "quarantined": quarantined}, done)


def undeclared_cursors(at: AppTarget) -> list[UndeclaredCursor]:
    """Return the names that have a cursor and are no longer declared, sorted by name."""
    positions: dict[str, int] = {}
    for stored in _cursors(at):
        name, position = declared_name(stored.cursor.name), stored.cursor.position
        if not _is_declared(at, name):
            positions[name] = min(position, positions.get(name, position))
    return [UndeclaredCursor(name, position) for name, position in sorted(positions.items())]


async def _drop(at: AppTarget, cursors: Sequence[CursorSeen]) -> int:
    """Remove cursors and their quarantine; return its number of open events. Raises `UsageError` if one was written."""
    from eventjet.subscriptions.cursor_store import Cursors, StoredCursor

    quarantined = 0
    async with at.client() as client:
        store = Cursors(client, at.app().name)
        for stored in cursors:
            entries = await store.quarantined(stored.cursor.name, resolved=True)
            try:
                await store.drop(StoredCursor(stored.cursor, stored.sequence), entries)
            except CursorFenced:
                raise UsageError(
                    f"Somebody wrote the cursor {stored.cursor.name!r} just now. Look, and try again."
                ) from None
            quarantined += sum(entry.is_open for entry in entries)
    return quarantined


def _delete_durables(at: AppTarget, cursors: Sequence[CursorSeen]) -> None:
    """Delete the durables of removed cursors on the log; that of an inbox stays, since its stream is not known."""
    from eventjet.jetstream.api import delete_consumer
    from eventjet.subscriptions.declarations import INBOX

    for stored in cursors:
        if stored.cursor.kind == INBOX:
            durable = f"{at.app().name}-{stored.cursor.name}"
            note(f"Its durable {durable} stays in the stream that it followed; delete it there.")
    names = [stored.cursor.name for stored in cursors if stored.cursor.kind != INBOX]
    if not names:
        return
    try:
        with at.connection("cursor") as link:
            for name in names:
                link.ask(delete_consumer(at.app().name, name))
    except (EventjetError, OSError) as error:
        note(f"The durable {', '.join(names)} may stay on the server, where it costs next to nothing: {error}")


def _cursors(at: AppTarget) -> list[CursorSeen]:
    from eventjet.subscriptions.status import cursors_seen

    with at.connection("cursor") as link:
        return cursors_seen(link, at.app())


def _is_declared(at: AppTarget, name: str) -> bool:
    from eventjet.subscriptions.declarations import declarations_of

    return any(declaration.declared_as == declared_name(name) for declaration in declarations_of(at.app()).values())
