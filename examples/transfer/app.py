"""The transfers, wired: accounts, the process that moves money, and a reactor that tells of the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

from eventjet import App, Reaction, Recorded, reactor
from eventjet.examples.transfer.accounts import Account, Book
from eventjet.examples.transfer.transfers import Completed, Failed, Refunded, Transfer


class Mails(Protocol):
    """What sends mails; told the same key twice, it sends one."""

    async def send(self, text: str, *, key: str) -> None: ...


class HasMails(Protocol):
    """What `receipts` needs."""

    @property
    def mails(self) -> Mails: ...


@reactor("receipts")
async def receipts(event: Recorded[Completed | Refunded | Failed], to: Reaction[HasMails]) -> None:
    """Mail what became of a transfer, and note it in the book."""
    await to.deps.mails.send(f"{event.aggregate_id}: {type(event.data).__name__}", key=to.key)
    await to.repository(Book).execute("all", Book.note, event.aggregate_id)


class PrintedMails:
    """Stands in for a mail service: it prints."""

    async def send(self, text: str, *, key: str) -> None:
        print(f"mail {key}: {text}", flush=True)


class Outside:
    """What this app's reactors need."""

    mails: Mails = PrintedMails()


@asynccontextmanager
async def outside() -> AsyncGenerator[Outside]:
    """Opened once a worker; what it opens it closes."""
    yield Outside()


transfers = App("transfers", aggregates=[Account, Book], processes=[Transfer], reactors=[receipts], deps=outside)
