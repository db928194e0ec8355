"""Which answer to a publish counts: only the answer of the stream that the publish is meant for (ADR 0046).

NATS delivers a publish to every subscriber of its subject in the account, and each of them may answer: the stream, a
stream of another JetStream domain that a leaf node connects, or any other subscriber. A stream's acknowledgement names
the stream and its domain; an error names the stream alone.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from eventjet.nats.protocol import Frame, nobody_listens
from eventjet.observability import logs

_log = logging.getLogger(__name__)

AMBIGUOUS_S = 60.0
"""How long answers are doubted after two answers to one publish named the same stream.

Errors are doubted, and acknowledgements, too, if the domain does not tell the streams apart. An acknowledgement that
was compared with the log vouches for later ones as long.
"""
PROBE = b"NATS/1.0\r\nNats-Expected-Stream: none.of.this.name\r\n\r\n"
"""Headers of a message that no stream stores, since stream names have no dot: each stream answers with an error."""
_EXPECTED_STREAM = 10060
_SEQUENCE_MAX = 1 << 63
_NAMED_MAX = 100


class StreamAnswer(NamedTuple):
    """An answer to a publish in the form of a stream's answer, whoever sent it."""

    stream: str
    domain: str
    sequence: int
    """Sequence of the acknowledged message; 0 in an error."""
    messages: int
    """How many messages the acknowledged batch has; 1 for a single message."""
    error: int
    """The code of an error, 0 for an error without a code; -1 in an acknowledgement."""

    @property
    def is_error(self) -> bool:
        return self.error >= 0


def stream_answer(body: bytes) -> StreamAnswer | None:
    """Parse an answer to a publish; None if it does not have the form of a stream's answer."""
    try:
        value: dict[str, Any] = orjson.loads(body)
        stream, domain, sequence = value.get("stream"), value.get("domain", ""), value.get("seq", 0)
        error = value["error"].get("err_code", 0) if "error" in value else -1
        messages = value.get("count", 1)
    except (ValueError, AttributeError, TypeError):
        return None
    if not isinstance(stream, str) or not isinstance(domain, str):
        return None
    # `isinstance` would accept a bool as an int.
    if type(sequence) is not int or type(error) is not int or type(messages) is not int:
        return None
    if error < 0 and ("error" in value or not 0 < sequence < _SEQUENCE_MAX):
        return None
    return StreamAnswer(stream, domain, sequence, messages, error)


class Answerers:
    """Those who answer a client's publishes besides the streams that are meant; each is logged once."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], str] = {}
        self._namesakes_until: dict[str, float] = {}
        """For each stream, until when a stream of its name in another domain is expected to answer, too."""
        self._errors_until: dict[str, float] = {}
        self._acks_until: dict[str, float] = {}

    def saw_other(self, stream: str, subject: str, frame: Frame, *, is_namesake: bool) -> str:
        """Note who else answers, perhaps for another stream of the name (`is_namesake`), and return that in words."""
        if is_namesake:
            self._errors_until[stream] = self._namesakes_until[stream] = time.monotonic() + AMBIGUOUS_S
        answer = stream_answer(frame[4])
        if answer is None:
            who = f"a subscriber that is no stream ({frame[4][:80]!r})"
        elif answer.domain:
            who = f"the stream {answer.stream} of the JetStream domain {answer.domain}"
        else:
            who = f"a stream that calls itself {answer.stream}, of no JetStream domain"
        self._name(stream, subject, who, "" if answer is None else f"{answer.stream}@{answer.domain}")
        return who

    @property
    def others(self) -> tuple[str, ...]:
        """The streams and subscribers that answered, and the subjects that they answered to, in words."""
        return tuple(self._named.values())

    def saw_second(self, stream: str, subject: str, answer: StreamAnswer, *, acks: int) -> None:
        """Note a second answer to one publish that names the stream.

        The second answer may come from a server that has lost the leadership and does not know it yet, or from a stream
        whose acknowledgements name another domain; otherwise the two streams cannot be told apart. `acks` is how many
        of the answers are acknowledgements.
        """
        now = time.monotonic()
        self._errors_until[stream] = now + AMBIGUOUS_S
        if acks > 1 or self._namesakes_until.get(stream, 0.0) <= now:
            self._acks_until[stream] = now + AMBIGUOUS_S
        if acks > 1:
            self._name(stream, subject, "a second stream of the same name and JetStream domain", "twin")
        elif answer.error == _EXPECTED_STREAM:
            self._name(stream, subject, "a second stream of the same name", "namesake")

    def doubt(self, stream: str, answer: StreamAnswer) -> str:
        """Return why an answer that names the stream may be another stream's; empty for an answer that is believed."""
        until = self._errors_until if answer.is_error else self._acks_until
        if until.get(stream, 0.0) <= time.monotonic():
            return ""
        kind = f"error {answer.error}" if answer.is_error else "an acknowledgement"
        return f"{kind} of a stream {stream!r}, and more than one answers"

    def _name(self, stream: str, subject: str, who: str, key: str) -> None:
        if (stream, key) not in self._named and len(self._named) < _NAMED_MAX:
            # Without the last token: the aggregate's id does not belong in a log file.
            pattern = f"{subject.rpartition('.')[0]}.*"
            self._named[stream, key] = f"{who} answers what is published to {pattern} for the stream {stream}"
            logs.ANSWERED_BY_ANOTHER.log(_log, stream=stream, subject=pattern, who=who)


@dataclass(slots=True, eq=False)
class ExpectedAnswer:
    """The answer that one publish expects; it judges each answer, in whatever number and order they arrive."""

    stream: str
    subject: str
    messages: int
    """How many messages the batch of the publish has; 1 for a single message."""
    domain: str | None
    """JetStream domain of the stream; None if it is not known."""
    answerers: Answerers
    is_answered: bool = False
    """Whether an answer arrived that may be the stream's, or that says that nobody listens."""
    other: str = ""
    """In words, who else answered this publish."""
    _acks: int = 0
    _errors: int = 0

    def accepts(self, frame: Frame) -> bool:
        """Return whether an answer may be the stream's, or says that nobody listens; other answers are ignored."""
        if nobody_listens(frame):
            self.is_answered = True
            return True
        answer = stream_answer(frame[4])
        is_namesake = answer is not None and answer.stream == self.stream
        if answer is None or not is_namesake or not self._fits(answer):
            self.other = self.answerers.saw_other(self.stream, self.subject, frame, is_namesake=is_namesake)
            return False
        if not answer.is_error:
            self._acks += 1
        else:
            self._errors += 1
        if self._acks + self._errors > 1:
            self.answerers.saw_second(self.stream, self.subject, answer, acks=self._acks)
        self.is_answered = True
        return True

    def best(self, frames: list[Frame]) -> tuple[Frame, StreamAnswer | None]:
        """Return the first acknowledgement among accepted answers, else an error, else that nobody listens."""
        answers = [(frame, stream_answer(frame[4])) for frame in frames]
        return min(answers, key=lambda pair: 2 if pair[1] is None else pair[1].is_error)

    def doubt(self, answer: StreamAnswer) -> str:
        """Return why an accepted answer may be another stream's; empty for an answer that is believed."""
        if not answer.is_error and self.domain is None:
            return f"an acknowledgement of a stream {self.stream!r}, whose JetStream domain is not known"
        return self.answerers.doubt(self.stream, answer)

    def _fits(self, answer: StreamAnswer) -> bool:
        if answer.is_error:
            return answer.domain in ("", self.domain)
        return self.domain in (None, answer.domain) and answer.messages == self.messages
