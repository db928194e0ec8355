"""Make a mirror of the log, look at it, and promote it when the log is gone (ADR 0071). Blocks.

The log is where `Settings.servers` lead, the mirror where `Settings.read_from` leads.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from sqlalchemy import update

from eventjet.codec.subjects import cursor_bucket
from eventjet.domain.position import RETIRED
from eventjet.errors import (
    ApiRefused,
    EventjetError,
    Forbidden,
    LogUnusable,
    StoreError,
    StoreUnavailable,
    Unreachable,
    UsageError,
)
from eventjet.jetstream.answers import PROBE
from eventjet.jetstream.api import StreamState, create_stream, next_message, update_stream
from eventjet.jetstream.client import connected
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import earlier_logs, missing_range
from eventjet.log.mirror import (
    comparing,
    lag_reason,
    mirror_configs,
    mirror_fault,
    mirrored_configs,
    shown_servers,
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
from eventjet.projections.app_ref import Application
from eventjet.runtime import run_async
from eventjet.settings import Settings
from eventjet.sql import migrations
from eventjet.sql.checkpoint import Checkpoint, read_all
from eventjet.sql.database import Database
from eventjet.sql.own_tables import projections
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import CHANGES_MAX, Cursors
from eventjet.subscriptions.status import cursors_seen

FIRST_WORD_S = 20.0
"""How long `create` waits for the mirror's first word from the log."""
CATCH_UP_S = 60.0
"""How long `promote` waits for the mirror to get the last events of a log that is sealed."""
_POLL_S = 0.1
_ANSWER_S = 0.5
"""How long `status` waits for the log to answer a message that is published at the mirror."""


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
    crosses: bool
    """Whether events that are published at the mirror reach the log: after a promotion both would store them."""
    fault: str | None
    """Why nothing may be read from the mirror, or why its events do not arrive; None if all is well."""
    unreachable: str | None
    """Why the log is not reached; None if it is."""

    @property
    def lag(self) -> int | None:
        """How many positions the mirror lacks; None if the log is not reached."""
        return None if self.log_last is None else max(0, self.log_last - self.last)


@dataclass(frozen=True, slots=True)
class Beyond:
    """Something that was made of events which the mirror does not have."""

    what: str
    position: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a promotion does, or did."""

    stream: str
    old: str
    """Identity of the log so far."""
    new: str
    """Identity of the log from now on; empty before the promotion."""
    end: int
    """Last position of the mirror when it was promoted."""
    log_last: int | None
    """Last position of the old log; None if it is not reached."""
    sealed: bool
    """Whether the old log takes nothing any more, for good."""
    beyond: tuple[Beyond, ...]
    """Checkpoints, cursors and the old log where they are beyond the mirror's end."""
    unknown: tuple[str, ...]
    """In words, what could not be looked at."""
    moved: int = 0
    """How many checkpoints and cursors have the new identity."""

    @property
    def known_last(self) -> int:
        """The last position that anything is known to have had."""
        return max([self.end, *(each.position for each in self.beyond)])


@contextmanager
def _mirror_link(settings: Settings) -> Generator[NatsConnection]:
    if settings.read_from is None:
        raise UsageError(
            "EVENTJET_READ_FROM is not set, so it is not known where the mirror is. Set it to the URLs of its servers, "
            "such as nats://west.example:4222, or to its JetStream domain."
        )
    with NatsConnection.open(Endpoint.of(settings.for_reads()).with_name("eventjet mirror")) as link:
        yield link


def _log_link(settings: Settings) -> NatsConnection:
    return NatsConnection.open(Endpoint.of(settings).with_name("eventjet mirror"))


def _where(settings: Settings) -> str:
    return shown_servers(Endpoint.of(settings.for_reads()))


# Create.


def create(app: str, settings: Settings, replicas: int, api_prefix: str | None = None) -> list[str]:
    """Create the mirrors of an app's log, cursors and large bodies that are missing; return the names of those.

    `api_prefix` is what the mirror's servers call the JetStream API of the log's; by default it follows from the log's
    domain. Raises `UsageError` where both are one JetStream, and `LogUnusable` for streams that are in the way, and
    if the mirror hears nothing of the log.
    """
    where, created = _where(settings), list[str]()
    with _log_link(settings) as log_link, _mirror_link(settings) as link:
        log = log_link.run(reading_log_state(app))
        identity_of(log)
        if missing := missing_range(log):
            raise LogUnusable(f"The log {app!r}", missing, "Restore it first: a mirror would lack the same events.")
        prefix = api_prefix or _api_prefix(log_link, link, where)
        states = {app: log}
        for declared in mirrored_configs(app, replicas)[:-1]:
            if (state := log_link.run(finding_stream(declared["name"]))) is not None:
                states[declared["name"]] = state
        for config in mirror_configs(app, replicas, prefix, states):
            name = config["name"]
            existing = link.run(finding_stream(name))
            if existing is None:
                try:
                    link.ask(create_stream(config))
                except ApiRefused as refusal:
                    raise not_created(name, refusal) from None
                created.append(name)
            elif existing.mirror is None:
                raise _in_the_way(name, where)
        _await_first_word(link, log_link, app, where)
    return created


def _api_prefix(log_link: NatsConnection, link: NatsConnection, where: str) -> str:
    domain, own = (str(each.api("INFO").get("domain", "")) for each in (log_link, link))
    if domain == own and domain:
        raise UsageError(
            f"The mirror would be in the JetStream domain {domain!r}, which has the log. A copy there is lost with it; "
            "more replicas or servers read faster. Name servers of another domain in EVENTJET_READ_FROM."
        )
    if not domain:
        raise UsageError(
            f"The log's JetStream has no domain, so {where} cannot ask it for its events. Write `domain: NAME` into "
            "the jetstream block of the log's servers and restart them one by one; or give --origin-api the prefix by "
            "which the account of the mirror imports the API of the log's."
        )
    return f"$JS.{domain}.API"


def _in_the_way(name: str, where: str) -> LogUnusable:
    remedy = "Delete it there if nobody needs it, or name other servers in EVENTJET_READ_FROM."
    return LogUnusable(f"The stream {name!r} at {where}", "it is no mirror", remedy)


def _await_first_word(link: NatsConnection, log_link: NatsConnection, app: str, where: str) -> None:
    deadline = time.monotonic() + FIRST_WORD_S
    while True:
        mirror = link.run(finding_stream(app))
        log = log_link.run(reading_log_state(app))
        if fault := mirror_fault(mirror, log, where, app):
            raise fault
        assert mirror is not None
        if silent_s(mirror) is not None and (mirror.last or not log.messages):
            break
        if time.monotonic() > deadline:
            raise LogUnusable(
                f"The mirror of {app!r} at {where}",
                f"it was made, and within {FIRST_WORD_S:g} s has heard nothing from the log",
                "See that the servers are linked by a leaf node, with $JS.DOMAIN.API of the log's domain allowed both "
                "ways, then run `eventjet mirror status`.",
            )
        time.sleep(_POLL_S)
    if differs := log_link.run(comparing(mirror, link)):
        raise LogUnusable(f"The mirror of {app!r} at {where}", differs, "Delete it and create it again.")


# Status.


def status(app: str, settings: Settings) -> MirrorStatus:
    """Compare the mirror with the log; raises `Unreachable` for a mirror whose servers do not answer."""
    where = _where(settings)
    with _mirror_link(settings) as link:
        mirror = link.run(finding_stream(app))
        log, unreachable, lag_s, differs = None, None, None, None
        crosses = mirror is not None and mirror.mirror is not None and _crosses(link, app)
        try:
            with _log_link(settings) as log_link:
                log = log_link.run(reading_log_state(app))
                missed = None if mirror is None else log_link.ask(next_message(app, mirror.last + 1))
                lag_s = 0.0 if missed is None else max(0.0, time.time() - missed[1] / 1e9)
                fault = mirror_fault(mirror, log, where, app)
                if fault is None and mirror is not None:
                    differs = log_link.run(comparing(mirror, link))
        except (StoreError, Unreachable) as error:
            unreachable = str(error)
            fault = mirror_fault(mirror, None, where, app)
    quiet = None if mirror is None or fault is not None else lag_reason(mirror, log)
    return MirrorStatus(
        stream=app,
        where=where,
        log=None if log is None else log.metadata.get(IDENTITY),
        log_last=None if log is None else log.last,
        mirror=None if mirror is None else mirror.metadata.get(IDENTITY),
        first=0 if mirror is None else mirror.first,
        last=0 if mirror is None else mirror.last,
        lag_s=lag_s,
        silent_s=None if mirror is None else silent_s(mirror),
        crosses=crosses,
        fault=str(fault) if fault is not None else differs or quiet,
        unreachable=unreachable,
    )


def _crosses(link: NatsConnection, app: str) -> bool:
    """Return whether anybody answers an event that is published at the mirror, which takes none; none is stored."""
    try:
        link.request(f"{app}._probe._probe", headers=PROBE, timeout_s=_ANSWER_S)
    except (StoreUnavailable, Forbidden):
        return False
    return True


# Promote.


def preview(app: Application, settings: Settings) -> Promotion:
    """Return what `promote` would do, and name what is beyond the mirror's end; nothing is changed.

    Raises `LogUnusable` for a mirror that must not become the log.
    """
    with _mirror_link(settings) as link:
        mirror = link.run(finding_stream(app.name))
        if mirror is None:
            fault = mirror_fault(None, None, _where(settings), app.name)
            assert fault is not None
            raise fault
        return _plan(app, settings, link, mirror)


def promote(app: Application, settings: Settings) -> Promotion:
    """Make the mirror the log, and return what that did. It may be repeated after a failure.

    A log that can be reached is sealed first, for good, and the mirror gets its last events. The new log has another
    identity, and says up to which position it continues the old one. Checkpoints and cursors up to there go on.
    """
    with _mirror_link(settings) as link:
        plan = preview(app, settings)
        log = _reached_log(app.name, settings)
        if log is not None:
            _seal(app.name, settings)
            if _state(link, app.name).mirror is not None:
                _await_end(link, app.name, settings)
        for declared in mirrored_configs(app.name, settings.replicas):
            _promote_stream(link, declared, app.name)
        state = _state(link, app.name)
        plan = replace(_plan(app, settings, link, state), new=identity_of(state), sealed=log is not None)
    moved = _move_checkpoints(app, settings, plan) + run_async(_move_cursors(app.name, settings, plan))
    return replace(plan, moved=moved)


def _state(link: NatsConnection, app: str) -> StreamState:
    """Return the state of the stream of the mirror, or of what it was promoted to."""
    return link.run(reading_log_state(app))


def _plan(app: Application, settings: Settings, link: NatsConnection, mirror: StreamState) -> Promotion:
    where, unknown = _where(settings), list[str]()
    log = _reached_log(app.name, settings)
    continued = earlier_logs(mirror)
    if mirror.mirror is None:
        if not continued or (log is not None and log.metadata.get(IDENTITY) not in continued):
            fault = mirror_fault(mirror, log, where, app.name)
            raise fault or LogUnusable(f"The stream {app.name!r} at {where}", "it is no mirror", "Name a mirror.")
        old = log.metadata[IDENTITY] if log is not None else list(continued)[-1]
        end = continued[old]
    else:
        old, end = identity_of(mirror), mirror.last
        fault = mirror_fault(mirror, log, where, app.name)
        if fault is not None and not (log is not None and mirror.last > log.last):
            raise fault
        if missing := missing_range(mirror):
            remedy = "Restore from an archive instead: `eventjet restore`."
            raise LogUnusable(f"The mirror of {app.name!r} at {where}", missing, remedy)
    beyond: list[Beyond] = []
    if log is None:
        unknown.append("the old log is not reached")
    elif log.last > end:
        beyond.append(Beyond("the old log", log.last))
    try:
        beyond += [
            Beyond(f"the read model {row.name!r}, revision {row.revision}", row.position)
            for row in _checkpoints(app, settings)
            if row.log == old and row.position > end
        ]
    except (EventjetError, OSError) as error:
        unknown.append(f"the checkpoints cannot be read ({error})")
    with suppress(StoreError):
        beyond += [
            Beyond(f"the cursor of {seen.cursor.name!r}", _furthest(seen.cursor))
            for seen in cursors_seen(link, app)
            if seen.cursor.log == old and _furthest(seen.cursor) > end
        ]
    return Promotion(
        stream=app.name,
        old=old,
        new="" if mirror.mirror is not None else identity_of(mirror),
        end=end,
        log_last=None if log is None else log.last,
        sealed=log is not None and bool(log.config.get("sealed")),
        beyond=tuple(beyond),
        unknown=tuple(unknown),
    )


def _reached_log(app: str, settings: Settings) -> StreamState | None:
    """Return the state of the log, None if it is not reached."""
    with suppress(StoreError, Unreachable), _log_link(settings) as link:
        return link.run(reading_log_state(app))
    return None


def _furthest(cursor: Cursor) -> int:
    return max([cursor.position, *(last for _, last in cursor.done)])


def _checkpoints(app: Application, settings: Settings) -> list[Checkpoint]:
    if not app.projections:
        return []
    database = Database(settings.database)
    with database.reaching_sync(), database.sync_engine("eventjet mirror").connect() as connection:
        if migrations.version(connection) != migrations.HEAD:
            return []
        return [row for row, _ in read_all(connection) if row.app in ("", app.name) and row.state != RETIRED]


def _seal(app: str, settings: Settings) -> None:
    """Seal the old log, then its cursors and large bodies: whoever still writes there is refused."""
    with _log_link(settings) as link:
        for declared in reversed(mirrored_configs(app, 1)):
            state = link.run(finding_stream(declared["name"]))
            if state is not None and not state.config.get("sealed"):
                try:
                    link.ask(update_stream({**state.config, "sealed": True}))
                except (ApiRefused, Forbidden) as refusal:
                    raise Unreachable(
                        f"The old log {declared['name']!r}",
                        f"it could not be sealed: {refusal}",
                        "Use the credentials of the role `admin`, or end its servers before you promote.",
                    ) from None


def _await_end(link: NatsConnection, app: str, settings: Settings) -> None:
    """Wait until the mirror has all events of the sealed log; raises `StoreUnavailable` if it does not get them."""
    with _log_link(settings) as log_link:
        last = log_link.run(reading_log_state(app)).last
    deadline = time.monotonic() + CATCH_UP_S
    while (mirror := _state(link, app)).last < last:
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"Promoting the mirror of {app!r}",
                f"the log is sealed at position {last:,}, and the mirror has reached {mirror.last:,}. Mend the link "
                "between them, or end the log's servers to go on without these events, and run it again",
            )
        time.sleep(_POLL_S)


def _promote_stream(link: NatsConnection, declared: Mapping[str, Any], app: str) -> None:
    """Make a mirror a stream with the declared settings, and the log's with another identity; nothing if it is one."""
    name = str(declared["name"])
    state = link.run(finding_stream(name))
    if state is None or state.mirror is None:
        return
    config = {key: value for key, value in state.config.items() if key not in ("mirror", "mirror_direct")}
    metadata = dict(state.metadata)
    if name == app:
        continued = f"{metadata.get(CONTINUES, '')} {identity_of(state)}@{state.last}".strip()
        metadata |= {IDENTITY: str(uuid4()), CONTINUES: continued}
    replicas = {"num_replicas": config.get("num_replicas", 1)}
    try:
        link.ask(update_stream({**config, **declared, **replicas, "metadata": metadata}))
    except ApiRefused as refusal:
        raise not_created(name, refusal) from None


def _move_checkpoints(app: Application, settings: Settings, plan: Promotion) -> int:
    """Give the checkpoints that the new log continues its identity; a database that is not reached is left as it is.

    A worker does the same when it begins, and compares the event at the position with the log first.
    """
    database = Database(settings.database)
    try:
        rows = [row for row in _checkpoints(app, settings) if row.log == plan.old and row.position <= plan.end]
        with database.reaching_sync(), database.sync_engine("eventjet mirror").begin() as connection:
            for row in rows:
                change = update(projections).where(
                    projections.c.name == row.name,
                    projections.c.revision == row.revision,
                    projections.c.log == plan.old,
                    projections.c.position <= plan.end,
                )
                connection.execute(change.values(log=plan.new))
        return len(rows)
    except (EventjetError, OSError):
        return 0


async def _move_cursors(app: str, settings: Settings, plan: Promotion) -> int:
    """Give the cursors that the new log continues, and their quarantine, its identity; return how many."""
    moved = 0
    async with connected(settings.for_reads()) as client:
        cursors = Cursors(client, app)
        for record in await client.values(cursor_bucket(app), "c.*"):
            cursor = Cursor.decoded(record[4])
            stored = await cursors.find(cursor.name)
            if stored is None or stored.cursor.log != plan.old or _furthest(stored.cursor) > plan.end:
                continue
            entries = [
                replace(entry, log=plan.new)
                for entry in await cursors.parked(cursor.name, resolved=True)
                if entry.log == plan.old
            ]
            parts = [entries[at : at + CHANGES_MAX] for at in range(0, len(entries), CHANGES_MAX)] or [[]]
            for part in parts[:-1]:
                await cursors.decide(stored, stored.cursor, part)
            await cursors.decide(stored, replace(stored.cursor, log=plan.new, owner=None), parts[-1])
            moved += 1
    return moved
