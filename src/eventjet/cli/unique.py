"""The commands `eventjet unique …`: build the claims of unique values, and check them against aggregates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.output import Answer
from eventjet.cli.running import progress
from eventjet.cli.target import AggregateArgument, AppTarget, argument, on_app, switch
from eventjet.errors import UsageError
from eventjet.projections.app_ref import aggregate_of
from eventjet.runtime import run_async
from eventjet.text import counted, listed, suggestion

if TYPE_CHECKING:
    from eventjet.app import App
    from eventjet.commands.unique import ClaimReport, Mismatches

unique = typer.Typer(name="unique", help="Values that no two aggregates may have at once.", no_args_is_help=True)

NameArgument = Annotated[str | None, argument("NAME", "Which constraint; without it, all.")]


@unique.command()
@on_app(database=False)
def build(
    at: AppTarget,
    aggregate: AggregateArgument,
    name: NameArgument = None,
    keep_shared: Annotated[
        bool, switch("--keep-shared", "Begin although some have one value; no third may take it then.")
    ] = False,
) -> Answer:
    """Claim the values that aggregates have, and begin to keep them unique; exit status 1 when two have the same.

    For a constraint that is new on a log with events, after an import, and to put right what `unique check` finds.
    Run again, it stores only what is missing.
    """
    reports = run_async(_run(at, aggregate, name, keep_shared=keep_shared))
    done = all(
        report.built and (keep_shared or not report.shared.count) and not report.unreadable.count for report in reports
    )
    return Answer(reports, _lines(reports, mends=True), ok=done)


@unique.command()
@on_app(database=False)
def check(
    at: AppTarget,
    aggregate: Annotated[
        str | None, argument("AGGREGATE", "The aggregate's name; without it, all.", "aggregates")
    ] = None,
    name: NameArgument = None,
) -> Answer:
    """Compare all claims with the states of all aggregates, and change nothing; exit status 1 when they do not fit."""
    reports = run_async(_run(at, aggregate, name, keep_shared=None))
    return Answer(reports, _lines(reports, mends=False), ok=all(report.sound for report in reports))


async def unbuilt(at: AppTarget) -> list[str]:
    """Return a line for each unique constraint whose claims were not built yet, which says what to do."""
    app = at.app()
    constrained = _constrained(app, None, None)
    if not constrained:
        return []
    lines: list[str] = []
    async with app.connect(at.settings) as jet:
        for cls, aggregate, constraint in constrained:
            if not await jet.repository(cls).unique.is_built(constraint):
                lines.append(
                    f"{aggregate} {constraint}: nobody claimed the values that the log has. Nothing may take one "
                    f"before `eventjet unique build {aggregate} {constraint}` has run."
                )
    return lines


async def _run(
    at: AppTarget, aggregate: str | None, name: str | None, *, keep_shared: bool | None
) -> list[ClaimReport]:
    """Build claims, or with `keep_shared` None check them."""
    from eventjet.commands.unique import check_claims

    reports: list[ClaimReport] = []
    constrained = _constrained(at.app(), aggregate, name)
    async with at.jet() as jet:
        with progress() as show:
            for cls, owner, constraint in constrained:
                claims, shown = jet.repository(cls).unique, partial(show, f"{owner} {constraint}")
                repairs = keep_shared is not None
                reports.append(
                    await check_claims(claims, constraint, shown, repairs=repairs, keep_shared=bool(keep_shared))
                )
    return reports


def _constrained(app: App, aggregate: str | None, name: str | None) -> list[tuple[Any, str, str]]:
    """Return (class, aggregate, constraint) of the named constraints, or of all; raises `UsageError` without one."""
    if aggregate is not None:
        cls, info = aggregate_of(app, aggregate)
        names = [constraint.name for constraint in info.unique]
        if not names or (name is not None and name not in names):
            has = f"It has {listed(names)}." if names else "It has none; declare one with `@unique`."
            near = suggestion(name or "", names)
            raise UsageError(f"The aggregate {aggregate!r} has no unique {name or 'values'}. {near}{has}")
        return [(cls, aggregate, constraint) for constraint in names if name in (None, constraint)]
    return [(cls, info.name, constraint.name) for cls, info in app.aggregates.items() for constraint in info.unique]


def _lines(reports: Sequence[ClaimReport], *, mends: bool) -> Iterator[str]:
    if not reports:
        yield "No aggregate of the app has unique values."
    for report in reports:
        title = f"{report.aggregate} {report.constraint}"
        state = "is kept" if report.built else "is NOT kept yet"
        counts = f"{counted(report.aggregates, 'aggregate')} with {counted(report.values, 'value')}"
        yield f"{title} {state}: {counts}"
        done = ("claimed now", "released now") if mends else ("not claimed", "claimed and not had")
        yield from _mismatches("value", done[0], report.missing)
        yield from _mismatches("value", done[1], report.stale)
        yield from _mismatches("value", "that more than one has", report.shared)
        yield from _mismatches("aggregate", "that cannot be read", report.unreadable)
        build = f"`eventjet unique build {title}`"
        if report.unreadable.count:
            yield "`eventjet audit` says what is wrong with them."
        if report.shared.count:
            end = "." if report.built else ", or begin with `--keep-shared`: then no third one may take it."
            yield f"Give all but one another value and run {build} again{end}"
        elif not mends and not report.sound:
            yield f"{build} puts it right."


def _mismatches(noun: str, predicate: str, mismatches: Mismatches) -> Iterator[str]:
    if mismatches.count:
        yield f"{counted(mismatches.count, noun)} {predicate}:"
        yield from (f"  - {example}" for example in mismatches.examples)
        if mismatches.count > len(mismatches.examples):
            yield f"  - and {mismatches.count - len(mismatches.examples):,} more"
