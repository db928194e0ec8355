"""The commands `eventjet mirror …`: a copy of the log in another JetStream, to read from and to survive on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.output import Answer, confirm, note
from eventjet.cli.target import AppTarget, YesOption, on_app, option, switch

if TYPE_CHECKING:
    from eventjet.operations.mirrors import MirrorStatus
    from eventjet.operations.promotion import Promotion

mirror = typer.Typer(
    name="mirror", help="A copy of the log on other servers: EVENTJET_READ_FROM names them.", no_args_is_help=True
)


@mirror.command()
@on_app(database=False)
def create(
    at: AppTarget,
    origin_api: Annotated[
        str | None,
        option("--origin-api", "PREFIX", "What the mirror's account calls the JetStream API of the log's."),
    ] = None,
) -> Answer:
    """Make mirrors of the app's log, cursors and large bodies on the servers that EVENTJET_READ_FROM names.

    What exists is compared with the log and left as it is. Exit status 1 where a mirror hears nothing from the log.
    """
    from eventjet.operations import mirrors

    app = at.app().name
    created = mirrors.create(app, at.settings, at.settings.replicas, origin_api)
    status = mirrors.status(app, at.settings)
    lines = [f"created  mirror {name}" for name in created]
    value = {"created": created, **_status_value(status)}
    return Answer(value, [*lines, *_status_lines(status)], ok=status.fault is None)


@mirror.command("status")
@on_app(database=False)
def mirror_status(at: AppTarget) -> Answer:
    """Say how far the mirror is behind the log, whether it is whole, and of which log; exit status 1 if it is unfit."""
    from eventjet.operations import mirrors

    status = mirrors.status(at.app().name, at.settings)
    return Answer(_status_value(status), list(_status_lines(status)), ok=status.fault is None)


@mirror.command()
@on_app()
def promote(
    at: AppTarget,
    dry_run: Annotated[bool, switch("--dry-run", "Say what would be done, and change nothing.")] = False,
    log_is_gone: Annotated[
        bool, switch("--log-is-gone", "Do not wait until the mirror hears nothing from a log that is not reached.")
    ] = False,
    yes: YesOption = False,
) -> Answer:
    """Make the mirror the log, when the log is lost or is to move; what the mirror lacks is named by position.

    A log that can be reached is sealed for good, and the mirror gets its last events. Run it again when the old servers
    are back: it seals what is there, and names what was recorded on them alone.
    """
    from eventjet.log.mirror import shown_servers
    from eventjet.nats.endpoint import Endpoint
    from eventjet.operations import promotion

    plan = promotion.preview(at.app(), at.settings)
    if not dry_run:
        if not yes:
            for line in _plan_lines(plan):
                note(line)
        where = shown_servers(Endpoint.of(at.settings.for_reads()))
        question = f"Make the mirror at {where} the log of {plan.stream!r}, for good?"
        confirm(question, yes=yes, otherwise="Nothing was changed.")
        plan = promotion.promote(at.app(), at.settings, log_is_gone=log_is_gone)
    value = {**asdict(plan), "known_last": plan.known_last}
    return Answer(value, list(_plan_lines(plan) if dry_run else _promoted_lines(plan)), ok=not plan.beyond)


def _status_value(status: MirrorStatus) -> dict[str, object]:
    return {**asdict(status), "lag": status.lag}


def _status_lines(status: MirrorStatus) -> Iterator[str]:
    if status.mirror is not None:
        yield f"mirror   of {status.stream} at {status.where}: positions {status.first:,} to {status.last:,}"
        yield f"log      {status.mirror}" + ("" if status.log else ", as the mirror says")
    if status.unreachable is not None:
        yield f"origin   not reached: {status.unreachable}"
    elif status.mirror is not None:
        yield f"lag      {status.lag:,} positions, {status.lag_s or 0.0:.1f} s"
    if status.silent_s is not None:
        yield f"heard    from the log {status.silent_s:.1f} s ago"
    if status.crosses:
        from eventjet.operations.mirrors import denials

        yield (
            "crosses  the link between the servers: what is published here reaches those of the log. After a promotion "
            f"both would store it, so it is refused. {denials(status.stream)}."
        )
    if status.crosses is None:
        yield "crosses  the link between the servers: not known. Name the mirror's servers, not their JetStream domain."
    if status.fault is not None:
        yield f"wrong    {status.fault}"


def _plan_lines(plan: Promotion) -> Iterator[str]:
    yield f"log      {plan.old}, of which the mirror has the events up to position {plan.end:,}"
    if plan.log_last is not None:
        is_sealed = "is sealed" if plan.sealed else "will be sealed, for good"
        yield f"old log  at position {plan.log_last:,}; it {is_sealed}"
    yield from _lost_lines(plan)


def _promoted_lines(plan: Promotion) -> Iterator[str]:
    yield f"promoted {plan.stream} is the log {plan.new}, which continues {plan.old} after position {plan.end:,}"
    yield f"moved    {plan.moved} checkpoints and cursors"
    if plan.log_last is not None:
        yield f"sealed   the old log, at position {plan.log_last:,}"
    yield from _lost_lines(plan)
    yield "Name these servers in EVENTJET_SERVERS, unset EVENTJET_READ_FROM, and run `eventjet init`."
    if plan.log_last is None:
        yield "Keep writers from the old servers; when those are back, run this again: it seals the old log."


def _lost_lines(plan: Promotion) -> Iterator[str]:
    for beyond in plan.beyond:
        yield f"beyond   {beyond.what} has reached position {beyond.position:,}"
    if plan.beyond:
        yield f"lost     positions {plan.end + 1:,} to {plan.known_last:,} were recorded, and the mirror lacks them."
        yield "Read models beyond it are rebuilt with `eventjet rebuild`, cursors are put with `eventjet cursor set`."
    for what in plan.unknown:
        yield f"unknown  {what}"
