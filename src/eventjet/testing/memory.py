"""An app's `Jet` over a log in memory: commands in an application's own tests, without a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from eventjet.jet import Jet
from eventjet.projections.app_ref import Application
from eventjet.repository.repositories import Repositories
from eventjet.settings import Settings
from eventjet.store.memory import MemoryStore


@asynccontextmanager
async def in_memory(app: Application) -> AsyncGenerator[Jet]:
    """What `App.connect` gives, over an empty log that is gone afterwards.

    Repositories, transactions, imports and `tail` do what they do on a server, conflicts included. No worker keeps
    read models of it, so `caught_up` raises `UsageError`: test a projection with `projected`.
    """
    yield Jet(Repositories(app, MemoryStore(app.name)), Settings())
