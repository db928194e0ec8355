"""`Notifier`: tells over core NATS how far projections are true, so that nobody has to ask the database all the time.

A thread and a link of its own: a worker's reading link is locked by the thread that waits on it, for up to half a
second, so nothing can be sent over it in time. Telling never waits and never fails. At most one publish is under way;
what is told meanwhile is merged, the newest position of each projection. What is lost is harmless (see `waiting`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from eventjet.codec.subjects import notice, notice_subject
from eventjet.errors import Forbidden, Unauthorized
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame
from eventjet.observability import logs

_log = logging.getLogger(__name__)

_REST_S = 0.005
"""Between two publishes: with tiny batches 200 notices a second say as much as thousands."""
_LISTEN_S = 5.0
"""How often an idle link is looked at: the server wants its pings answered."""
_RETRY_S = 1.0
_OPEN_S = 3.0
_END_S = 2.0

Revision = tuple[str, int]


class Notifier:
    """For one process; the thread starts with the first notice. `close` sends what is left."""

    def __init__(self, endpoint: Endpoint, app: str) -> None:
        self._endpoint = endpoint.with_name("eventjet worker notices")
        self._app = app
        self._changed = threading.Condition()
        self._news: dict[Revision, int] = {}
        self._closed = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._link: NatsConnection | None = None
        self._denied = False

    def tell(self, projection: str, revision: int, position: int) -> None:
        with self._changed:
            self._news[projection, revision] = position
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="eventjet notices", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send what is left, if that can be done at once, and end. Blocks for 2 s at the most."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        self._ended.set()
        if thread is not None:
            thread.join(_END_S)
            if thread.is_alive() and self._link is not None:
                self._link.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._news and not self._closed:
                    self._changed.wait(_LISTEN_S)
                news, self._news = self._news, {}
                closed = self._closed
            try:
                self._publish(news)
            except Exception as error:  # noqa: BLE001 - the thread goes on for as long as the worker does
                logs.NOTICES_WAIT.tell(_log, reason=error)
                self._drop_link()
                with self._changed:
                    self._news = {**news, **self._news}
                self._ended.wait(_RETRY_S)
            else:
                self._ended.wait(_REST_S)
            if closed:
                self._drop_link()
                return

    def _publish(self, news: Mapping[Revision, int]) -> None:
        if self._link is None:
            self._link = NatsConnection.open(self._endpoint, timeout_s=_OPEN_S)
            self._denied = False
        if news and not self._denied:
            frames = [
                publish_frame(notice_subject(self._app, name), notice(revision, position))
                for (name, revision), position in news.items()
            ]
            self._link.send(b"".join(frames))
        try:
            self._link.receive(0.0)
        except Unauthorized:
            raise
        except Forbidden as error:
            self._denied = True
            logs.NOTICES_DENIED.tell(_log, reason=error)

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
