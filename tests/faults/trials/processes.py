"""Servers killed and stopped, connections that go silent, and processes without file descriptors."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from eventjet.dev.nats import NatsServer
from tests.faults.trials.trial import Run, Trial, recovered, scenario
from tests.nats_cluster import NatsCluster

RETURNS_S = 120.0


def alone(trial: Trial, config: str = "") -> NatsServer:
    """The only server."""
    return trial.stack.enter_context(NatsServer(config=config))


@scenario("kill-single")
def kill_single(trial: Trial) -> None:
    """The only server is killed and started again."""
    server = alone(trial)
    with trial.running([server.url]):
        for _ in range(trial.options.rounds * 3):
            trial.wait(0.7)
            server.kill()
            trial.wait(0.2)
            server.start()
    trial.note(f"{trial.options.rounds * 3} kills")


def struck(trial: Trial, strike: Callable[[NatsCluster, Run], None]) -> None:
    cluster = trial.stack.enter_context(NatsCluster())
    with trial.running(cluster.urls) as run:
        for _ in range(trial.options.rounds):
            trial.wait()
            strike(cluster, run)
            cluster.start(RETURNS_S)
            trial.wait()


@scenario("kill-r3-leader")
def kill_leader(trial: Trial) -> None:
    """Of three servers the one that leads the stream is killed, and comes back a while later."""

    def strike(cluster: NatsCluster, run: Run) -> None:
        (cluster.stream_leader(run.ledger.name) or cluster.servers[0]).kill()
        trial.note(f"the first save after a kill was acknowledged {run.commands.await_acks(1):.1f} s later")
        trial.wait(2)

    struck(trial, strike)


@scenario("kill-r3-all")
def kill_all(trial: Trial) -> None:
    """All three servers are killed at once."""
    struck(trial, lambda cluster, run: cluster.kill())


@scenario("stop-single")
def stop_single(trial: Trial) -> None:
    """The only server stands still (SIGSTOP) for longer than a request waits."""
    server = alone(trial)
    with trial.running([server.url], request_timeout_s=1.0):
        for _ in range(trial.options.rounds):
            trial.wait()
            server.pause()
            trial.wait(1.5)
            server.resume()


@scenario("stop-r3-leader")
def stop_leader(trial: Trial) -> None:
    """Of three servers the one that leads the stream stands still, is replaced, and goes on."""

    def strike(cluster: NatsCluster, run: Run) -> None:
        leader = cluster.stream_leader(run.ledger.name) or cluster.servers[0]
        leader.pause()
        run.commands.await_silence(0.5, 3.0)
        trial.note(f"twenty saves after a stop were acknowledged {run.commands.await_acks(20, 300.0):.1f} s later")
        trial.wait(2)
        leader.resume()

    struck(trial, strike)


@scenario("half-open")
def half_open(trial: Trial) -> None:
    """Connections go silent: they stay open, and nothing arrives any more, in neither direction."""
    server = alone(trial)
    with trial.running([server.url], proxied=True, request_timeout_s=1.0) as run:
        proxy = run.commands.proxy
        assert proxy is not None
        for number in range(trial.options.rounds):
            trial.wait()
            proxy.silent = True
            # Within a save's deadline, and beyond it.
            trial.wait(1.5 if number % 2 == 0 else 9)
            proxy.cut()
            proxy.silent = False
        trial.note(f"{proxy.connections} connections")


def descriptors(pid: int | str) -> int:
    """Return how many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@contextmanager
def without_descriptors() -> Generator[None]:
    """Keep this process from opening anything more, also when it closes something meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.0005):
            with suppress(OSError):
                opened.append(os.open(os.devnull, os.O_RDONLY))

    taker = threading.Thread(target=take, daemon=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors("self"), hard))
    taker.start()
    try:
        yield
    finally:
        ended.set()
        taker.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


@scenario("descriptors-client")
def descriptors_client(trial: Trial) -> None:
    """Clients lose their connections while their process cannot open another file."""
    server = alone(trial)
    with trial.running([server.url], proxied=True) as run:
        proxy = run.commands.proxy
        assert proxy is not None
        for _ in range(trial.options.rounds):
            trial.wait()
            with without_descriptors():
                proxy.cut()
                trial.wait(2)
    trial.note(f"{run.commands.refusals()} of the answers")


@scenario("descriptors-server")
def descriptors_server(trial: Trial) -> None:
    """The server cannot open another file, while connections are cut and come back.

    nats-server may store nothing after that until it is started anew, as after a full disk.
    """
    server = alone(trial)
    with trial.running([server.url], proxied=True) as run:
        proxy = run.commands.proxy
        assert proxy is not None
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        for _ in range(trial.options.rounds):
            trial.wait()
            used = descriptors(server.pid)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (max(8, used - 4), before[1]))
            proxy.cut()
            trial.wait(2)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
            if not recovered(trial, run, "descriptors again"):
                server.stop()
                server.start()
                assert recovered(trial, run, "started anew")
