"""Room that runs out: full disks, limits of the stream and of the account."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.jetstream.api import stream_info, update_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from tests.faults.trials.power import on_disk
from tests.faults.trials.trial import Run, Trial, recovered, scenario
from tests.tables import execute

STARVES_S = 60.0
FILLS_MAX = 300
"""The most files of a megabyte each."""


@scenario("disk-full-nats", needs=("disk",))
def disk_full_nats(trial: Trial) -> None:
    """The disk of the only server is full, and later has room again; then the server is started anew."""
    disk = trial.disk(64)
    server = trial.stack.enter_context(on_disk(disk, trial.folder / "server", "always"))
    with trial.running([server.url]) as run:
        for _ in range(trial.options.rounds):
            trial.wait()
            ballast = disk.fill()
            run.commands.await_silence(2.0, STARVES_S)
            trial.note(f"full: {run.commands.refusals()}")
            ballast.unlink()
            if not recovered(trial, run, "room again", 20.0):
                server.stop()
                server.start()
                assert recovered(trial, run, "started anew")
    server.stop()


@scenario("disk-full-postgres", needs=("disk",))
def disk_full_postgres(trial: Trial) -> None:
    """The disk of the read models' PostgreSQL is full, and later has room again; the worker goes on by itself."""
    disk = trial.disk(256)
    server = trial.stack.enter_context(NatsServer())
    postgres = trial.stack.enter_context(PostgresServer(disk.path / "postgres"))
    with trial.running([server.url], postgres.url):
        for _ in range(trial.options.rounds):
            trial.wait()
            ballast = disk.fill()
            trial.note(f"full: {refused_by(postgres)}")
            trial.wait()
            ballast.unlink()
            if not postgres.running:
                trial.note("PostgreSQL had ended, and was started again")
                postgres.start()
            trial.wait()


def refused_by(postgres: PostgresServer) -> str:
    """Use up the space that PostgreSQL has reserved on its disk; return its error."""
    try:
        execute(postgres.url, "create table if not exists filling (text varchar)")
        for _ in range(FILLS_MAX):
            execute(postgres.url, "insert into filling select repeat('x', 1000) from generate_series(1, 1000)")
    except DBAPIError as error:
        return str(error.orig).splitlines()[0]
    raise AssertionError("PostgreSQL finds room on a full disk")


def limited(trial: Trial, run: Run, limit: Callable[[bool], None], name: str) -> None:
    """Impose a limit, wait until saves end, and lift it."""
    for _ in range(trial.options.rounds):
        trial.wait()
        limit(True)
        assert run.commands.await_silence(1.0, STARVES_S), "the limit has no effect"
        before = len(run.commands.attempts)
        trial.wait()
        answers = {attempt.error for attempt in run.commands.attempts[before:] if attempt.error}
        trial.note(f"{name}: {', '.join(sorted(answers))}")
        began = time.monotonic()
        limit(False)
        run.commands.await_acks(10)
        trial.note(f"lifted: saves go on after {time.monotonic() - began:.1f} s")


@scenario("max-bytes", may=("torn",))
def max_bytes(trial: Trial) -> None:
    """The stream may grow no more (`max_bytes`), and later may again.

    The limit is lowered while others write, and nats-server 2.15.1 may tear a batch then: what it is told is unknown.
    """
    server = trial.stack.enter_context(NatsServer())
    with trial.running([server.url]) as run, NatsConnection.open(Endpoint.of(run.settings)) as link:

        def limit(on: bool) -> None:
            stream = link.ask(stream_info(run.ledger.name))
            link.ask(update_stream({**stream.config, "max_bytes": stream.bytes + 2_000 if on else -1}))

        limited(trial, run, limit, "max_bytes")


@scenario("account-limit", may=("torn",))
def account_limit(trial: Trial) -> None:
    """The account may store no more, and later may again; the server learns both by reloading its configuration.

    As with `max-bytes`, nats-server 2.15.1 may tear a batch that it stores meanwhile.
    """
    server = trial.stack.enter_context(NatsServer(config=account(None)))
    with trial.running([server.url.replace("//", "//app:app@")]) as run:

        def limit(on: bool) -> None:
            with NatsConnection.open(Endpoint.of(run.settings)) as link:
                stored = link.ask(stream_info(run.ledger.name)).bytes
            reload(server, account(stored + 2_000 if on else None))

        limited(trial, run, limit, "max_file of the account")


def reload(server: NatsServer, line: str) -> None:
    """Have the running server take another line of accounts."""
    config = server.directory / "nats.conf"
    lines = [setting for setting in config.read_text().splitlines() if not setting.startswith("accounts ")]
    config.write_text("\n".join([*lines, line, ""]))
    os.kill(server.pid, signal.SIGHUP)


def account(max_file: int | None) -> str:
    limits = "enabled" if max_file is None else f"{{ max_file: {max_file}, max_mem: 1MB }}"
    return f"accounts {{ A {{ jetstream: {limits}, users: [{{ user: app, password: app }}] }} }}"
