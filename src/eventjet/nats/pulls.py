"""The pulls that wait at a consumer: how much is asked for, and what the end of a pull means."""

from __future__ import annotations

import json

from eventjet.errors import ApiRefused, Evicted
from eventjet.nats.api import Consumer
from eventjet.nats.connection import NatsConnection
from eventjet.nats.protocol import number_in, publish_frame, status_of

_BYTES_MAX = 4 * 1024 * 1024
_ENDED_FULL = ("message size exceeds maxbytes", "batch completed")


class Pulls:
    """Keeps up to `window` messages asked for, in pulls of up to `batch`, overlapped.

    Counts by ADR-37: what was asked, less what arrived, less what a pull that ended early says it left.
    """

    def __init__(
        self,
        link: NatsConnection,
        consumer: Consumer,
        *,
        batch: int,
        window: int,
        heartbeat_s: float,
        expires_s: float = 30.0,
    ) -> None:
        limits = consumer.config
        batch = min(batch, limits.get("max_batch") or batch)
        self.outstanding = 0
        """Messages asked for that neither came nor were given up."""
        self.sid = link.subscribe(f"{link.inbox}.p")
        self._link = link
        self._consumer = consumer
        self._reply = f"{link.inbox}.p".encode()
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.name}"
        self._batch = batch
        self._window = max(batch, min(window, batch * (limits.get("max_waiting") or 512)))
        expires_ns = int(expires_s * 1e9)
        expires_ns = min(expires_ns, limits.get("max_expires") or expires_ns)
        room = max(_BYTES_MAX, link.max_payload + 65_536)
        self._request = {
            "expires": expires_ns,
            "idle_heartbeat": min(int(heartbeat_s * 1e9), expires_ns // 2),
            "max_bytes": min(room, limits.get("max_bytes") or room),
        }

    def ask(self, limit: int | None = None) -> None:
        """Top up; `limit` is how many messages are wanted in all beyond those already asked for."""
        frames: list[bytes] = []
        while (count := self._batch if limit is None else min(self._batch, limit)) > 0:
            if self.outstanding and self.outstanding + count > self._window:
                break
            request = json.dumps({"batch": count, **self._request}).encode()
            frames.append(publish_frame(self._subject, request, reply=self._reply))
            self.outstanding += count
            limit = None if limit is None else limit - count
        if frames:
            self._link.send(b"".join(frames))

    def arrived(self, count: int) -> None:
        """Take note of messages that came."""
        self.outstanding = max(0, self.outstanding - count)

    def ended(self, status: bytes) -> None:
        """Take note of a status: a heartbeat is nothing, an expired or full pull is asked for again by `ask`.

        Raises `Evicted` when the consumer is not there for us any more, `ApiRefused` when the server will not take
        such pulls.
        """
        code, description = status_of(status)
        if code == 100:
            return
        self.arrived(number_in(status, b"Nats-Pending-Messages") or 0)
        lowered = description.lower()
        if code in (404, 408) or (code == 409 and lowered.startswith(_ENDED_FULL)):
            return
        if code == 503:
            raise Evicted(self._consumer.name, "nobody answers for it")
        if code == 409 and not lowered.startswith(("exceeded maxrequest", "consumer is push")):
            raise Evicted(self._consumer.name, description)
        raise ApiRefused(self._subject, code, 0, description or "no description")
