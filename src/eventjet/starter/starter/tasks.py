"""The domain: what may be decided about a task, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

from eventjet import aggregate, event


class NoSuchTask(Exception):
    """The task was never added."""


@event("task.added")
class Added:
    title: str


@event("task.finished")
class Finished:
    pass


TaskEvent = Added | Finished


@aggregate("task")
class Task:
    """One thing to do."""

    title: str | None = None
    done: bool = False

    # Decisions: pure, return what follows.

    def add(self, title: str) -> Added | None:
        return None if self.title else Added(title=title)

    def finish(self) -> Finished | None:
        if self.title is None:
            raise NoSuchTask("There is no such task; add it first.")
        return None if self.done else Finished()

    # Evolution: total, never refuses.

    def evolve(self, event: TaskEvent) -> Task:
        match event:
            case Added(title=title):
                return replace(self, title=title)
            case Finished():
                return replace(self, done=True)
