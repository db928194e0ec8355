"""`eventjet schema export` and `check`: the shapes of what an app writes, and what changing them would break."""

from __future__ import annotations

import asyncio
import inspect
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli import exports
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, say
from eventjet.errors import UsageError
from eventjet.shown import counted, printable

if TYPE_CHECKING:
    from eventjet.commands.log_check import LogCheck
    from eventjet.contracts.compatibility import EventChange
    from eventjet.projections.app_ref import AppRef

schema = typer.Typer(name="schema", help="The shapes of events on the wire: export and check.", no_args_is_help=True)

_FOLDER = "schemas"
_ASYNCAPI = "asyncapi.json"


@schema.command()
@on_app(servers=False, database=False)
def export(
    at: AppTarget,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a file for each event and schema there.")
    ] = None,
    asyncapi: Annotated[bool, typer.Option("--asyncapi", help="An AsyncAPI 3.0 document, too.")] = False,
    release: Annotated[
        str, typer.Option("--release", metavar="TEXT", help="The version that the AsyncAPI document names.")
    ] = "0.0.0",
) -> None:
    """Write JSON Schemas of the app's events, published events and served commands, to keep beside the code.

    Without --out one document is printed: with --asyncapi that one, else all schemas. Files of events that are not
    declared any more are left: the log may have such events.
    """
    from eventjet.contracts.asyncapi import asyncapi_of
    from eventjet.contracts.contract import contract_of, text_of

    app = at.app()
    contract = contract_of(app)
    documents: dict[str, Any] = contract.documents()
    if out is None:
        print(text_of(asyncapi_of(app, contract, release) if asyncapi else documents), end="")
        return
    if asyncapi:
        documents[_ASYNCAPI] = asyncapi_of(app, contract, release)
    changed = exports.write({name: text_of(one) for name, one in documents.items()}, out)
    told = "".join(f"  - {one}\n" for one in changed) or "  - nothing has changed\n"
    say(f"{out}: {counted(len(documents), 'file')} of {app.name}\n{told}".rstrip())


@schema.command()
@on_app(database=False)
def check(
    at: AppTarget,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="REF|DIR|FILE", help="An export: in a commit of git, or on disk."),
    ] = None,
    against_log: Annotated[
        int | None,
        typer.Option("--against-log", metavar="N", min=1, help="Read the log, and fold N histories of each event."),
    ] = None,
    folder: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Where a commit has the export, from the current folder.")
    ] = _FOLDER,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write the verdicts as SARIF 2.1.0, too.")
    ] = None,
    readers_stopped: Annotated[
        bool,
        typer.Option("--readers-stopped", help="Older readers are stopped first: what breaks only them is no fault."),
    ] = False,
) -> Answer:
    """Say of each event whether stored ones, and older readers, survive what this app makes of it; else status 1.

    With --against the app is compared with an export of before. With --against-log the stored events are read with
    this app: some of each event and schema, and the histories that they belong to.
    """
    if against is None and against_log is None:
        raise UsageError("Say what to check the app against: --against main, or --against-log 100, or both.")
    if sarif is not None and against is None:
        raise UsageError("--sarif tells what --against finds. Give that too.")
    compared: tuple[str, list[EventChange]] | None = None
    if against is not None:
        compared = _compared(at, against, folder, sarif)
    log = None if against_log is None else asyncio.run(_read_log(at, against_log))
    is_fine = (log is None or log.readable) and (compared is None or _passes(compared[1], readers_stopped))

    def show() -> None:
        if compared is not None:
            _print_judged(*compared, readers_stopped=readers_stopped)
        if log is not None:
            _print_log(log)

    value: dict[str, Any] = {"passes": is_fine}
    if compared is not None:
        value |= {"against": compared[0], "events": [_as_json(one) for one in compared[1]]}
    if log is not None:
        value["log"] = {**asdict(log), "readable": log.readable}
    return Answer(value, show, ok=is_fine)


def _compared(at: AppTarget, against: str, folder: str, sarif: Path | None) -> tuple[str, list[EventChange]]:
    from importlib.metadata import version

    from eventjet.contracts.compatibility import changes_between, sarif_of
    from eventjet.contracts.contract import contract_in, contract_of, text_of

    app = at.app()
    where, documents = exports.read(against, folder.rstrip("/"))
    old = contract_in(documents, where)
    if old.app != app.name:
        raise UsageError(f"The export in {where} is of the app {old.app!r}, and this one is {app.name!r}.")
    judged = changes_between(old, contract_of(app), app.catalog)
    if sarif is not None:
        told = text_of(sarif_of(judged, partial(_place_of, at.ref), version("eventjet")))
        try:
            sarif.write_text(told, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{sarif} cannot be written: {error}. Name another file with --sarif.") from None
    return where, judged


async def _read_log(at: AppTarget, histories: int) -> LogCheck:
    from eventjet.commands.log_check import check_log

    app = at.app()
    async with app.connect(at.settings) as jet:
        await jet.log()  # says that `init` is missing, where it is
        return await check_log(app, jet.store, histories)


def _passes(judged: list[EventChange], readers_stopped: bool) -> bool:
    from eventjet.contracts.compatibility import Compatibility

    most = Compatibility.OLD_READERS if readers_stopped else Compatibility.SAFE
    return all(one.compatibility.rank <= most.rank for one in judged)


def _place_of(app: AppRef, one: EventChange) -> tuple[str, int]:
    """The class of an event, from the current folder; the app's module where there is none."""
    try:
        thing: Any = one.kind or sys.modules[app.module]
        file = Path(inspect.getsourcefile(thing) or "").resolve()
        return file.relative_to(Path.cwd()).as_posix(), inspect.getsourcelines(thing)[1] if one.kind else 1
    except (TypeError, OSError, ValueError, KeyError):
        return "pyproject.toml", 1  # in no file of this folder, and some line has to be named


def _as_json(one: EventChange) -> dict[str, Any]:
    remarks = [{"verdict": each.compatibility.value, "what": each.what, "fix": each.fix} for each in one.remarks]
    return {
        "event": one.event,
        "schema": one.schema,
        "verdict": one.compatibility.value,
        "tried": one.tried,
        "remarks": remarks,
    }


def _print_judged(where: str, judged: list[EventChange], *, readers_stopped: bool) -> None:
    from eventjet.contracts.compatibility import Compatibility

    say(f"Compared with {where}:")
    for one in sorted(judged, key=lambda each: each.compatibility.rank):
        _print_one(one)
    counts = Counter(one.compatibility for one in judged)
    told = ", ".join(f"{each.value}: {counts[each]}" for each in Compatibility if counts[each])
    stopped = counts[Compatibility.OLD_READERS] and readers_stopped
    say(f"\n{counted(len(judged), 'event')}; {told or 'none'}." + (" Older readers are stopped." if stopped else ""))


def _print_one(one: EventChange) -> None:
    print(printable(f"{one.compatibility.value:<20} {one.event}"))
    fixes: dict[str, None] = {}
    for remark in one.remarks:
        say(f"  - {remark.what}")
        if remark.fix:
            fixes[remark.fix] = None
    for fix in fixes:
        is_code = fix.startswith(("@", "App("))
        lines = fix.splitlines() if is_code else textwrap.wrap(fix, 72)
        print("\n".join(f"      {printable(line)}".rstrip() for line in lines), flush=True)


def _print_log(log: LogCheck) -> None:
    judged = "can be read" if log.readable else "can NOT be read"
    say(f"{log.stream} {judged} by this app, as far as was looked: {log.told}")
    for kind in log.kinds:
        seen = f"{counted(kind.seen, 'event')} seen, from position {kind.first:,} to {kind.last:,}"
        folded = f"; {counted(kind.folded, 'history')} folded".replace("historys", "histories")
        say(f"  - {kind.type} schema {kind.schema}: {seen}{folded if kind.folded else ''}")
    for fault in log.faults:
        more = f" (and {fault.count - 1:,} more like it)" if fault.count > 1 else ""
        say(f"\n{fault.type} schema {fault.schema} at position {fault.position:,}: {fault.reason}{more}")
    if not log.whole:
        say("\nWhat was not looked at may hold others; `eventjet audit` reads the whole log.")
