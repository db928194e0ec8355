"""Reactors, processes, publications and inboxes: their cursors beside the log, their workers, and what is parked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from eventjet.doctor.diagnosis import Diagnoses, Installation
from eventjet.doctor.monitoring import Greeting
from eventjet.doctor.streams import tell_no_server
from eventjet.doctor.work import tell_work
from eventjet.errors import Forbidden, LogUnusable
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import state_of_log
from eventjet.nats.endpoint import Endpoint
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import look_at_followers


def look_at_reactions(
    installation: Installation, told: Diagnoses, servers: Callable[[], Sequence[Greeting] | None]
) -> None:
    """Every cursor of the app, those of what it no longer declares too."""
    declared = declarations_of(installation.app)
    if servers() is None:
        if declared:
            tell_no_server(told)
        return
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor reactions")
    nothing = () if declared else (LogUnusable, Forbidden)  # Nobody misses what is not declared.
    with (
        NatsConnection.open(endpoint) as link,
        told.guarded("cursor", told_by="streams"),
        suppress(*nothing),
    ):
        _, state = state_of_log(link, installation.app.name)
        for one in look_at_followers(link, installation.app, declared, state.last):
            tell_work(told, one)
