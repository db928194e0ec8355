"""Writers and the server are killed while many race for few values: no two ever share one, and every claim fits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from eventjet import App, Settings
from eventjet.commands.unique import check_claims
from eventjet.dev.nats import NatsServer
from eventjet.domain.claim import Released, Taken
from eventjet.domain.unique import CLAIMS
from eventjet.errors import StoreUnavailable, Unreachable
from eventjet.jet import Jet
from tests.contracts.unique_contract import User
from tests.faults.claimants import NAMES, USERS
from tests.forked import ROOT, Forked
from tests.logs import fresh_name
from tests.nats_cluster import NatsCluster

CLUSTER_KILLS = int(os.environ.get("EVENTJET_TEST_UNIQUE_CLUSTER_KILLS", "4"))
KILLS = int(os.environ.get("EVENTJET_TEST_UNIQUE_KILLS", "12"))
WRITERS = 3
EVENTS = 60
"""The least number between two kills."""
WAIT_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(600 + 30 * KILLS)
async def test_values_stay_unique_while_writers_and_the_server_are_killed(tmp_path: Path, processes: ExitStack) -> None:
    server = processes.enter_context(NatsServer(tmp_path / "nats"))
    server.start()
    name, chance = fresh_name("claims"), random.Random(KILLS)
    app = App(name, aggregates=[User])

    def writer(seed: int) -> Forked:
        return begun(server.url, name, seed, tmp_path, processes)

    async with app.connect(servers=server.url) as jet:
        await jet.init()
        writers = [writer(seed) for seed in range(WRITERS)]
        for kill in range(KILLS):
            await grown(jet, writers)
            if kill % 3 == 2:
                server.kill()
                server.start()
            else:
                victim = writers.pop(chance.randrange(WRITERS))
                victim.send_signal(signal.SIGKILL)
                victim.wait(WAIT_S)
                writers.append(writer(WRITERS + kill))
        await grown(jet, writers)
        ended(writers)
        await judge(jet)


@pytest.mark.slow
@pytest.mark.timeout(900 + 60 * CLUSTER_KILLS)
async def test_values_stay_unique_while_the_logs_leader_is_killed(tmp_path: Path, processes: ExitStack) -> None:
    cluster = processes.enter_context(NatsCluster())
    processes.callback(cluster.kill)  # a clean end would take some seconds
    name = fresh_name("claims")
    settings = Settings(servers=tuple(cluster.urls), replicas=3)
    async with App(name, aggregates=[User]).connect(settings) as jet:
        await jet.init()
        writers = [begun(cluster.url, name, seed, tmp_path, processes) for seed in range(WRITERS)]
        for _ in range(CLUSTER_KILLS):
            await grown(jet, writers)
            leader = led_by(cluster, name)
            leader.kill()
            await grown(jet, writers)  # the other two go on
            leader.start()
            cluster.wait_ready()
        await grown(jet, writers)
        ended(writers)
        await judge(jet)
        users = jet.repository(User)
        for number in range(USERS):  # none is stuck: whoever has something gives it up, and another takes all there is
            await users.execute(f"u-{number}", User.leave)
        for number in range(NAMES):
            await users.execute(f"new-{number}", User.call, f"n-{number}@bank")
            await users.execute(f"new-{number}", User.phone, f"n-{number}@bank")


def led_by(cluster: NatsCluster, stream: str) -> NatsServer:
    """Return the server that leads the log, once there is one."""
    deadline = time.monotonic() + WAIT_S
    while (leader := cluster.stream_leader(stream)) is None:
        assert time.monotonic() < deadline, "the log has no leader"
        time.sleep(0.05)
    return leader


def begun(url: str, app: str, seed: int, folder: Path, processes: ExitStack) -> Forked:
    """Start a writer, killed with the test."""
    log = folder / f"writer-{seed}.log"
    environ = {**os.environ, "EVENTJET_SAVE_TIMEOUT_S": "5"}
    started = Forked(
        "tests.faults.claimants", [url, app, str(seed)],
        folder=ROOT, environ=environ, out=log, err=log, path=[str(ROOT)],
    )  # fmt: skip
    processes.callback(lambda: started.poll() is None and started.kill())
    return started


def ended(writers: list[Forked]) -> None:
    for writer in writers:
        writer.kill()
        writer.wait(WAIT_S)


async def grown(jet: Jet, writers: list[Forked]) -> None:
    """Wait until the log has grown by so many events."""
    deadline, before = time.monotonic() + WAIT_S, 0
    while time.monotonic() < deadline:
        assert all(writer.poll() is None for writer in writers), "a writer ended by itself"
        try:
            last = (await jet.log()).last
        except (StoreUnavailable, Unreachable):
            continue
        before = before or last
        if last >= before + EVENTS:
            return
    raise AssertionError("the log does not grow")


async def judge(jet: Jet) -> None:
    """Check the states, the claims, and the log at every position."""
    users = jet.repository(User)
    states = [await users.load(f"u-{number}") for number in range(USERS)]
    emails = Counter(state.email for state in states if state.email)
    phones = Counter(phone for state in states for phone in set(state.phones))
    assert max([*emails.values(), *phones.values()]) == 1, (emails, phones)
    for constraint in ("email", "phone"):
        report = await check_claims(users.unique, constraint)
        assert report.sound, report
    holders: dict[str, str] = {}
    async for event in jet.tail():
        if event.aggregate != CLAIMS:
            continue
        if isinstance(event.data, Taken):
            assert holders.setdefault(event.aggregate_id, event.data.holder) == event.data.holder
        elif isinstance(event.data, Released):
            assert holders.pop(event.aggregate_id) == event.data.holder
