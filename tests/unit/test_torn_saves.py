"""A save of which the log holds only a part is never called stored, by no repetition of its command either."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eventjet.codec.headers import BATCH_COMMIT, BATCH_ID, BATCH_NUMBER
from eventjet.commands.repository import Repository
from eventjet.errors import OutcomeUnknown, SaveTorn
from eventjet.log.memory import MemoryStore
from tests.unit.written_logs import APP, Account, unbatched


class Log(MemoryStore):
    """A log whose server keeps its messages in batches."""

    def batch(self, positions: Sequence[int], *, ends: bool) -> None:
        """Have the messages at these positions be of one batch, which may have no end."""
        for number, position in enumerate(positions, 1):
            end = f"{BATCH_COMMIT}: 1\r\n" if ends and position == positions[-1] else ""
            told = f"{BATCH_ID}: b\r\n{BATCH_NUMBER}: {number}\r\n{end}\r\n".encode()
            at, time_ns, subject, block, body = self._records[position - 1]
            self._records[position - 1] = (at, time_ns, subject, unbatched(block)[:-2] + told, body)


def accounts(log: Log) -> Repository[Account, object]:
    return Repository("bank", log, APP.catalog.of_log(), Account)


async def saved(*amounts: int) -> Log:
    log = Log("bank")
    await accounts(log).command("c").execute("a", Account.deposit, *amounts)
    return log


@pytest.mark.parametrize("goes_on", [True, False])
async def test_the_command_of_a_torn_save_is_not_told_that_it_is_stored(goes_on: bool) -> None:
    log = await saved(1, 2)
    log.batch([1, 2], ends=False)
    if goes_on:
        await accounts(log).execute("a", Account.deposit, 3)
    with pytest.raises(SaveTorn, match=r"only a part of a save on bank\.account\.a") as caught:
        await accounts(log).command("c").execute("a", Account.deposit, 1, 2)
    assert isinstance(caught.value, OutcomeUnknown)
    assert len(caught.value.event_ids) == 2
    assert [one.version for one in await accounts(log).history("a")] == [1, 2, 3][: 2 + goes_on]
    async with APP.in_memory() as jet:
        with pytest.raises(SaveTorn):
            await jet.resolve(caught.value)


@pytest.mark.parametrize("last", [2, 4])
async def test_a_whole_save_is_told_as_it_was_also_where_a_restored_batch_goes_on_behind_it(last: int) -> None:
    log = await saved(1, 2)
    await accounts(log).execute("b", Account.deposit, 3, 4)
    log.batch(range(1, last + 1), ends=True)
    again = await accounts(log).command("c").execute("a", Account.deposit, 1, 2)
    assert (again.version, again.position, len(again.events)) == (2, 2, 2)


def test_a_save_of_many_aggregates_names_some_of_them() -> None:
    subjects = [f"bank.account.{number}" for number in range(1_000)]
    for error in (OutcomeUnknown(subjects, subjects, "no answer", ()), SaveTorn(subjects, subjects)):
        assert "bank.account.9 and 990 more" in str(error)
