"""The commands `eventjet objects …`: the large bodies of events, in the object store beside the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.output import Answer, Block, Fields, Table
from eventjet.cli.running import progress
from eventjet.cli.target import AppTarget, argument, on_app, option, switch
from eventjet.text import counted

if TYPE_CHECKING:
    from eventjet.log.sweep import Objects, Reference

objects = typer.Typer(name="objects", help="Large bodies, which events refer to by their digest.", no_args_is_help=True)

_ROWS_MAX = 20

OlderThanOption = Annotated[
    str, option("--older-than", "AGE", "Leave younger objects alone: 90m, 36h, 2d; an hour at least.")
]


@objects.command()
@on_app(database=False)
def status(at: AppTarget, older_than: OlderThanOption = "1d") -> Answer:
    """Count the objects, and those that no event refers to; exit status 1 when one is missing.

    It reads the whole log once, and changes nothing.
    """
    result = _objects(at, older_than, removes=False)
    return Answer(_value(result), _status_lines(result), ok=not result.missing)


@objects.command()
@on_app(database=False)
def sweep(
    at: AppTarget,
    older_than: OlderThanOption = "1d",
    dry_run: Annotated[bool, switch("--dry-run", "Say what would be removed, and remove nothing.")] = False,
) -> Answer:
    """Remove objects that no event refers to, such as those of commands that failed after their upload.

    It reads the whole log once, and may run beside commands.
    """
    swept = _objects(at, older_than, removes=not dry_run)
    return Answer(_value(swept), _sweep_lines(swept, dry_run=dry_run), ok=not swept.missing)


@objects.command()
@on_app(database=False)
def verify(at: AppTarget) -> Answer:
    """Read every body that an event refers to and compare it with its digest; exit status 1 when one differs."""
    from eventjet.log.sweep import faults_of, references_of

    with at.connection("objects") as link, progress() as show:
        references = references_of(link, at.endpoint("objects"), at.app().name, partial(show, "read"))
        faults = list(faults_of(link, at.app().name, references.values(), partial(show, "bodies")))
    value = {
        "checked": len(references),
        "faults": [{**asdict(reference), "fault": fault} for reference, fault in faults],
    }
    return Answer(value, _verify_lines(len(references), faults), ok=not faults)


@objects.command()
@on_app(database=False)
def restore(at: AppTarget, url: Annotated[str, argument("ARCHIVE", "The archive's folder, or its URL.")]) -> Answer:
    """Bring back bodies that events refer to from an archive; exit status 1 when it lacks one."""
    from eventjet.archive.bodies import ArchivedBodies, restore_bodies
    from eventjet.log.sweep import references_of
    from eventjet.operations.reports import body_lines

    bodies = ArchivedBodies(url)
    with at.connection("objects") as link, progress() as show:
        references = references_of(link, at.endpoint("objects"), at.app().name, partial(show, "read"))
        report = restore_bodies(link, at.app().name, bodies, references.values(), partial(show, "bodies"))
    lines = list(body_lines(report, "the archive")) or ["No event refers to a body."]
    return Answer(report, lines, ok=not report.missing)


def _objects(at: AppTarget, older_than: str, *, removes: bool) -> Objects:
    from eventjet.log.sweep import age_in, sweep_objects

    age_s = age_in(older_than)
    with at.connection("objects") as link, progress() as show:
        shown = partial(show, "read")
        return sweep_objects(link, at.endpoint("objects"), at.app().name, age_s=age_s, removes=removes, progress=shown)


def _value(result: Objects) -> dict[str, object]:
    return {
        "bucket": result.bucket,
        "position": result.position,
        "objects": result.objects,
        "bytes": result.bytes,
        "referenced": result.referenced,
        "missing": [
            {"digest": gone.digest, "position": gone.position, "type": gone.type_name} for gone in result.missing
        ],
        "orphans": [{"digest": orphan.digest, "bytes": orphan.size} for orphan in result.orphans],
        "young": result.young,
        "unfinished": result.unfinished,
        "removed": result.removed,
        "removed_uploads": result.removed_uploads,
    }


def _status_lines(result: Objects) -> Iterator[Block]:
    yield Fields(
        [
            ("bucket", result.bucket),
            ("objects", f"{result.objects:,}, {_size(result.bytes)}"),
            ("referred to", f"{result.referenced:,}, up to position {result.position:,}"),
            ("orphans", f"{len(result.orphans):,}, {_size(result.orphaned_bytes)}"),
            ("young", f"{result.young:,} that no event refers to yet"),
            ("uploads", f"{result.unfinished:,} that nobody goes on with"),
        ]
    )
    if result.orphans or result.unfinished:
        yield "`eventjet objects sweep` removes the orphans."
    yield from _missing_lines(result.missing)


def _sweep_lines(swept: Objects, *, dry_run: bool) -> Iterator[Block]:
    orphans = counted(len(swept.orphans), "orphan")
    if dry_run:
        yield f"A sweep would remove {orphans} of {_size(swept.orphaned_bytes)}, and {_uploads(swept.unfinished)}."
    else:
        yield f"{swept.removed:,} of {orphans} removed, and {_uploads(swept.removed_uploads)}."
        if swept.removed < len(swept.orphans):
            yield "Commands refer to the others by now, so they stay."
    yield from _missing_lines(swept.missing)


def _uploads(count: int) -> str:
    return f"{counted(count, 'upload')} that nobody goes on with"


def _missing_lines(missing: Sequence[Reference]) -> Iterator[Block]:
    if missing:
        yield f"{_bodies(len(missing))} that events refer to {'is' if len(missing) == 1 else 'are'} missing:"
        yield _table([(reference, "missing") for reference in missing])
        yield "`eventjet objects restore ARCHIVE` brings back what an archive has."


def _verify_lines(checked: int, faults: Sequence[tuple[Reference, str]]) -> Iterator[Block]:
    if not faults:
        yield f"{_bodies(checked)} checked; each has the digest that the log says."
        return
    yield f"{len(faults):,} of {_bodies(checked)} not as the log says:"
    yield _table(faults)
    yield "`eventjet objects restore ARCHIVE` brings back what an archive has."


def _bodies(count: int) -> str:
    return "1 body" if count == 1 else f"{count:,} bodies"


def _table(faults: Sequence[tuple[Reference, str]]) -> Table:
    rows = [(fault.position, fault.type_name, fault.digest[7:19], reason) for fault, reason in faults[:_ROWS_MAX]]
    return Table(("position", "event", "sha256", "fault"), rows)


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,} bytes"
