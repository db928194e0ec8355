"""Two JetStreams with domains of their own, east and west, which a leaf node links."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.log.topology import every_config
from eventjet.settings import Settings


@dataclass(frozen=True)
class Regions:
    """The servers of the log, and the servers of its mirror."""

    east: NatsServer
    west: NatsServer

    def settings(self, folder: Path) -> Settings:
        """Of an application that has its log in the east and reads from the mirror in the west."""
        return Settings(
            servers=(self.east.url,), read_from=(self.west.url,), database=f"sqlite:///{folder}/models.db",
            request_timeout_s=30.0, save_timeout_s=120.0,
        )  # fmt: skip


@contextmanager
def two_regions(folder: Path, app: str) -> Generator[Regions]:
    """Start both regions; events of the app do not cross the link."""
    subjects = json.dumps([subject for config in every_config(app, 1) for subject in config["subjects"]])
    deny = f"deny_imports: {subjects}, deny_exports: {subjects}"
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        east = NatsServer(
            folder / "east", jetstream=False, config=_config(folder, "east", f'listen: "127.0.0.1:{port}"')
        )
        remote = f'remotes: [ {{ url: "nats://127.0.0.1:{port}", {deny} }} ]'
        west = NatsServer(folder / "west", jetstream=False, config=_config(folder, "west", remote))
        yield Regions(stack.enter_context(east), stack.enter_context(west))


def _config(folder: Path, name: str, links: str) -> str:
    store = f'store_dir: "{folder / name}/data", sync_interval: always, domain: {name}'
    return f"server_name: {name}\nleafnodes {{ {links} }}\njetstream {{ {store} }}"
