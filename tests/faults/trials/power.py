"""Power cuts: a save that was called stored is there when the power is back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventjet.dev.nats import NatsServer
from eventjet.errors import Unreachable
from tests.faults.trials.commands import Commands
from tests.faults.trials.machine import Disk
from tests.faults.trials.trial import Trial, scenario
from tests.nats_cluster import NatsCluster

DEFAULT = "2m"
"""The server's own `sync_interval`."""
RETURNS_S = 120.0


def cut(servers: Sequence[NatsServer], disks: Sequence[Disk]) -> None:
    """Cut all at one moment; afterwards the disks have what was synced, and no server runs."""
    for server in servers:
        server.pause()
    for disk in disks:
        disk.cut()
    for server in servers:
        server.kill()
    for disk in disks:
        disk.restore()


def on_disk(disk: Disk, folder: Path, sync_interval: str) -> NatsServer:
    """Return a server whose data is on the disk, and its log and ports are not."""
    folder.mkdir()
    (folder / "data").symlink_to(disk.path)
    return NatsServer(folder, sync_interval=sync_interval)


def settles(sync_interval: str) -> float:
    """Return how long unknown saves may take. A control's log may be gone, so that none of them is ever settled."""
    return 5.0 if sync_interval == DEFAULT else 90.0


def single(trial: Trial, sync_interval: str, cuts: int) -> None:
    disk = trial.disk()
    folder = trial.folder / disk.path.name.replace("disk", "server")
    server = trial.stack.enter_context(on_disk(disk, folder, sync_interval))
    with trial.running([server.url], settles_s=settles(sync_interval)) as run:
        for _ in range(cuts):
            trial.wait()
            cut([server], [disk])
            server.start()
            trial.wait(0.5)
    server.stop()
    trial.note(f"{cuts} cuts, {run.commands.acked} saves acknowledged")


@scenario("power-single", needs=("disk",))
def power_single(trial: Trial) -> None:
    """The only server loses its power again and again, with `sync_interval: always`."""
    single(trial, "always", trial.options.rounds)


@scenario("power-single-default", needs=("disk",), must_lose=True)
def power_single_default(trial: Trial) -> None:
    """The control: the same once, with the server's own `sync_interval` of two minutes."""
    single(trial, DEFAULT, 1)


def clustered(trial: Trial, sync_interval: str) -> tuple[NatsCluster, list[Disk]]:
    """Three servers, each with a disk of its own."""
    disks = [trial.disk() for _ in range(3)]
    cluster = NatsCluster(sync_interval=sync_interval, data=[disk.path for disk in disks])
    return trial.stack.enter_context(cluster), disks


def back(cluster: NatsCluster, trial: Trial) -> None:
    cluster.start(RETURNS_S)
    trial.wait()


@scenario("power-r3-one", needs=("disk",))
def power_r3_one(trial: Trial) -> None:
    """Of three servers one loses its power: the stream's leader, then any, in turns; `sync_interval: always`."""
    cluster, disks = clustered(trial, "always")
    with trial.running(cluster.urls) as run:
        for number in range(trial.options.rounds):
            trial.wait()
            leader = cluster.stream_leader(run.ledger.name)
            server = leader if number % 2 == 0 and leader is not None else trial.chance.choice(cluster.servers)
            cut([server], [disks[cluster.servers.index(server)]])
            trial.wait(2)
            back(cluster, trial)
    trial.note(f"{trial.options.rounds} cuts of one server")


@scenario("power-r3-all", needs=("disk",))
def power_r3_all(trial: Trial) -> None:
    """All three servers lose their power at once, again and again, with `sync_interval: always`."""
    cluster, disks = clustered(trial, "always")
    with trial.running(cluster.urls):
        for _ in range(trial.options.rounds):
            trial.wait()
            cut(cluster.servers, disks)
            back(cluster, trial)
    trial.note(f"{trial.options.rounds} cuts of all three")


@scenario("power-r3-all-default", needs=("disk",), must_lose=True)
def power_r3_all_default(trial: Trial) -> None:
    """The control: all three at once with the server's own `sync_interval`."""
    cluster, disks = clustered(trial, DEFAULT)
    with trial.running(cluster.urls, settles_s=settles(DEFAULT)):
        trial.wait()
        cut(cluster.servers, disks)
        back(cluster, trial)


def swap(trial: Trial, sync_interval: str, swaps: int) -> None:
    cluster, disks = clustered(trial, sync_interval)
    with trial.running(cluster.urls, settles_s=settles(sync_interval)) as run:
        for _ in range(swaps):
            trial.wait()
            leader = cluster.stream_leader(run.ledger.name) or cluster.servers[0]
            behind, other = trial.chance.sample([server for server in cluster.servers if server is not leader], 2)
            for disk in disks:
                disk.write_back()
            # Killed, not stopped: what the leader sends to a stopped server waits for it in the kernel.
            behind.kill()
            # What is stored from here on is on two servers.
            run.commands.await_acks(20, 300.0)
            trial.wait()
            cut([other], [disks[cluster.servers.index(other)]])
            leader.pause()
            behind.start()
            other.start()
            # These two are a majority, which knows only what the power cut has left. They agree within 7 s; but every
            # writer went over to the leader before that stood still, and leaves it after 20 s of silence.
            trial.note(_gap_note(run.commands))
            leader.resume()
            try:
                back(cluster, trial)
            except Unreachable:
                if sync_interval != DEFAULT:
                    raise
                # They may have lost what they had agreed on among themselves: begun from their disks, they elect anew.
                trial.note("the three did not agree on a leader until they were started again")
                back(cluster, trial)
    trial.note(f"{swaps} swaps")


def _gap_note(commands: Commands) -> str:
    commands.await_silence(0.5, 5.0)
    try:
        return f"the new majority acknowledged a save after {commands.await_acks(10, 40.0):.1f} s"
    except AssertionError:
        return "the new majority acknowledged nothing for 40 s"


@scenario("quorum-swap", needs=("disk",))
def quorum_swap(trial: Trial) -> None:
    """A follower is down while two servers store; one of them loses its power and the other stands still: the

    server that was behind and the one whose power is back go on as the majority. `sync_interval: always`.
    """
    swap(trial, "always", trial.options.rounds)


@scenario("quorum-swap-default", needs=("disk",), must_lose=True)
def quorum_swap_default(trial: Trial) -> None:
    """The control: the same once, with the server's own `sync_interval`.

    Servers that have lost what they had agreed on may never agree again, so a second swap might find no majority.
    """
    swap(trial, DEFAULT, 1)
