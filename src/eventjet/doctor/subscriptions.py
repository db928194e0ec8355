"""Check each projection, reactor, process, publication and inbox: its position, worker and quarantine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from eventjet.doctor.database import StoredReadModels
from eventjet.doctor.report import Installation, Report
from eventjet.doctor.server import Greeting
from eventjet.errors import Forbidden, LogUnusable
from eventjet.findings import Level
from eventjet.jetstream.api import next_message
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import identity_of, reading_log_state
from eventjet.nats.endpoint import Endpoint
from eventjet.subscriptions.declarations import declarations_of, filters_of
from eventjet.subscriptions.status import look_at_followers, look_at_projections
from eventjet.subscriptions.work_status import PROJECTION, WorkStatus
from eventjet.text import counted


def check_read_models(
    installation: Installation,
    report: Report,
    servers: Callable[[], Sequence[Greeting] | None],
    database: Callable[[], StoredReadModels | None],
) -> None:
    """Check every projection that the app declares; the part `database` reports undeclared revisions."""
    app = installation.app
    if not app.projections:
        return
    if servers() is None:
        report.no_server()
        return
    stored = database()
    if stored is None:
        report.unknown("checkpoint", "not looked at: their checkpoints could not be read (see database)")
        return
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor read models")
    with NatsConnection.open(endpoint) as link, report.guarded("log", reported_by="streams"):
        statuses, _ = look_at_projections(link, app.name, stored.checkpoints)
        for status in statuses:
            if status.declared:
                check_work(report, status)
                _check_code(installation, report, status, stored)
                _check_empty(installation, report, link, status, stored)


def _check_code(installation: Installation, report: Report, status: WorkStatus, stored: StoredReadModels) -> None:
    """Report rows that other code than this app's made under the same revision."""
    code = installation.app.projections[status.name].code
    for row, _ in stored.checkpoints.rows:
        if (row.name, row.revision) == (status.name, status.revision) and row.has_rows_of_other_code(code):
            report.warning(
                "code",
                f"rows of {status.name} revision {status.revision} were made by other code than this app has under it",
                "readers see rows of both where they differ",
                f"`eventjet verify {status.name}` says whether any differ, and ends this warning where none does; else "
                f"`eventjet rebuild {status.name}`, or declare revision={status.revision + 1}",
            )


def _check_empty(
    installation: Installation, report: Report, link: NatsConnection, status: WorkStatus, stored: StoredReadModels
) -> None:
    """Report tables without rows where the checkpoint has passed events that the projection takes."""
    if status.name not in stored.empty or not status.position:
        return
    resolved = installation.app.projections[status.name]
    for subject in filters_of(installation.app, resolved.events):
        record = link.ask(next_message(installation.app.name, 1, subject))
        if record is not None and record[0] <= status.position:
            report.warning(
                "rows",
                f"{status.name} has no rows, and its checkpoint has passed events from position {record[0]:,} on",
                "if somebody emptied it, what was in it does not come back by itself",
                f"`eventjet verify {status.name}` says whether that is right; `eventjet rebuild {status.name}` makes "
                "it so",
            )
            return


def check_reactions(
    installation: Installation, report: Report, servers: Callable[[], Sequence[Greeting] | None]
) -> None:
    """Check every cursor of the app, including cursors that it no longer declares."""
    declared = declarations_of(installation.app)
    if servers() is None:
        if declared:
            report.no_server()
        return
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor reactions")
    nothing = () if declared else (LogUnusable, Forbidden)  # Without reactions these are no findings.
    with (
        NatsConnection.open(endpoint) as link,
        report.guarded("cursor", reported_by="streams"),
        suppress(*nothing),
    ):
        state = link.run(reading_log_state(installation.app.name))
        identity_of(state)  # raises for a log that has lost its identity
        for status in look_at_followers(link, installation.app, declared, state.last):
            check_work(report, status)


def check_work(report: Report, status: WorkStatus) -> None:
    """Report the state of one subscription in at least one finding, with the word that `eventjet status` has for it."""
    name, is_projection, condition = status.name, status.kind == PROJECTION, status.condition
    label = name if is_projection else f"{status.kind} {name}"
    stale = "readers see what was true then" if is_projection else "what events lead to does not happen"
    if not status.declared:
        what = f"{label} has a cursor at position {status.position:,}, and the app does not declare it"
        if status.owner is not None:
            cost, fix = "a worker with other code handles its events now", "leave it while that release runs"
        else:
            cost = "its events are handled by nobody; a reactor under a new name can go on there"
            fix = f"`eventjet cursor set NEW {status.position}`, or `eventjet cursor drop {name}`"
        report.note("cursor", what, cost, fix)
        return
    before = len(report.findings)
    check, what, fix = _work_finding(label, status)
    if check and condition.level is not Level.OK:
        report.add(condition.level, check, what, stale, fix)
    if status.location:
        report.warning(
            "revision",
            f"{label} revision {status.revision} is not what readers see: it is inactive{_reason_text(status)}",
            "they see an earlier revision until this one has caught up and taken over",
            f"`eventjet worker`, or `eventjet rebuild {name}`; if it is still inactive then, `eventjet db promote "
            f"{name}`",
        )
    if status.quarantined:
        report.warning(
            "quarantine",
            f"{label} has {status.quarantined:,} quarantined",
            "they are in no read model, and later events of their aggregates wait behind them",
            f"`eventjet quarantine list {name}`",
        )
    if len(report.findings) == before:
        report.ok("work", f"{label} is {condition.word} at position {status.position:,}, by {status.owner}")


def _reason_text(status: WorkStatus) -> str:
    """Return why a revision could not be activated, as its worker noted it; empty where it noted nothing."""
    return f" ({status.reason.rstrip('.')})" if status.reason and status.owner else ""


def _work_finding(label: str, status: WorkStatus) -> tuple[str, str, str]:
    """Return (check, what, fix) for the condition of a subscription; empty texts for one that other findings tell."""
    name, word, behind = status.name, status.condition.word, counted(status.lag_events, "event") + " behind"
    match word:
        case "stopped":
            fix = "`eventjet status` shows it again; a worker tries it when it starts"
            return "log", f"{label} is stopped: {status.reason or 'it failed'}", fix
        case "retired":
            return "checkpoint", f"{label} revision {status.revision} was retired", "`eventjet init`"
        case "not begun":
            return "cursor", f"{label} has no cursor", "`eventjet init`"
        case "paused":
            return "paused", f"{label} is paused, {behind}", f"`eventjet resume {name}`"
        case "no worker" if status.lost_owner:
            since = "since the database's clock was set back"
            since = since if status.lost_s is None else f"for {status.lost_s:,.0f} s"
            what = f"{label} has no worker: {status.lost_owner} has not been seen {since}, and none has taken over"
            return "lease", what, f"`eventjet worker {name}`; a second one beside it takes over within seconds"
        case "no worker":
            return "worker", f"{label} has no worker, {behind}", f"`eventjet worker {name}`"
        case "waiting":
            what = f"{label} is waiting at position {status.position:,}, {behind}: {status.reason}"
            fix = "Do what the reason says; a worker that runs tries again by itself, else `eventjet worker {}`"
            return "waits", what, fix.format(name)
        case "rebuilding":
            return "rebuild", f"{label} is rebuilding", "`eventjet status --watch` shows when it is done"
        case "lag unknown":
            what = f"the lag of {label}, at position {status.position:,}, is unknown: the log did not say where it ends"
            return "lag", what, "the part `streams` says what is wrong with the log"
        case "behind" if status.condition.level is Level.WARNING:
            what = f"{label} is {behind}, for {status.lag_s or 0:,.0f} s"
            fix = "`eventjet status --watch` shows its pace"
            faster = f"; `eventjet rebuild {name}` is faster for many" if status.kind == PROJECTION else ""
            return "lag", what, fix + faster
        case _:
            return "", "", ""
