"""What an app has on the server: declared once, compared ever after, never purged or deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from eventjet.codec.subjects import (
    SERVER_MESSAGE_MAX,
    covers,
    cursor_bucket,
    due_subject,
    snapshot_bucket,
    stream_subjects,
    timer_stream,
    timer_subject,
)
from eventjet.errors import (
    ApiRefused,
    Forbidden,
    IdentityLost,
    LogDrifted,
    LogUnusable,
    StoreError,
    StreamFull,
    StreamMissing,
    UnknownAggregate,
)
from eventjet.jetstream.api import (
    LIMITS,
    NAME_IN_USE,
    NO_RESOURCES,
    StreamState,
    create_stream,
    stream_info,
    update_stream,
)
from eventjet.jetstream.client import Client
from eventjet.log.wholeness import FIRST

IDENTITY = "eventjet.log"
"""Key of the log's UUID in the stream's metadata; a restore copies it."""
AGGREGATES = "eventjet.aggregates"
"""Key of the names of all aggregates that `init` was run for over this log, with blanks between them."""
_NOTES_MAX = 20
"""So often the names are noted again, where others change the stream at the same time."""
_SETTLED_S = 0.5
"""Whoever read the stream before its last change is taken to have sent their own by then."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One setting of a stream that is not as declared."""

    stream: str
    setting: str
    declared: Any
    found: Any

    @property
    def is_harmless(self) -> bool:
        """Whether what is stored, dropped and read is the same nevertheless."""
        return self.setting in _HARMLESS

    @property
    def cost(self) -> str:
        """What this setting does to a log or a bucket where it is not as declared."""
        return COSTS.get(self.setting, "eventjet relies on it")

    def __str__(self) -> str:
        return f"{self.stream}: {self.setting} is {self.found!r}, declared is {self.declared!r}"


@dataclass(frozen=True, slots=True)
class Topology:
    """What is there of an app's streams and buckets, found or made: `Jet.init`."""

    identity: str
    created: tuple[str, ...]
    drifts: tuple[Drift, ...]
    cursors: tuple[tuple[str, int], ...] = ()
    """Name and position of what follows the log from now on."""
    others: tuple[str, ...] = ()
    """Who else answers what is published for them, in words: streams of other JetStream domains, and subscribers."""
    unknown: tuple[UnknownAggregate, ...] = ()
    """What the log has events of and the app does not declare: nothing more was made for it."""
    unusable: tuple[LogUnusable, ...] = ()
    """Streams of publications and inboxes that cannot be used as they are, and the log where the names of the app's
    aggregates could not be noted in it; all else was made nevertheless."""


_COMMON = {
    "storage": "file",
    "retention": "limits",
    "discard": "new",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msg_size": SERVER_MESSAGE_MAX,
    "duplicate_window": 120_000_000_000,
    "deny_delete": True,
    "allow_direct": True,
}
UNSET: Mapping[str, Any] = {
    "no_ack": False,
    "mirror": None,
    "sources": None,
    "subject_transform": None,
    "republish": None,
    "discard_new_per_subject": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "allow_msg_ttl": False,
    "subject_delete_marker_ttl": 0,
    "allow_msg_counter": False,
    "allow_msg_schedules": False,
    "allow_atomic": False,
    "allow_batched": False,
    "persist_mode": "default",
    "consumer_limits": None,
    "template_owner": "",
}
"""Settings as a stream has them that does not mention them: so they have to be, where a declaration does not either."""
INDIFFERENT: Mapping[str, str] = {
    "name": "a stream is looked up by it",
    "description": "it is for people",
    "metadata": "eventjet's own keys in it are looked at one by one; others are for people",
    "placement": "where the copies are is the operator's choice",
    "compression": "what is read is the same, however the server keeps it on its disk",
    "first_seq": "it counts only while the stream is made; where the log begins is compared with what is there",
    "mirror_direct": "it has a meaning for mirrors alone, and being one is compared",
}
"""Settings that may be any, and why."""
COSTS: Mapping[str, str] = {
    "subjects": "events of other subjects are not stored, or another program's are",
    "storage": "everything is gone when the server ends",
    "retention": "the server drops events once consumers have had them",
    "discard": "where a limit is reached the server drops the oldest instead of refusing the newest",
    "discard_new_per_subject": "where a limit is reached, whoever writes to a subject is refused",
    "max_age": "the server drops what is older",
    "max_msgs": "the server drops or refuses what is beyond",
    "max_bytes": "the server drops or refuses what is beyond",
    "max_msgs_per_subject": "the server drops the beginning of an aggregate's history, or keeps older values of a key",
    "max_msg_size": "larger events are refused",
    "deny_delete": "whoever may delete messages can take single events out of the log",
    "deny_purge": "whoever may purge can empty the log, and a purged aggregate looks like a new one",
    "allow_rollup_hdrs": "a message with a rollup header erases a history; for a bucket it is needed",
    "allow_msg_ttl": "events can be stored that expire; the cursors' bucket needs it",
    "subject_delete_marker_ttl": "the server adds messages of its own",
    "allow_atomic": "saves of several events, and every batch, are refused",
    "allow_batched": "other programs can publish in batches that are stored in part",
    "allow_direct": "aggregates cannot be loaded",
    "allow_msg_counter": "the server takes nothing but counters",
    "allow_msg_schedules": "no timer is set, so no process is woken at its deadline; a log has no use for it",
    "duplicate_window": "a repeat is known by its message id for another time than expected; positions still fence it",
    "max_consumers": "a worker or a rebuild may not be able to make its consumer",
    "consumer_limits": "a worker or a rebuild may not be able to make its consumer",
    "num_replicas": "what happens to a server or its disk happens to what it holds",
    "no_ack": "no save is acknowledged, so each of them ends in a timeout",
    "mirror": "the stream holds what another one does, and takes nothing by itself",
    "sources": "messages of other streams come into it, which no save has compared with what is there",
    "subject_transform": "what is acknowledged is stored on another subject, where nobody reads it",
    "republish": "the server gives copies of everything to whoever hears another subject",
    "sealed": "nothing can be stored any more, and that cannot be undone",
    "persist_mode": "the server acknowledges what is not on its disk yet, and loses it when it ends",
    "template_owner": "another program's template may change or delete the stream",
}
"""Of each setting that is compared, what it does where it is not as declared."""


def stream_config(app: str, replicas: int) -> dict[str, Any]:
    """The stream of an app, as the JetStream API takes it."""
    return {
        "name": app,
        "subjects": [stream_subjects(app)],
        "num_replicas": replicas,
        **_COMMON,
        "max_msgs_per_subject": -1,
        "deny_purge": True,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
        "allow_atomic": True,
    }


def bucket_config(app: str, replicas: int) -> dict[str, Any]:
    """The key-value bucket of an app's snapshots: disposable, one value a key."""
    bucket = snapshot_bucket(app)
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "num_replicas": replicas,
        **_COMMON,
        "max_msgs_per_subject": 1,
        "deny_purge": False,
        "allow_rollup_hdrs": True,
    }


def cursors_config(app: str, replicas: int) -> dict[str, Any]:
    """The key-value bucket of an app's cursors: one value a key, replaced by compare-and-set, several in a batch."""
    bucket = cursor_bucket(app)
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "num_replicas": replicas,
        **_COMMON,
        "max_msgs_per_subject": 1,
        "deny_purge": False,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "allow_atomic": True,
    }


def timer_config(app: str, replicas: int) -> dict[str, Any]:
    """The stream of an app's timers. No limit of any kind: one that is raised later fires old timers again."""
    return {
        "name": timer_stream(app),
        "subjects": [timer_subject(app, "*", "*"), due_subject(app, "*", "*")],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "duplicate_window": 120_000_000_000,
        "allow_msg_schedules": True,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "num_replicas": replicas,
    }


def every_config(app: str, replicas: int) -> tuple[dict[str, Any], ...]:
    """All that an app may have on the server: its log, snapshots, cursors and timers."""
    made = (stream_config, bucket_config, cursors_config, timer_config)
    return tuple(config(app, replicas) for config in made)


def needed_configs(app: str, replicas: int, *, cursors: bool, timers: bool) -> tuple[dict[str, Any], ...]:
    """What it has to have there, the log first: what keeps `cursors`, and what `timers` need, only where asked for."""
    log, snapshots, of_cursors, of_timers = every_config(app, replicas)
    return (log, snapshots, *([of_cursors] if cursors else []), *([of_timers] if timers else []))


async def declare(
    client: Client,
    app: str,
    replicas: int,
    *,
    cursors: bool = False,
    timers: bool = False,
    aggregates: Collection[str] = (),
) -> Topology:
    """Create what is missing and report what differs; nothing that exists is changed. Raises `LogUnusable`.

    What keeps `cursors`, and what `timers` need, is made for an app that has something for them. A log that is made
    has the names of the `aggregates` noted in it from the beginning; for any other see `note_aggregates`.
    """
    created: list[str] = []
    drifts: list[Drift] = []
    identity = ""
    for config in needed_configs(app, replicas, cursors=cursors, timers=timers):
        name = str(config["name"])
        found = await _find(client, name)
        if found is None:
            own = {IDENTITY: str(uuid4()), FIRST: "1", **_with_noted({}, aggregates)}
            fresh = {**config, "metadata": own} if name == app else config
            found = await _create(client, fresh)
            if name == app and found.last and identity_of(found) == fresh["metadata"][IDENTITY]:
                raise await _not_new(client, config, found)
            created.append(name)
        else:
            drifts += compare(config, found.config)
        if name == app:
            identity = identity_of(found)
    return Topology(identity, tuple(created), tuple(drifts))


async def others_answering(client: Client, kinds: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Who else answers what is published there. What comes later than in a moment is only logged."""
    for stream, subject in kinds:
        client.probe(stream, subject)
    # Where there is a domain there are others, perhaps far away.
    await asyncio.sleep(0.5 if client.domain else 0.05)
    return client.answerers.strangers


async def note_aggregates(client: Client, app: str, aggregates: Collection[str]) -> LogUnusable | None:
    """Note in the log's metadata that these may begin histories in it; return why that could not be done, else None.

    The server compares nothing when it takes a configuration: whoever read an older one and sends theirs later takes
    the names out again, as this may undo what others changed. So what was read last is sent, at once, and some time
    later the stream is looked at again, until the names are there. Raises `LogUnusable` for a stream that is missing.
    """
    missing, why = set(aggregates), "others change the stream again and again"
    for _ in range(_NOTES_MAX):
        found = await info(client, app)
        missing = set(aggregates) - _noted(found.metadata)
        if not missing:
            return None
        try:
            await client.ask(update_stream({**found.config, "metadata": _with_noted(found.metadata, aggregates)}))
        except Forbidden as denied:
            why = f"these credentials may not use {denied.subject}"
            break
        except ApiRefused as refusal:
            why = f"the server refused it: {refusal.description} ({refusal.err_code})"
            break
        await asyncio.sleep(_SETTLED_S)
    return LogUnusable(
        f"The stream {app!r}",
        f"it was not noted in it that {', '.join(sorted(missing))} may begin histories in it: {why}",
        "First events of these are refused as long as the log is noted to be of others that the app does not declare. "
        f"Run `eventjet init` again, with credentials that may use $JS.API.STREAM.UPDATE.{app}: the role `admin` may.",
    )


def _noted(metadata: Mapping[str, str]) -> set[str]:
    return set(metadata.get(AGGREGATES, "").split())


def _with_noted(metadata: Mapping[str, str], aggregates: Collection[str]) -> dict[str, str]:
    names = _noted(metadata) | set(aggregates)
    return {**metadata, **({AGGREGATES: " ".join(sorted(names))} if names else {})}


async def info(client: Client, app: str) -> StreamState:
    """The app's stream; raises `LogUnusable` when `init` has not run."""
    found = await _find(client, app)
    if found is None:
        raise missing(app)
    return found


def missing(stream: str) -> LogUnusable:
    """The error for a stream that is not there."""
    remedy = (
        "Run `eventjet init` once; a log that was lost comes back with `eventjet restore` instead, and one in the "
        "JetStream of another domain, such as that of a leaf node's hub, is named by EVENTJET_JETSTREAM_DOMAIN."
    )
    return LogUnusable(f"The stream {stream!r}", "it does not exist", remedy)


def identity_of(found: StreamState) -> str:
    """The UUID of the log in a stream; raises `IdentityLost` for one that carries none."""
    if IDENTITY not in found.metadata:
        raise IdentityLost(found.name)
    return found.metadata[IDENTITY]


async def _find(client: Client, name: str) -> StreamState | None:
    try:
        return await client.ask(stream_info(name))
    except StreamMissing:
        return None
    except ApiRefused as refusal:
        raise LogUnusable(f"The stream {name!r}", str(refusal), "Look at the server's log.") from None


async def _create(client: Client, config: Mapping[str, Any]) -> StreamState:
    name = str(config["name"])
    try:
        return await client.ask(create_stream(config))
    except ApiRefused as refusal:
        found = await _find(client, name) if refusal.err_code == NAME_IN_USE else None
        if found is not None:
            return found  # another `init` was quicker
        raise not_created(name, refusal) from None


async def _not_new(client: Client, config: Mapping[str, Any], found: StreamState) -> LogUnusable:
    """The error for a stream that had events when it was made, which gets no identity: it is not known whose they are.

    The server takes files that it finds in its folder for the stream's own: of one that was deleted a moment ago, or
    whose configuration was lost.
    """
    await client.ask(update_stream(config))
    return LogUnusable(
        f"The stream {found.name!r}",
        f"it was not there, and the server made it with events up to position {found.last} in it",
        "If they are the app's, its configuration was lost: run `eventjet init --repair`. If it was deleted a moment "
        "ago, delete it again, wait until its folder is gone from the server's store, and run `eventjet init`.",
    )


def not_created(stream: str, refusal: ApiRefused) -> LogUnusable:
    """The error for a stream that the server would not create."""
    return LogUnusable(
        f"The stream {stream!r}",
        f"the server would not create it: {refusal.description} ({refusal.err_code})",
        "Look at the account's limits and the number of servers for its replicas.",
    )


def drifts_of(found: StreamState) -> tuple[Drift, ...]:
    """What has drifted of an app's stream and concerns who writes to it: what is stored, dropped and read."""
    drifts = compare(stream_config(found.name, 1), found.config)
    return tuple(drift for drift in drifts if not drift.is_harmless)


_HARMLESS = ("num_replicas", "duplicate_window", "max_consumers")
_WRONG = ("subject_transform", "sources", "mirror", "no_ack", "retention", "subjects", "max_age")
"""Settings by which a log is not what was recorded, does not say that it was, or forgets it."""


def check_settings(found: StreamState) -> None:
    """Raise `LogDrifted` for a log over which nothing may be recorded or followed. Weaker ones only get a warning.

    A limit that refuses new events is a weaker one; one for which stored events are dropped is not.
    """
    drifts, dropping = compare(stream_config(found.name, 1), found.config), ["max_msgs", "max_bytes", "discard"]
    if found.config.get("discard") != "old" or not {each.setting for each in drifts} & set(dropping[:2]):
        dropping = []
    if not (found.config.get("discard") == "new" and found.config.get("discard_new_per_subject")):
        dropping.append("max_msgs_per_subject")
    wrong = [
        drift
        for drift in drifts
        if drift.setting in (*_WRONG, *dropping)
        # More subjects than its own bring another program's messages, and take nothing away.
        and not (drift.setting == "subjects" and any(covers(each, f"{found.name}.*") for each in drift.found or ()))
    ]
    if wrong:
        raise drifted(found.name, wrong)


_STANDSTILL = ("allow_direct", "no_ack", "sealed", "subject_transform", "subjects", "mirror", "retention")
"""Settings by which nothing can be read from a stream of cursors or timers, or is known to be stored in it."""
_ROOM_BYTES = 1024
"""A stream that drops what is oldest drops some for the next, where it has less room than this."""


def standstill(found: StreamState, declared: Mapping[str, Any]) -> LogDrifted | None:
    """The error for settings with which nobody can work with a stream of cursors or timers; None for what can be."""
    # One that drops nothing takes another value of a key that it has, however many there are, within its bytes.
    sizes = {"max_bytes": found.bytes}
    if found.config.get("discard") == "old":
        sizes = {"max_msgs": found.messages, "max_bytes": found.bytes + _ROOM_BYTES}
    reached = [limit for limit, size in sizes.items() if size >= found.config.get(limit, 0)]
    timers = ["allow_msg_schedules"] if declared.get("allow_msg_schedules") else []
    wrong = [
        drift
        for drift in compare(declared, found.config)
        if drift.setting in (*_STANDSTILL, *timers, *reached)
        and not (drift.setting == "subjects" and {*drift.declared} <= {*(drift.found or ())})
    ]
    return drifted(found.name, wrong) if wrong else None


def drifted(stream: str, drifts: Sequence[Drift]) -> LogDrifted:
    """The error for what these settings of a stream stand in the way of."""
    return LogDrifted(stream, {drift.setting: f"{drift.found!r} ({drift.cost})" for drift in drifts})


async def explained(client: Client, declared: Mapping[str, Any], error: StoreError) -> StoreError:
    """Return what a stream as it is has to do with an error that came of it: `LogDrifted`, else the same error.

    The stream is asked for its configuration once. One that does not exist is a `LogUnusable`.
    """
    name = str(declared["name"])
    try:
        found = await client.ask(stream_info(name))
    except StreamMissing:
        return missing(name)
    except StoreError:
        return error
    return explained_by(found, declared, error)


def explained_by(found: StreamState, declared: Mapping[str, Any], error: StoreError) -> StoreError:
    """As `explained`, of a stream as it was found."""
    drifts = [drift for drift in compare(declared, found.config) if not drift.is_harmless]
    return drifted(found.name, drifts) if drifts else error


def full_stream(stream: str, config: Mapping[str, Any], code: int, text: str) -> StreamFull | None:
    """The error for an answer which says that a limit of a stream, or of its account, is reached; None for another."""
    if code == NO_RESOURCES:
        limit = f"its account has used up the storage that it may use: {text}"
        return StreamFull(stream, limit, "Raise the account's limit, or remove what nobody needs from its streams.")
    setting = LIMITS.get(text)
    if setting is None:
        return None
    of_subject = "of one subject " if setting == "max_msgs_per_subject" else ""
    limit = f"{setting} {config.get(setting, '?'):,}" if isinstance(config.get(setting), int) else text
    remedy = f"Raise the limit or remove old messages {of_subject}from it."
    return StreamFull(stream, f"{limit}; discard {config.get('discard', '?')}", remedy)


def compare(declared: Mapping[str, Any], found: Mapping[str, Any]) -> list[Drift]:
    """The settings that are not as declared; room for larger messages than events can be is harmless."""
    name = str(declared["name"])
    drifts: list[Drift] = []
    for key, value in {**UNSET, **declared}.items():
        actual = found.get(key, UNSET.get(key))
        is_empty = not value and not actual
        is_roomier = key == "max_msg_size" and 0 < value < (actual or 0)
        if actual != value and not is_empty and not is_roomier:
            drifts.append(Drift(name, key, value, actual))
    return drifts


def unknown_settings(found: StreamState) -> list[str]:
    """Settings of a stream that this release does not know, of a newer server: what they do cannot be told."""
    known = {*_COMMON, *UNSET, *INDIFFERENT, *COSTS}
    return sorted(key for key, value in found.config.items() if value and key not in known)
