"""Errors of the log and its connection, and of encoding and decoding events."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eventjet.errors.base import EventjetError, Unreachable
from eventjet.text import listed


class StoreError(EventjetError):
    """The log could not carry out a request."""


class ConcurrencyConflict(StoreError):
    """Another writer has recorded an event after the expected position; nothing of this save is stored."""

    def __init__(
        self, subject: str, expected: int, *, rival: Any = None, races: int = 1, is_unseen: bool = False
    ) -> None:
        self.subject = subject
        self.expected = expected
        self.rival = rival
        """The other writer's record, the last of the aggregate at that time; None if it is not known."""
        self.races = races
        """The number of conflicts in a row."""
        self.is_unseen = is_unseen
        """Whether the log has no event of another writer, so that the server compares the save with something else."""
        moved = f"{subject} moved on: its last event is no longer at position {expected}."
        if races == 1:
            super().__init__(f"{moved} Load it again and decide again.")
        elif is_unseen:
            super().__init__(
                f"The server refused {races} saves to {subject} in a row as if others had written to it, and the log "
                "has nothing of theirs. Nothing is stored. Run `eventjet doctor`, which compares the stream with what "
                "eventjet declared."
            )
        else:
            super().__init__(
                f"{moved} That was the last of {races} tries, and each time another writer was quicker. Nothing is "
                "stored. Try again later, or have fewer connections write to it: commands of one connection queue."
            )


_READ_ONLY = (
    "The server answers reads and stores nothing: look at its disk, since nats-server has to be restarted after a full "
    "one, and with several replicas see that most of them are up. "
)


class OutcomeUnknown(StoreError):
    """The log did not say before the deadline whether the events are stored; they may still appear."""

    def __init__(
        self,
        subjects: Sequence[str],
        event_ids: Sequence[str],
        cause: str,
        writes: Sequence[Any],
        *,
        is_read_only: bool = False,
        log: str = "",
    ) -> None:
        self.subjects = tuple(subjects)
        self.event_ids = tuple(event_ids)
        self.cause = cause
        self.writes = tuple(writes)
        """The writes of the save, as `Jet.resolve` needs them."""
        self.is_read_only = is_read_only
        """Whether the server answered reads all the time, so that it can read but not store."""
        self.log = log
        """The identity of the log on which the save began; empty if it is not known."""
        super().__init__(
            f"It is not known whether {len(self.event_ids)} event(s) on {listed(self.subjects)} are stored "
            f"(last answer: {cause}). {_READ_ONLY if is_read_only else ''}Pass this error to `resolve` once the server "
            "answers again; do not decide again before that."
        )


class SaveTorn(OutcomeUnknown):
    """The log contains only a part of a save, permanently, because the server did not store its batch as a whole."""

    def __init__(self, subjects: Sequence[str], event_ids: Sequence[str], writes: Sequence[Any] = ()) -> None:
        super().__init__(subjects, event_ids, "the log holds only a part of them", writes)
        message = (
            f"The log holds only a part of a save on {listed(self.subjects)}: the server did not keep its batch "
            "whole. What is there counts and stays. `eventjet audit` names it; record what is missing by a command of "
            "its own."
        )
        self.args = (message,)


class LogReplaced(OutcomeUnknown):
    """The stream became another log during a save, one without the history on which the save was decided.

    That is so where a connection is made anew and leads to a mirror that was promoted (ADR 0071), or to a stream that
    was made again. A log that has the history of these aggregates takes the save.
    """

    def __init__(
        self, subjects: Sequence[str], event_ids: Sequence[str], reason: str, position: int | None = None
    ) -> None:
        super().__init__(subjects, event_ids, reason, ())
        self.reason = reason
        self.position = position
        """Position of the last event if this log has stored the save all the same; None if it has not."""
        stored = "This log has not stored it"
        if position is not None:
            stored = f"It was sent before that was known, and this log has stored it, up to position {position:,}"
        message = (
            f"A save to {', '.join(self.subjects)} met another log than the one on which it was decided: {reason}. "
            f"{stored}. Whether the log before has stored it is not known here. Load the state again, and decide again."
        )
        self.args = (message,)


class Refused(StoreError):
    """The request is refused and will be refused again unless it changes; nothing is stored."""

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what} was refused: {reason}. {remedy}")


class CommandReused(Refused):
    """A command id was already used for a different request; nothing of this command is stored."""

    def __init__(
        self, command_id: str, where: str, version: int, recorded: str, asked: str, arguments: Sequence[str] = ()
    ) -> None:
        self.command_id = command_id
        self.where = where
        """The aggregate on which the id was used before."""
        self.version = version
        """The version of the first event that was recorded under the id."""
        self.recorded = recorded
        """The request recorded under the id: its decision and a digest of its arguments."""
        self.asked = asked
        """The request of this command."""
        self.arguments = tuple(arguments)
        """The names of the arguments that differ, where the recorded events prove it; else empty."""
        names = listed(map(repr, self.arguments)) if arguments else ""
        super().__init__(
            f"The command {command_id!r} on {where}",
            f"at version {version} its id recorded the request {recorded}, and this one is {asked}"
            + (f", with another {names}" if names else ""),
            "Give each command an id of its own; one that is repeated, the same decision and arguments. An argument "
            "that may differ, such as the time, is left out with `command(id, ignoring=(…,))`.",
        )


class NotUnique(Refused):
    """Another aggregate of the type has the unique value; nothing is stored.

    That is the newest state of the stream's leader (ADR 0006).
    """

    def __init__(self, aggregate: str, constraint: str, aggregate_id: str, holder: str | None) -> None:
        self.aggregate = aggregate
        self.constraint = constraint
        self.aggregate_id = aggregate_id
        """The id of the aggregate that would have taken the value; no message repeats the value itself."""
        self.holder = holder
        """The id of the aggregate that has the value; None for a caller of a service, who does not learn it."""
        who = "another one" if holder is None else f"{aggregate} {holder!r}"
        super().__init__(
            f"The {constraint} of {aggregate} {aggregate_id!r}",
            f"{who} has the same, and it is unique",
            "Have it release that first, or take another.",
        )


class UniqueNotBuilt(Refused):
    """The log has aggregates whose values were never claimed, so uniqueness cannot be checked; nothing is stored."""

    def __init__(self, aggregate: str, constraint: str) -> None:
        self.aggregate = aggregate
        self.constraint = constraint
        super().__init__(
            f"A new {constraint} of {aggregate}",
            f"the log has events of {aggregate!r} from before {constraint!r} was unique, or from an import",
            f"Run `eventjet unique build {aggregate} {constraint}` once.",
        )


class StreamFull(Refused):
    """A limit of a stream or its account is reached, so the stream stores nothing until there is room."""

    def __init__(self, stream: str, limit: str, remedy: str) -> None:
        self.stream = stream
        self.limit = limit
        """The limit that is reached, and how much it allows."""
        super().__init__(f"A message for the stream {stream!r}", f"the stream is full: {limit}", remedy)
        self.args = (f"The stream {stream!r} is full ({limit}), so it takes nothing more. {remedy}",)


class BlobMissing(Refused):
    """A large body is not in the object store; a command that refers to it stores nothing."""

    def __init__(self, digest: str, bucket: str, where: str = "") -> None:
        self.digest = digest
        self.bucket = bucket
        self.where = where
        """The field of the event that refers to it; empty where only the body was asked for."""
        owner = f", to which {where} refers" if where else ""
        message = (
            f"The object store {bucket!r} does not have the body {digest}{owner}, or not all of it. "
            f"{'This `Blob` has no content with it, nor has a copy that `replace` made. ' if where else ''}"
            "Store it with `await jet.blobs.put(content)`, which gives the same content the same digest. If it was "
            "there, bring it back from an archive with `eventjet objects restore`."
        )
        super().__init__(f"The body {digest}", f"the object store {bucket!r} does not have it", message)
        self.args = (f"{message}{' Nothing is recorded.' if where else ''}",)


class BlobDamaged(StoreError):
    """The content of a large body in the object store is not what its digest says; nothing of it is to be used."""

    def __init__(self, digest: str, bucket: str, size: int, expected: int, where: str = "") -> None:
        self.digest = digest
        self.bucket = bucket
        self.size = size
        """How many bytes the object store has."""
        self.expected = expected
        """How many bytes the body should have."""
        self.where = where
        """The field of the event that refers to it; empty where only the body was asked for."""
        self.fault = f"it has {size:,} of {expected:,} bytes" if size != expected else "its bytes have another digest"
        owner = f", to which {where} refers," if where else ""
        super().__init__(
            f"The body {digest}{owner} in the object store {bucket!r} is damaged: {self.fault}. "
            "Bring it back from an archive with `eventjet objects restore`, or from its source with "
            "`await jet.blobs.put(content)`."
        )


class Forbidden(StoreError):
    """The server denied a permission to the credentials in use; nothing is stored."""

    def __init__(self, subject: str, reason: str, remedy: str = "") -> None:
        self.subject = subject
        self.reason = reason
        self.remedy = remedy
        """What to do, if granting the permission is not enough; otherwise empty."""
        advice = remedy or "Grant it to these credentials, or use others."
        super().__init__(f"The server denied {subject}: {reason}. {advice}")


class Unauthorized(Forbidden):
    """The server does not accept these credentials."""


class StoreUnavailable(StoreError):
    """The log did not answer in time; nothing was written by this call."""

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what} had no answer: {reason}. Check that the server is up and try again.")


class ConnectionLost(StoreUnavailable):
    """The connection broke or the server stopped answering; the last request may or may not have arrived."""


class ConnectionClosed(StoreUnavailable):
    """This side closed the connection; nothing was sent."""

    def __init__(self) -> None:
        super().__init__("The connection to NATS", "it was closed by this process")
        message = (
            "The connection to NATS is closed: this process ended it, and then used it. What `async with "
            "app.connect() as jet:` gives, and every repository of it, works within that block alone. Move the call "
            "into the block, or keep the block open for as long as the program needs it."
        )
        self.args = (message,)


class NoResponders(StoreUnavailable):
    """No service or stream listens on the subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        reason = "nobody listens there, so the stream, the consumer or JetStream itself is missing"
        if ".DIRECT.GET." in subject:
            reason += ", or `allow_direct` was taken from the stream (`eventjet doctor` names it)"
        super().__init__(subject, reason)


class LogUnusable(StoreError, Unreachable):
    """The server answers, but the log cannot be used; nothing was written by this call.

    The stream does not exist or is not eventjet's, or JetStream is switched off.
    """


class SingleResponse(LogUnusable):
    """This account imports JetStream's API in a way that delivers only the first of several answers."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        """The subject under which this account imports the API."""
        super().__init__(
            "JetStream's API",
            f"what this account imports as {subject} is exported as an ordinary service, which delivers one answer, "
            "and this request has several",
            "Set `response_type: Stream` in the export of the account that has JetStream.",
        )


class IdentityLost(LogUnusable):
    """A stream with the app's name carries no stream identity, so it is not known which log it is."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"The stream {stream!r}",
            "it carries no log identity: another program made it, or changed it and took that away",
            "Run `eventjet init --repair`, which finds the identity again; if eventjet never made this stream, give "
            "the app another name, or another account on this server.",
        )


class LogDrifted(LogUnusable):
    """A stream or bucket does not have the settings that eventjet declared; nothing was written by this call."""

    def __init__(self, stream: str, settings: Mapping[str, str], remedy: str = "") -> None:
        self.stream = stream
        self.settings = settings
        """Name of each changed setting → its present value, and its effect."""
        changed = "; ".join(f"{name} is {value}" for name, value in settings.items())
        super().__init__(
            f"The stream {stream!r}",
            f"it is not as eventjet declared it, and that stands in the way: {changed}",
            remedy or "Run `eventjet init --repair`, which sets back whatever the server lets it.",
        )


class HistoryBroken(StoreError):
    """An aggregate's history fails a check: versions are not contiguous, or a predecessor check fails."""

    def __init__(self, subject: str, position: int, reason: str) -> None:
        self.subject = subject
        self.position = position
        self.reason = reason
        super().__init__(
            f"The history of {subject} is broken at position {position}: {reason}. "
            "Nothing was decided on it; compare the stream with its mirror or archive before going on."
        )


class LogIncomplete(StoreError):
    """Events that were in the log are missing from it."""

    def __init__(self, where: str, reason: str) -> None:
        self.where = where
        self.reason = reason
        super().__init__(
            f"{where} is not whole: {reason}. Nothing was made of the rest. Look for what is gone in an archive "
            "(rebuild with `--from-archive`, or `eventjet restore` to another server), in a mirror or a backup; "
            "`eventjet init --repair` takes away what drops events, and `--accept-loss` beside it goes on without them."
        )


class ApiRefused(StoreError):
    """JetStream answered with an error."""

    def __init__(self, subject: str, code: int, err_code: int, description: str) -> None:
        self.subject = subject
        self.code = code
        self.err_code = err_code
        self.description = description
        super().__init__(
            f"JetStream refused {subject}: {description} ({code}, {err_code}). "
            "Run `eventjet doctor`, which names what differs from what the app needs, and what mends it."
        )


class StreamMissing(ApiRefused):
    """There is no stream with this name."""


class Evicted(StoreError):
    """The consumer was deleted, moved or shut down while a pull was waiting."""

    def __init__(self, consumer: str, reason: str) -> None:
        self.consumer = consumer
        self.reason = reason
        super().__init__(
            f"Consumer {consumer!r} ended the pull: {reason}. Check that the lease is still held before pulling again."
        )


class DeliveryGap(StoreError):
    """A delivery does not follow the previous one, because another client pulls from the consumer, or one was lost."""

    def __init__(self, consumer: str, position: int, reason: str) -> None:
        self.consumer = consumer
        self.position = position
        self.reason = reason
        super().__init__(
            f"Consumer {consumer!r} delivered position {position}, but {reason}. "
            "Give the lease up and start again from the stored position."
        )


class CodecError(EventjetError):
    """An event could not be encoded, or a record could not be decoded."""


class UnknownEvent(CodecError):
    """No declared event has this wire name and schema."""

    def __init__(self, type_name: str, schema: int, position: int, data: bytes, declared_schema: int = 0) -> None:
        self.type_name = type_name
        self.schema = schema
        self.position = position
        self.data = data
        self.declared_schema = declared_schema
        """The schema of this event that the application declares; 0 if it does not declare the name."""
        what = f"The event at position {position} is {type_name!r} schema {schema}, which this application does not "
        if 0 < declared_schema < schema:
            super().__init__(
                f"{what}declare: it knows schema {declared_schema}, so a newer release recorded the event. Deploy that "
                "release here; this one cannot read the event."
            )
            return
        super().__init__(
            f"{what}declare. If a newer release recorded it, deploy that. If it has another name now, give its event "
            f"`formerly=({type_name!r},)`. Only if nobody needs its data, list it in `retired_events`: then it is "
            "passed over."
        )


class UnknownAggregate(CodecError):
    """The log is of an aggregate that the application does not declare: it has its events, or was made for it."""

    def __init__(self, stream: str, aggregate: str, histories: int, event_type: str, position: int) -> None:
        self.stream = stream
        self.aggregate = aggregate
        self.histories = histories
        """How many aggregates of this name have events; 0 for a log that was made for this aggregate and is empty."""
        self.event_type = event_type
        """The wire name of the last of their events; empty for an empty log."""
        self.position = position
        """The position of the last of their events; 0 for an empty log."""
        holds = f"has events of {histories:,} {aggregate!r} (the last one is {event_type!r} at position {position:,})"
        super().__init__(
            f"The log {stream!r} {holds if histories else f'was made for {aggregate!r} and is empty'}, "
            f"and this application declares no such aggregate or process. {unknown_aggregate_remedy(aggregate)}"
        )


def unknown_aggregate_remedy(aggregate: str) -> str:
    """Return what to do where the log has an aggregate that the application does not declare."""
    return (
        f"If {aggregate!r} is called otherwise now, give it its name back, whatever its class is called: "
        f"@aggregate({aggregate!r}). If a newer release records it, deploy that. If it is another application's, give "
        "this one a name or an account of its own. Only if nobody needs it any more, list it in `retired_aggregates`."
    )


_MISSING = re.compile(r"([\w.\[\]]+): (?:Field required|missing)(?:;|$)")
"""The first field of the class that a stored body lacks, in the reason of a `ValidationError`."""


def _is_json_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


class UndecodableEvent(CodecError):
    """The stored bytes are not the event their headers announce."""

    def __init__(
        self, type_name: str, position: int, data: bytes, reason: str, unknown_aggregate: str | None = None
    ) -> None:
        self.type_name = type_name
        self.position = position
        self.data = data
        self.reason = reason
        self.unknown_aggregate = unknown_aggregate
        """The aggregate of its subject if the application does not declare it: the event may be sound."""
        self.refused_by_class = reason.startswith("ValidationError") and _is_json_object(data)
        """Whether only the class of this release refuses the body: another release may read it."""
        remedy = "Inspect it with `eventjet tail`; upcast it, or have everybody pass over it with `eventjet skip`."
        if self.refused_by_class:
            missing = _MISSING.search(reason)
            default = f"give `{missing[1]}` a default, or " if missing else ""
            remedy = (
                f"If a newer release recorded it, deploy that. Otherwise {default}raise `schema` and write an "
                "upcaster. Only if nobody needs the event, have everybody pass over it with `eventjet skip`."
            )
        if unknown_aggregate is not None:
            remedy = unknown_aggregate_remedy(unknown_aggregate)
        super().__init__(
            f"The event at position {position} ({type_name!r}, {len(data)} bytes) cannot be decoded: {reason}. {remedy}"
        )


class UndecodableMessage(UndecodableEvent):
    """A message of another stream does not have the form that the inbox takes."""

    def __init__(self, subject: str, position: int, data: bytes, reason: str) -> None:
        super().__init__(subject, position, data, reason)
        message = f"The message at position {position} on {subject!r} ({len(data)} bytes) cannot be taken: {reason}. "
        self.args = (
            f"{message}Have it sent as what the inbox takes, or go on without it (`eventjet quarantine drop`).",
        )


class UnencodableEvent(CodecError):
    """An event would not be read back equal, so it is not sent."""

    def __init__(self, event: Any, reason: str) -> None:
        self.event = event
        self.reason = reason
        super().__init__(
            f"{type(event).__name__} cannot be stored: {reason}. Give its fields values that survive JSON."
        )
