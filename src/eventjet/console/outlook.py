"""`Outlook`: one look, taken again and again, and why it comes to nothing while it does."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from eventjet.calls import called
from eventjet.errors import EventjetError

T = TypeVar("T")

SLOW_S = 1.3
"""A look that has no answer after so long is told of."""
_LOG = logging.getLogger("eventjet.console")


class Outlook(Generic[T]):
    """Of one thing; whatever ends a look, the next one is taken."""

    def __init__(self, what: str, look: Callable[[], Coroutine[Any, Any, T]], every_s: float) -> None:
        """`what` is said of a look without an answer, as "The log"."""
        self.value: T | None = None
        """What the last look that came to something found; kept over faults."""
        self.first = asyncio.Event()
        """Set once a look has come to something, or to nothing."""
        self._what = what
        self._look = look
        self._every_s = every_s
        self._fault = ""
        self._seen_at: float | None = None
        self._began: float | None = None
        self._next = 0.0

    @property
    def fault(self) -> str:
        """Why there is nothing new; empty while there is."""
        slow_s = 0.0 if self._began is None else time.monotonic() - self._began
        if not self._fault and slow_s > SLOW_S:
            return f"{self._what} has not answered for {slow_s:.0f} s."
        return self._fault

    @property
    def seen_s(self) -> float | None:
        """How old the value is; None while there is none."""
        return None if self._seen_at is None else time.monotonic() - self._seen_at

    async def run(self) -> None:
        """Look without end, never more often than it may be."""
        while True:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self._began = time.monotonic()
            self._next = self._began + self._every_s
            try:
                self.value = await called(self._look(), "A look")
            except (EventjetError, TimeoutError) as error:
                self._fault = str(error) or f"{self._what} did not answer in time."
            except Exception as error:  # noqa: BLE001 - told, and the next look is taken all the same
                _LOG.exception("a look of the console failed")
                self._fault = f"This is a fault of eventjet's own ({type(error).__name__}); see the console's log."
            else:
                self._fault = ""
                self._seen_at = time.monotonic()
            finally:
                self._began = None
            self.first.set()


async def in_thread(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, in a thread that the end of the program does not wait for."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if came.done():
            return
        if error is not None:
            came.set_exception(error)
        else:
            came.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            fault = error
        with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=run, name="eventjet ui look", daemon=True).start()
    return await came
