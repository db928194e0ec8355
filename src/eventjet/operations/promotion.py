"""Make a mirror the log, when the log is gone or moves (ADR 0071). Blocks."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from sqlalchemy import update

from eventjet import failpoints
from eventjet.codec.subjects import cursor_bucket
from eventjet.domain.position import RETIRED
from eventjet.errors import (
    ApiRefused,
    CursorDamaged,
    CursorFenced,
    EventjetError,
    Forbidden,
    LogUnusable,
    StoreError,
    StoreUnavailable,
    Unreachable,
    UsageError,
)
from eventjet.jetstream.api import StreamState, delete_consumer, next_message, reading_values, update_stream
from eventjet.jetstream.client import connected
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import earlier_logs, missing_range
from eventjet.log.mirror import mirror_fault, mirrored_configs, silence, silent_s
from eventjet.log.topology import CONTINUES, IDENTITY, finding_stream, identity_of, not_created, reading_log_state
from eventjet.operations.mirrors import POLL_S, MirrorLink, after_election, bucket_streams, denials, mirror_link
from eventjet.projections.app_ref import Application
from eventjet.runtime import run_async
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.own_tables import projections
from eventjet.sql.revisions import stored_checkpoints
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import cursors_seen

CATCH_UP_S = 60.0
"""How long `promote` waits for a mirror that lacks something and gets nothing."""
ELECTION_S = 30.0
"""How long a promotion waits for the leader of a stream: a log that just chooses one is alive, and must be sealed."""
GONE_S = 10.0
"""A mirror hears from its log every second; after this long without a word `promote` takes the log for gone."""
_SLACK_S = 0.3
"""How much later than it was asked a server may say how long ago it heard something."""
_SETTLED_S = 1.0
"""How long the end of a sealed stream has to stay the same: members of a cluster may still apply what came before."""
_ARCHIVE = "Restore from an archive instead: `eventjet restore`."


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


def preview(app: Application, settings: Settings) -> Promotion:
    """Return what `promote` would do, and name what is beyond the mirror's end; nothing is changed.

    Raises `LogUnusable` for a mirror that must not become the log, and where both would store what is published from
    then on; and `UsageError` where the servers of the log lead to the mirror.
    """
    with mirror_link(app.name, settings, ELECTION_S) as link:
        _check_promotable(link)
        return _plan(app, link, ELECTION_S)


def promote(app: Application, settings: Settings, *, log_is_gone: bool = False) -> Promotion:
    """Make the mirror the log, and return what that did. It may be repeated after a failure.

    A log that can be reached is sealed first, for good, and the mirror gets its last events. The new log has another
    identity, and says up to which position it continues the old one. Checkpoints and cursors up to there go on.

    A log that is not reached is promoted away once the mirror has heard nothing from it for ten seconds. With
    `log_is_gone` that is not waited for. Raises `UsageError` if the mirror hears from the log, and as `preview`.
    """
    with mirror_link(app.name, settings, ELECTION_S) as link:
        is_mirror = _check_promotable(link)
        before = _plan(app, link, ELECTION_S)
        is_reached = before.log_last is not None
        if is_reached:
            _seal_and_copy(link, is_mirror=is_mirror)
        elif is_mirror and not log_is_gone:
            _await_silence(link)
        for declared in mirrored_configs(app.name, 1):
            failpoints.reach("promote.stream")
            _promote_stream(link, declared, before.old)
        failpoints.reach("promote.promoted")
        plan = _plan(app, link)
        checkpoints, unmoved = _move_checkpoints(app, settings, plan)
        failpoints.reach("promote.checkpoints")
        cursors = 0
        if link.find(f"KV_{cursor_bucket(app.name)}") is not None:
            cursors = run_async(_move_cursors(app.name, settings, plan, unmoved))
        # Once more: a worker may have gone on under the old identity until its consumer was deleted.
        after = _plan(app, link)
    furthest = {each.what: each for each in sorted((*plan.beyond, *after.beyond), key=lambda each: each.position)}
    return replace(
        after,
        sealed=is_reached,
        beyond=tuple(furthest.values()),
        unknown=tuple(dict.fromkeys((*plan.unknown, *after.unknown, *unmoved))),
        moved=checkpoints + cursors,
    )


# Look first.


def _check_promotable(link: MirrorLink) -> bool:
    """Return whether the mirror is one still, and not the log by an earlier promotion.

    Raises `LogUnusable` if it must not be the log.
    """
    mirror = link.state()
    for declared in mirrored_configs(link.app, 1):
        state = link.find(declared["name"])
        if state is not None and state.mirror is not None and state.config.get("sealed"):
            raise link.unfit(state.name, "it is sealed, so nothing could be recorded in it", _ARCHIVE)
    if mirror.mirror is not None and link.crosses():
        raise link.unfit(
            link.app,
            "what is published there reaches the log's servers, so after the promotion both would store it",
            f"{denials(link.app)}, then run it again. Nothing was changed.",
        )
    return mirror.mirror is not None


def _plan(app: Application, link: MirrorLink, election_s: float = 0.0) -> Promotion:
    mirror, unknown = link.state(), list[str]()
    log, unreached = _reached_log(link, mirror, election_s)
    old, end = _joint(link, mirror, log)
    beyond: list[Beyond] = []
    if log is None:
        heard_s = silent_s(mirror)
        heard = "" if heard_s is None or heard_s >= GONE_S else f" The mirror heard from it {heard_s:.1f} s ago."
        unknown.append("whether more was acknowledged: the old log is not reached")
        unknown.append(f"whether the old log is gone: {unreached}{heard}")
    elif log.last > end:
        beyond.append(Beyond("the old log", log.last))
    if log is None or (mirror.mirror is not None and link.is_elsewhere):
        unknown.append(f"whether the old servers would store what is recorded from now on, too. {denials(link.app)}")
    try:
        beyond += [
            Beyond(f"the read model {row.name!r}, revision {row.revision}", row.position)
            for row in _checkpoints(app, link.settings)
            if row.log == old and row.position > end
        ]
    except (EventjetError, OSError) as error:
        unknown.append(f"how far read models have come: the checkpoints cannot be read ({error})")
    try:
        for cursor in (seen.cursor for seen in cursors_seen(link.connection, app)):
            if not cursor.log:
                unknown.append(f"how far the cursor of {cursor.name!r} has come: {cursor.reason}")
            elif cursor.log == old and cursor.furthest > end:
                beyond.append(Beyond(f"the cursor of {cursor.name!r}", cursor.furthest))
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


def _reached_log(link: MirrorLink, mirror: StreamState, election_s: float) -> tuple[StreamState | None, str]:
    """Return the state of the log, or None and why it is not reached. An election gets `election_s`.

    Raises `Forbidden` where a server does not accept the credentials, `UsageError` if the log is the mirror, and
    `LogUnusable` for a log whose cursors or large bodies have no mirror.
    """
    try:
        with link.open_log() as connection:
            log, names = after_election(lambda: _look_at_log(link, connection), election_s)
    except Forbidden:
        raise
    except Unreachable as error:  # not its remedy, which is to start the log
        return None, f"{error.component}: {error.reason}."
    except StoreError as error:
        return None, str(error)
    link.check_apart(log, mirror)
    unmirrored = next(link.unmirrored(names), None) if mirror.mirror is not None else None
    if unmirrored is not None:
        remedy = "To go on without it, end the log's servers before you promote. Nothing was changed."
        raise link.unfit(link.app, unmirrored, remedy)
    return log, ""


def _look_at_log(link: MirrorLink, log: NatsConnection) -> tuple[StreamState, list[str]]:
    """Return the state of the log, and which streams of cursors and large bodies it has."""
    return log.run(reading_log_state(link.app)), bucket_streams(link.app, log)


def _joint(link: MirrorLink, mirror: StreamState, log: StreamState | None) -> tuple[str, int]:
    """Return the identity of the old log, and the last position of it that the mirror has.

    Raises `LogUnusable` for a mirror of another log, one that lacks events, and for what is neither a mirror nor the
    log that it became.
    """
    fault = mirror_fault(mirror, log, link.where, link.app)
    if mirror.mirror is None:
        continued = earlier_logs(mirror)
        old = next(reversed(continued), "") if log is None else log.metadata.get(IDENTITY, "")
        if old not in continued:
            raise fault or link.unfit(link.app, "it is no mirror", "Name a mirror.")
        return old, continued[old]
    if fault is not None and not (log is not None and mirror.last > log.last):
        raise fault
    if missing := missing_range(mirror):
        raise link.unfit(link.app, missing, _ARCHIVE)
    return identity_of(mirror), mirror.last


def _unknown_of_buckets(app: Application, link: MirrorLink, *, is_reached: bool) -> Generator[str]:
    if is_reached:
        yield from (f"whether all will arrive: {reason}" for reason in link.silent_buckets())
        return
    bodies, cursors, _ = (link.find(each["name"]) for each in mirrored_configs(app.name, 1))
    if cursors is None and declarations_of(app):
        yield "how far reactors and processes have come: their cursors have no mirror, so they begin anew"
    if bodies is not None:
        yield "which large bodies arrived: `eventjet objects status` names the events whose body is missing"


def _checkpoints(app: Application, settings: Settings) -> list[Checkpoint]:
    if not app.projections:
        return []
    rows = stored_checkpoints(Database(settings.database), app.name, "eventjet mirror")
    return [row for row in rows if row.state != RETIRED]


# The old log.


def _await_silence(link: MirrorLink) -> None:
    """Return once the mirror has heard nothing for `GONE_S`; raises `UsageError` if it does hear from the log."""
    began = time.monotonic()
    while True:
        quiet_s, waited_s = silent_s(link.state()), time.monotonic() - began
        if quiet_s is not None and quiet_s < waited_s - _SLACK_S:
            raise UsageError(
                f"The log {link.app!r} is not reached at EVENTJET_SERVERS, and the mirror heard from it {quiet_s:.1f} "
                "s ago: it is alive, and would go on beside the promoted mirror. Name its servers in EVENTJET_SERVERS, "
                "so that it is sealed first; or cut its link to the mirror and end its servers; or give --log-is-gone "
                "if you know that nobody records there any more. Nothing was changed."
            )
        if (waited_s if quiet_s is None else quiet_s) >= GONE_S:
            return
        time.sleep(POLL_S)


def _seal_and_copy(link: MirrorLink, *, is_mirror: bool) -> None:
    """Seal the old log, once its mirror has caught up, and wait until the mirror has all of it."""
    with link.open_log() as log:
        if is_mirror:
            _await_copies(link, log, is_sealed=False)
        failpoints.reach("promote.ready")
        _seal(link.app, log)
        failpoints.reach("promote.sealed")
        if is_mirror:
            _await_copies(link, log, is_sealed=True)


def _seal(app: str, log: NatsConnection) -> None:
    """Seal the old log, then its cursors and large bodies: whoever still writes there is refused."""
    for declared in reversed(mirrored_configs(app, 1)):
        state = log.run(finding_stream(declared["name"]))
        if state is not None and not state.config.get("sealed"):
            try:
                log.ask(update_stream({**state.config, "sealed": True}))
            except (ApiRefused, Forbidden) as refusal:
                raise Unreachable(
                    f"The old log {declared['name']!r}",
                    f"it could not be sealed: {refusal}",
                    "Use the credentials of the role `admin`, or end its servers before you promote.",
                ) from None


def _await_copies(link: MirrorLink, log: NatsConnection, *, is_sealed: bool) -> None:
    """Wait until the mirrors have all that the log, its cursors and its large bodies have at present.

    Raises `LogUnusable` before the log is sealed, and `StoreUnavailable` after, if they do not get it.
    """
    for declared in mirrored_configs(link.app, 1):
        name = str(declared["name"])
        origin, reached, deadline = log.run(finding_stream(name)), -1, 0.0
        if origin is None:
            continue
        while is_sealed:
            time.sleep(_SETTLED_S)
            before, origin = origin, log.run(finding_stream(name)) or origin
            if before.last == origin.last:
                break
        while True:
            mirror = link.find(name)
            if mirror is None or mirror.mirror is None:  # it was promoted by a promotion that was interrupted
                break
            quiet = None if is_sealed else silence(mirror)
            # What was deleted or has expired at the end does not arrive: nothing is lacking then.
            has_all = mirror.last >= origin.last or log.ask(next_message(name, mirror.last + 1)) is None
            if has_all and quiet is None:
                break
            if mirror.last > reached:
                reached, deadline = mirror.last, time.monotonic() + CATCH_UP_S
            if time.monotonic() > deadline:
                raise _incomplete(link, mirror, origin, quiet, is_sealed=is_sealed)
            time.sleep(POLL_S)


def _incomplete(
    link: MirrorLink, mirror: StreamState, origin: StreamState, quiet: str | None, *, is_sealed: bool
) -> StoreUnavailable | LogUnusable:
    if is_sealed:
        return StoreUnavailable(
            f"Promoting the mirror of {mirror.name!r}",
            f"the log is sealed at position {origin.last:,}, and the mirror has reached {mirror.last:,}. Mend the link "
            "between them, or end the log's servers to go on without these events, and run it again",
        )
    lag = f"has reached position {mirror.last:,} of {origin.last:,}"
    return link.unfit(
        mirror.name,
        f"it {quiet}, and {lag}" if quiet else f"it {lag} and gets nothing more",
        "Mend the link between the servers; or end the log's servers, to go on without what is lacking. Nothing was "
        "changed.",
    )


# The new log.


def _promote_stream(link: MirrorLink, declared: Mapping[str, Any], old: str) -> None:
    """Make a mirror a stream with the declared settings, and the log's with another identity; nothing if it is one.

    The log's consumers are of workers that read the mirror. They end with it, so that nobody goes on under the old
    identity.
    """
    name, is_log = str(declared["name"]), declared["name"] == link.app
    state = link.find(name)
    if state is None or state.mirror is None:
        return
    config = {key: value for key, value in state.config.items() if key not in ("mirror", "mirror_direct")}
    continued = f"{state.metadata.get(CONTINUES, '')} {old}@{state.last}".strip()
    metadata = {**state.metadata, CONTINUES: continued, **({IDENTITY: str(uuid4())} if is_log else {})}
    replicas = config.get("num_replicas", 1)
    if is_log:
        _delete_consumers(link)
    try:
        link.connection.ask(update_stream({**config, **declared, "num_replicas": replicas, "metadata": metadata}))
    except ApiRefused as refusal:
        raise not_created(name, refusal) from None
    if is_log:
        _delete_consumers(link)


def _delete_consumers(link: MirrorLink) -> None:
    while consumers := link.connection.api(f"CONSUMER.LIST.{link.app}").get("consumers"):
        for consumer in consumers:
            link.connection.ask(delete_consumer(link.app, consumer["name"]))


def _move_checkpoints(app: Application, settings: Settings, plan: Promotion) -> tuple[int, list[str]]:
    """Give the checkpoints that the new log continues its identity; return how many, and why others have the old one.

    A worker does the same when it begins, and compares the event at the position with the log first.
    """
    try:
        rows = [row for row in _checkpoints(app, settings) if row.log == plan.old and row.position <= plan.end]
        if not rows:
            return 0, []
        database = Database(settings.database)
        with database.reaching_sync(), database.sync_engine("eventjet mirror", existing=True).begin() as connection:
            for row in rows:
                change = update(projections).where(
                    projections.c.name == row.name,
                    projections.c.revision == row.revision,
                    projections.c.log == plan.old,
                    projections.c.position <= plan.end,
                )
                connection.execute(change.values(log=plan.new))
        return len(rows), []
    except (EventjetError, OSError) as error:
        return 0, [f"how far read models go on: their checkpoints were left as they are ({error}); workers move them"]


async def _move_cursors(app: str, settings: Settings, plan: Promotion, unmoved: list[str]) -> int:
    """Give the cursors that the new log continues, and their quarantine, its identity; return how many.

    What keeps the old one is added to `unmoved`, in words: a worker does the same when it begins.
    """
    moved = 0
    try:
        async with connected(settings.for_reads()) as client:
            cursors = Cursors(client, app)
            for record in await client.run(reading_values(cursor_bucket(app), "c.*")):
                name = record[2].decode().rpartition(".c.")[2]
                try:
                    stored = await cursors.find(name)
                    if stored is not None and stored.cursor.log == plan.old and stored.cursor.furthest <= plan.end:
                        await cursors.adopt(stored, replace(stored.cursor, log=plan.new, owner=None))
                        moved += 1
                except (CursorDamaged, CursorFenced) as error:
                    unmoved.append(f"whether the cursor of {name!r} goes on: it was left as it is ({error})")
    except (StoreError, Unreachable) as error:
        unmoved.append(f"whether cursors go on: some were left as they are ({error}); workers move them")
    return moved
