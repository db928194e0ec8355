"""`python -m starter add ID TITLE`, and `done ID`: a command, and then the table."""

from __future__ import annotations

import asyncio
import os
import sys

from sqlalchemy import create_engine, select

from starter.app import app
from starter.read_models import tasks
from starter.tasks import NoSuchTask, Task


async def main(arguments: list[str]) -> None:
    async with app.connect() as jet:
        repository = jet.repository(Task)
        match arguments:
            case ["add", task_id, title]:
                done = await repository.execute(task_id, Task.add, title)
            case ["done", task_id]:
                done = await repository.execute(task_id, Task.finish)
            case _:
                sys.exit(__doc__)
        # The worker is another process: wait until the table has come so far.
        await jet.caught_up("tasks", position=done.position, timeout_s=30)
    with create_engine(os.environ["EVENTJET_DATABASE"]).connect() as connection:
        for row in connection.execute(select(tasks.table).order_by(tasks.table.c.task_id)):
            print("x" if row.done else "-", row.task_id, row.title)


try:
    asyncio.run(main(sys.argv[1:]))
except NoSuchTask as error:
    sys.exit(str(error))
