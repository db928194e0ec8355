"""The voids of a log on the server: found, one request for each and one for the end, and recorded."""

from __future__ import annotations

from eventjet.codec.headers import (
    EXPECTED,
    MSG_ID,
    SCHEMA,
    TYPE,
    VERSION,
    VOID_REASON_MAX,
    VOID_TYPE,
    RawRecord,
    header_block,
    reason_in,
    void_body,
    void_subject,
    voided_by,
)
from eventjet.domain.identity import new_event_id
from eventjet.errors import Refused, StoreUnavailable
from eventjet.jetstream.api import WRONG_SEQUENCE, last_message, next_message
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection
from eventjet.log import outcome

VOIDS_MAX = 10_000
"""So many records of one log may be void."""


def voids_in(connection: NatsConnection, app: str) -> dict[int, str]:
    """Position → reason, as the leader knows them. Blocks."""
    found = _Voids(app)
    while (record := connection.ask(next_message(app, found.next, found.subjects))) is not None:
        found.add(record)
    return found.reasons


async def voids_of(client: Client, app: str) -> dict[int, str]:
    """As `voids_in`, for a loop."""
    found = _Voids(app)
    while (record := await client.ask(next_message(app, found.next, found.subjects))) is not None:
        found.add(record)
    return found.reasons


async def record_void(client: Client, app: str, position: int, reason: str) -> bool:
    """Declare a position void for good; False when it was before. Raises `Refused` and `StoreUnavailable`.

    Run again after an unanswered try, it stores nothing twice.
    """
    if not 0 < len(reason) <= VOID_REASON_MAX or not reason.isprintable():
        raise Refused("The reason of a void", f"it is not one line of 1 to {VOID_REASON_MAX} characters", "Give one.")
    named = {MSG_ID: new_event_id(), EXPECTED: "0", TYPE: VOID_TYPE, SCHEMA: "1", VERSION: "1"}
    subject = void_subject(app, position)
    reply = await client.request(subject, void_body(position, reason), header_block(named.items()), stream=app)
    answer = outcome.answer_in(reply[4])
    if isinstance(answer, outcome.Acked):
        return True
    if isinstance(answer, outcome.ErrorReply):
        if answer.code == WRONG_SEQUENCE:
            if await client.ask(last_message(app, subject)) is None:
                raise StoreUnavailable(f"The void of position {position}", "the server says it is there, and it is not")
            return False
        raise Refused(f"The void of position {position}", f"the server answered {answer.text!r}", "Nothing was stored.")
    raise StoreUnavailable(f"The void of position {position}", "the server's answer cannot be read")


class _Voids:
    """What was found so far, and where to look next."""

    def __init__(self, app: str) -> None:
        self.subjects = void_subject(app, "*")
        self.next = 1
        self.reasons: dict[int, str] = {}

    def add(self, record: RawRecord) -> None:
        self.next = record[0] + 1
        position = voided_by(record[2])
        if position is not None:
            self.reasons.setdefault(position, reason_in(record[4]))
        if len(self.reasons) > VOIDS_MAX:
            raise StoreUnavailable(self.subjects, f"there are more than {VOIDS_MAX:,}, which is not what voids are for")
