"""Commands and loads against the floor and a peer: `python -m benchmarks.commands`.

The floor is one publish with an expected sequence, or one direct get, by hand over the same client. The peer is
pyeventsourcing on PostgreSQL, written as its own documentation does, when it is installed (`--group bench`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from uuid import uuid4

import orjson

from benchmarks.measure import Comparison, Figures, interleave, keep, show
from eventjet import App, Imported, Jet
from eventjet.dev import NatsServer, PostgresServer
from eventjet.repository import Repository
from eventjet.store.requests import Requests
from examples.bank.account import Account, Deposited, Opened
from examples.bank.app import withdrawn_has_a_reason

HEADER = "Nats-Expected-Last-Subject-Sequence"


class Bench:
    """One server, one app, one connection."""

    def __init__(self, jet: Jet, app: App, url: str, runs: int, count: int) -> None:
        assert jet.requests is not None
        self.jet, self.app, self.url, self.runs, self.count = jet, app, url, runs, count
        self.requests: Requests = jet.requests

    async def bare_publishes(self, count: int, tasks: int) -> float:
        body = orjson.dumps({"amount": "12.50"})
        each = count // tasks

        async def one() -> None:
            subject, last = f"{self.app.name}.bare.{uuid4().hex}", 0
            for _ in range(each):
                headers = {"Nats-Msg-Id": str(uuid4()), HEADER: str(last)}
                last = orjson.loads((await self.requests.ask(subject, body, headers)).data)["seq"]

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(tasks)))
        return each * tasks / (time.perf_counter() - started)

    async def executes(self, count: int, tasks: int) -> float:
        accounts = self.jet.repository(Account)
        each = count // tasks

        async def one() -> None:
            name = uuid4().hex
            for _ in range(each):
                await accounts.execute(name, Account.deposit, Decimal("12.50"))

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(tasks)))
        return each * tasks / (time.perf_counter() - started)

    async def commands(self, tasks: int) -> Figures:
        figures = Figures(f"commands, {tasks} task(s)", "ops/s", higher_is_better=True)

        async def floor() -> None:
            figures.add("floor: bare publish with expected sequence", await self.bare_publishes(self.count, tasks))

        async def ours() -> None:
            figures.add("eventjet: execute on hot aggregates", await self.executes(self.count, tasks))

        await interleave(self.runs, floor, ours)
        return figures

    async def snapshot_load(self) -> Figures:
        figures = Figures("load with a snapshot at the tip", "ms", higher_is_better=False)
        await self.jet.append_many(_history("tip", 200), source="tip")
        async with self.app.connect(servers=self.url) as other:
            await other.repository(Account).load("tip")
        accounts = self.jet.repository(Account)
        await accounts.load("tip")
        await asyncio.sleep(0.5)
        subject = f"$JS.API.DIRECT.GET.{self.app.name}.{self.app.name}.account.tip"
        accounts.cache.drop("tip")
        state = await accounts.load("tip")
        assert state.balance == Decimal(199), state

        async def get() -> None:
            await self.requests.ask(subject)

        async def load() -> None:
            accounts.cache.drop("tip")
            await accounts.load("tip")

        await interleave(
            self.runs,
            lambda: _timed(figures, "floor: one direct get of the last event", get, 300),
            lambda: _timed(figures, "eventjet: load from a snapshot", load, 300),
        )
        return figures

    async def long_load(self, length: int, peer: Peer | None) -> Figures:
        figures = Figures(f"load of {length:,} events without a snapshot", "ms", higher_is_better=False)
        name = f"long{length}"
        accounts = self.jet.repository(Account)
        for _ in range(length // 100):
            await accounts.execute(name, _hundred)

        plain = Repository(self.app.name, self.jet.store, self.app.catalog, Account, self.app.aggregates[Account])
        expected = Decimal("12.50") * length

        async def load() -> None:
            plain.cache.drop(name)
            assert (await plain.load(name)).balance == expected

        subjects = [lambda: _timed(figures, "eventjet", load, 20)]
        if peer is not None:
            made = peer.account(length)

            async def theirs() -> None:
                peer.load(made)

            subjects.append(lambda: _timed(figures, "pyeventsourcing on PostgreSQL", theirs, 10))
        await interleave(self.runs, *subjects)
        return figures


class Peer:
    """pyeventsourcing on PostgreSQL."""

    def __init__(self, url: str) -> None:
        from urllib.parse import urlparse

        from eventsourcing.application import Application
        from eventsourcing.domain import Aggregate, event

        class Owned(Aggregate):
            @event("Opened")
            def __init__(self, owner: str) -> None:
                self.owner = owner
                self.balance = Decimal(0)

            @event("Deposited")
            def deposit(self, amount: Decimal) -> None:
                self.balance += amount

        globals()["Owned"] = Owned
        Owned.__qualname__ = "Owned"
        place = urlparse(url.replace("+psycopg", ""))
        env = {
            "PERSISTENCE_MODULE": "eventsourcing.postgres",
            "POSTGRES_DBNAME": place.path.lstrip("/"),
            "POSTGRES_HOST": place.hostname or "",
            "POSTGRES_PORT": str(place.port),
            "POSTGRES_USER": place.username or "",
            "POSTGRES_PASSWORD": place.password or "",
        }
        self._aggregate = Owned
        self.application = Application(env=env)

    def account(self, length: int) -> object:
        account = self._aggregate(owner="ada")
        for _ in range(length - 1):
            account.deposit(amount=Decimal("12.50"))
        self.application.save(account)
        return account.id

    def load(self, account_id: object) -> None:
        assert self.application.repository.get(account_id).balance  # type: ignore[arg-type, attr-defined]  the peer is untyped

    def executes(self, count: int) -> float:
        account = self._aggregate(owner="ada")
        self.application.save(account)
        started = time.perf_counter()
        for _ in range(count):
            found = self.application.repository.get(account.id)
            found.deposit(amount=Decimal("12.50"))  # type: ignore[attr-defined]  the peer is untyped
            self.application.save(found)
        return count / (time.perf_counter() - started)


async def _timed(figures: Figures, subject: str, call: Callable[[], Awaitable[None]], times: int) -> None:
    laps: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        laps.append(time.perf_counter() - started)
    figures.add(subject, sorted(laps)[len(laps) // 2] * 1000)


def _hundred(_: Account) -> list[Deposited]:
    return [Deposited(amount=Decimal("12.50"))] * 100


def _history(name: str, length: int) -> list[Imported]:
    deposits = [Imported(Account, name, Deposited(amount=Decimal(1))) for _ in range(length - 1)]
    return [Imported(Account, name, Opened(owner="ada")), *deposits]


async def main(runs: int, count: int) -> None:
    app = App("bench", aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    try:
        import eventsourcing  # noqa: F401  is it installed?

        postgres: PostgresServer | None = PostgresServer()
    except ModuleNotFoundError:
        print("pyeventsourcing is not installed; its rows are left out (pip install --group bench)")
        postgres = None
    with NatsServer() as nats:
        if postgres is not None:
            postgres.start()
        try:
            peer = Peer(postgres.create_database("peer")) if postgres is not None else None
            async with app.connect(servers=nats.url) as jet:
                await jet.init()
                bench = Bench(jet, app, nats.url, runs, count)
                print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, sync_interval always")
                one, many = await bench.commands(1), await bench.commands(64)
                tip, long = await bench.snapshot_load(), await bench.long_load(1_000, peer)
                for figures in (one, many, tip, long):
                    figures.show()
                bare, ours = "floor: bare publish with expected sequence", "eventjet: execute on hot aggregates"
                get, load = "floor: one direct get of the last event", "eventjet: load from a snapshot"
                comparisons = [
                    Comparison(one, ours, bare, 0.8),
                    Comparison(many, ours, bare, 0.7),
                    Comparison(tip, load, get, 1 / 3),
                ]
                if peer is not None:
                    comparisons.append(Comparison(long, "eventjet", "pyeventsourcing on PostgreSQL", 2))
                show(comparisons)
                keep([one, many, tip, long], comparisons)
        finally:
            if postgres is not None:
                postgres.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--count", type=int, default=2_000)
    given = parser.parse_args()
    asyncio.run(main(given.runs, given.count))
