"""`PublicStream`: the stream of a publication, in which its last message says how far it has come.

The first message of each batch expects the publication's last message (a wildcard over its subjects, ADR-50), so
neither a deposed publisher nor a repeated batch adds anything twice, and the messages of two publishers stay in the
order of the log.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventjet.codec.cloud_events import POSITION, PublicMessage
from eventjet.codec.headers import EXPECTED, batch_blocks, header_lines, number_of
from eventjet.codec.subjects import covers, overlap
from eventjet.errors import ApiRefused, ConcurrencyConflict, LogUnusable, StoreError, StoreUnavailable, StreamMissing
from eventjet.jetstream import api
from eventjet.jetstream.api import StreamState
from eventjet.jetstream.client import Client
from eventjet.log.topology import IDENTITY, full_stream

EXPECTED_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
"""Header with the subjects whose last message is compared with the expected sequence."""


class PublicStream:
    """A publisher of one publication's events into its stream, for one task at a time."""

    def __init__(self, client: Client, stream: str, publication: str) -> None:
        self.prefix = f"{stream}.{publication}"
        self._publication = publication
        self._client = client
        self._stream = stream
        self._end: tuple[int, int] | None = None

    async def check(self) -> None:
        """Raise `LogUnusable` if the stream cannot be used for the publication."""
        await check_public_stream(self._client, self._stream, self._publication)

    async def published_until(self) -> int:
        """Return the log position of the last published event or 0; raises `StoreUnavailable` and `LogUnusable`."""
        if self._end is None:
            try:
                record = await self._client.ask(api.last_message(self._stream, f"{self.prefix}.>"))
            except (ApiRefused, StoreUnavailable) as error:
                raise await self._explained(error) from error
            self._end = (0, 0) if record is None else (record[0], number_of(record[3], POSITION) or 0)
        return self._end[1]

    async def publish(self, messages: Sequence[PublicMessage], position: int) -> None:
        """Publish the messages of the event at a log position, all of them or none.

        Raises `ConcurrencyConflict` if another publisher was quicker, after which `published_until` reads again;
        `StreamFull` and `LogUnusable` if the stream accepts nothing; and `StoreUnavailable`.
        """
        await self.published_until()
        assert self._end is not None
        last_sequence, _ = self._end
        lines = [header_lines(message.headers) for message in messages]
        lines[0] += header_lines([(EXPECTED, str(last_sequence)), (EXPECTED_OF, f"{self.prefix}.>")])
        *before, (subject, body, block) = [
            (message.subject, message.body, block) for message, block in zip(messages, batch_blocks(lines), strict=True)
        ]
        self._end = None  # until there is an answer, the messages may or may not be stored
        try:
            frame = await self._client.request(subject, body, block, earlier_messages=before, stream=self._stream)
            answer = api.answer_in(frame, f"The stream {self._stream}")
        except (ApiRefused, StoreUnavailable) as error:
            if isinstance(error, ApiRefused) and error.err_code in api.CONFLICTS:
                raise ConcurrencyConflict(f"{self.prefix}.>", last_sequence) from None
            raise await self._explained(error) from error
        if answer.get("duplicate"):
            raise ConcurrencyConflict(f"{self.prefix}.>", last_sequence)
        self._end = (int(answer["seq"]), position)

    async def _explained(self, error: ApiRefused | StoreUnavailable) -> StoreError:
        """Return a clearer error if the stream's settings explain this one, else the same error."""
        try:
            state = await check_public_stream(self._client, self._stream, self._publication)
        except LogUnusable as unusable:
            return unusable
        except StoreError:
            return error
        if not isinstance(error, ApiRefused):
            return error
        return full_stream(self._stream, state.config, error.err_code, error.description) or error


async def check_public_stream(client: Client, stream: str, publication: str) -> StreamState:
    """Return the state of a publication's stream; raises `LogUnusable` if it is missing or cannot be used."""
    try:
        state = await client.ask(api.stream_info(stream))
    except StreamMissing:
        state = None
    return check_public(state, stream, publication)


def check_public(state: StreamState | None, stream: str, publication: str) -> StreamState:
    """Return a stream's state; raises `LogUnusable` if it is missing or a publication cannot use it. PURE."""
    what = f"The stream {stream!r} of the publication {publication!r}"
    if state is None:
        remedy = f"Create it with the subject {stream}.{publication}.> and --allow-batch, or name another."
        raise LogUnusable(what, "it does not exist", remedy)
    if IDENTITY in state.metadata:
        raise LogUnusable(what, "it is the log of an app, and would have public events in it", "Name another stream.")
    config = state.config
    if not config.get("allow_atomic"):
        raise LogUnusable(what, "it does not take atomic batches", "Set `allow_atomic` on it.")
    if not any(covers(subject, f"{stream}.{publication}.*") for subject in config.get("subjects") or ()):
        remedy = f"Give it the subject {stream}.{publication}.>, or name another."
        raise LogUnusable(what, f"it does not listen to {stream}.{publication}.>", remedy)
    transform = config.get("subject_transform")
    if transform is not None and overlap(transform.get("src") or ">", f"{stream}.{publication}.*"):
        raise LogUnusable(
            what, f"its subject_transform {transform} stores what is published on other subjects", "Take that away."
        )
    for setting, effect in _PREVENTS.items():
        if config.get(setting):
            raise LogUnusable(what, f"{setting} is set on it: {effect}", "Take that away, or name another stream.")
    return state


_PREVENTS = {
    "no_ack": "it acknowledges nothing",
    "sealed": "it takes nothing any more",
    "allow_msg_counter": "it takes nothing but counters",
}
