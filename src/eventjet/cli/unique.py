"""`eventjet unique …`: claims of unique values, made for aggregates of before, and held against their states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, note, say
from eventjet.errors import UsageError
from eventjet.projections.app_ref import aggregate_of
from eventjet.shown import counted
from eventjet.spelling import listed, meant

if TYPE_CHECKING:
    from eventjet.app import App
    from eventjet.commands.unique import ClaimReport, Mismatches

unique = typer.Typer(name="unique", help="Values that no two aggregates may have at once.", no_args_is_help=True)

_TOLD_EVERY = 10_000

NameArgument = Annotated[str | None, typer.Argument(metavar="NAME", help="Which constraint; without it, all.")]


@unique.command()
@on_app(database=False)
def build(
    at: AppTarget,
    aggregate: Annotated[
        str,
        typer.Argument(
            metavar="AGGREGATE",
            help="The aggregate's name, for instance user.",
            autocompletion=names_of("aggregates"),
        ),
    ],
    name: NameArgument = None,
    keep_shared: Annotated[
        bool, typer.Option("--keep-shared", help="Begin although some have one value; no third may take it then.")
    ] = False,
) -> Answer:
    """Claim the values that aggregates have, and begin to keep them unique; exit status 1 when two have the same.

    For a constraint that is new on a log with events, after an import, and to put right what `unique check` finds.
    Run again, it stores only what is missing.
    """
    reports = asyncio.run(_run(at, aggregate, name, keep_shared=keep_shared))
    done = all(one.built and (keep_shared or not one.shared.count) and not one.unreadable.count for one in reports)
    return Answer(reports, lambda: _print(reports, mends=True), ok=done)


@unique.command()
@on_app(database=False)
def check(
    at: AppTarget,
    aggregate: Annotated[
        str | None,
        typer.Argument(
            metavar="AGGREGATE", help="The aggregate's name; without it, all.", autocompletion=names_of("aggregates")
        ),
    ] = None,
    name: NameArgument = None,
) -> Answer:
    """Compare all claims with the states of all aggregates, and change nothing; exit status 1 when they do not fit."""
    reports = asyncio.run(_run(at, aggregate, name, keep_shared=None))
    return Answer(reports, lambda: _print(reports, mends=False), ok=all(one.sound for one in reports))


async def unbuilt(at: AppTarget) -> list[str]:
    """Constraints that are not kept yet, each with what to do."""
    app = at.app()
    constrained = _constrained(app, None, None)
    if not constrained:
        return []
    found: list[str] = []
    async with app.connect(at.settings) as jet:
        for cls, aggregate, constraint in constrained:
            if not await jet.repository(cls).unique.is_built(constraint):
                found.append(
                    f"{aggregate} {constraint}: nobody claimed the values that the log has. Nothing may take one "
                    f"before `eventjet unique build {aggregate} {constraint}` has run."
                )
    return found


async def _run(
    at: AppTarget, aggregate: str | None, name: str | None, *, keep_shared: bool | None
) -> list[ClaimReport]:
    """Build, or with `keep_shared` None check."""
    from eventjet.commands.unique import build_claims, check_claims

    app = at.app()
    reports: list[ClaimReport] = []
    constrained = _constrained(app, aggregate, name)
    async with app.connect(at.settings) as jet:
        await jet.log()  # says that `init` is missing, where it is
        for cls, of, constraint in constrained:
            unique = jet.repository(cls).unique
            progress = _Progress(f"{of} {constraint}").told
            if keep_shared is None:
                reports.append(await check_claims(unique, constraint, progress))
            else:
                reports.append(await build_claims(unique, constraint, progress, keep_shared=keep_shared))
    return reports


class _Progress:
    """A line on standard error, now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = _TOLD_EVERY

    def told(self, aggregates: int) -> None:
        if aggregates >= self._next:
            self._next += _TOLD_EVERY
            note(f"{self._what}: {aggregates:,} looked at")


def _constrained(app: App, aggregate: str | None, name: str | None) -> list[tuple[Any, str, str]]:
    """(class, name, constraint) of what is meant; raises `UsageError` for what the app does not have."""
    if aggregate is not None:
        cls, info = aggregate_of(app, aggregate)
        known = [one.name for one in info.unique]
        if not known or (name is not None and name not in known):
            has = f"It has {listed(known)}." if known else "It has none; declare one with `@unique`."
            near = meant(name or "", known)
            raise UsageError(f"The aggregate {aggregate!r} has no unique {name or 'values'}. {near}{has}")
        return [(cls, aggregate, one) for one in known if name in (None, one)]
    return [(cls, info.name, one.name) for cls, info in app.aggregates.items() for one in info.unique]


def _print(reports: Sequence[ClaimReport], *, mends: bool) -> None:
    if not reports:
        say("No aggregate of the app has unique values.")
    for one in reports:
        _print_one(one, mends=mends)


def _print_one(report: ClaimReport, *, mends: bool) -> None:
    what = f"{report.aggregate} {report.constraint}"
    kept = "is kept" if report.built else "is NOT kept yet"
    there = f"{counted(report.aggregates, 'aggregate')} with {counted(report.values, 'value')}"
    say(f"{what} {kept}: {there}")
    done = ("claimed now", "released now") if mends else ("not claimed", "claimed and not had")
    _print_found(f"{counted(report.missing.count, 'value')} {done[0]}", report.missing)
    _print_found(f"{counted(report.stale.count, 'value')} {done[1]}", report.stale)
    _print_found(f"{counted(report.shared.count, 'value')} that more than one has", report.shared)
    _print_found(f"{counted(report.unreadable.count, 'aggregate')} that cannot be read", report.unreadable)
    build = f"`eventjet unique build {what}`"
    if report.unreadable.count:
        say("`eventjet audit` says what is wrong with them.")
    if report.shared.count:
        say(
            f"Give all but one another value and run {build} again"
            + ("." if report.built else ", or begin with `--keep-shared`: then no third one may take it.")
        )
    elif not mends and not report.sound:
        say(f"{build} puts it right.")


def _print_found(what: str, found: Mismatches) -> None:
    if not found.count:
        return
    say(f"{what}:")
    for one in found.examples:
        say(f"  - {one}")
    if found.count > len(found.examples):
        say(f"  - and {found.count - len(found.examples):,} more")
