"""PURE: what a save may be, checked before anything is sent: one oversize frame closes the whole connection."""

from __future__ import annotations

from collections.abc import Sequence

from eventjet.codec.subjects import SERVER_MESSAGE_MAX, subject_of
from eventjet.errors import Refused
from eventjet.store.store import Append, NewEvent

BATCH_MAX = 1_000
"""Messages in one atomic batch (ADR-50)."""
_HEADERS_MAX = 400
"""Bytes of all other headers at the most: id, expectation, schema, version, and those of a batch."""


def check_save(app: str, writes: Sequence[Append]) -> None:
    """Raises `Refused` when the log could not take this, whatever it holds."""
    subjects = [subject_of(app, write.aggregate, write.aggregate_id) for write in writes]
    if len(writes) != 1:
        _check_members(writes, subjects)
    count = sum([len(write.events) for write in writes])
    if count > BATCH_MAX:
        raise Refused(f"A save of {count} events", f"{BATCH_MAX} is the limit", "Record fewer at once.")
    for subject, write in zip(subjects, writes, strict=True):
        if not write.events:
            raise Refused("A save", "it records nothing for one of its aggregates", "Leave that aggregate out.")
        for new in write.events:
            size = len(subject) + message_size(new)
            if size > SERVER_MESSAGE_MAX:
                raise Refused(
                    f"{new.encoded.type_name} of {size:,} bytes",
                    f"a message holds {SERVER_MESSAGE_MAX:,}, headers included",
                    "Keep large content elsewhere and record where it is.",
                )


def _check_members(writes: Sequence[Append], subjects: Sequence[str]) -> None:
    if not writes:
        raise Refused("A save", "it records nothing", "Give it at least one event.")
    if len(set(subjects)) < len(subjects):
        raise Refused("A save", "it names one aggregate twice", "Give each aggregate one list of events.")


def message_size(new: NewEvent) -> int:
    """Bytes of one event on the wire, at the most."""
    size = len(new.encoded.body) + len(new.encoded.type_name) + _HEADERS_MAX
    for name, value in new.context:
        size += len(name) + len(value) + 4
    return size
