"""The streams and buckets of an app on the server: declared, created, and compared with what exists (ADR 0047).

Nothing here purges or deletes, and of existing streams only metadata is changed: the noted aggregates and the identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from eventjet.codec.subjects import (
    SERVER_MESSAGE_MAX,
    covers,
    cursor_bucket,
    due_subject,
    object_bucket,
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
from eventjet.jetstream import api
from eventjet.jetstream.api import Conversation, StreamState
from eventjet.jetstream.client import Client

IDENTITY = "eventjet.log"
"""Metadata key for the log's UUID, in its stream and in that of its large bodies; a restore copies it."""
AGGREGATES = "eventjet.aggregates"
"""Metadata key for the names of all aggregates that `init` was run for over this log, separated by blanks."""
FIRST = "eventjet.first"
"""Metadata key for the log's first position: 1, or the first position of the archive that it was restored from."""
MISSING = "eventjet.missing"
"""Metadata key for how many missing positions after the first an operator has accepted; without the key it is 0."""
CONTINUES = "eventjet.continues"
"""Metadata key of a promoted mirror: `identity@position` of each log whose past it has, up to that position."""
_NOTES_MAX = 20
"""How often the aggregates' names are noted at most, if others change the stream at the same time."""
_SETTLED_S = 0.5
"""After this pause, a client that read the stream before the last change has presumably sent its own change."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A setting of a stream that is not as declared."""

    stream: str
    setting: str
    declared: Any
    actual: Any
    is_sealed: bool = False
    """Whether the stream is sealed, so that the server changes none of its settings any more."""

    @property
    def is_harmless(self) -> bool:
        """Whether the stream stores, drops and returns the same messages nevertheless."""
        return SETTINGS[self.setting].is_harmless

    @property
    def cost(self) -> str:
        """What the difference does to a log or a bucket, in words."""
        return SETTINGS[self.setting].cost

    @property
    def remedy(self) -> str:
        """What to do about it, as sentences."""
        if self.is_sealed:
            return (
                "If a mirror of it was promoted, set EVENTJET_SERVERS to the mirror's servers; else restore an archive "
                "to another server or account."
            )
        return "Run `eventjet init --repair`."

    def __str__(self) -> str:
        return f"{self.stream}: {self.setting} is {self.actual!r}, declared is {self.declared!r}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The streams and buckets of an app, existing or created: the result of `Jet.init`."""

    identity: str
    """UUID of the log."""
    created: tuple[str, ...]
    """Names of the streams and buckets that were created."""
    drifts: tuple[Drift, ...]
    """Settings of existing streams and buckets that are not as declared."""
    cursors: tuple[tuple[str, int], ...] = ()
    """Name and position of each subscription that follows the log from now on."""
    others: tuple[str, ...] = ()
    """In words, who else answers publishes to their subjects: streams of other JetStream domains, and subscribers."""
    unknown: tuple[UnknownAggregate, ...] = ()
    """Aggregates that have events in the log and that the app does not declare."""
    unusable: tuple[LogUnusable, ...] = ()
    """Errors for the streams of publications and inboxes that cannot be used as they are, and for a log in which the
    names of the app's aggregates could not be noted; everything else was created."""


class Setting(NamedTuple):
    """A setting of a stream that is compared with its declaration."""

    cost: str
    """What a difference does to a log or a bucket, in words."""
    unset: Any = ...
    """Its value in a stream or declaration that does not mention it; `...` for a setting that both always mention."""
    is_harmless: bool = False
    """Whether the stream stores, drops and returns the same messages nevertheless."""
    stops_log: bool = False
    """Whether the log then stores something else than was published, acknowledges nothing, or drops events."""
    stops_others: bool = False
    """Whether cursors or timers then cannot be read, or their stream does not say if it stored a message."""


SETTINGS: Mapping[str, Setting] = {
    "subjects": Setting(
        "events of other subjects are not stored, or another program's are", stops_log=True, stops_others=True
    ),
    "storage": Setting("everything is gone when the server ends"),
    "retention": Setting("the server drops events once consumers have had them", stops_log=True, stops_others=True),
    "discard": Setting("where a limit is reached the server drops the oldest instead of refusing the newest"),
    "discard_new_per_subject": Setting("where a limit is reached, whoever writes to a subject is refused", False),
    "max_age": Setting("the server drops what is older", stops_log=True),
    "max_msgs": Setting("the server drops or refuses what is beyond"),
    "max_bytes": Setting("the server drops or refuses what is beyond"),
    "max_msgs_per_subject": Setting(
        "the server drops the beginning of an aggregate's history, or keeps older values of a key"
    ),
    "max_msg_size": Setting("larger events are refused"),
    "deny_delete": Setting("whoever may delete messages can take single events out of the log", False),
    "deny_purge": Setting("whoever may purge can empty the log, and a purged aggregate looks like a new one", False),
    "allow_rollup_hdrs": Setting("a message with a rollup header erases a history; for a bucket it is needed", False),
    "allow_msg_ttl": Setting("events can be stored that expire; the cursors' bucket needs it", False),
    "subject_delete_marker_ttl": Setting("the server adds messages of its own", 0),
    "allow_atomic": Setting("saves of several events, and every batch, are refused", False),
    "allow_batched": Setting("other programs can publish in batches that are stored in part", False),
    "allow_direct": Setting("aggregates cannot be loaded", stops_others=True),
    "allow_msg_counter": Setting("the server takes nothing but counters", False),
    "allow_msg_schedules": Setting(
        "no timer is set, so no process is woken at its deadline; a log has no use for it", False
    ),
    "duplicate_window": Setting(
        "a repeat is known by its message id for another time than expected; positions still fence it", is_harmless=True
    ),
    "max_consumers": Setting("a worker or a rebuild may not be able to make its consumer", is_harmless=True),
    "consumer_limits": Setting("a worker or a rebuild may not be able to make its consumer", None),
    "num_replicas": Setting("what happens to a server or its disk happens to what it holds", is_harmless=True),
    "no_ack": Setting(
        "no save is acknowledged, so each of them ends in a timeout", False, stops_log=True, stops_others=True
    ),
    "mirror": Setting(
        "the stream holds what another one does, and takes nothing by itself", None, stops_log=True, stops_others=True
    ),
    "sources": Setting(
        "messages of other streams come into it, which no save has compared with what is there", None, stops_log=True
    ),
    "subject_transform": Setting(
        "what is acknowledged is stored on another subject, where nobody reads it",
        None,
        stops_log=True,
        stops_others=True,
    ),
    "republish": Setting("the server gives copies of everything to whoever hears another subject", None),
    "sealed": Setting("nothing can be stored any more, and that cannot be undone", False, stops_others=True),
    "persist_mode": Setting(
        "the server acknowledges what is not on its disk yet, and loses it when it ends", "default"
    ),
    "template_owner": Setting("another program's template may change or delete the stream", ""),
}
INDIFFERENT = frozenset({"name", "description", "metadata", "placement", "compression", "first_seq", "mirror_direct"})
"""Settings that may have any value.

They are for people or the operator's choice; `compression` changes nothing that is read, `first_seq` counts only while
the stream is made, and `mirror_direct` has a meaning for mirrors alone, and being one is compared.
"""
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


# What an app declares.


def stream_config(app: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of an app's log stream, as the JetStream API takes it."""
    settings = {"deny_purge": True, "allow_rollup_hdrs": False, "allow_msg_ttl": False, "allow_atomic": True}
    return _config(app, replicas, [stream_subjects(app)]) | settings


def _config(name: str, replicas: int, subjects: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "subjects": subjects, "num_replicas": replicas, **_COMMON, "max_msgs_per_subject": -1}


def bucket_config(bucket: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of a key-value bucket with one value for each key."""
    settings = {"max_msgs_per_subject": 1, "deny_purge": False, "allow_rollup_hdrs": True}
    return _config(f"KV_{bucket}", replicas, [f"$KV.{bucket}.>"]) | settings


def snapshots_config(app: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of the bucket of an app's snapshots, which are disposable."""
    return bucket_config(snapshot_bucket(app), replicas)


def cursors_config(app: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of the bucket of an app's cursors, of which several may be replaced in one batch."""
    return {**bucket_config(cursor_bucket(app), replicas), "allow_msg_ttl": True, "allow_atomic": True}


def objects_config(app: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of the object store (ADR-20) with the content of an app's blobs."""
    bucket = object_bucket(app)
    config = _config(f"OBJ_{bucket}", replicas, [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"])
    return config | {"deny_purge": False, "allow_rollup_hdrs": True}


def timer_config(app: str, replicas: int) -> dict[str, Any]:
    """Return the configuration of an app's timers, without limits: after a raised one, old timers would fire again."""
    config = _config(timer_stream(app), replicas, [timer_subject(app, "*", "*"), due_subject(app, "*", "*")])
    limits = {"discard": "old", "deny_delete": False, "max_msg_size": -1}
    return config | limits | {"allow_msg_schedules": True, "allow_rollup_hdrs": True}


def every_config(app: str, replicas: int) -> tuple[dict[str, Any], ...]:
    """Return the configurations of all that an app may have on the server, the log first."""
    configs = (stream_config, snapshots_config, cursors_config, timer_config, objects_config)
    return tuple(config(app, replicas) for config in configs)


def needed_configs(
    app: str, replicas: int, *, cursors: bool, timers: bool, objects: bool
) -> tuple[dict[str, Any], ...]:
    """Return the configurations of what an app needs on the server, the log first; the named ones only if asked."""
    log, snapshots, *others = every_config(app, replicas)
    needs = zip(others, (cursors, timers, objects), strict=True)
    return (log, snapshots, *(config for config, is_needed in needs if is_needed))


# Creating the streams and buckets.


async def declare(
    client: Client,
    app: str,
    replicas: int,
    *,
    cursors: bool = False,
    timers: bool = False,
    objects: bool = False,
    aggregates: Collection[str] = (),
) -> Topology:
    """Create the streams and buckets of an app that are missing, and report drifted settings. Raises `LogUnusable`.

    The names of `aggregates` are noted in a log that is created; for an existing log see `note_aggregates`.
    """
    created: list[str] = []
    drifts: list[Drift] = []
    identity = ""
    for config in needed_configs(app, replicas, cursors=cursors, timers=timers, objects=objects):
        name = str(config["name"])
        state = await client.run(finding_stream(name))
        if state is None:
            metadata = {IDENTITY: identity} if config == objects_config(app, replicas) else {}
            if name == app:
                metadata = {IDENTITY: str(uuid4()), FIRST: "1", **_with_noted_aggregates({}, aggregates)}
            state = await _create(client, {**config, "metadata": metadata})
            if name == app and state.last and identity_of(state) == metadata[IDENTITY]:
                raise await _existing_events_error(client, config, state)
            created.append(name)
        else:
            drifts += compare(config, state.config)
        if name == app:
            identity = identity_of(state)
    return Topology(identity, tuple(created), tuple(drifts))


async def others_answering(client: Client, kinds: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return in words who besides the stream answers publishes to each (stream, subject) within half a second."""
    for stream, subject in kinds:
        client.probe(stream, subject)
    # If JetStream has a domain, there may be other domains, perhaps far away.
    await asyncio.sleep(0.5 if client.domain else 0.05)
    return client.answerers.others


async def note_aggregates(client: Client, app: str, aggregates: Collection[str]) -> LogUnusable | None:
    """Note in the log's metadata that these aggregates may begin histories in it; return the error if that failed.

    The server compares nothing when it accepts a configuration: a client that read an older configuration and sends its
    own later removes the names again, and this update may undo a change of another client. So the configuration is sent
    at once after it was read, and some time later the stream is read again, until the names are there. Raises
    `LogUnusable` for a stream that is missing.
    """
    missing, reason = set(aggregates), "others change the stream again and again"
    for _ in range(_NOTES_MAX):
        state = await client.run(reading_log_state(app))
        missing = set(aggregates) - noted_aggregates(state.metadata)
        if not missing:
            return None
        try:
            await client.ask(
                api.update_stream({**state.config, "metadata": _with_noted_aggregates(state.metadata, aggregates)})
            )
        except Forbidden as error:
            reason = f"these credentials may not use {error.subject}"
            break
        except ApiRefused as refusal:
            reason = f"the server refused it: {refusal.description} ({refusal.err_code})"
            break
        await asyncio.sleep(_SETTLED_S)
    return LogUnusable(
        f"The stream {app!r}",
        f"it was not noted in it that {', '.join(sorted(missing))} may begin histories in it: {reason}",
        "First events of these are refused as long as the log is noted to be of others that the app does not declare. "
        f"Run `eventjet init` again, with credentials that may use $JS.API.STREAM.UPDATE.{app}: the role `admin` may.",
    )


def noted_aggregates(metadata: Mapping[str, str]) -> set[str]:
    """Return the names of the aggregates that `init` has noted in a log's metadata."""
    return set(metadata.get(AGGREGATES, "").split())


def _with_noted_aggregates(metadata: Mapping[str, str], aggregates: Collection[str]) -> dict[str, str]:
    names = noted_aggregates(metadata) | set(aggregates)
    return {**metadata, **({AGGREGATES: " ".join(sorted(names))} if names else {})}


def finding_stream(name: str) -> Conversation[StreamState | None]:
    """Return the state of a stream; None if it does not exist."""
    try:
        return (yield api.stream_info(name))
    except StreamMissing:
        return None
    except ApiRefused as refusal:
        raise LogUnusable(f"The stream {name!r}", str(refusal), "Look at the server's log.") from None


def reading_log_state(app: str) -> Conversation[StreamState]:
    """Return the state of the app's stream; raises `LogUnusable` if `init` has not run."""
    state = yield from finding_stream(app)
    if state is None:
        raise missing_stream(app)
    return state


def missing_stream(stream: str) -> LogUnusable:
    """Return the error for a stream that does not exist."""
    remedy = (
        "Run `eventjet init` once; a log that was lost comes back with `eventjet restore` instead, and one in the "
        "JetStream of another domain, such as that of a leaf node's hub, is named by EVENTJET_JETSTREAM_DOMAIN."
    )
    return LogUnusable(f"The stream {stream!r}", "it does not exist", remedy)


def identity_of(state: StreamState) -> str:
    """Return the UUID of the log in a stream; raises `IdentityLost` if the stream's metadata has none."""
    if IDENTITY not in state.metadata:
        raise IdentityLost(state.name)
    return state.metadata[IDENTITY]


async def _create(client: Client, config: Mapping[str, Any]) -> StreamState:
    name = str(config["name"])
    try:
        return await client.ask(api.create_stream(config))
    except ApiRefused as refusal:
        existing = await client.run(finding_stream(name)) if refusal.err_code == api.NAME_IN_USE else None
        if existing is not None:
            return existing  # another `init` has created it meanwhile
        raise not_created(name, refusal) from None


async def _existing_events_error(client: Client, config: Mapping[str, Any], state: StreamState) -> LogUnusable:
    """Remove the identity from a stream that had events when it was created, and return the error to raise.

    The server adopts files that it finds in the stream's folder: of a stream that was deleted a moment ago, or whose
    configuration was lost. So it is not known whose events they are.
    """
    await client.ask(api.update_stream(config))
    return LogUnusable(
        f"The stream {state.name!r}",
        f"it was not there, and the server made it with events up to position {state.last} in it",
        "If they are the app's, its configuration was lost: run `eventjet init --repair`. If it was deleted a moment "
        "ago, delete it again, wait until its folder is gone from the server's store, and run `eventjet init`.",
    )


def not_created(stream: str, refusal: ApiRefused) -> LogUnusable:
    """Return the error for a stream that the server would not create."""
    return LogUnusable(
        f"The stream {stream!r}",
        f"the server would not create it: {refusal.description} ({refusal.err_code})",
        "Look at the account's limits and the number of servers for its replicas.",
    )


# Comparing the declaration with what exists.


def compare(declared: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Drift]:
    """Return the settings that are not as declared; a larger limit for the size of messages is no drift."""
    drifts: list[Drift] = []
    for name, setting in SETTINGS.items():
        value, current = declared.get(name, setting.unset), actual.get(name, setting.unset)
        if value is ...:
            continue
        current = None if current is ... else current
        is_roomier = name == "max_msg_size" and 0 < value < (current or 0)
        if current != value and (value or current) and not is_roomier:
            drifts.append(Drift(str(declared["name"]), name, value, current, bool(actual.get("sealed"))))
    return drifts


def unknown_settings(state: StreamState) -> list[str]:
    """Return the settings of a stream that a newer server knows and this release does not."""
    return sorted(key for key, value in state.config.items() if value and key not in {*SETTINGS, *INDIFFERENT})


def drifts_of(state: StreamState) -> tuple[Drift, ...]:
    """Return the drifts of an app's stream that change what is stored, dropped or read."""
    return tuple(drift for drift in compare(stream_config(state.name, 1), state.config) if not drift.is_harmless)


def check_settings(state: StreamState) -> None:
    """Raise `LogDrifted` for settings with which the log may be neither written nor followed.

    Other drifts only get a warning. A limit that refuses new events is among them; one that drops stored events is not.
    """
    drifts = compare(stream_config(state.name, 1), state.config)
    discard, dropping = state.config.get("discard"), set[str]()
    if discard == "old" and {"max_msgs", "max_bytes"} & {drift.setting for drift in drifts}:
        dropping |= {"max_msgs", "max_bytes", "discard"}
    if not (discard == "new" and state.config.get("discard_new_per_subject")):
        dropping.add("max_msgs_per_subject")

    def is_wrong(drift: Drift) -> bool:
        # Additional subjects bring another program's messages, but no event is lost by them.
        if drift.setting == "subjects":
            return not any(covers(subject, f"{state.name}.*") for subject in drift.actual or ())
        return SETTINGS[drift.setting].stops_log or drift.setting in dropping

    if wrong := list(filter(is_wrong, drifts)):
        raise drifted(state.name, wrong)


_ROOM_BYTES = 1024
"""With less room than this before `max_bytes`, a stream with `discard: old` drops messages to store the next."""


def standstill(state: StreamState, declared: Mapping[str, Any]) -> LogDrifted | None:
    """Return the error for settings with which a stream of cursors or timers cannot be used at all, if any."""
    # A stream with `discard: new` accepts another value of an existing key even at `max_msgs`, within its bytes.
    sizes = {"max_bytes": state.bytes}
    if state.config.get("discard") == "old":
        sizes = {"max_msgs": state.messages, "max_bytes": state.bytes + _ROOM_BYTES}

    def is_wrong(drift: Drift) -> bool:
        if drift.setting == "subjects":
            return not {*drift.declared} <= {*(drift.actual or ())}
        if drift.setting == "allow_msg_schedules":
            return bool(drift.declared)
        is_reached = drift.setting in sizes and sizes[drift.setting] >= state.config.get(drift.setting, 0)
        return SETTINGS[drift.setting].stops_others or is_reached

    wrong = list(filter(is_wrong, compare(declared, state.config)))
    return drifted(state.name, wrong) if wrong else None


# How a stream's settings explain an error.


def drifted(stream: str, drifts: Sequence[Drift]) -> LogDrifted:
    """Return the error for drifted settings of a stream that prevent an operation."""
    settings = {drift.setting: f"{drift.actual!r} ({drift.cost})" for drift in drifts}
    return LogDrifted(stream, settings, next((drift.remedy for drift in drifts if drift.is_sealed), ""))


async def explained(client: Client, declared: Mapping[str, Any], error: StoreError) -> StoreError:
    """Return `LogDrifted` or `LogUnusable` if the stream's settings may have caused the error, else the same error."""
    name = str(declared["name"])
    try:
        state = await client.ask(api.stream_info(name))
    except StreamMissing:
        return missing_stream(name)
    except StoreError:
        return error
    return explained_by(state, declared, error)


def explained_by(state: StreamState, declared: Mapping[str, Any], error: StoreError) -> StoreError:
    """Return the error that `explained` returns, for a stream in this state."""
    drifts = [drift for drift in compare(declared, state.config) if not drift.is_harmless]
    return drifted(state.name, drifts) if drifts else error


def full_stream(stream: str, config: Mapping[str, Any], code: int, text: str) -> StreamFull | None:
    """Return the error for an answer that says a limit of the stream or its account is reached; None for others."""
    if code == api.NO_RESOURCES:
        limit = f"its account has used up the storage that it may use: {text}"
        return StreamFull(stream, limit, "Raise the account's limit, or remove what nobody needs from its streams.")
    setting = api.LIMITS.get(text)
    if setting is None:
        return None
    of_subject = "of one subject " if setting == "max_msgs_per_subject" else ""
    limit = f"{setting} {config.get(setting, '?'):,}" if isinstance(config.get(setting), int) else text
    remedy = f"Raise the limit or remove old messages {of_subject}from it."
    return StreamFull(stream, f"{limit}; discard {config.get('discard', '?')}", remedy)
