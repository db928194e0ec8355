"""Parser and printer of the NATS client protocol: bytes in, frames out, and no I/O.

A byte stream gives the same frames however it is cut into chunks. Bytes that are not the protocol raise `ValueError`,
after which the parser must not be fed again. A parser buffers at most `LINE_MAX` + `FRAME_MAX` bytes.
Source: the NATS client protocol; ADR-4 for headers and status lines.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from eventjet.errors import ConnectionLost, Forbidden, Unauthorized, UsageError

Frame: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes]
"""A message: (subscription id, subject, reply subject or empty, header block or empty, body)."""

Control: TypeAlias = tuple[bytes, bytes]
"""A line of the protocol that is no message: (verb, argument); the verb is PING, PONG, INFO, +OK or -ERR."""

LINE_MAX = 65_536
"""Bytes in one control line at most; only an INFO that names a large cluster comes near."""

FRAME_MAX = 64 * 1024 * 1024 + LINE_MAX
"""Bytes of headers and body in one message at most: the largest payload a server can be configured for, and headers."""

_INBOX = (
    "Set EVENTJET_INBOX_PREFIX to the inbox that these credentials may hear: _INBOX_worker for the user worker of "
    "`eventjet nats-config`."
)
_VERBS = frozenset((b"PING", b"PONG", b"INFO", b"+OK", b"-ERR"))
_SUBJECT = re.compile(r"[^\s\x00-\x1f\x7f]{1,2000}")


class FrameParser:
    """A parser of one byte stream; it keeps only the bytes of the frame that is not complete yet."""

    __slots__ = ("_chunks", "_size", "_size_needed")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0
        self._size_needed = 0

    def feed(self, chunk: bytes) -> tuple[list[Frame], list[Control]]:
        """Return the messages and the control lines that this chunk completes, each in the order of the stream."""
        if self._chunks:
            self._chunks.append(chunk)
            self._size += len(chunk)
            if self._size < self._size_needed:
                return [], []
            chunk = b"".join(self._chunks)
        frames: list[Frame] = []
        controls: list[Control] = []
        position, size_needed = _parse(chunk, frames, controls)
        remaining = len(chunk) - position
        self._chunks = [chunk[position:]] if remaining else []
        self._size = remaining
        self._size_needed = size_needed
        return frames, controls


def _parse(data: bytes, frames: list[Frame], controls: list[Control]) -> tuple[int, int]:
    """Append the frames of `data`; return where the unfinished frame starts and how many bytes it needs at least.

    This is the hot loop of every bulk read, so it is written out: a search for one byte is twice as fast as for two.
    """
    position = 0
    size = len(data)
    find, append = data.find, frames.append
    while True:
        line_end = find(b"\r", position)
        if line_end < 0 or line_end + 2 > size:
            if size - position > LINE_MAX:
                raise ValueError(f"a control line of more than {LINE_MAX} bytes")
            return position, size - position + 1
        if data[position] == 72:  # H
            fields = data[position:line_end].split(b" ")
            if len(fields) == 6:
                verb, subject, sid, reply, header_size, total_size = fields
            else:
                verb, subject, sid, header_size, total_size = fields
                reply = b""
            start = line_end + 2
            end = start + int(total_size)
            if end + 2 > size:
                return position, _needed(end + 2 - position)
            body_start = start + int(header_size)
            if verb != b"HMSG" or not start <= body_start <= end or data[end] != 13:
                raise ValueError(f"a broken message: {data[position:line_end][:80]!r}")
            append((sid, subject, reply, data[start:body_start], data[body_start:end]))
            position = end + 2
        elif data[position] == 77:  # M
            verb, subject, sid, *rest = data[position:line_end].split(b" ")
            reply, total_size = (b"", *rest) if len(rest) == 1 else rest
            start = line_end + 2
            end = start + int(total_size)
            if end + 2 > size:
                return position, _needed(end + 2 - position)
            if verb != b"MSG" or start > end or data[end] != 13:
                raise ValueError(f"a broken message: {data[position:line_end][:80]!r}")
            append((sid, subject, reply, b"", data[start:end]))
            position = end + 2
        else:
            controls.append(_control(data[position:line_end]))
            position = line_end + 2


def _control(line: bytes) -> Control:
    verb, _, argument = line.partition(b" ")
    if verb not in _VERBS:
        raise ValueError(f"no frame of the protocol: {verb[:20]!r}")
    return verb, argument.strip()


def _needed(length: int) -> int:
    if length > FRAME_MAX + LINE_MAX:
        raise ValueError(f"a message of {length} bytes")
    return length


def publish_frame(subject: str | bytes, body: bytes = b"", *, reply: bytes = b"", headers: bytes = b"") -> bytes:
    """Return a PUB frame, or HPUB with a whole header block; raises `UsageError` for an invalid subject."""
    name, reply_to = checked_subject(subject), reply + b" " if reply else b""
    if headers:
        return b"HPUB %b %b%d %d\r\n%b%b\r\n" % (name, reply_to, len(headers), len(headers) + len(body), headers, body)
    return b"PUB %b %b%d\r\n%b\r\n" % (name, reply_to, len(body), body)


def checked_subject(subject: str | bytes) -> bytes:
    """Return a subject as bytes; raises `UsageError` for characters that would end its field of the control line."""
    text = subject if isinstance(subject, str) else subject.decode("utf-8", "replace")
    if not _SUBJECT.fullmatch(text):
        raise UsageError(f"{text[:60]!r} cannot be a NATS subject. Use 1 to 2000 characters without blanks.")
    return text.encode()


def status_of(headers: bytes) -> tuple[int, str]:
    """Return (code, description) of a header block such as `NATS/1.0 408 Request Timeout`; (0, "") without a status."""
    line = headers[8 : headers.find(b"\r\n")].strip() if headers.startswith(b"NATS/1.0") else b""
    code, _, description = line.partition(b" ")
    return (int(code), description.decode("utf-8", "replace")) if code.isdigit() else (0, "")


def nobody_listens(frame: Frame) -> bool:
    """Return whether nobody subscribes to a request's subject; a stored message like that has a position."""
    return not frame[4] and frame[3].startswith(b"NATS/1.0 503") and b"\r\nNats-Sequence: " not in frame[3]


def server_fault(text: str, peer: str) -> Exception:
    """Return the error for an `-ERR` line; all but permissions violations end the connection."""
    reason = text.strip("' ")
    lowered = reason.lower()
    if lowered.startswith("permissions violation"):
        subject = reason.split('"')[1] if reason.count('"') > 1 else "a subject"
        if "publish" in lowered:
            return Forbidden(subject, "publishing there is not permitted")
        return Forbidden(subject, "subscribing there is not permitted", _INBOX if "_INBOX" in subject else "")
    if "authorization" in lowered or lowered.endswith(("authentication expired", "authentication revoked")):
        return Unauthorized(f"the connection to {peer}", reason)
    return ConnectionLost(f"NATS at {peer}", f"the server said {reason!r}")
