"""Make a mirror of the log, and look at it (ADR 0071). Blocks.

The log is where `Settings.servers` lead, the mirror where `Settings.read_from` leads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from eventjet.codec.subjects import cursor_bucket, object_bucket, probes, snapshot_bucket
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    Forbidden,
    LogUnusable,
    StoreError,
    StoreUnavailable,
    Unreachable,
    UsageError,
)
from eventjet.jetstream.answers import PROBE
from eventjet.jetstream.api import StreamState, create_stream, next_message
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import missing_range
from eventjet.log.mirror import (
    comparing,
    lag_reason,
    mirror_configs,
    mirror_fault,
    mirrored_configs,
    shown_servers,
    silence,
    silent_s,
)
from eventjet.log.topology import (
    CONTINUES,
    IDENTITY,
    finding_stream,
    identity_of,
    not_created,
    reading_log_state,
)
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings

T = TypeVar("T")
FIRST_WORD_S = 20.0
"""How long `create` waits for the mirror's first word from the log."""
POLL_S = 0.1
"""How often a mirror that is waited for is looked at."""
_ANSWER_S = 0.5
"""How long the log may take to answer a message that is published at the mirror."""


@dataclass(frozen=True, slots=True)
class MirrorStatus:
    """A mirror beside its log."""

    stream: str
    where: str
    """The first server of the mirror."""
    log: str | None
    """Identity of the log; None if it is not reached."""
    log_last: int | None
    """Last position of the log; None if it is not reached."""
    mirror: str | None
    """Identity of the log that was mirrored; None without a mirror."""
    first: int
    last: int
    """Last position of the mirror."""
    lag_s: float | None
    """Age of the first event that the mirror lacks, in seconds; 0 if it lacks none, None if the log is not reached."""
    silent_s: float | None
    """Seconds since the mirror heard from the log; None if it never has."""
    crosses: bool | None
    """Whether what is published at the mirror reaches the log's servers: after a promotion both would store it.

    None if that cannot be asked, since the mirror is named by its JetStream domain.
    """
    fault: str | None
    """Why nothing may be read from the mirror, or why its events do not arrive; None if all is well."""
    unreachable: str | None
    """Why the log is not reached; None if it is."""

    @property
    def lag(self) -> int | None:
        """How many positions the mirror lacks; None if the log is not reached."""
        return None if self.log_last is None else max(0, self.log_last - self.last)


@dataclass(frozen=True, slots=True)
class MirrorLink:
    """The connection to the servers of an app's mirror, and how its log is reached."""

    app: str
    settings: Settings
    connection: NatsConnection
    election_s: float = 0.0
    """How long a stream that has no leader may take to choose one."""

    @property
    def where(self) -> str:
        """The first server of the mirror."""
        return shown_servers(Endpoint.of(self.settings.for_reads()))

    @property
    def is_elsewhere(self) -> bool:
        """Whether the mirror is in another JetStream than that of the servers which the connection is to."""
        return Endpoint.of(self.settings.for_reads()).is_elsewhere

    def find(self, stream: str) -> StreamState | None:
        """Return the state of a stream of the mirror's servers; None if it does not exist."""
        return after_election(lambda: self.connection.run(finding_stream(stream)), self.election_s)

    def state(self) -> StreamState:
        """Return the state of the mirror, or of the log that it was promoted to; raises `LogUnusable` without it."""
        state = self.find(self.app)
        if state is None:
            raise self.unfit(self.app, "it does not exist", "`eventjet mirror create` makes it.")
        return state

    def open_log(self) -> NatsConnection:
        """Connect to the servers of the log."""
        return NatsConnection.open(Endpoint.of(self.settings).with_name("eventjet mirror"))

    def unfit(self, stream: str, reason: str, remedy: str) -> LogUnusable:
        """Return the error for a mirror that cannot be used."""
        return LogUnusable(f"The mirror of {stream!r} at {self.where}", reason, remedy)

    def check_apart(self, log: StreamState, mirror: StreamState | None) -> None:
        """Raise `UsageError` if the servers of the log led to the mirror: nobody could tell the two apart."""
        if log.mirror is not None or (mirror is not None and mirror.created == log.created):
            raise UsageError(
                f"EVENTJET_SERVERS ({self.settings.shown()['servers']}) lead to the stream {log.name!r} that "
                "EVENTJET_READ_FROM names, not to the log that it is a mirror of. Name only the log's own servers in "
                "EVENTJET_SERVERS, also if they do not answer. Nothing was changed."
            )

    def unmirrored(self, names: Iterable[str]) -> Generator[str]:
        """Say in words which of the log's streams of cursors and large bodies lack a mirror, and why."""
        for name in names:
            mirror = self.find(name)
            if mirror is None:
                yield f"the log has {name!r}, of which there is no mirror: `eventjet mirror create` makes it"
            elif mirror.mirror is None and CONTINUES not in mirror.metadata:
                yield f"the stream {name!r} is in the way of a mirror: delete it there if nobody needs it"

    def silent_buckets(self) -> Generator[str]:
        """Say in words which mirrors of cursors and large bodies hear nothing from the log."""
        for name in _bucket_names(self.app):
            mirror = self.find(name)
            if mirror is not None and (reason := silence(mirror)):
                yield f"the mirror of {name!r} {reason}"

    def crosses(self) -> bool | None:
        """Return whether the log's servers answer what is published at the mirror, which takes nothing.

        Nothing is stored. A subject that these credentials may not use is left out, and so is a stream of these servers
        that is no mirror, which would answer itself. None if the connection is to other servers than the mirror's.
        """
        if self.is_elsewhere:
            return None
        bodies = object_bucket(self.app)
        kinds = probes(self.app, ["_probe"], (), cursors=True, timers=True)
        for stream, subject in (*kinds, (f"OBJ_{bodies}", f"$O.{bodies}.C._probe")):
            try:
                state = self.find(stream)
                if state is None or state.mirror is not None:
                    self.connection.request(subject, headers=PROBE, timeout_s=_ANSWER_S)
                    return True
            except (StoreUnavailable, Forbidden):
                continue
        return False


def after_election(ask: Callable[[], T], election_s: float) -> T:
    """Ask for the state of a stream until it has a leader; raises `StoreUnavailable` if it has none by then.

    Without a leader nobody answers, or a replica says so. An election takes 4 to 9 seconds.
    """
    deadline = time.monotonic() + election_s
    while True:
        try:
            return ask()
        except (ConnectionLost, ConnectionClosed):
            raise
        except StoreUnavailable:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


@contextmanager
def mirror_link(app: str, settings: Settings, election_s: float = 0.0) -> Generator[MirrorLink]:
    """Connect to the mirror of an app; raises `UsageError` if the settings name none."""
    if settings.read_from is None:
        raise UsageError(
            "EVENTJET_READ_FROM is not set, so it is not known where the mirror is. Set it to the URLs of its servers, "
            "such as nats://west.example:4222, or to its JetStream domain."
        )
    with NatsConnection.open(Endpoint.of(settings.for_reads()).with_name("eventjet mirror")) as connection:
        yield MirrorLink(app, settings, connection, election_s)


def denials(app: str) -> str:
    """Return in words which subjects must not cross the link between the servers of the log and of its mirror."""
    buckets = f"$KV.{cursor_bucket(app)}.>, $KV.{snapshot_bucket(app)}.>, $O.{object_bucket(app)}.>"
    return f"Deny {app}.>, _EJ.{app}.>, {buckets} on the leaf node's remote (deny_imports and deny_exports)"


def bucket_streams(app: str, log: NatsConnection) -> list[str]:
    """Return which streams of cursors and large bodies the log has."""
    return [name for name in _bucket_names(app) if log.run(finding_stream(name)) is not None]


def _bucket_names(app: str) -> list[str]:
    return [config["name"] for config in mirrored_configs(app, 1)[:-1]]


# Create.


def create(app: str, settings: Settings, replicas: int, api_prefix: str | None = None) -> list[str]:
    """Create the mirrors of an app's log, cursors and large bodies that are missing; return the names of those.

    `api_prefix` is what the mirror's servers call the JetStream API of the log's; by default it follows from the log's
    domain. A cluster that starts gets some time to choose a leader. Raises `UsageError` where both are one JetStream,
    `LogUnusable` for streams that are in the way, and if the mirror hears nothing of the log, and `Unreachable`.
    """
    created = list[str]()
    with mirror_link(app, settings) as link, link.open_log() as log_connection:
        for connection in (log_connection, link.connection):
            connection.await_leader()
        log = log_connection.run(reading_log_state(app))
        if log.mirror is not None or api_prefix:
            link.check_apart(log, link.find(app))
        identity_of(log)
        if missing := missing_range(log):
            raise LogUnusable(f"The log {app!r}", missing, "Restore it first: a mirror would lack the same events.")
        prefix = api_prefix or _api_prefix(log_connection, link)
        states = {app: log}
        for name in _bucket_names(app):
            if (state := log_connection.run(finding_stream(name))) is not None:
                states[name] = state
        for config in mirror_configs(app, replicas, prefix, states):
            name, existing = config["name"], link.find(config["name"])
            if existing is None:
                try:
                    link.connection.ask(create_stream(config))
                except ApiRefused as refusal:
                    raise not_created(name, refusal) from None
                created.append(name)
            elif existing.mirror is None:
                remedy = "Delete it there if nobody needs it, or name other servers in EVENTJET_READ_FROM."
                raise LogUnusable(f"The stream {name!r} at {link.where}", "it is no mirror", remedy)
            elif (origin := existing.config["mirror"]["name"]) != name:
                remedy = "Delete it there, then `eventjet mirror create` makes it."
                raise link.unfit(name, f"it copies the stream {origin!r}", remedy)
        for name in states:
            _await_first_word(link, log_connection, name)
        if differs := log_connection.run(comparing(link.state(), link.connection)):
            raise link.unfit(app, differs, "Delete it and create it again.")
    return created


def _api_prefix(log: NatsConnection, link: MirrorLink) -> str:
    domain, own = (str(connection.api("INFO").get("domain", "")) for connection in (log, link.connection))
    if domain == own and domain:
        raise UsageError(
            f"The mirror would be in the JetStream domain {domain!r}, which has the log. A copy there is lost with it; "
            "more replicas or servers read faster. Name servers of another domain in EVENTJET_READ_FROM."
        )
    if not domain:
        raise UsageError(
            f"The log's JetStream has no domain, so {link.where} cannot ask it for its events. Write `domain: NAME` "
            "into the jetstream block of the log's servers and restart them one by one; or give --origin-api the "
            "prefix by which the account of the mirror imports the API of the log's."
        )
    return f"$JS.{domain}.API"


def _await_first_word(link: MirrorLink, log_connection: NatsConnection, name: str) -> None:
    deadline = time.monotonic() + FIRST_WORD_S
    while True:
        mirror, log = link.find(name), log_connection.run(finding_stream(name))
        if log is None:
            return
        if name == link.app and (fault := mirror_fault(mirror, log, link.where, name)):
            raise fault
        if mirror is not None and silent_s(mirror) is not None and (mirror.last or not log.messages):
            return
        if time.monotonic() > deadline:
            raise link.unfit(
                name,
                f"it was made, and within {FIRST_WORD_S:g} s has heard nothing from the log",
                "See that the servers are linked by a leaf node, with $JS.DOMAIN.API of the log's domain allowed both "
                "ways, then run `eventjet mirror status`.",
            )
        time.sleep(POLL_S)


# Status.


def status(app: str, settings: Settings) -> MirrorStatus:
    """Compare the mirror with the log; raises `Unreachable` for a mirror whose servers do not answer."""
    with mirror_link(app, settings) as link:
        mirror = link.find(app)
        log, unreachable, lag_s, reasons = None, None, None, list[str]()
        crosses = link.crosses() if mirror is not None and mirror.mirror is not None else False
        try:
            with link.open_log() as log_connection:
                log = log_connection.run(reading_log_state(app))
                link.check_apart(log, mirror)
                missed = None if mirror is None else log_connection.ask(next_message(app, mirror.last + 1))
                lag_s = 0.0 if missed is None else max(0.0, time.time() - missed[1] / 1e9)
                fault = mirror_fault(mirror, log, link.where, app)
                if fault is None and mirror is not None:
                    differs = log_connection.run(comparing(mirror, link.connection))
                    reasons = [differs or "", lag_reason(mirror, log) or ""]
                    reasons += [*link.unmirrored(bucket_streams(app, log_connection)), *link.silent_buckets()]
        except (StoreError, Unreachable) as error:
            unreachable = str(error)
            fault = mirror_fault(mirror, None, link.where, app)
            reasons = [(lag_reason(mirror, None) or "") if mirror is not None else ""]
        reasons = [str(fault)] if fault is not None else [reason for reason in reasons if reason]
        return MirrorStatus(
            stream=app,
            where=link.where,
            log=None if log is None else log.metadata.get(IDENTITY),
            log_last=None if log is None else log.last,
            mirror=None if mirror is None else mirror.metadata.get(IDENTITY),
            first=0 if mirror is None else mirror.first,
            last=0 if mirror is None else mirror.last,
            lag_s=lag_s,
            silent_s=None if mirror is None else silent_s(mirror),
            crosses=crosses,
            fault=reasons[0] if reasons else None,
            unreachable=unreachable,
        )
