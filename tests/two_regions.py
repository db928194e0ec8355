"""Two JetStreams with domains of their own, east and west, which leaf nodes link: servers alone, or clusters."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.jetstream.answers import PROBE
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import every_config
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings


@dataclass(frozen=True)
class Regions:
    """The servers of the log, and the servers of its mirror."""

    east: NatsServer
    west: NatsServer

    def settings(self, folder: Path) -> Settings:
        """Return the settings of an application with its log in the east, which reads from the mirror in the west."""
        return Settings(
            servers=(self.east.url,), read_from=(self.west.url,), database=f"sqlite:///{folder}/models.db",
            request_timeout_s=30.0, save_timeout_s=120.0,
        )  # fmt: skip


def stored(app: str) -> list[str]:
    """Return the subjects of all that an app stores."""
    return [subject for config in every_config(app, 1) for subject in config["subjects"]]


def denied(subjects: Sequence[str]) -> str:
    """Return the settings with which a leaf node's remote keeps these subjects to its side of the link."""
    return f"deny_imports: {json.dumps(subjects)}, deny_exports: {json.dumps(subjects)}"


def crossing(east: str, west: str, app: str) -> set[str]:
    """Return which subjects of an app's storage are received in the east when they are published in the west."""
    heard, bodies = set[str](), dict[str, str]()
    with NatsConnection.open(Endpoint((east,))) as hearing, NatsConnection.open(Endpoint((west,))) as saying:
        for subject in (*stored(app), "over.*"):
            hearing.subscribe(subject)
        for text in ("begin", *stored(app), "end"):
            bodies[text] = text.replace("*", "_probe").replace(">", "_probe") if "." in text else f"over.{text}"

        def hear(last: str) -> None:
            while last not in heard:
                saying.publish(bodies[last], last.encode(), headers=PROBE)
                heard.update(frame[4].decode() for frame in hearing.receive(0.1))

        hear("begin")  # now the link knows the subscriptions
        for subject in stored(app):
            saying.publish(bodies[subject], subject.encode(), headers=PROBE)
        hear("end")
    return heard - {"begin", "end"}


@contextmanager
def two_regions(
    folder: Path,
    app: str,
    *,
    deny: Sequence[str] | None = None,
    accounts: str = "",
    user: str = "",
    account: str = "",
) -> Generator[Regions]:
    """Start both regions; what the app stores does not cross the link, or only what `deny` names does not.

    Both have the same `accounts`, if any are given: then `user`, with the same password, links those named `account`.
    """
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        listen = _config(folder, "east", f'listen: "127.0.0.1:{port}"')
        east = NatsServer(folder / "east", jetstream=False, config=listen + accounts)
        login, of_account = (f"{user}:{user}@", f", account: {account}") if user else ("", "")
        denied_subjects = denied(stored(app) if deny is None else deny)
        remote = f'remotes: [ {{ url: "nats://{login}127.0.0.1:{port}", {denied_subjects}{of_account} }} ]'
        west = NatsServer(folder / "west", jetstream=False, config=_config(folder, "west", remote) + accounts)
        yield Regions(stack.enter_context(east), stack.enter_context(west))


def two_clusters(folder: Path, app: str, stack: ExitStack) -> tuple[list[NatsServer], list[NatsServer]]:
    """Return three servers in the east and three in the west, leaf nodes of the east; none of them is started yet."""
    leaves = [stack.enter_context(reserved_port()) for _ in range(3)]
    urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in leaves)
    links = {
        "east": [f'listen: "127.0.0.1:{port}"' for port in leaves],
        "west": [f"remotes: [ {{ urls: [{urls}], {denied(stored(app))} }} ]"] * 3,
    }

    def cluster(region: str) -> list[NatsServer]:
        routes = [stack.enter_context(reserved_port()) for _ in range(3)]
        named = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routes)
        return [
            NatsServer(
                folder / f"{region}{number}",
                jetstream=False,
                config=(
                    f"server_name: {region}{number}\nleafnodes {{ {link} }}\n"
                    f"cluster {{ name: {region}, listen: 127.0.0.1:{route}, routes: [{named}] }}\n"
                    f'jetstream {{ store_dir: "{folder}/{region}{number}/data", sync_interval: always, '
                    f"domain: {region} }}"
                ),
            )
            for number, (route, link) in enumerate(zip(routes, links[region], strict=True), start=1)
        ]

    east, west = cluster("east"), cluster("west")
    for server in (*east, *west):
        stack.callback(server.close)
    return east, west


def _config(folder: Path, name: str, links: str) -> str:
    store = f'store_dir: "{folder / name}/data", sync_interval: always, domain: {name}'
    return f"server_name: {name}\nleafnodes {{ {links} }}\njetstream {{ {store} }}\n"
