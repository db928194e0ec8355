"""Make a mirror of the log, look at it, and promote it when the log is gone (ADR 0071). Blocks.

The log is where `Settings.servers` lead, the mirror where `Settings.read_from` leads.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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
from eventjet.jetstream.api import StreamState, create_stream, delete_consumer, next_message, update_stream
from eventjet.jetstream.client import connected
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import earlier_logs, missing_range
from eventjet.log.mirror import (
    SILENT_S,
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
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import cursors_seen

FIRST_WORD_S = 20.0
"""How long `create` waits for the mirror's first word from the log."""
CATCH_UP_S = 60.0
"""How long `promote` waits for a mirror that lacks something and gets nothing."""
GONE_S = 10.0
"""A mirror hears from its log every second; after this long without a word `promote` takes the log for gone."""
_POLL_S = 0.1
_SETTLED_S = 1.0
"""How long the end of a sealed stream has to stay the same: members of a cluster may still apply what came before."""
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
        if log.mirror is not None or api_prefix:
            _check_apart(log, link.run(finding_stream(app)), settings)
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
            elif existing.config["mirror"]["name"] != name:
                raise LogUnusable(
                    f"The mirror {name!r} at {where}",
                    f"it copies the stream {existing.config['mirror']['name']!r}",
                    "Delete it there, then `eventjet mirror create` makes it.",
                )
        for name in states:
            _await_first_word(link, log_link, name, where)
        if differs := log_link.run(comparing(_state(link, app), link)):
            raise LogUnusable(f"The mirror of {app!r} at {where}", differs, "Delete it and create it again.")
    return created


def _check_apart(log: StreamState, mirror: StreamState | None, settings: Settings) -> None:
    """Raise `UsageError` if the servers of the log led to the mirror: nobody could tell the two apart."""
    if log.mirror is not None or (mirror is not None and mirror.created == log.created):
        raise UsageError(
            f"EVENTJET_SERVERS ({', '.join(settings.servers)}) lead to the stream {log.name!r} that EVENTJET_READ_FROM "
            "names, not to the log that it is a mirror of. Name only the log's own servers in EVENTJET_SERVERS, also "
            "if they do not answer. Nothing was changed."
        )


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


def _await_first_word(link: NatsConnection, log_link: NatsConnection, name: str, where: str) -> None:
    deadline = time.monotonic() + FIRST_WORD_S
    while True:
        mirror, log = link.run(finding_stream(name)), log_link.run(finding_stream(name))
        if log is None:
            return
        if IDENTITY in log.metadata and (fault := mirror_fault(mirror, log, where, name)):
            raise fault
        if mirror is not None and silent_s(mirror) is not None and (mirror.last or not log.messages):
            return
        if time.monotonic() > deadline:
            raise LogUnusable(
                f"The mirror of {name!r} at {where}",
                f"it was made, and within {FIRST_WORD_S:g} s has heard nothing from the log",
                "See that the servers are linked by a leaf node, with $JS.DOMAIN.API of the log's domain allowed both "
                "ways, then run `eventjet mirror status`.",
            )
        time.sleep(_POLL_S)


# Status.


def status(app: str, settings: Settings) -> MirrorStatus:
    """Compare the mirror with the log; raises `Unreachable` for a mirror whose servers do not answer."""
    where = _where(settings)
    with _mirror_link(settings) as link:
        mirror = link.run(finding_stream(app))
        log, unreachable, lag_s, differs, lacks = None, None, None, None, list[str]()
        crosses = mirror is not None and mirror.mirror is not None and _crosses(link, app)
        try:
            with _log_link(settings) as log_link:
                log = log_link.run(reading_log_state(app))
                _check_apart(log, mirror, settings)
                missed = None if mirror is None else log_link.ask(next_message(app, mirror.last + 1))
                lag_s = 0.0 if missed is None else max(0.0, time.time() - missed[1] / 1e9)
                fault = mirror_fault(mirror, log, where, app)
                if fault is None and mirror is not None:
                    differs = log_link.run(comparing(mirror, link))
                    lacks = [*_unfit_buckets(link, log_link, app), *_quiet_buckets(link, app)]
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
        fault=str(fault) if fault is not None else differs or quiet or next(iter(lacks), None),
        unreachable=unreachable,
    )


def _crosses(link: NatsConnection, app: str) -> bool:
    """Return whether anybody answers an event that is published at the mirror, which takes none; none is stored."""
    try:
        link.request(f"{app}._probe._probe", headers=PROBE, timeout_s=_ANSWER_S)
    except (StoreUnavailable, Forbidden):
        return False
    return True


def _unfit_buckets(link: NatsConnection, log_link: NatsConnection, app: str) -> Generator[str]:
    """Say for cursors and large bodies that the log has how they lack a mirror; blank if they have one."""
    for declared in mirrored_configs(app, 1)[:-1]:
        name = str(declared["name"])
        if log_link.run(finding_stream(name)) is None:
            continue
        mirror = link.run(finding_stream(name))
        if mirror is None:
            yield f"the log has {name!r}, of which there is no mirror: `eventjet mirror create` makes it"
        elif mirror.mirror is None and CONTINUES not in mirror.metadata:
            yield f"the stream {name!r} is in the way of a mirror: delete it there if nobody needs it"


def _quiet_buckets(link: NatsConnection, app: str) -> Generator[str]:
    for declared in mirrored_configs(app, 1)[:-1]:
        mirror = link.run(finding_stream(str(declared["name"])))
        if mirror is not None and (reason := _quiet(mirror)):
            yield f"the mirror of {mirror.name!r} {reason}"


def _quiet(mirror: StreamState) -> str | None:
    """Return in words that a mirror hears nothing; None if it does, and for a stream that is no mirror any more."""
    if mirror.mirror is None:
        return None
    error: Mapping[str, Any] = mirror.mirror.get("error") or {}
    seconds = silent_s(mirror)
    if seconds is not None and seconds <= SILENT_S and not error:
        return None
    said = f" ({error.get('description')})" if error else ""
    return f"has heard nothing {'yet' if seconds is None else f'for {seconds:,.0f} s'}{said}"


# Promote.


def preview(app: Application, settings: Settings) -> Promotion:
    """Return what `promote` would do, and name what is beyond the mirror's end; nothing is changed.

    Raises `LogUnusable` for a mirror that must not become the log, and `UsageError` where the servers of the log lead
    to the mirror.
    """
    with _mirror_link(settings) as link:
        return _plan(app, settings, link, _promotable(app.name, settings, link))


def promote(app: Application, settings: Settings, *, log_is_gone: bool = False) -> Promotion:
    """Make the mirror the log, and return what that did. It may be repeated after a failure.

    A log that can be reached is sealed first, for good, and the mirror gets its last events. The new log has another
    identity, and says up to which position it continues the old one. Checkpoints and cursors up to there go on.

    A log that is not reached is promoted away once the mirror has heard nothing from it for ten seconds. With
    `log_is_gone` that is not waited for. Raises `UsageError` if the mirror hears from the log, and as `preview`.
    """
    with _mirror_link(settings) as link:
        mirror = _promotable(app.name, settings, link)
        plan = _plan(app, settings, link, mirror)
        if plan.log_last is not None:
            with _log_link(settings) as log_link:
                if mirror.mirror is not None:
                    _await_copies(link, log_link, app.name, settings, is_sealed=False)
                _seal(app.name, log_link)
                if mirror.mirror is not None:
                    _await_copies(link, log_link, app.name, settings, is_sealed=True)
        elif mirror.mirror is not None and not log_is_gone:
            _await_silence(link, app.name)
        for declared in mirrored_configs(app.name, settings.replicas):
            _promote_stream(link, declared, app.name, plan.old)
        plan = replace(_plan(app, settings, link, _state(link, app.name)), sealed=plan.log_last is not None)
    moved = _move_checkpoints(app, settings, plan) + run_async(_move_cursors(app.name, settings, plan))
    return replace(plan, moved=moved)


def _promotable(app: str, settings: Settings, link: NatsConnection) -> StreamState:
    """Return the state of the mirror, or of what it was promoted to; raises `LogUnusable` if it must not be the log."""
    mirror = link.run(finding_stream(app))
    if mirror is None:
        fault = mirror_fault(None, None, _where(settings), app)
        assert fault is not None
        raise fault
    for declared in mirrored_configs(app, 1):
        state = link.run(finding_stream(str(declared["name"])))
        if state is not None and state.mirror is not None and state.config.get("sealed"):
            raise LogUnusable(
                f"The mirror of {state.name!r} at {_where(settings)}",
                "it is sealed, so nothing could be recorded in it",
                "Restore from an archive instead: `eventjet restore`.",
            )
    return mirror


def _await_silence(link: NatsConnection, app: str) -> None:
    """Return once the mirror has heard nothing for `GONE_S`; raises `UsageError` if it does hear from the log."""
    heard_at = began = time.monotonic()
    while True:
        seconds = silent_s(_state(link, app))
        now = time.monotonic()
        if seconds is not None and began == heard_at:
            heard_at = min(began, now - seconds)
        if seconds is not None and now - seconds > heard_at + _POLL_S * 3:
            raise UsageError(
                f"The log {app!r} is not reached at EVENTJET_SERVERS, and the mirror heard from it {seconds:.1f} s "
                "ago: it is alive, and would go on beside the promoted mirror. Name its servers in EVENTJET_SERVERS, "
                "so that it is sealed first; or cut its link to the mirror and end its servers; or give --log-is-gone "
                "if you know that nobody records there any more. Nothing was changed."
            )
        if now - heard_at >= GONE_S:
            return
        time.sleep(_POLL_S)


def _state(link: NatsConnection, app: str) -> StreamState:
    """Return the state of the stream of the mirror, or of what it was promoted to."""
    return link.run(reading_log_state(app))


def _plan(app: Application, settings: Settings, link: NatsConnection, mirror: StreamState) -> Promotion:
    where, unknown = _where(settings), list[str]()
    log, unreached = _reached_log(app.name, settings, link, mirror)
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
        unknown.append(f"whether more was acknowledged: the old log is not reached ({unreached})")
        heard_s = silent_s(mirror)
        if heard_s is not None and heard_s < GONE_S:
            unknown.append(f"whether the old log is gone: the mirror heard from it {heard_s:.1f} s ago")
    elif log.last > end:
        beyond.append(Beyond("the old log", log.last))
    try:
        beyond += [
            Beyond(f"the read model {row.name!r}, revision {row.revision}", row.position)
            for row in _checkpoints(app, settings)
            if row.log == old and row.position > end
        ]
    except (EventjetError, OSError) as error:
        unknown.append(f"how far read models have come: the checkpoints cannot be read ({error})")
    try:
        for cursor in (seen.cursor for seen in cursors_seen(link, app)):
            if not cursor.log:
                unknown.append(f"how far the cursor of {cursor.name!r} has come: {cursor.reason}")
            elif cursor.log == old and _furthest(cursor) > end:
                beyond.append(Beyond(f"the cursor of {cursor.name!r}", _furthest(cursor)))
    except (StoreError, Unreachable) as error:
        unknown.append(f"how far cursors have come: they cannot be read ({error})")
    unknown += _unknown_of_buckets(app, link, is_reached=log is not None)
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


def _reached_log(
    app: str, settings: Settings, link: NatsConnection, mirror: StreamState
) -> tuple[StreamState | None, str]:
    """Return the state of the log, or None and why it is not reached.

    Raises `Forbidden` where a server does not accept the credentials, `UsageError` if the log is the mirror, and
    `LogUnusable` for a log whose cursors or large bodies have no mirror.
    """
    try:
        with _log_link(settings) as log_link:
            log = log_link.run(reading_log_state(app))
            _check_apart(log, mirror, settings)
            unfit = next(_unfit_buckets(link, log_link, app), None) if mirror.mirror is not None else None
    except Forbidden:
        raise
    except (StoreError, Unreachable) as error:
        return None, str(error)
    if unfit is not None:
        remedy = "To go on without it, end the log's servers before you promote. Nothing was changed."
        raise LogUnusable(f"The mirror of {app!r} at {_where(settings)}", unfit, remedy)
    return log, ""


def _unknown_of_buckets(app: Application, link: NatsConnection, *, is_reached: bool) -> Generator[str]:
    if is_reached:
        yield from (f"whether all will arrive: {reason}" for reason in _quiet_buckets(link, app.name))
        return
    bodies, cursors, _ = (link.run(finding_stream(each["name"])) for each in mirrored_configs(app.name, 1))
    if cursors is None and declarations_of(app):
        yield "how far reactors and processes have come: their cursors have no mirror, so they begin anew"
    if bodies is not None:
        yield "which large bodies arrived: `eventjet objects status` names the events whose body is missing"


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


def _seal(app: str, link: NatsConnection) -> None:
    """Seal the old log, then its cursors and large bodies: whoever still writes there is refused."""
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


def _await_copies(
    link: NatsConnection, log_link: NatsConnection, app: str, settings: Settings, *, is_sealed: bool
) -> None:
    """Wait until the mirrors have all that the log, its cursors and its large bodies have at present.

    Raises `LogUnusable` before the log is sealed, and `StoreUnavailable` after, if they do not get it.
    """
    for declared in mirrored_configs(app, 1):
        name = str(declared["name"])
        log, reached, deadline = log_link.run(finding_stream(name)), -1, 0.0
        if log is None:
            continue
        while is_sealed:
            time.sleep(_SETTLED_S)
            before, log = log, log_link.run(finding_stream(name)) or log
            if before.last == log.last:
                break
        while True:
            mirror = link.run(finding_stream(name))
            if mirror is None or mirror.mirror is None:  # it was promoted by a promotion that was interrupted
                break
            quiet = None if is_sealed else _quiet(mirror)
            # What was deleted or has expired at the end does not arrive: nothing is lacking then.
            has_all = mirror.last >= log.last or log_link.ask(next_message(name, mirror.last + 1)) is None
            if has_all and quiet is None:
                break
            if mirror.last > reached:
                reached, deadline = mirror.last, time.monotonic() + CATCH_UP_S
            if time.monotonic() > deadline:
                raise _incomplete(mirror, log, quiet, _where(settings), is_sealed=is_sealed)
            time.sleep(_POLL_S)


def _incomplete(
    mirror: StreamState, log: StreamState, quiet: str | None, where: str, *, is_sealed: bool
) -> StoreUnavailable | LogUnusable:
    if is_sealed:
        return StoreUnavailable(
            f"Promoting the mirror of {mirror.name!r}",
            f"the log is sealed at position {log.last:,}, and the mirror has reached {mirror.last:,}. Mend the link "
            "between them, or end the log's servers to go on without these events, and run it again",
        )
    lag = f"it has reached position {mirror.last:,} of {log.last:,}"
    return LogUnusable(
        f"The mirror of {mirror.name!r} at {where}",
        f"it {quiet}, and {lag[3:]}" if quiet else f"{lag} and gets nothing more",
        "Mend the link between the servers; or end the log's servers, to go on without what is lacking. Nothing was "
        "changed.",
    )


def _promote_stream(link: NatsConnection, declared: Mapping[str, Any], app: str, old: str) -> None:
    """Make a mirror a stream with the declared settings, and the log's with another identity; nothing if it is one.

    Its consumers are of workers that read the mirror. They end with it, so that nobody goes on under the old identity.
    """
    name = str(declared["name"])
    state = link.run(finding_stream(name))
    if state is None or state.mirror is None:
        return
    config = {key: value for key, value in state.config.items() if key not in ("mirror", "mirror_direct")}
    continued = f"{state.metadata.get(CONTINUES, '')} {old}@{state.last}".strip()
    metadata = {**state.metadata, CONTINUES: continued}
    if name == app:
        metadata[IDENTITY] = str(uuid4())
    replicas = {"num_replicas": config.get("num_replicas", 1)}
    _delete_consumers(link, name)
    try:
        link.ask(update_stream({**config, **declared, **replicas, "metadata": metadata}))
    except ApiRefused as refusal:
        raise not_created(name, refusal) from None
    _delete_consumers(link, name)


def _delete_consumers(link: NatsConnection, stream: str) -> None:
    while consumers := link.api(f"CONSUMER.NAMES.{stream}").get("consumers"):
        for consumer in consumers:
            link.ask(delete_consumer(stream, consumer))


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
