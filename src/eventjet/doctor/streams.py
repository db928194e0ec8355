"""Check the app's streams and buckets: existence, settings, integrity, replicas, and the consumers of the log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from eventjet.codec.subjects import declared_name, snapshot_bucket
from eventjet.doctor.report import Installation, Report, check_clock
from eventjet.doctor.server import Greeting
from eventjet.domain.reactor import Inbox
from eventjet.errors import Forbidden, LogUnusable, UnknownAggregate, UnknownEvent, Unreachable
from eventjet.findings import Level
from eventjet.jetstream.api import StreamState, call, direct_page, server_time, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.gathering import (
    check_gathering,
    check_origins,
    lagging_sources,
    reading_origins,
    stalled_sources,
)
from eventjet.log.integrity import accepted_missing, missing_range
from eventjet.log.public_stream import check_public
from eventjet.log.topology import Drift, compare, finding_stream, identity_of, needed_configs, unknown_settings
from eventjet.log.unknown_events import LIST_S, LOOKS, unknown_aggregates, unknown_events
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.log import move_in, replicas_in
from eventjet.operations.mirrors import status as mirror_status
from eventjet.projections.app_ref import Application
from eventjet.subscriptions.declarations import declarations_of, has_timers, probes_of
from eventjet.text import listed

_PAGES_MAX = 20
_LISTEN_S = 1.0
"""Seconds to wait for answers of other subscribers."""
_SILENT_S = 5.0
"""Silence in seconds after which a replica counts as away: a leader hears from it every second, or more often."""
_PAGE_BYTES = 2_000_000
_REPAIR = "`eventjet init --repair`"
_OF_PROJECTION = re.compile(r"([a-z][a-z0-9_]*)-r([0-9]+)")


def check_streams(installation: Installation, report: Report, servers: Callable[[], Sequence[Greeting] | None]) -> None:
    """Check the streams and buckets that `eventjet init` makes, and the streams of publications and inboxes."""
    if servers() is None:
        report.no_server()
        return
    app, replicas = installation.app, installation.settings.replicas
    follows = declarations_of(app)
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor streams")
    with NatsConnection.open(endpoint) as link:
        missing: set[str] = set()
        for config in needed_configs(
            app.name, replicas, cursors=bool(follows), timers=has_timers(app), objects=bool(app.catalog.with_blobs)
        ):
            name = str(config["name"])
            with report.guarded("stream"):
                state = link.run(finding_stream(name))
                check_stream(report, app, config, state)
                if state is None:
                    missing.add(name)
                else:
                    check_copies(report, name, state.cluster)
        for declaration in app.publications.values():
            with report.guarded("publication"):
                public = link.run(finding_stream(declaration.stream))
                missing |= {declaration.stream} if public is None else set()
                check_public(public, declaration.stream, declaration.name)
                report.ok("publication", f"the stream {declaration.stream} takes what {declaration.name} publishes")
        for declaration in app.inboxes.values():
            with report.guarded("inbox"):
                _check_inbox(report, link, declaration, link.run(finding_stream(declaration.stream)))
        with report.guarded("answers"):
            _check_answers(report, link, installation, missing)
        if app.name in missing:
            return
        if installation.settings.read_from is not None:
            with report.guarded("mirror"):
                _check_mirror(report, installation)
        with report.guarded("pages"), suppress(Forbidden):
            log = link.ask(stream_info(app.name))
            if log.messages:
                link.check_pages(direct_page(app.name, log.first, None, count=1, size=_PAGE_BYTES))
        with report.guarded("clock"):
            before, began = installation.clock(), time.monotonic()
            server_now = link.ask(server_time(app.name))
            check_clock(report, "server", "the NATS server", (before, server_now, before + time.monotonic() - began))
        with report.guarded("aggregates"):
            _check_aggregates(report, link.run(unknown_aggregates(app.name, app.catalog.aggregates), LIST_S))
        with report.guarded("events"):
            _check_events(report, unknown_events(link, link.ask(stream_info(app.name)), app.catalog))
        with report.guarded("durables"):
            _check_durables(report, link, app)


def _check_mirror(report: Report, installation: Installation) -> None:
    cost = "workers, rebuilds and `tail` read nothing from it"
    try:
        status = mirror_status(installation.app.name, installation.settings)
    except LogUnusable:
        raise
    except Unreachable as error:
        report.unreachable("mirror", f"the mirror's server: {error.reason}", cost, error.remedy)
        return
    if status.fault is not None:
        report.fault("mirror", status.fault, cost, "`eventjet mirror status`")
    else:
        behind = "" if status.lag_s is None else f", {status.lag:,} positions and {status.lag_s:.1f} s behind the log"
        report.ok("mirror", f"events are read at {status.where} up to position {status.last:,}{behind}")


def check_stream(report: Report, app: Application, declared: dict[str, Any], state: StreamState | None) -> None:
    """Check one stream or bucket against its declaration; `state` is None for a missing one."""
    name = str(declared["name"])
    is_disposable = name == f"KV_{snapshot_bucket(app.name)}"
    if state is None:
        cost = "histories are read from their first event" if is_disposable else "nothing that needs it works"
        report.fault("stream", f"the stream {name} does not exist", cost, "`eventjet init`")
        return
    is_log = name == app.name
    if is_log:
        with report.guarded("identity"):
            _check_log(report, state)
    drifts = compare(declared, state.config)
    for drift in drifts:
        if drift.setting != "num_replicas":
            level = Level.WARNING if drift.is_harmless or is_disposable else Level.FAULT
            report.add(level, "setting", str(drift), drift.cost, drift.remedy)
    if not drifts:
        report.ok("stream", f"{name} is as declared")
    for setting in unknown_settings(state):
        report.unknown(
            "setting",
            f"{name}: {setting} is {state.config[setting]!r}, and this eventjet does not know what that does",
            "a setting of a newer server may change what is stored or read",
            "Upgrade eventjet, or take the setting away.",
        )
    replica_drift = next((candidate for candidate in drifts if candidate.setting == "num_replicas"), None)
    if (is_log or replica_drift is not None) and not state.config.get("sealed"):
        _check_replicas(report, name, state, replica_drift)


def _check_log(report: Report, state: StreamState) -> None:
    identity = identity_of(state)
    gap = missing_range(state)
    if gap:
        report.fault(
            "whole",
            f"the log is not whole: {gap}",
            "read models made anew lack them, purged aggregates look like new ones, and rebuilds refuse",
            f"`eventjet audit --archive URL` says what an archive still has; {_REPAIR} stops what drops events",
        )
    elif missing := accepted_missing(state):
        report.note("whole", f"somebody accepted that {missing:,} positions of the log are missing")
    if not gap:
        report.ok("whole", f"log {identity}: {state.messages:,} events up to position {state.last:,}")


def _check_replicas(report: Report, name: str, state: StreamState, drift: Drift | None) -> None:
    copies = int(state.config.get("num_replicas") or 1)
    if drift is not None and copies > int(drift.declared):
        report.warning(
            "replicas",
            f"{name} has {copies} replicas, and EVENTJET_REPLICAS says {drift.declared}",
            f"{_REPAIR} with these settings takes copies away",
            f"export EVENTJET_REPLICAS={copies}",
        )
    elif drift is not None:
        cost = "what happens to a server or its disk happens to what it holds"
        report.warning("replicas", f"{name} has {copies} of {drift.declared} replicas", cost, _REPAIR)
    elif copies == 1:
        report.warning(
            "replicas",
            f"{name} has one replica",
            "it is away while its server is, and gone with that server's disk",
            f"three servers with sync_interval: always; export EVENTJET_REPLICAS=3, then {_REPAIR}",
        )
    else:
        report.ok("replicas", f"{name} has {copies} replicas")


def check_copies(report: Report, name: str, cluster: Mapping[str, Any]) -> None:
    """Report copies that are away or behind, and a move, a scaling or an evacuation that is under way."""
    info = {"cluster": cluster}
    move = move_in(info)
    if move is not None:
        report.add(
            Level.WARNING if move.is_stuck else Level.NOTE,
            "move",
            f"{name} is {move}",
            "until it has arrived, fewer servers than usual have all of it",
            f"Stop no server meanwhile. A request to $JS.API.STREAM.CANCEL_MOVE.{name} takes it back.",
        )
    for replica in replicas_in(info):
        # A copy that a move adds has not been heard of at first.
        is_silent = (move is None or move.is_long) if replica.silent_s is None else replica.silent_s > _SILENT_S
        if replica.is_offline or (not replica.is_current and is_silent):
            last_heard = (
                "not heard of by its leader"
                if replica.silent_s is None
                else f"last heard of {replica.silent_s:,.0f} s ago"
            )
            what = f"{name}: the copy on {replica.name} is away, {last_heard}"
            cost = "one more server that fails may stop every save"
            report.warning("copies", what, cost, "Start that server, or look at its log.")
        elif not replica.is_current:
            report.note("copies", f"{name}: the copy on {replica.name} is catching up")


def _check_answers(report: Report, link: NatsConnection, installation: Installation, missing: Collection[str]) -> None:
    """Report whether any subscriber besides the streams answers messages that are published to them."""
    app = installation.app
    kinds = [kind for kind in probes_of(app) if kind[0] not in missing]
    # Subjects that an event could have: credentials that may probe and not write these may be in another account.
    events = [(app.name, f"{subject.rpartition('.')[0]}._asked") for stream, subject in kinds if stream == app.name]
    answers, answerers = link.probe([*kinds, *events], _LISTEN_S)
    answers, writer_answers = answers[: len(kinds)], answers[len(kinds) :]
    for answerer in answerers:
        report.warning(
            "answers",
            answerer,
            "their answers are not believed: a save that only they answer takes longer, since the log is read to see "
            "whether it was stored; if the streams have the same name, that is every save",
            "deny the subjects on the leaf node connection (deny_imports, deny_exports), give each JetStream a domain "
            "of its own, or take the permission to hear them from the subscriber",
        )
    silent = [answer.subject for answer in answers if not answer.is_answered]
    if silent:
        what = f"not known who else answers: these credentials may not publish to {listed(silent)}"
        report.unknown("answers", what, "it is not looked at", "Use credentials that may write.")
    elif writer_answers and not any(answer.is_answered for answer in writer_answers):
        report.note(
            "answers",
            "not known who else answers writers: these credentials may write no event, so writers may be of another "
            "account, as those of `eventjet nats-config` are, and what subscribes there is not heard here",
            "a subscriber of that account may answer saves",
            "`eventjet doctor` with the credentials of `writer`, or of `actor`, hears it",
        )
    elif not answerers:
        report.ok("answers", "nobody but the streams answers what these credentials publish for them")


def _check_aggregates(report: Report, unknown: Sequence[UnknownAggregate]) -> None:
    """Report the aggregates in the log that the app does not declare."""
    for aggregate in unknown:
        name, histories = aggregate.aggregate, aggregate.histories
        holds = f"has events of {histories:,} {name!r}" if histories else f"was made for {name!r}"
        report.fault(
            "aggregates",
            f"the log {holds}, which the app does not declare",
            "if it was renamed, its aggregates would begin a second history; new aggregates are refused until then",
            "`eventjet init` says what to do",
        )
    if not unknown:
        report.ok("aggregates", "every aggregate of the log is one of the app's")


def _check_events(report: Report, unknown: Sequence[UnknownEvent]) -> None:
    """Report the events in a sample of the log that the app does not declare."""
    for event in unknown:
        report.fault(
            "events",
            f"the event at position {event.position:,} is {event.type_name!r} schema {event.schema}, which the app "
            "does not declare",
            "its aggregate cannot be loaded, and whatever follows the log waits at it or quarantines it",
            "`eventjet init` says what to do",
        )
    if not unknown:
        report.ok("events", f"the app declares every event of a sample of {LOOKS}, the last ones included")


def _check_inbox(report: Report, link: NatsConnection, inbox: Inbox[Any, Any], state: StreamState | None) -> None:
    name, stream = inbox.name, inbox.stream
    if state is None:
        cost = "none of its messages becomes a command"
        fix = "`eventjet init`" if inbox.sources else "Have it made by who owns it, or name another in the inbox."
        report.fault("inbox", f"the stream {stream}, which {name} follows, does not exist", cost, fix)
        return
    check_gathering(state, inbox)
    report.ok("inbox", f"the stream {stream}, which {name} follows, is there")
    for stalled in stalled_sources(state):
        cost = f"{name} gets none of its messages until it is back"
        report.warning("sources", stalled, cost, "Make that stream, start its server, or take the source away.")
    for source, lag in lagging_sources(state):
        report.note("sources", f"{stream!r} has not gathered the last {lag:,} messages of its source {source}")
    if not state.config.get("sources"):
        return
    with report.guarded("sources"):
        origins = link.run(reading_origins(state))
        check_origins(origins, inbox)
        for origin in origins:
            if origin.fault:
                what = f"the source {origin.label} of {stream!r} could not be read: {origin.fault}"
                report.unknown("sources", what, "whether it was made again, or is mixed with another, is not known")
            elif origin.ungathered:
                need = f"; it needs {origin.imports}" if origin.imports else ""
                report.warning(
                    "sources",
                    f"{stream!r} has gathered none of the {origin.ungathered:,} messages of its source {origin.label}",
                    f"{name} gets none of them",
                    f"If that lasts, look at the server's log{need}.",
                )
            elif origin.made_again:
                report.warning(
                    "sources",
                    f"the source {origin.label} of {stream!r}: {origin.made_again}",
                    "messages of the one before that had not been gathered are gone",
                    f"Ask who runs it whether there were any; `eventjet cursor set {name} POSITION` goes back",
                )


def _check_durables(report: Report, link: NatsConnection, app: Application) -> None:
    """Report the durable consumers of the log that no subscription of the app uses."""
    consumers: list[dict[str, Any]] = []
    for _ in range(_PAGES_MAX):
        answer = link.ask(call(f"CONSUMER.LIST.{app.name}", {"offset": len(consumers)}))
        page: list[dict[str, Any]] = answer.get("consumers") or []
        consumers += page
        if not page or len(consumers) >= int(answer.get("total", 0)):
            break
    used = {projection.durable for projection in app.projections.values()} | declarations_of(app).keys()
    durables = [consumer for consumer in consumers if not consumer["config"].get("inactive_threshold")]
    unused = [consumer for consumer in durables if consumer["name"] not in used]
    if not unused:
        report.ok("durables", "every durable of the log is one of the app's")
    for consumer in unused[: 2 * _PAGES_MAX]:
        usage = "; somebody reads through it now" if consumer.get("num_waiting") else ""
        report.note(
            "durables",
            f"the durable {consumer['name']} is of nothing that the app declares{usage}",
            "the server keeps its state for ever; another program, or another release of this one, may need it",
            _way_to_remove(app, str(consumer["name"])),
        )


def _way_to_remove(app: Application, durable: str) -> str:
    of_projection = _OF_PROJECTION.fullmatch(durable)
    if of_projection is not None:
        return f"`eventjet db unused --drop {of_projection[1]}:{of_projection[2]}` takes it along"
    declared = {declaration.declared_as for declaration in declarations_of(app).values()}
    if declared_name(durable) in declared:
        return f"`nats consumer rm {app.name} {durable}`, once no worker of that partitioning runs"
    return f"`eventjet cursor drop {durable}` if it was a reactor's, else `nats consumer rm {app.name} {durable}`"
