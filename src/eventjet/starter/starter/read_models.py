"""What is asked of the tasks, as SQL tables that follow from the events."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eventjet import Key, Recorded, projection

from starter.tasks import Added, Finished, TaskEvent


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A row of the table `tasks`."""

    task_id: Key[str]
    title: str
    done: bool = False


@projection("tasks")
def tasks(row: TaskRow | None, event: Recorded[TaskEvent]) -> TaskRow | None:
    match row, event.data:
        case _, Added(title=title):
            return TaskRow(event.aggregate_id, title)
        case TaskRow(), Finished():
            return replace(row, done=True)
        case _:
            return row
