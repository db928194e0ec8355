"""Actions of the console: each is previewed, confirmed, recorded, and then carried out once.

An action that cannot be recorded as begun is not carried out. An action runs as a task of the console, so the visitor
may leave the page. `action_kinds` declares the kinds of actions.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from starlette.exceptions import HTTPException

from eventjet.app import App
from eventjet.archive.reading import folder_of
from eventjet.console.access import Visitor
from eventjet.console.jobs import Jobs
from eventjet.console.sources import Sources
from eventjet.errors import EventjetError, PromotionRefused, UsageError
from eventjet.operations import actions as audit
from eventjet.operations.actions import ActionRecord, Outcome
from eventjet.projections.app_ref import projections_of
from eventjet.rebuild.plan import CHOICES, EngineChoice
from eventjet.runtime import called
from eventjet.subscriptions.supervisor import chosen_of
from eventjet.text import counted

POSITIONS_MAX = 1_000
"""The most events that one action on a quarantine may name."""
_RUNNING_MAX = 20
_RECORDED_S = 5.0
"""Seconds that recording may take before an action is refused."""
_WAIT_S = 1.5
"""Seconds that the page waits for an action to end, so that a short action is over when it shows."""
_CLEARED_S = 20.0
"""Seconds that running actions have to clear up when the console ends."""
_END_TRIES = 3
_END_PAUSE_S = 1.0
ACTION_ID = re.compile(r"[0-9a-f]{32}")
"""The id of an action, of its form, and of the job that it starts."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_URL_MAX = 1_000
_LOG = logging.getLogger("eventjet.console")

Target: TypeAlias = Literal["work", "quarantine", "projections", "projection", "job"]


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """A requested action, from the query of a confirmation page or from its form."""

    action: str
    names: tuple[str, ...] = ()
    revision: int | None = None
    positions: tuple[int, ...] = ()
    engine: EngineChoice = "auto"
    from_archive: str = ""
    job: str = ""
    """The id of the job to cancel."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> ActionRequest:
        """Read a request from pairs of a field and its value; raises `HTTPException` 400 for invalid values."""
        fields: dict[str, list[str]] = {}
        for name, value in pairs:
            fields.setdefault(name, []).append(value)
        last_values = {name: values[-1].strip() for name, values in fields.items()}
        engine = last_values.get("engine") or "auto"
        job, archive = last_values.get("job", ""), last_values.get("from_archive", "")
        if engine not in CHOICES:
            raise HTTPException(400, f"The engine is one of {', '.join(CHOICES)}.")
        if job and not ACTION_ID.fullmatch(job):
            raise HTTPException(400, "A job is named by 32 hexadecimal digits.")
        if len(archive) > _URL_MAX:
            raise HTTPException(400, f"The URL of an archive has {_URL_MAX:,} characters at the most.")
        positions = tuple(dict.fromkeys(map(_number, _split(fields.get("position", ())))))
        if len(positions) > POSITIONS_MAX:
            raise HTTPException(400, f"{POSITIONS_MAX:,} events at the most are decided about at once.")
        names = tuple(dict.fromkeys(_split(fields.get("name", ()))))
        if not all(map(_NAME.fullmatch, names)):
            raise HTTPException(400, "A name has up to 64 letters, digits, dots, dashes and underscores.")
        revision = _number(last_values["revision"]) if last_values.get("revision") else None
        return cls(last_values.get("action", ""), names, revision, positions, engine, archive, job)

    def fields(self) -> list[tuple[str, str]]:
        """Return the fields of the form that confirms this request."""
        pairs = [
            ("action", self.action),
            ("name", ",".join(self.names)),
            ("revision", "" if self.revision is None else str(self.revision)),
            ("position", ",".join(map(str, self.positions))),
            ("engine", "" if self.engine == "auto" else self.engine),
            ("from_archive", self.from_archive),
            ("job", self.job),
        ]
        return [(name, value) for name, value in pairs if value]

    def details(self) -> dict[str, Any]:
        """Return what the audit table records of the request besides its action and names."""
        details = {"revision": self.revision, "positions": list(self.positions), "job": self.job}
        details |= {"engine": "" if self.engine == "auto" else self.engine, "from_archive": self.from_archive}
        return {name: value for name, value in details.items() if value}


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action will do, in plain words."""

    effects: Sequence[str]
    facts: Sequence[tuple[str, str]] = ()
    """The present state, as pairs of a label and a value."""
    refusal: str = ""
    """Why the action would be refused; nothing can be confirmed then."""
    fault: str = ""
    """Which part of the present state could not be read, and why."""


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of action: its preview and its operation."""

    name: str
    title: str
    """The verb on its button."""
    target: Target
    """What it acts on: any subscriptions, one quarantine, projections, one projection, or a job of this console."""
    preview: Callable[[Actions, ActionRequest], Awaitable[Preview]]
    run: Callable[[Actions, ActionRequest, ActionRecord], Awaitable[str]]
    """Carries out the action with the code of the command line, and returns the result as text."""
    is_harm: bool = False
    """Whether the action cannot be undone."""

    def check(self, app: App, request: ActionRequest) -> None:
        """Raise `UsageError` for a request without valid targets."""
        if self.target == "job":
            if not request.job:
                raise UsageError("Name the job to cancel.")
            return
        if not request.names:
            raise UsageError("Name what to act on.")
        if self.target in ("quarantine", "projection") and len(request.names) != 1:
            raise UsageError(f"{self.title} one at a time. Name one {self.target}.")
        if self.target.startswith("projection"):
            projections_of(app, request.names)
            if request.from_archive:
                folder_of(request.from_archive)
            return
        chosen = chosen_of(app, request.names)
        if request.revision is not None and (len(chosen.projections) != 1 or chosen.followers):
            raise UsageError("A revision is about one projection. Name one.")
        if self.target == "quarantine" and not request.positions:
            raise UsageError("Choose the events to decide about.")


class Actions:
    """The actions that one console runs, and its jobs."""

    def __init__(self, kinds: Mapping[str, Action], sources: Sources) -> None:
        self.sources = sources
        self.jobs = Jobs(sources.app, sources.settings)
        self.unrecorded: dict[str, str] = {}
        """Results that could not be recorded, by the id of the action."""
        self._kinds = kinds
        self._running: dict[str, asyncio.Task[None]] = {}

    def named(self, request: ActionRequest) -> Action:
        """Return the requested kind of action; raises `HTTPException` 400 for an invalid request."""
        action = self._kinds.get(request.action)
        if action is None:
            raise HTTPException(400, f"An action is one of {', '.join(self._kinds)}.")
        try:
            action.check(self.sources.app, request)
        except UsageError as error:
            raise HTTPException(400, str(error)) from None
        return action

    def is_running(self, action_id: str) -> bool:
        """Return whether the action runs in this console."""
        return action_id in self._running

    async def begin(self, visitor: Visitor, request: ActionRequest, form: str) -> str:
        """Record an action, start it unless the same form has started it before, and return its id.

        Returns when the action is over or after 1.5 seconds. Raises `HTTPException` for an invalid request, and when
        the action cannot be recorded; then nothing is done.
        """
        action = self.named(request)
        if not ACTION_ID.fullmatch(form):
            raise HTTPException(400, "This form is not of this console. Open the page again.")
        if form in self._running:
            return form
        if len(self._running) >= _RUNNING_MAX:
            raise HTTPException(503, f"{_RUNNING_MAX} actions are being carried out. Wait for one of them.")
        targets = request.names or (request.job,)
        begun = ActionRecord(form, self.sources.app.name, visitor.actor, request.action, targets, request.details())
        if await self._recorded(begun):
            task = asyncio.create_task(self._carry_out(action, request, begun))
            self._running[form] = task
            task.add_done_callback(lambda _: self._running.pop(form, None))
            await asyncio.wait({task}, timeout=_WAIT_S)
        return form

    async def close(self) -> None:
        """Cancel the running actions and wait at most 20 seconds for them to clear up."""
        running = set(self._running.values())
        if running:
            _LOG.warning("cancelled, and clearing away what was begun: %s", counted(len(running), "action"))
        for action_id in list(self._running):
            self.cancel(action_id)
        if running:
            await asyncio.wait(running, timeout=_CLEARED_S)

    def cancel(self, action_id: str) -> bool:
        """Cancel an action and return True; return False if this console runs no action of that id."""
        task, job = self._running.get(action_id), self.jobs.get(action_id)
        if task is None:
            return False
        if job is None or not job.is_ending:
            if job is not None:
                job.is_ending = True
            task.cancel()
        return True

    async def _recorded(self, begun: ActionRecord) -> bool:
        """Record the beginning; return whether the action must be carried out now."""
        writing = asyncio.ensure_future(audit.begin(self.sources.database, begun))
        done, _ = await asyncio.wait({writing}, timeout=_RECORDED_S)
        if not done:
            # The entry may be written after all, and an action that nobody carries out must not look as if it ran.
            late = asyncio.create_task(self._end_late(writing, begun))
            self._running[begun.id] = late
            late.add_done_callback(lambda _: self._running.pop(begun.id, None))
            raise HTTPException(503, f"Nothing was done: it could not be recorded within {_RECORDED_S:g} s.")
        try:
            return writing.result()
        except EventjetError as error:
            reason = f"Nothing was done, since it could not be recorded. {error} {self.remedy}"
            raise HTTPException(503, reason) from None

    @property
    def remedy(self) -> str:
        """How to create the audit table in an app without read models, for which `eventjet init` needs no database."""
        return "" if self.sources.app.projections else "As this app has no read models, run `eventjet db upgrade`."

    async def _end_late(self, writing: asyncio.Future[bool], begun: ActionRecord) -> None:
        try:
            if await writing:
                await self._ended(begun, "refused", "It was not recorded in time, so nothing was done.")
        except EventjetError:
            return  # the action was never recorded

    async def _carry_out(self, action: Action, request: ActionRequest, begun: ActionRecord) -> None:
        """Carry out an action and record its outcome, whatever the action raises."""
        outcome: Outcome
        try:
            outcome, result = "done", await called(action.run(self, request, begun), "What the action did")
        except asyncio.CancelledError:
            outcome, result = "cancelled", "It was cancelled, and what it had begun was cleared away."
        except (UsageError, PromotionRefused) as error:
            outcome, result = "refused", str(error)
        except EventjetError as error:
            outcome, result = "failed", str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody has to be told
            _LOG.error("the action %s failed: %s", begun.action, type(error).__name__, exc_info=error)
            outcome, result = "failed", f"{type(error).__name__}; its traceback is in the console's log."
        await self._ended(begun, outcome, result)

    async def _ended(self, begun: ActionRecord, outcome: Outcome, result: str) -> None:
        """Record the end of an action, with up to three tries when the database does not answer."""
        for remaining in reversed(range(_END_TRIES)):
            try:
                await audit.end(self.sources.database, begun.id, outcome, result)
            except EventjetError as error:
                if remaining:
                    await asyncio.sleep(_END_PAUSE_S)
                    continue
                _LOG.error("the end of the action %s %s could not be recorded: %s", begun.action, begun.id, error)
                while len(self.unrecorded) >= _RUNNING_MAX:
                    del self.unrecorded[next(iter(self.unrecorded))]
                self.unrecorded[begun.id] = f"It is {outcome}, and that could not be recorded. {result}\n{error}"
            return


def _split(values: Iterable[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise HTTPException(400, "A position and a revision are whole numbers.")
    return int(text)
