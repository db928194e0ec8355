"""The network between three servers is cut: what was called stored is stored, on whichever side it was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from eventjet.dev.nats import NatsServer
from tests.faults.trials.machine import Network
from tests.faults.trials.trial import Trial, scenario
from tests.nats_cluster import NatsCluster

ROUTES, CLIENTS = 6222, 4222
HEALS_S = 120.0


class Host(NatsServer):
    """A server on a host of its own."""

    def __init__(self, network: Network, number: int, config: str) -> None:
        self._network, self._number = network, number
        self.address = network.addresses[number]
        listen = f"listen: {self.address}:{CLIENTS}\nhttp: {self.address}:8222\n"
        super().__init__(config=listen + config)

    def start(self, timeout_s: float = 30.0) -> Self:
        with self._network.inside(self._number):
            return super().start(timeout_s)

    @property
    def url(self) -> str:
        return f"nats://{self.address}:{CLIENTS}"


class Hosts(NatsCluster):
    """Three servers on three hosts."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def _made(self, route_ports: Sequence[int]) -> list[NatsServer]:
        addresses = self._network.addresses
        routes = ", ".join(f"nats-route://{address}:{ROUTES}" for address in addresses)
        return [
            Host(
                self._network,
                number,
                f"server_name: n{number + 1}\n"
                f"cluster {{ name: eventjet, listen: {address}:{ROUTES}, routes: [{routes}] }}",
            )
            for number, address in enumerate(addresses)
        ]


def parted(trial: Trial, *, with_clients: bool) -> None:
    network = trial.stack.enter_context(Network(3))
    cluster = trial.stack.enter_context(Hosts(network))
    with trial.running(cluster.urls) as run:
        for _ in range(trial.options.rounds):
            trial.wait()
            leader = cluster.stream_leader(run.ledger.name) or cluster.servers[0]
            number = cluster.servers.index(leader)
            others = [address for address in network.addresses if address != network.addresses[number]]
            others += [] if with_clients else [network.gateway]
            network.cut_off(number, others)
            trial.note(f"the first save after a cut was acknowledged {run.commands.await_acks(1, 300.0):.1f} s later")
            run.commands.await_acks(20, 300.0)
            trial.wait(4)
            network.heal(number, others)
            cluster.wait_ready(HEALS_S)
            trial.wait()


@scenario("partition", needs=("network",), may=("stale",))
def partition(trial: Trial) -> None:
    """The stream's leader no longer hears the other two, and half of the clients still talk to it.

    Until it notices (some 10 s) it answers reads by itself, so that a decision that records nothing may be stale.
    """
    parted(trial, with_clients=True)


@scenario("partition-alone", needs=("network",))
def partition_alone(trial: Trial) -> None:
    """The stream's leader no longer hears the other two, nor any client."""
    parted(trial, with_clients=False)
