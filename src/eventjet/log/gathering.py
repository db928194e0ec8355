"""The stream of an inbox that the server gathers from other streams: made, checked, and watched (ADR 0072).

Nothing here changes a stream that exists. What an origin's operator may do, such as making it again, is only told.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

from eventjet.codec.cloud_events import origin_of
from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import overlap
from eventjet.domain.reactor import Inbox
from eventjet.errors import ApiRefused, LogUnusable, NoResponders, StoreError, StreamMissing
from eventjet.jetstream.api import Conversation, StreamState, create_stream, last_message, next_message, stream_info
from eventjet.jetstream.client import Client

_CHANGE = "Change `sources` of the inbox, or make the stream yourself."
_SILENT_S = 10.0
"""Silence in seconds after which a source counts as away: it sends a heartbeat every second."""
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_HASH_LEN = 8


def is_gathered(state: StreamState) -> bool:
    """Return whether a stream takes the messages of other streams, and none that anybody publishes to it."""
    return bool(state.config.get("sources")) and not state.config.get("subjects")


def source_names(state: StreamState) -> dict[str, tuple[str, str]] | None:
    """Return (stream, API prefix) of each source by its name in `Nats-Stream-Source`; None if it is not gathered."""
    if not is_gathered(state):
        return None
    places = [_place(source) for source in state.config["sources"]]
    return {f"{stream}:{_hash(api)}" if api else stream: (stream, api) for stream, api in places}


def _hash(text: str) -> str:
    """Return the hash that nats-server makes of an API prefix, and of the time at which a stream was made."""
    digest = hashlib.sha256(text.encode()).digest()
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:_HASH_LEN])


def _place(source: Mapping[str, Any]) -> tuple[str, str]:
    """Return (stream, API prefix) of a source as the server describes it."""
    external: Mapping[str, Any] = source.get("external") or {}
    return str(source["name"]), str(external.get("api") or "")


def _label(place: tuple[str, str]) -> str:
    stream, api = place
    return f"{stream!r} ({api})" if api else repr(stream)


async def gather(client: Client, inbox: Inbox[Any, Any], replicas: int) -> bool:
    """Make the stream of an inbox with sources unless it is there, and check it; return whether it was made."""
    start = {"opt_start_time": datetime.now(UTC).isoformat()} if inbox.start == "new" else {}
    config: dict[str, Any] = {
        "name": inbox.stream,
        "storage": "file",
        "retention": "limits",
        "num_replicas": replicas,
        "allow_direct": True,
        "sources": [source.config | start for source in inbox.sources],
    }
    is_new = False
    try:
        state = await client.ask(stream_info(inbox.stream))
    except StreamMissing:
        is_new = True
        try:
            state = await client.ask(create_stream(config))
        except ApiRefused as refusal:
            raise LogUnusable(_title(inbox), f"the server refused to make it: {refusal.description}", _CHANGE) from None
    check_gathering(state, inbox)
    origins = await client.run(reading_origins(state))
    check_origins(origins, inbox)
    return is_new


def check_gathering(state: StreamState, inbox: Inbox[Any, Any]) -> None:
    """Raise `LogUnusable` where an inbox's stream does not gather what was declared, or would lose or mix messages."""
    config = state.config
    actual = [(*_place(source), str(source.get("filter_subject") or "")) for source in config.get("sources") or ()]
    declared = [(source.stream, source.prefix, source.subject) for source in inbox.sources]
    if declared and sorted(actual) != sorted(declared):
        lacks = [_label(place[:2]) for place in declared if place not in actual]
        others = [_label(place[:2]) for place in actual if place not in declared]
        reason = " and ".join(
            [
                *([f"it does not gather {', '.join(lacks)} as the inbox declares it"] if lacks else []),
                *([f"it gathers {', '.join(others)}, which the inbox does not declare so"] if others else []),
            ]
        )
        raise LogUnusable(
            _title(inbox), reason, f"Change `sources` of the inbox, or the stream: `nats stream edit {inbox.stream}`."
        )
    for fault in _config_faults(config) if actual else ():
        raise LogUnusable(
            _title(inbox), fault, f"Change it: `nats stream edit {inbox.stream}`; or name another stream."
        )


def _title(inbox: Inbox[Any, Any]) -> str:
    return f"The stream {inbox.stream!r} of the inbox {inbox.name!r}"


def _config_faults(config: Mapping[str, Any]) -> list[str]:
    """Return in words how a stream with sources would lose messages, or mix those of its sources."""
    sources: Sequence[Mapping[str, Any]] = config["sources"]
    faults: list[str] = []
    if config.get("subjects"):
        faults.append(
            "it has subjects beside its sources, so what anybody publishes there is mixed with what it gathers"
        )
    if config.get("subject_transform") or any(source.get("subject_transforms") for source in sources):
        faults.append("it transforms subjects, so messages of different streams may be mixed on one subject")
    if config.get("duplicate_window"):
        faults.append("it has a duplicate_window, within which one of two messages with the same Nats-Msg-Id is lost")
    if config.get("retention", "limits") != "limits":
        faults.append(f"its retention is {config['retention']}, so what another consumer has had is lost")
    places = [_place(source) for source in sources]
    faults += [
        f"it gathers {_label(place)} more than once, and a message of both subjects comes twice"
        for place in dict.fromkeys(places)
        if places.count(place) > 1
    ]
    return faults


def stalled_sources(state: StreamState) -> list[str]:
    """Return in words each source from which the server gathers nothing at present."""
    stalled: list[str] = []
    for source in state.sources:
        label, error, active = _label(_place(source)), source.get("error"), int(source.get("active") or 0)
        imports = imports_of(source)
        hint = f"; it needs {imports}" if imports else ""
        if error:
            stalled.append(f"{state.name!r} gets nothing from its source {label}: {error.get('description')}{hint}")
        elif active < 0:
            stalled.append(f"{state.name!r} has not heard of its source {label} yet{hint}")
        elif active / 1e9 > _SILENT_S:
            stalled.append(f"{state.name!r} has not heard of its source {label} for {active / 1e9:,.0f} s{hint}")
    return stalled


def imports_of(source: Mapping[str, Any]) -> str:
    """Return in words what the account imports for a source of another account; empty for other sources."""
    external: Mapping[str, Any] = source.get("external") or {}
    api, deliver = external.get("api"), external.get("deliver")
    if not deliver:
        return ""
    create = f"{api}.CONSUMER.CREATE.{source['name']}{'.>' if source.get('filter_subject') else ''}"
    return f"imports of {create}, {deliver}.> and $JS.FC.{source['name']}.>"


def lagging_sources(state: StreamState) -> list[tuple[str, int]]:
    """Return (source in words, how many of its messages are not gathered yet) of each source that lags."""
    return [(_label(_place(source)), int(source["lag"])) for source in state.sources if source.get("lag")]


@dataclass(frozen=True, slots=True)
class OriginState:
    """A source of a gathered stream, compared with what was gathered from it."""

    label: str
    subjects: tuple[str, ...]
    """The subjects that are gathered; empty where they are not known."""
    fault: str = ""
    """Why the origin could not be read; empty if it was."""
    made_again: str = ""
    """In words, that the origin was made again and what that means; empty if nothing shows it."""
    ungathered: int = 0
    """How many messages it has, if none of them has ever been gathered although all were asked for."""
    imports: str = ""
    """What the account imports for it, in words; empty unless it is of another account."""


def reading_origins(state: StreamState) -> Conversation[list[OriginState]]:
    """Read the streams that a stream is gathered from, as far as these credentials may.

    An origin that was made again has another identity than the messages that were gathered before (from nats-server
    2.15 on). A permission that is missing is a fault in the result.
    """
    origins: list[OriginState] = []
    names = source_names(state) or {}
    begun = [_place(source) for source in state.sources if source.get("seq")]
    for source in state.config.get("sources") or ():
        place, imports = _place(source), imports_of(source)
        label, subject_filter = _label(place), str(source.get("filter_subject") or "")
        try:
            origin: StreamState = yield stream_info(*place)
        except StreamMissing:
            origins.append(OriginState(label, (), "it does not exist"))
            continue
        except NoResponders as error:
            fault = f"nobody answers {error.subject}: the account does not import it, or the other does not export it"
            origins.append(OriginState(label, (), fault if imports else str(error)))
            continue
        except StoreError as error:
            origins.append(OriginState(label, (), str(error)))
            continue
        subjects = (subject_filter,) if subject_filter else tuple(origin.config.get("subjects") or ())
        gathered: list[tuple[int, str]] = []
        for subject in subjects:
            for request in (next_message(state.name, 1, subject), last_message(state.name, subject)):
                record: RawRecord | None = yield request
                noted = None if record is None else origin_of(record, names)
                if record is not None and noted is not None and (noted.stream, noted.api) == place and noted.made:
                    gathered.append((record[0], noted.made))
        is_all = not (subject_filter or source.get("opt_start_time") or source.get("opt_start_seq"))
        ungathered = origin.messages if is_all and not gathered and place not in begun else 0
        again = _made_again(sorted(gathered), origin)
        origins.append(OriginState(label, subjects, "", again, ungathered, imports))
    return origins


def _made_again(gathered: Sequence[tuple[int, str]], origin: StreamState) -> str:
    """Return in words that an origin was made again, from (position, identity) of its gathered messages."""
    if not gathered:
        return ""
    (_, first), (position, last) = gathered[0], gathered[-1]
    if last != _hash(origin.created):
        return (
            f"it was made again at {origin.created}, and the last gathered message, {position:,}, is of the one before"
        )
    if first != last:
        return f"it was made again before message {position:,} was gathered, and earlier ones are of the one before"
    return ""


def check_origins(origins: Sequence[OriginState], inbox: Inbox[Any, Any]) -> None:
    """Raise `LogUnusable` where two origins have messages on the same subjects."""
    for origin, other in combinations(origins, 2):
        common = [(first, second) for first in origin.subjects for second in other.subjects if overlap(first, second)]
        for first, second in common:
            raise LogUnusable(
                _title(inbox),
                f"its sources {origin.label} and {other.label} both have messages on {first} and {second}",
                "Give one of the two other subjects, or gather them into two streams with an inbox each.",
            )
