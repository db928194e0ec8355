"""Decisions and projections are pure, so their tests need no server."""

from __future__ import annotations

from eventjet.testing import on, projected, scenario

from starter.read_models import TaskRow, tasks
from starter.tasks import Added, Finished, NoSuchTask, Task


def test_a_task_is_done_once() -> None:
    scenario(Task).given(Added(title="Tea")).when(Task.finish).then(Finished())
    scenario(Task).given(Added(title="Tea"), Finished()).when(Task.finish).then()


def test_a_task_that_was_never_added_cannot_be_done() -> None:
    scenario(Task).given().when(Task.finish).then_raises(NoSuchTask)


def test_the_table_shows_what_is_done() -> None:
    projected(tasks, on("t-1", Added(title="Tea"), Finished())).rows(TaskRow("t-1", "Tea", done=True))
