"""The streams and buckets of the app: there, as declared, whole, copied; and the consumers of the log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from eventjet.codec.subjects import declared_name, snapshot_bucket
from eventjet.doctor.clocks import tell_clock
from eventjet.doctor.diagnosis import Diagnoses, Installation, named
from eventjet.doctor.monitoring import Greeting
from eventjet.errors import Forbidden, UnknownAggregate, UnknownEvent
from eventjet.findings import Level
from eventjet.jetstream.api import StreamState, direct_page, server_time, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import accepted_missing, missing_range
from eventjet.log.integrity import find_stream as find
from eventjet.log.public_stream import check_public
from eventjet.log.topology import Drift, compare, identity_of, needed_configs, unknown_settings
from eventjet.log.unknown_events import LIST_S, LOOKS, unknown_aggregates, unknown_events
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.inspection import ListedConsumer, list_consumers, replicas_of
from eventjet.projections.app_ref import Application
from eventjet.subscriptions.declarations import declarations_of, has_timers, probes_of

_PAGES_MAX = 20
_LISTEN_S = 1.0
"""Whoever else answers is taken to answer within this time."""
_SILENT_S = 5.0
"""Leaders hear of followers every second, and more often under load."""
_PAGE_BYTES = 2_000_000
_REPAIR = "`eventjet init --repair`"
_OF_PROJECTION = re.compile(r"([a-z][a-z0-9_]*)-r([0-9]+)")


def look_at_streams(
    installation: Installation, told: Diagnoses, servers: Callable[[], Sequence[Greeting] | None]
) -> None:
    """All that `eventjet init` makes, and what publications and inboxes name."""
    if servers() is None:
        tell_no_server(told)
        return
    app, replicas = installation.app, installation.settings.replicas
    follows = declarations_of(app)
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor streams")
    with NatsConnection.open(endpoint) as link:
        missing: set[str] = set()
        for config in needed_configs(app.name, replicas, cursors=bool(follows), timers=has_timers(app)):
            name = str(config["name"])
            with told.guarded("stream"):
                state = find(link, name)
                tell_stream(told, app, config, state)
                if state is None:
                    missing.add(name)
                elif int(state.config.get("num_replicas") or 1) > 1:
                    _tell_copies(told, link, name)
        for one in app.publications.values():
            with told.guarded("publication"):
                public = find(link, one.stream)
                missing |= {one.stream} if public is None else set()
                check_public(public, one.stream, one.name)
                told.ok("publication", f"the stream {one.stream} takes what {one.name} publishes")
        for one in app.inboxes.values():
            with told.guarded("inbox"):
                _tell_inbox(told, one.name, one.stream, find(link, one.stream))
        with told.guarded("answers"):
            _tell_answers(told, link, installation, missing)
        if app.name in missing:
            return
        with told.guarded("pages"), suppress(Forbidden):
            log = link.ask(stream_info(app.name))
            if log.messages:
                link.check_pages(direct_page(app.name, log.first, None, count=1, size=_PAGE_BYTES))
        with told.guarded("clock"):
            before, began = installation.clock(), time.monotonic()
            there = link.ask(server_time(app.name))
            tell_clock(told, "server", "the NATS server", (before, there, before + time.monotonic() - began))
        with told.guarded("aggregates"):
            tell_aggregates(told, link.run(unknown_aggregates(app.name, app.catalog.aggregates), LIST_S))
        with told.guarded("events"):
            tell_events(told, unknown_events(link, link.ask(stream_info(app.name)), app.catalog))
        with told.guarded("durables"):
            tell_consumers(told, app, _consumers(link, app.name))


def tell_no_server(told: Diagnoses) -> None:
    """For parts that need NATS where it cannot be reached."""
    told.add("reach", Level.UNKNOWN, "not looked at: no server answered, or not in time (see server)")


def tell_stream(told: Diagnoses, app: Application, declared: dict[str, Any], state: StreamState | None) -> None:
    """One stream or bucket; None for one that is missing."""
    name = str(declared["name"])
    is_disposable = name == f"KV_{snapshot_bucket(app.name)}"
    if state is None:
        cost = "histories are read from their first event" if is_disposable else "nothing that needs it works"
        told.add("stream", Level.FAULT, f"the stream {name} does not exist", cost, "`eventjet init`")
        return
    is_log = name == app.name
    if is_log:
        with told.guarded("identity"):
            _tell_log(told, state)
    drifts = compare(declared, state.config)
    for drift in drifts:
        if drift.setting != "num_replicas":
            bad = Level.WARNING if drift.is_harmless or is_disposable else Level.FAULT
            told.add("setting", bad, str(drift), drift.cost, _REPAIR)
    if not drifts:
        told.ok("stream", f"{name} is as declared")
    for setting in unknown_settings(state):
        told.add(
            "setting",
            Level.UNKNOWN,
            f"{name}: {setting} is {state.config[setting]!r}, and this eventjet does not know what that does",
            "a setting of a newer server may change what is stored or read",
            "Upgrade eventjet, or take the setting away.",
        )
    of_replicas = next((one for one in drifts if one.setting == "num_replicas"), None)
    if is_log or of_replicas is not None:
        _tell_replicas(told, name, state, of_replicas)


def _tell_log(told: Diagnoses, state: StreamState) -> None:
    identity = identity_of(state)
    gone = missing_range(state)
    if gone:
        told.add(
            "whole",
            Level.FAULT,
            f"the log is not whole: {gone}",
            "read models made anew lack them, purged aggregates look like new ones, and rebuilds refuse",
            f"`eventjet audit --archive URL` says what an archive still has; {_REPAIR} stops what drops events",
        )
    elif missing := accepted_missing(state):
        told.add("whole", Level.NOTE, f"somebody accepted that {missing:,} positions of the log are missing")
    if not gone:
        told.ok("whole", f"log {identity}: {state.messages:,} events up to position {state.last:,}")


def _tell_replicas(told: Diagnoses, name: str, state: StreamState, drift: Drift | None) -> None:
    copies = int(state.config.get("num_replicas") or 1)
    if drift is not None and copies > int(drift.declared):
        told.add(
            "replicas",
            Level.WARNING,
            f"{name} has {copies} replicas, and EVENTJET_REPLICAS says {drift.declared}",
            f"{_REPAIR} with these settings takes copies away",
            f"export EVENTJET_REPLICAS={copies}",
        )
    elif drift is not None:
        cost = "what happens to a server or its disk happens to what it holds"
        told.add("replicas", Level.WARNING, f"{name} has {copies} of {drift.declared} replicas", cost, _REPAIR)
    elif copies == 1:
        told.add(
            "replicas",
            Level.WARNING,
            f"{name} has one replica",
            "it is away while its server is, and gone with that server's disk",
            f"three servers with sync_interval: always; export EVENTJET_REPLICAS=3, then {_REPAIR}",
        )
    else:
        told.ok("replicas", f"{name} has {copies} replicas")


def _tell_copies(told: Diagnoses, link: NatsConnection, name: str) -> None:
    for one in link.ask(replicas_of(name)):
        if one.is_offline or (not one.is_current and (one.silent_s is None or one.silent_s > _SILENT_S)):
            heard = "not heard of by its leader" if one.silent_s is None else f"last heard of {one.silent_s:,.0f} s ago"
            what = f"{name}: the copy on {one.name} is away, {heard}"
            cost = "one more server that fails may stop every save"
            told.add("copies", Level.WARNING, what, cost, "Start that server, or look at its log.")
        elif not one.is_current:
            told.add("copies", Level.NOTE, f"{name}: the copy on {one.name} is catching up")


def _tell_answers(told: Diagnoses, link: NatsConnection, installation: Installation, missing: Collection[str]) -> None:
    """Whether anybody but the streams answers what is published for them."""
    app = installation.app
    kinds = [kind for kind in probes_of(app) if kind[0] not in missing]
    # Of an event that could be one: who may ask and may not write it is not where writers are.
    events = [(app.name, f"{subject.rpartition('.')[0]}._asked") for stream, subject in kinds if stream == app.name]
    asked, others = link.probe([*kinds, *events], _LISTEN_S)
    asked, as_writer = asked[: len(kinds)], asked[len(kinds) :]
    for other in others:
        told.add(
            "answers",
            Level.WARNING,
            other,
            "their answers are not believed, so a save that only they answer takes until its slot was looked at; where "
            "the names are the same, every save is looked at",
            "deny the subjects on the leaf node connection (deny_imports, deny_exports), give each JetStream a domain "
            "of its own, or take the permission to hear them from the subscriber",
        )
    silent = [one.subject for one in asked if not one.is_answered]
    if silent:
        what = f"not known who else answers: these credentials may not publish to {named(silent)}"
        told.add("answers", Level.UNKNOWN, what, "it is not looked at", "Use credentials that may write.")
    elif as_writer and not any(one.is_answered for one in as_writer):
        told.add(
            "answers",
            Level.NOTE,
            "not known who else answers writers: these credentials may write no event, so writers may be of another "
            "account, as those of `eventjet nats-config` are, and what subscribes there is not heard here",
            "a subscriber of that account may answer saves",
            "`eventjet doctor` with the credentials of `writer`, or of `actor`, hears it",
        )
    elif not others:
        told.ok("answers", "nobody but the streams answers what these credentials publish for them")


def tell_aggregates(told: Diagnoses, unknown: Sequence[UnknownAggregate]) -> None:
    """Aggregates in the log that the app does not declare."""
    if not unknown:
        told.ok("aggregates", "every aggregate of the log is one of the app's")
    for one in unknown:
        told.add(
            "aggregates",
            Level.FAULT,
            f"the log has events of {one.histories:,} {one.aggregate!r}, which the app does not declare",
            "of an aggregate that was renamed a second history would begin; new aggregates are refused until then",
            "`eventjet init` says what to do",
        )


def tell_events(told: Diagnoses, unknown: Sequence[UnknownEvent]) -> None:
    """Of the events that were looked at, those that the app does not declare."""
    if not unknown:
        told.ok(
            "events", f"the app declares every event that was looked at: a sample of {LOOKS}, the last ones included"
        )
    for one in unknown:
        told.add(
            "events",
            Level.FAULT,
            f"the event at position {one.position:,} is {one.type_name!r} schema {one.schema}, which the app does not "
            "declare",
            "its aggregate cannot be loaded, and whatever follows the log waits at it or parks it",
            "`eventjet init` says what to do",
        )


def _tell_inbox(told: Diagnoses, name: str, stream: str, state: StreamState | None) -> None:
    if state is not None:
        told.ok("inbox", f"the stream {stream}, which {name} follows, is there")
        return
    cost = "none of its messages becomes a command"
    fix = "Have it made by who owns it, or name another in the inbox."
    told.add("inbox", Level.FAULT, f"the stream {stream}, which {name} follows, does not exist", cost, fix)


def _consumers(link: NatsConnection, stream: str) -> list[ListedConsumer]:
    found: list[ListedConsumer] = []
    for _ in range(_PAGES_MAX):
        page, total = link.ask(list_consumers(stream, len(found)))
        found += page
        if not page or len(found) >= total:
            break
    return found


def tell_consumers(told: Diagnoses, app: Application, listed: Sequence[ListedConsumer]) -> None:
    """Durables of the log that nothing of the app reads through."""
    own = {one.durable for one in app.projections.values()} | declarations_of(app).keys()
    strange = [one for one in listed if one.is_durable and one.name not in own]
    if not strange:
        told.ok("durables", "every durable of the log is one of the app's")
    for one in strange[: 2 * _PAGES_MAX]:
        used = "; somebody reads through it now" if one.waiting else ""
        told.add(
            "durables",
            Level.NOTE,
            f"the durable {one.name} is of nothing that the app declares{used}",
            "the server keeps its state for ever; another program, or another release of this one, may need it",
            _way_to_remove(app, one.name),
        )


def _way_to_remove(app: Application, durable: str) -> str:
    of_projection = _OF_PROJECTION.fullmatch(durable)
    if of_projection is not None:
        return f"`eventjet db unused --drop {of_projection[1]}:{of_projection[2]}` takes it along"
    declared = {one.declared_as for one in declarations_of(app).values()}
    if declared_name(durable) in declared:
        return f"`nats consumer rm {app.name} {durable}`, once no worker of that partitioning runs"
    return f"`eventjet cursor drop {durable}` if it was a reactor's, else `nats consumer rm {app.name} {durable}`"
