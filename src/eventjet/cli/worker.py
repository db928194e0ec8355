"""The commands `eventjet worker` and `serve`, and `pause` and `resume` for the subscriptions of workers."""

from __future__ import annotations

from typing import Annotated

from eventjet.cli.dev import prepare_here, served_names, serving
from eventjet.cli.output import Answer, LogFormat, LogFormatOption, log_to_stderr, note
from eventjet.cli.running import STATES, run_until_stopped, until_signalled
from eventjet.cli.target import AppTarget, argument, on_app, option, switch
from eventjet.errors import UsageError
from eventjet.runtime import run_async

NamesArgument = Annotated[list[str], argument("NAME", "Which ones.", "work")]
RevisionOption = Annotated[int | None, option("--revision", "N", "Another revision than the app declares.", min=1)]


@on_app()
def worker(
    at: AppTarget,
    names: Annotated[
        list[str] | None, argument("NAME", "Projections, reactors, processes; default: all of the app.", "work")
    ] = None,
    http: Annotated[
        str | None,
        option(
            "--http", "HOST:PORT", "Serve /healthz and /metrics there; else nowhere.", envvar="EVENTJET_WORKER_HTTP"
        ),
    ] = None,
    make: Annotated[bool, switch("--prepare", "", hidden=True)] = False,
    logs: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Keep read models up to date and do what events lead to, until SIGTERM or Ctrl-C; current work is finished first.

    Any number may run: each projection, reactor and process is worked on by one of them, and the others stand by.
    """
    from eventjet.subscriptions.health import address_of

    log_to_stderr(logs)
    address = None if http is None else address_of(http)
    chosen = at.work(names or []).names
    if not chosen and not make:
        raise UsageError("The app declares nothing to work on. List a projection or a reactor in its App.")

    async def work(names_text: str) -> None:
        await run_until_stopped(at, chosen, lambda kept: note(f"ready: {names_text}; {kept or STATES}"), http=address)

    async def run() -> None:
        if not make:
            await work(", ".join(chosen))
            return
        # `dev --reload`, whose worker may come with new tables, and with new commands to serve
        await prepare_here(at)
        async with serving(at):
            await work(", ".join([*chosen, *served_names(at)]) or "nothing to work on")

    run_async(run())


@on_app(database=False)
def serve(at: AppTarget, logs: LogFormatOption = LogFormat.TEXT) -> None:
    """Serve the app's commands (`App(served=[…])`) as a NATS micro-service, until SIGTERM or Ctrl-C.

    Any number may run: they share the requests. Requests that have begun are finished first.
    """
    from eventjet.commands.repository import open_repositories
    from eventjet.serving.service import Service

    log_to_stderr(logs)
    app = at.app()
    if not app.served:
        raise UsageError("The app serves nothing. List its commands in App(served=[served(…)]).")

    async def run() -> None:
        async with open_repositories(app, at.settings) as (repositories, client):
            await repositories.store.state()  # raises where `eventjet init` has not run
            service = Service(repositories, client, app.served)
            await service.open()
            names = ", ".join(f"{app.aggregates[command.aggregate].name}.{command.name}" for command in app.served)
            note(f"ready: {names}")
            await until_signalled()
            note("stopping: what is in hand is finished first")
            await service.close()

    run_async(run())


@on_app()
def pause(at: AppTarget, names: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let projections, reactors or processes stand still, all of them or none, until `eventjet resume`.

    Their workers stop before the next commit, or event, and stand by. A rebuild may go on; what it swaps in stays
    paused.
    """
    from eventjet.operations import actions

    done = run_async(actions.pause(at.app(), at.settings, names, revision))
    return Answer(done, [actions.change_text(at.app(), change) for change in done])


@on_app()
def resume(at: AppTarget, names: NamesArgument, revision: RevisionOption = None) -> Answer:
    """Let what is paused go on, all of it or none; a worker that stands by takes it at its next look."""
    from eventjet.operations import actions

    done = run_async(actions.resume(at.app(), at.settings, names, revision))
    return Answer(done, [actions.change_text(at.app(), change, resumed=True) for change in done])
