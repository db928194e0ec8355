"""The read models: their checkpoints beside the log, their workers, and what is parked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eventjet.doctor.database import SeenDatabase
from eventjet.doctor.diagnosis import Diagnoses, Installation
from eventjet.doctor.monitoring import Greeting
from eventjet.doctor.streams import tell_no_server
from eventjet.doctor.work import tell_work
from eventjet.findings import Level
from eventjet.jetstream.api import next_message
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.subscriptions.declarations import filters_of
from eventjet.subscriptions.status import WorkStatus, look_at_projections


def look_at_models(
    installation: Installation,
    told: Diagnoses,
    servers: Callable[[], Sequence[Greeting] | None],
    database: Callable[[], SeenDatabase | None],
) -> None:
    """Every projection that the app declares; what others are there of, the database's part says."""
    app = installation.app
    if not app.projections:
        return
    if servers() is None:
        tell_no_server(told)
        return
    seen = database()
    if seen is None:
        told.add("checkpoint", Level.UNKNOWN, "not looked at: their checkpoints could not be read (see database)")
        return
    declared = {(one.name, one.revision) for one in app.projections.values()}
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor read models")
    with NatsConnection.open(endpoint) as link, told.guarded("log", told_by="streams"):
        statuses, _ = look_at_projections(link, app.name, seen.checkpoints, declared)
        for one in statuses:
            if one.declared:
                tell_work(told, one)
                _tell_code(installation, told, one, seen)
                _tell_empty(installation, told, link, one, seen)


def _tell_code(installation: Installation, told: Diagnoses, one: WorkStatus, seen: SeenDatabase) -> None:
    """Rows that were made by other code than that of the app at hand, under the same revision."""
    code = installation.app.projections[one.name].code
    for held, _ in seen.checkpoints.rows:
        if (held.name, held.revision) == (one.name, one.revision) and held.has_rows_of_other_code(code):
            told.add(
                "code",
                Level.WARNING,
                f"rows of {one.name} revision {one.revision} were made by other code than this app has under it",
                "readers see rows of both where they differ",
                f"`eventjet verify {one.name}` says whether any differ, and ends this warning where none does; else "
                f"`eventjet rebuild {one.name}`, or declare revision={one.revision + 1}",
            )


def _tell_empty(
    installation: Installation, told: Diagnoses, link: NatsConnection, one: WorkStatus, seen: SeenDatabase
) -> None:
    """A table without rows under a checkpoint that has passed events which it takes."""
    if one.name not in seen.empty or not one.position:
        return
    resolved = installation.app.projections[one.name]
    for subject in filters_of(installation.app, resolved.events):
        first = link.ask(next_message(installation.app.name, 1, subject))
        if first is not None and first[0] <= one.position:
            told.add(
                "rows",
                Level.WARNING,
                f"{one.name} has no rows, and its checkpoint has passed events from position {first[0]:,} on",
                "if somebody emptied it, what was in it does not come back by itself",
                f"`eventjet verify {one.name}` says whether that is right; `eventjet rebuild {one.name}` makes it so",
            )
            return
