"""What a rebuild did, or would do, in words."""

from __future__ import annotations

from collections.abc import Iterator

from eventjet.rebuild import Preview, RebuildReport
from eventjet.shown import counted, in_location, spent


def rebuilt_told(report: RebuildReport) -> Iterator[str]:
    """Line by line."""
    for one in report.projections:
        made = f"{counted(one.rows, 'row')} from {counted(report.events, 'event')}"
        how = ", sequentially" if one.sequential else ""
        yield f"{one.projection} revision {one.revision}: {made}{how}, swapped in at position {one.position:,}"
        if one.location:
            yield (
                f"It is {in_location(one.location)}, beside the revision that readers see. If it is newer, its worker "
                f"lets it take over; `eventjet db promote {one.projection}` does so at once."
            )
    yield from _beginning(report.first)
    yield f"{report.engine} engine: {spent(report.seconds)}"
    total_s = sum(report.seconds.values())
    local_s = report.local_at_most_s
    if local_s is not None and local_s < total_s:
        yield (
            f"Starting Spark outweighed the work: `--engine local` would have taken about {local_s:.0f} s or less, "
            f"and this took {total_s:.0f} s."
        )


def _beginning(first: int) -> Iterator[str]:
    if first > 1:
        yield (
            f"The log begins at position {first:,}: rows hold nothing of what came before. If an archive has it, use "
            "`--from-archive`."
        )


def preview_told(planned: Preview) -> Iterator[str]:
    """Line by line."""
    plan = planned.plan
    for one in planned.candidates:
        live = (
            "no live one yet" if one.position is None else f"the live one is {one.state} at position {one.position:,}"
        )
        yield f"{one.projection} revision {one.revision}: {one.route.value}; {live}"
    yield f"{plan.stream}: {counted(plan.events, 'event')}, positions {plan.first:,} to {plan.last:,}"
    yield from _beginning(plan.first)
    if plan.archived >= plan.first:
        yield f"Positions up to {min(plan.archived, plan.last):,} would be read from the archive."
    on = f"spark engine on {planned.master}" if planned.master else "local engine"
    times = "once" if len(plan.passes) == 1 else f"{len(plan.passes)} times"
    ranges, parts = counted(len(plan.ranges), "range"), counted(plan.partitions, "partition")
    yield f"{on}: the log is read {times}, in {ranges} into {parts}"
    yield f"{planned.database}: the shadows would be in {planned.location}"
    if planned.upgrades:
        yield "eventjet's own tables would be made, or brought up to date, first."
    if planned.leftovers:
        yield f"What killed rebuilds left would be removed first: {', '.join(planned.leftovers)}."
    for refusal in planned.refusals:
        yield f"Refused: {refusal}"
    yield "Nothing was changed."
