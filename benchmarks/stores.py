"""A fresh store for every lap: a server of its own, an empty database, or an empty file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from benchmarks import message_db
from eventjet.dev import NatsServer, PostgresServer
from tests.nats_cluster import NatsCluster

Store: TypeAlias = Callable[[], AbstractContextManager[str]]
"""Opens one lap's store and tells its URL."""


@dataclass
class Stores:
    """Where stores come from, for the length of a `with`."""

    _postgres: PostgresServer
    _folder: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    @contextmanager
    def opened(cls) -> Generator[Stores]:
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="eventjet-bench-"))
            yield cls(stack.enter_context(PostgresServer()), Path(folder))

    @contextmanager
    def nats_always(self) -> Generator[str]:
        """Synced before every acknowledgement, as PostgreSQL and SQLite are."""
        with NatsServer() as server:
            yield server.url

    @contextmanager
    def nats_default(self) -> Generator[str]:
        """Synced every two minutes, as NATS is unless told otherwise."""
        with NatsServer(sync_interval="2m") as server:
            yield server.url

    @contextmanager
    def nats_replicas(self) -> Generator[str]:
        """Three servers that form a cluster, each synced before every acknowledgement."""
        with NatsCluster() as cluster:
            yield cluster.url

    @contextmanager
    def postgres(self) -> Generator[str]:
        name = f"lap{next(self._numbers)}"
        yield self._postgres.create_database(name)
        self._postgres.drop_database(name)

    @contextmanager
    def sqlite(self) -> Generator[str]:
        yield f"sqlite:///{self._folder / f'lap{next(self._numbers)}.db'}"

    @contextmanager
    def message_db(self) -> Generator[str]:
        with self.postgres() as url:
            message_db.install(url)
            yield url
