"""Render the reports of bulk work as lines for people, and as values for programs where a report is not one itself.

Lines that begin with a dash are items of the last line before them without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from eventjet.domain.personal import masked_row, masked_whole
from eventjet.text import counted, cut, in_location, spent

if TYPE_CHECKING:
    from eventjet.archive.bodies import CopiedBodies
    from eventjet.archive.reading import Segment
    from eventjet.rebuild import (
        ArchiveReport,
        AuditReport,
        Difference,
        LogFinding,
        Place,
        Preview,
        RebuildReport,
        Restored,
        SnapshotReport,
        VerifyReport,
    )

_BODIES_MAX = 20
"""The most bodies that a report names."""


def rebuild_lines(report: RebuildReport) -> Iterator[str]:
    """Yield the lines of a rebuild's report."""
    for rebuilt in report.projections:
        summary = f"{counted(rebuilt.rows, 'row')} from {counted(report.events, 'event')}"
        how = ", sequentially" if rebuilt.sequential else ""
        name = f"{rebuilt.projection} revision {rebuilt.revision}"
        yield f"{name}: {summary}{how}, swapped in at position {rebuilt.position:,}"
        if rebuilt.location:
            yield (
                f"It is {in_location(rebuilt.location)}, beside the revision that readers see. If it is newer, its "
                f"worker lets it take over; `eventjet db promote {rebuilt.projection}` does so at once."
            )
    yield from _log_start(report.first)
    yield f"{report.engine} engine: {spent(report.seconds)}"
    total_s, local_s = sum(report.seconds.values()), report.local_at_most_s
    if local_s is not None and local_s < total_s:
        yield (
            f"Starting Spark outweighed the work: `--engine local` would have taken about {local_s:.0f} s or less, "
            f"and this took {total_s:.0f} s."
        )


def preview_lines(preview: Preview) -> Iterator[str]:
    """Yield the lines of a rebuild's preview."""
    plan = preview.plan
    for candidate in preview.candidates:
        live = "no live one yet"
        if candidate.position is not None:
            live = f"the live one is {candidate.state} at position {candidate.position:,}"
        yield f"{candidate.projection} revision {candidate.revision}: {candidate.route.value}; {live}"
    yield f"{plan.stream}: {counted(plan.events, 'event')}, positions {plan.first:,} to {plan.last:,}"
    yield from _log_start(plan.first)
    if plan.archived >= plan.first:
        yield f"Positions up to {min(plan.archived, plan.last):,} would be read from the archive."
    engine = f"spark engine on {preview.master}" if preview.master else "local engine"
    times = "once" if len(plan.passes) == 1 else f"{len(plan.passes)} times"
    ranges, parts = counted(len(plan.ranges), "range"), counted(plan.partitions, "partition")
    yield f"{engine}: the log is read {times}, in {ranges} into {parts}"
    yield f"{preview.database}: the shadows would be in {preview.location}"
    if preview.upgrades:
        yield "eventjet's own tables would be made, or brought up to date, first."
    if preview.leftovers:
        yield f"What killed rebuilds left would be removed first: {', '.join(preview.leftovers)}."
    for refusal in preview.refusals:
        yield f"Refused: {refusal}"
    yield "Nothing was changed."


def preview_value(preview: Preview) -> dict[str, Any]:
    """Return the preview as a value for JSON."""
    plan = preview.plan
    return {
        **{name: getattr(plan, name) for name in ("engine", "stream", "first", "last", "archived", "events")},
        "ranges": [span._asdict() for span in plan.ranges],
        "partitions": plan.partitions,
        "passes": [
            {"route": log_pass.route.value, "projections": list(log_pass.projections)} for log_pass in plan.passes
        ],
        "projections": [{**asdict(candidate), "route": candidate.route.value} for candidate in preview.candidates],
        **{name: getattr(preview, name) for name in ("master", "database", "location", "upgrades", "leftovers")},
        "refusals": preview.refusals,
    }


def _log_start(first: int) -> Iterator[str]:
    if first > 1:
        yield (
            f"The log begins at position {first:,}: rows hold nothing of what came before. If an archive has it, use "
            "`--from-archive`."
        )


def verify_lines(report: VerifyReport, *, private: bool) -> Iterator[str]:
    """Yield the lines of a verification's report; `private` says that the projection has personal data to mask."""
    differences = counted(report.differences, "difference")
    yield f"{differences}: {report.projection} at position {report.position:,}, {counted(report.rows, 'row')}"
    for example in report.examples:
        yield f"  - {key_text(example.key)}: {difference_text(example, private=private)}; {example.since}"
    yield from _and_more(report.differences, len(report.examples))
    if report.finding:
        yield report.finding.fix


def verify_value(report: VerifyReport, *, private: bool) -> dict[str, Any]:
    """Return the report as a value for JSON, with personal data masked."""
    examples = [
        {
            "key": key_text(example.key),
            "live": _columns(example.live, private=private),
            "expected": _columns(example.expected, private=private),
            "columns": example.columns,
            "since": example.since,
        }
        for example in report.examples
    ]
    return {**asdict(report), "examples": examples}


def key_text(key: tuple[Any, ...]) -> str:
    """Return a key as text; the parts of a composite key are separated by commas."""
    return ", ".join(map(str, key))


def difference_text(difference: Difference, *, private: bool) -> str:
    """Return the difference between two rows as text, column by column."""
    if difference.live is None:
        return "it has no row and should have one"
    if difference.expected is None:
        return "it has a row and should have none"
    values = [(_value(difference.live, name), _value(difference.expected, name)) for name in difference.columns]
    columns = differing_columns(difference, private=private)
    return ", ".join(_column_text(column, pair) for column, pair in zip(columns, values, strict=True))


def differing_columns(difference: Difference, *, private: bool) -> list[tuple[str, Any, Any]]:
    """Return (name, live value, expected value) of each column that differs; both rows must exist."""
    live = _columns(difference.live, private=private) or {}
    expected = _columns(difference.expected, private=private) or {}
    return [(name, live[name], expected[name]) for name in difference.columns]


def _column_text(column: tuple[str, Any, Any], values: tuple[Any, Any]) -> str:
    """Return the difference in one column as text; where two values print alike, types or words distinguish them."""
    name, live, expected = column[0], cut(str(column[1])), cut(str(column[2]))
    if live != expected:
        return f"{name} is {live} and should be {expected}"
    types = [type(value).__name__ for value in values]
    if types[0] != types[1]:
        return f"{name} is {live} ({types[0]}) and should be {expected} ({types[1]})"
    if str(values[0]) == str(values[1]):
        return f"{name} is {live} ({types[0]}) and should be another one, which prints alike"
    return f"{name} is {live} and should be another one"


def _value(row: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", row)[name] if isinstance(row, Mapping) else getattr(row, name)


def _columns(row: Any, *, private: bool) -> Mapping[str, Any] | None:
    """Return a row as it may be shown; of a SQL projection with personal data every value is masked."""
    if row is None or not isinstance(row, Mapping):
        return None if row is None else masked_row(row)
    columns = dict(cast("Mapping[str, Any]", row))
    return masked_whole(columns) if private else columns


def snapshot_lines(report: SnapshotReport) -> Iterator[str]:
    """Yield the lines of a report on building snapshots."""
    tally = report.tally
    written, read = counted(tally.written, "snapshot"), counted(tally.events, "event")
    aggregates = counted(tally.aggregates, "aggregate")
    yield f"{report.aggregate}: {written} written from {read} of {aggregates}, at position {report.position:,}"
    skipped = {
        "had a newer one, or the same": tally.newer,
        f"have fewer than {counted(report.min_events, 'event')}": tally.few,
        "are too large for the bucket": tally.too_large,
        "have a state that would not come back from JSON": tally.unkept,
        "could not be folded": tally.broken,
    }
    yield from (f"  - {number:,} {why}" for why, number in skipped.items() if number)
    yield from (f"  - {fault}" for fault in tally.faults)
    yield from _and_more(tally.broken, len(tally.faults))
    yield f"{report.engine} engine: {spent(report.seconds)}"


def archive_lines(report: ArchiveReport) -> Iterator[str]:
    """Yield the lines of an archiving report."""
    if not report.events:
        yield f"The log {report.stream} has no events, so there is nothing to archive."
        return
    for segment in report.sealed:
        events, files = counted(segment.events, "event"), counted(len(segment.files), "file")
        yield f"sealed {segment.first:,} to {segment.last:,}: {events} in {files}, {_bytes(segment) / 1e6:,.1f} MB"
    done = "" if report.sealed else "Up to date: "
    yield f"{done}{report.url} holds positions {report.first:,} to {report.last:,} of {report.stream}"
    if report.sealed:
        yield "; ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
    yield from body_lines(report.bodies, "the object store")


def archive_value(report: ArchiveReport) -> dict[str, Any]:
    """Return the report as a value for JSON, with the number and size of each segment's files."""
    sealed = [
        {
            **{name: getattr(segment, name) for name in ("first", "last", "events")},
            "files": len(segment.files),
            "bytes": _bytes(segment),
        }
        for segment in report.sealed
    ]
    return {**asdict(report), "sealed": sealed}


def body_lines(bodies: CopiedBodies, source: str) -> Iterator[str]:
    """Yield the lines about large bodies that were copied from a source; none where there are no bodies."""
    if bodies.copied or bodies.present:
        yield f"bodies: {bodies.copied:,} copied, {bodies.bytes / 1e6:,.1f} MB; {bodies.present:,} there already"
    if bodies.missing:
        yield f"NOT whole: {source} lacks bodies that events refer to, or has them damaged: {len(bodies.missing):,}"
        yield from (f"  - {reference.where}: {reference.digest}" for reference in bodies.missing[:_BODIES_MAX])
        yield from _and_more(len(bodies.missing), min(len(bodies.missing), _BODIES_MAX))


def _bytes(segment: Segment) -> int:
    return sum(file.bytes for file in segment.files)


def restore_lines(report: Restored) -> Iterator[str]:
    """Yield the lines of a restore's report."""
    events = counted(report.events, "event")
    yield f"{report.stream} is restored: {events} at positions {report.first:,} to {report.last:,}, log {report.log}"
    before = report.events - report.published
    if before:
        yield f"{counted(before, 'event')} of them were there before."
    publish_s, compare_s = report.seconds["publish"], report.seconds["compare"]
    rate = _rate(report.published, publish_s) if report.published else ""
    yield f"published in {publish_s:.1f} s{rate}, compared with the archive in {compare_s:.1f} s"
    if report.torn:
        yield (
            f"NOT whole: the archive ends within a save. {counted(report.torn, 'event')} of it at the end of the log "
            "count, and its other events are lost: `eventjet tail` shows what is there. Record what is missing, or its "
            "opposite."
        )
    yield from body_lines(report.bodies, "the archive")


def audit_lines(report: AuditReport, *, has_claims: bool) -> Iterator[str]:
    """Yield the lines of an audit's report; `has_claims` says whether an aggregate of the app has unique values."""
    judgement = "is sound" if report.sound else "is NOT sound"
    extent = f"{counted(report.events, 'event')} of {counted(report.aggregates, 'aggregate')}"
    yield f"{report.stream} {judgement}: {extent} up to position {report.last:,}, log {report.log}"
    archive = report.archive
    if archive is not None:
        yield (
            f"The archive {archive.url} holds positions {archive.first:,} to {archive.last:,}: "
            f"{archive.compared:,} were compared with the log."
        )
    if report.accepted:
        missing_more = "" if report.may_be_missing else ", and more are"
        accepted = counted(report.accepted, "event")
        yield f"{accepted} may be missing, as somebody has said with `eventjet init --accept-loss`{missing_more}."
    for kind in report.findings:
        yield from _kind_lines(kind)
    read_s = report.seconds["read"]
    space = "\n" if report.findings else ""
    yield f"{space}read in {read_s:.1f} s{_rate(report.events, read_s)}"
    if has_claims:
        yield "`eventjet unique check` compares the claims of unique values with the states that they are of."


def audit_value(report: AuditReport) -> dict[str, Any]:
    """Return the report as a value for JSON, with the explanation of each kind of finding."""
    findings = [
        {**asdict(kind), **{name: getattr(kind.finding, name) for name in ("level", "what", "cost", "fix")}}
        for kind in report.findings
    ]
    return {**asdict(report), "sound": report.sound, "findings": findings}


def _kind_lines(kind: LogFinding) -> Iterator[str]:
    positions = "" if kind.positions == kind.count else f", {counted(kind.positions, 'event')}"
    yield f"\n{kind.finding.what}: {counted(kind.count, 'finding')}{positions}"
    yield from (f"  - {_place(place)}{place.what}" for place in kind.examples)
    yield from _and_more(kind.count, len(kind.examples), "; --examples N shows N of them")
    yield f"What it costs: {kind.finding.cost}"
    yield f"The way out: {kind.finding.fix}"


def _place(place: Place) -> str:
    if not place.first:
        return ""
    run = str(place.first) if place.first == place.last else f"{place.first} to {place.last}"
    return f"{run} {place.subject}: " if place.subject else f"{run}: "


def _and_more(count: int, listed: int, hint: str = "") -> Iterator[str]:
    if count > listed:
        yield f"  - and {count - listed:,} more{hint}"


def _rate(events: int, seconds: float) -> str:
    return f" ({events / seconds:,.0f} events/s)" if seconds else ""
