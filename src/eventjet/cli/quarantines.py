"""Where a quarantine is: that of a projection in SQL, that of a reactor or a process beside its cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from eventjet.cli.target import AppTarget

if TYPE_CHECKING:
    from eventjet.cursors.kv import Cursors
    from eventjet.projections.sql_projection import AnyResolved
    from eventjet.quarantine.rows import Listed, Shown, VerdictOutcome

T = TypeVar("T")


class Quarantine(Protocol):
    """One quarantine, and what may be decided about it. Blocks; raises `UsageError` and `Unreachable`."""

    @property
    def what_dropping_means(self) -> str: ...

    def listed(self, *, resolved: bool) -> Sequence[Listed]: ...

    def shown(self, position: int) -> Shown | None: ...

    def retry(self, positions: Sequence[int] | None) -> list[int]: ...

    def drop(self, positions: Sequence[int]) -> list[int]: ...

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]: ...


def quarantine_of(at: AppTarget, name: str) -> Quarantine:
    """The quarantine of what the app calls so; raises `UsageError` for a stranger."""
    chosen = at.work([name])
    return _OfProjection(at, chosen.projections[0]) if chosen.projections else _OfCursor(at, name)


class _OfProjection:
    what_dropping_means = "A rebuild will leave it out too."

    def __init__(self, at: AppTarget, resolved: AnyResolved) -> None:
        self._at = at
        self._of = resolved.name, resolved.revision

    def listed(self, *, resolved: bool) -> Sequence[Listed]:
        from eventjet.quarantine.rows import listed

        with self._connected(read_only=True) as connection:
            return listed(connection, [self._of[0]], resolved=resolved)

    def shown(self, position: int) -> Shown | None:
        from eventjet.quarantine.rows import shown

        with self._connected(read_only=True) as connection:
            return shown(connection, *self._of, position)

    def retry(self, positions: Sequence[int] | None) -> list[int]:
        from eventjet.quarantine.rows import retry

        with self._connected() as connection:
            return retry(connection, *self._of, positions)

    def drop(self, positions: Sequence[int]) -> list[int]:
        from eventjet.quarantine.rows import drop

        with self._connected() as connection:
            return drop(connection, *self._of, positions)

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]:
        from eventjet.quarantine.rows import outcomes

        with self._connected(read_only=True) as connection:
            return outcomes(connection, *self._of, positions)

    @contextmanager
    def _connected(self, *, read_only: bool = False) -> Generator[Any]:
        from eventjet.sql.database import COMMAND, READ_ONLY, Database

        where = Database(self._at.settings.database)
        with (
            where.reaching_sync(),
            where.sync_engine("eventjet quarantine", COMMAND).connect() as connection,
            connection.execution_options(**{READ_ONLY: read_only}).begin(),
        ):
            yield connection


class _OfCursor:
    what_dropping_means = "What it leads to will not happen, and what waits behind it goes on."

    def __init__(self, at: AppTarget, name: str) -> None:
        self._at = at
        self._name = name

    def listed(self, *, resolved: bool) -> Sequence[Listed]:
        from eventjet.reactions import verdicts

        return self._asked(lambda cursors: verdicts.listed(cursors, self._name, resolved=resolved))

    def shown(self, position: int) -> Shown | None:
        from eventjet.reactions import verdicts

        return self._asked(lambda cursors: verdicts.shown(cursors, self._name, position))

    def retry(self, positions: Sequence[int] | None) -> list[int]:
        from eventjet.reactions import verdicts

        return self._asked(lambda cursors: verdicts.retry(cursors, self._name, positions))

    def drop(self, positions: Sequence[int]) -> list[int]:
        from eventjet.reactions import verdicts

        return self._asked(lambda cursors: verdicts.drop(cursors, self._name, positions))

    def outcomes(self, positions: Sequence[int]) -> list[VerdictOutcome]:
        from eventjet.reactions import verdicts

        return self._asked(lambda cursors: verdicts.outcomes(cursors, self._name, positions))

    def _asked(self, ask: Callable[[Cursors], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with self._at.cursors() as cursors:
                return await ask(cursors)

        return asyncio.run(run())
