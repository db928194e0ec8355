"""pyeventsourcing: `python -m benchmarks.subjects.peer_pyeventsourcing fill|run <store> <read model> <count>`.

As its documentation writes it. On PostgreSQL a `Projection` run by a `ProjectionRunner`; on SQLite, whose recorder has
no subscriptions, a `ProcessApplication` that pulls. Both commit rows and tracking together, once for every event.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from decimal import Decimal
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from eventsourcing.application import Application
from eventsourcing.dispatch import singledispatchmethod
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import Tracking
from eventsourcing.postgres import PostgresTrackingRecorder
from eventsourcing.projection import Projection, ProjectionRunner
from eventsourcing.sqlite import SQLiteProcessRecorder
from eventsourcing.system import ProcessApplication
from eventsourcing.utils import get_topic
from psycopg.sql import SQL

from benchmarks.postings import CURRENCY, Posting, postings
from benchmarks.readmodel import POSTGRESQL, SQLITE, cents, path_of
from benchmarks.subjects.clock import Clock

POOL = {"POSTGRES_POOL_SIZE": "16", "POSTGRES_MAX_OVERFLOW": "48"}
"""Settings of PostgreSQL for sixteen threads."""
PER_SAVE = 500
SECTION = 100
"""Events in one pull; its default of 10 is slower."""


class Account(Aggregate):
    """Opened by its first posting, so that there are as many events as postings."""

    @event("Opened")
    def __init__(self, account_id: UUID, tx_id: str, amount: Decimal, currency: str, memo: str) -> None:
        self._id = account_id
        self.balance = amount

    @staticmethod
    def create_id(account_id: UUID, **_: object) -> UUID:
        return account_id

    @event("Deposited")
    def deposit(self, tx_id: str, amount: Decimal, currency: str, memo: str) -> None:
        self.balance += amount

    @event("Withdrawn")
    def withdraw(self, tx_id: str, amount: Decimal, currency: str, memo: str) -> None:
        self.balance -= amount


class Bank(Application[UUID]):
    name = "bank"


def _signed(event: Any) -> Decimal:
    return -event.amount if isinstance(event, Account.Withdrawn) else event.amount


_UPSERT = (
    "insert into account_balance as b (account_id, balance, postings) values ({mark}, {mark}, 1) "
    "on conflict (account_id) do update set balance = b.balance + excluded.balance, postings = b.postings + 1"
)


class BalancesView(PostgresTrackingRecorder):
    """The materialised view."""

    _upsert = _UPSERT.format(mark="%s")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sql_create_statements.append(SQL(POSTGRESQL))

    def post(self, account_id: UUID, amount: Decimal, tracking: Tracking) -> None:
        with self.datastore.transaction(commit=True) as cursor:
            self._insert_tracking(cursor, tracking)
            cursor.execute(self._upsert, (str(account_id), amount), prepare=True)


class Balances(Projection[BalancesView]):
    name = "balances"
    topics = (get_topic(Account.Opened), get_topic(Account.Deposited), get_topic(Account.Withdrawn))
    clock = Clock()

    def __init__(self, view: BalancesView) -> None:
        super().__init__(view)
        self.clock.start()

    @singledispatchmethod
    def process_event(self, domain_event: Any, tracking: Tracking) -> None:
        """Nothing for other events."""

    @process_event.register
    def opened(self, domain_event: Account.Opened, tracking: Tracking) -> None:
        self.view.post(domain_event.originator_id, domain_event.amount, tracking)

    @process_event.register
    def deposited(self, domain_event: Account.Deposited, tracking: Tracking) -> None:
        self.view.post(domain_event.originator_id, domain_event.amount, tracking)

    @process_event.register
    def withdrawn(self, domain_event: Account.Withdrawn, tracking: Tracking) -> None:
        self.view.post(domain_event.originator_id, -domain_event.amount, tracking)


class BalancesRecorder(SQLiteProcessRecorder):
    """On SQLite: rows beside the tracking of a process application."""

    _upsert = _UPSERT.format(mark="?")

    def construct_create_table_statements(self) -> list[str]:
        return [*super().construct_create_table_statements(), SQLITE]

    def _insert_events(self, c: Any, stored_events: Any, **options: Any) -> Any:
        recorded = super()._insert_events(c, stored_events, **options)
        account_id, amount = options["posting"]
        c.execute(self._upsert, (str(account_id), cents(amount)))
        return recorded


class BalancesProcess(ProcessApplication[UUID]):
    name = "balances"
    pull_section_size = SECTION

    def policy(self, domain_event: Any, processing_event: Any) -> None:
        processing_event.saved_kwargs["posting"] = (domain_event.originator_id, _signed(domain_event))


def fill(store: str, all_postings: Sequence[Posting]) -> None:
    count = len(all_postings)
    application = Bank(environment(store))
    accounts: dict[UUID, Account] = {}
    touched: dict[UUID, Account] = {}
    for number, (account_id, is_deposit, tx_id, text, memo) in enumerate(all_postings, 1):
        amount = Decimal(text)
        account = accounts.get(account_id)
        if account is None:
            first = amount if is_deposit else -amount
            account = accounts[account_id] = Account(account_id, tx_id, first, CURRENCY, memo)
        else:
            (account.deposit if is_deposit else account.withdraw)(tx_id, amount, CURRENCY, memo)
        touched[account_id] = account
        if number % PER_SAVE == 0 or number == count:
            application.save(*touched.values())
            touched = {}
    stored = application.recorder.max_notification_id()
    if stored != count:
        raise RuntimeError(f"{stored} of {count} events were stored")
    application.close()
    print(version("eventsourcing"))


def run_postgres(store: str, view: str, count: int) -> None:
    both = {**environment(store), **environment(view, "BALANCES_")}
    with ProjectionRunner(
        application_class=Bank, projection_class=Balances, view_class=BalancesView, env=both
    ) as runner:
        runner.wait(count, timeout=300)
        Balances.clock.stop(count)


def run_sqlite(store: str, view: str) -> None:
    upstream = Bank(environment(store))
    upstream.notification_log.section_size = SECTION
    recorder = {"PROCESS_RECORDER_TOPIC": get_topic(BalancesRecorder)}
    process = BalancesProcess({**environment(view), **recorder})
    process.follow(upstream.name, upstream.notification_log)
    clock = Clock()
    clock.start()
    process.pull_and_process(upstream.name)
    clock.stop(process.recorder.max_tracking_id(upstream.name) or 0)
    process.close()
    upstream.close()


def environment(url: str, prefix: str = "") -> dict[str, str]:
    if url.startswith("sqlite"):
        settings = {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": path_of(url)}
    else:
        place = urlsplit(url)
        settings = {
            "PERSISTENCE_MODULE": "eventsourcing.postgres",
            "POSTGRES_DBNAME": place.path.lstrip("/"),
            "POSTGRES_HOST": place.hostname or "",
            "POSTGRES_PORT": str(place.port),
            "POSTGRES_USER": place.username or "",
            "POSTGRES_PASSWORD": place.password or "",
        }
    return {prefix + name: value for name, value in settings.items()}


if __name__ == "__main__":
    command, store, view, count = sys.argv[1:]
    if command == "fill":
        fill(store, list(postings(int(count))))
    elif view.startswith("sqlite"):
        run_sqlite(store, view)
    else:
        run_postgres(store, view, int(count))
