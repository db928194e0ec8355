"""The skip markers of a log: read them from the server, and record one."""

from __future__ import annotations

from eventjet.codec.headers import (
    EXPECTED,
    MSG_ID,
    SCHEMA,
    SKIP_REASON_MAX,
    SKIP_TYPE,
    TYPE,
    VERSION,
    RawRecord,
    header_block,
    reason_in,
    skip_body,
    skip_subject,
    skipped_by,
)
from eventjet.domain.identity import new_event_id
from eventjet.errors import Refused, StoreUnavailable
from eventjet.jetstream.api import WRONG_SEQUENCE, Conversation, last_message, next_message
from eventjet.jetstream.client import Client
from eventjet.log import outcome

MARKERS_MAX = 10_000
"""How many records of one log may be skipped at most."""


def reading_skip_markers(app: str) -> Conversation[dict[int, str]]:
    """Read the position and reason of each skipped record from the leader, with one request for each and one more."""
    subjects = skip_subject(app, "*")
    reasons: dict[int, str] = {}
    record: RawRecord | None = yield next_message(app, 1, subjects)
    while record is not None:
        position = skipped_by(record[2])
        if position is not None:
            reasons.setdefault(position, reason_in(record[4]))
        if len(reasons) > MARKERS_MAX:
            raise StoreUnavailable(
                subjects, f"there are more than {MARKERS_MAX:,}, which is not what skip markers are for"
            )
        record = yield next_message(app, record[0] + 1, subjects)
    return reasons


async def record_skip_marker(client: Client, app: str, position: int, reason: str) -> bool:
    """Record a skip marker for a position, which cannot be undone; return False if the position had one already.

    It may be repeated after an unanswered try, and stores nothing twice. Raises `Refused` and `StoreUnavailable`.
    """
    if not 0 < len(reason) <= SKIP_REASON_MAX or not reason.isprintable():
        raise Refused("The reason of a skip marker", f"it is not a line of 1 to {SKIP_REASON_MAX} letters", "Give one.")
    headers = {MSG_ID: new_event_id(), EXPECTED: "0", TYPE: SKIP_TYPE, SCHEMA: "1", VERSION: "1"}
    subject = skip_subject(app, position)
    reply = await client.request(subject, skip_body(position, reason), header_block(headers.items()), stream=app)
    what = f"The skip marker of position {position}"
    match outcome.answer_in(reply[4]):
        case outcome.Acked():
            return True
        case outcome.ErrorReply(code=code) if code == WRONG_SEQUENCE:
            if await client.ask(last_message(app, subject)) is None:
                raise StoreUnavailable(what, "the server says it is there, and it is not")
            return False
        case outcome.ErrorReply(text=text):
            raise Refused(what, f"the server answered {text!r}", "Nothing was stored.")
        case _:
            raise StoreUnavailable(what, "the server's answer cannot be read")
