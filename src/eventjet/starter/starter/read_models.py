"""What is asked of the tasks, as SQL tables that follow from the events."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eventjet import Recorded, projection
from sqlalchemy import Boolean, Column, MetaData, String, Table

from starter.tasks import Added, Finished, TaskEvent


@dataclass(frozen=True, slots=True)
class TaskRow:
    task_id: str
    title: str
    done: bool = False


tasks_table = Table(
    "tasks",
    MetaData(),
    Column("task_id", String(200), primary_key=True),
    Column("title", String(500), nullable=False),
    Column("done", Boolean, nullable=False),
)


@projection("tasks", table=tasks_table)
def tasks(row: TaskRow | None, event: Recorded[TaskEvent]) -> TaskRow | None:
    match row, event.data:
        case _, Added(title=title):
            return TaskRow(event.aggregate_id, title)
        case TaskRow(), Finished():
            return replace(row, done=True)
        case _:
            return row
