"""`eventjet serve`: chosen decisions as commands over the wire."""

from __future__ import annotations

import asyncio

from eventjet.cli.running import until_signalled
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import LogFormat, LogFormatOption, log_to_stderr, note
from eventjet.errors import UsageError


@on_app(database=False)
def serve(at: AppTarget, logs: LogFormatOption = LogFormat.TEXT) -> None:
    """Serve the app's commands (`App(served=[…])`) as a NATS micro-service, until SIGTERM or Ctrl-C.

    Any number may run: they share the requests. What is in hand is finished first.
    """
    log_to_stderr(logs)
    if not at.app().served:
        raise UsageError("The app serves nothing. List its commands in App(served=[served(…)]).")
    asyncio.run(_serve(at))


async def _serve(at: AppTarget) -> None:
    from eventjet.commands.repository import open_repositories
    from eventjet.serving.service import Service

    app = at.app()
    async with open_repositories(app, at.settings) as (repositories, client):
        await repositories.store.state()  # says that `init` is missing, where it is
        service = Service(repositories, client, app.served)
        await service.open()
        names = ", ".join(f"{app.aggregates[one.aggregate].name}.{one.name}" for one in app.served)
        note(f"ready: {names}")
        await until_signalled()
        note("stopping: what is in hand is finished first")
        await service.close()
