"""`examine`: every part in a thread of its own, all bounded by one time, so that what hangs hides nothing else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eventjet.doctor.database import look_at_database
from eventjet.doctor.diagnosis import Diagnoses, Installation
from eventjet.doctor.environment import look_at_environment
from eventjet.doctor.followers import look_at_reactions
from eventjet.doctor.models import look_at_models
from eventjet.doctor.monitoring import look_at_monitoring
from eventjet.doctor.server import look_at_server
from eventjet.doctor.streams import look_at_streams
from eventjet.errors import EventjetError, Forbidden, LogUnusable, StoreError, Unauthorized, Unreachable
from eventjet.findings import Finding, Level

T = TypeVar("T")

_SAY_S = 0.3
"""How long before the end one that waits for another gives up."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Everything that was found."""

    app: str
    found: tuple[Finding, ...]
    """By part, in the order in which they were looked at."""
    left_out: int
    """Diagnoses beyond what one part may have."""
    own_fault: Exception | None = None
    """What is wrong with eventjet itself, or with the app's own code."""

    @property
    def counts(self) -> Mapping[Level, int]:
        """How many of each level."""
        found = Counter(one.level for one in self.found)
        return {level: found[level] for level in Level}


def examine(installation: Installation) -> Examined:
    """Look at all of it, and change nothing. Blocks for `timeout_s` at the most, and some seconds of the machine's."""
    deadline = time.monotonic() + installation.timeout_s
    server = _Part("server", lambda told: look_at_server(installation, told), deadline)
    syncing = _Part("monitoring", lambda told: look_at_monitoring(installation, told, server.outcome), deadline)
    database = _Part("database", lambda told: look_at_database(installation, told), deadline)
    streams = _Part("streams", lambda told: look_at_streams(installation, told, server.outcome), deadline)
    models = _Part(
        "read models", lambda told: look_at_models(installation, told, server.outcome, database.outcome), deadline
    )
    reactions = _Part("reactions", lambda told: look_at_reactions(installation, told, server.outcome), deadline)
    environment = _Part("environment", look_at_environment, deadline)
    parts: list[_Part[Any]] = [server, syncing, streams, database, models, reactions, environment]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    return Examined(
        installation.app.name,
        tuple(one for part in parts for one in part.found()),
        sum(part.told.left_out for part in parts),
        next((part.own_fault for part in parts if part.own_fault is not None), None),
    )


class _Part(Generic[T]):
    """One part; its thread is left alone when its time is over."""

    def __init__(self, name: str, look: Callable[[Diagnoses], T], deadline: float) -> None:
        self.told = Diagnoses(name)
        self.own_fault: Exception | None = None
        self._look = look
        self._deadline = deadline
        self._result: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, name=f"eventjet doctor {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def outcome(self) -> T | None:
        """What its look returned, once it has; None where it came to nothing, or takes too long.

        Whoever asks must have time left to say so.
        """
        try:
            return self._result.result(max(0.0, self._deadline - _SAY_S - time.monotonic()))
        except Exception:  # noqa: BLE001 - the part tells of it itself, of a time that was too short too
            return None

    def join(self) -> None:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))

    def found(self) -> list[Finding]:
        found = list(self.told.found)
        if self._thread.is_alive():
            what = "it did not answer in time, so the rest of it was not looked at"
            fix = "Look at its load, or allow more with `--timeout SECONDS`."
            found.append(Finding(self.told.part, "time", Level.UNREACHABLE, what, _UNSEEN, fix))
        return found

    def _run(self) -> None:
        try:
            result = self._look(self.told)
        except Exception as error:  # noqa: BLE001 - one part must not hide what the others find
            self._tell(error)
            self._result.set_exception(error)
        else:
            self._result.set_result(result)

    def _tell(self, error: Exception) -> None:
        told = self.told
        match error:
            case Unauthorized():
                fix = "Set EVENTJET_USER and EVENTJET_PASSWORD, EVENTJET_CREDENTIALS, EVENTJET_NKEY or EVENTJET_TOKEN."
                told.add("access", Level.UNREACHABLE, f"it refused the credentials ({error.reason})", _UNSEEN, fix)
            case Forbidden():
                told.add_forbidden("access", error)
            case LogUnusable():
                told.add_unusable("log", error)
            case Unreachable():
                told.add("reach", Level.UNREACHABLE, f"{error.component}: {error.reason}", _UNSEEN, error.remedy)
            case StoreError() | OSError():
                told.add("reach", Level.UNREACHABLE, str(error), _UNSEEN, "Look at the server's log, then try again.")
            case EventjetError():
                told.add("use", Level.FAULT, str(error), _UNSEEN)
            case _:
                self.own_fault = error


_UNSEEN = "what rests on it was not looked at"
