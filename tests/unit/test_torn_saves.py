"""A save that the log has only in part is never reported as stored, even to a repeated command."""

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
        """Make the messages at these positions a batch, with or without its end."""
        for number, position in enumerate(positions, 1):
            end = f"{BATCH_COMMIT}: 1\r\n" if ends and position == positions[-1] else ""
            fields = f"{BATCH_ID}: b\r\n{BATCH_NUMBER}: {number}\r\n{end}\r\n".encode()
            at, time_ns, subject, block, body = self._records[position - 1]
            self._records[position - 1] = (at, time_ns, subject, unbatched(block)[:-2] + fields, body)


def accounts(log: Log) -> Repository[Account, object]:
    return Repository("bank", log, APP.catalog.of_log(), Account)


async def saved(*amounts: int) -> Log:
    log = Log("bank")
    await accounts(log).command("c").execute("a", Account.deposit, *amounts)
    return log


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_repeated_command_of_a_torn_save_raises_save_torn(goes_on: bool) -> None:
    log = await saved(1, 2)
    log.batch([1, 2], ends=False)
    if goes_on:
        await accounts(log).execute("a", Account.deposit, 3)
    with pytest.raises(SaveTorn, match=r"only a part of a save on bank\.account\.a") as caught:
        await accounts(log).command("c").execute("a", Account.deposit, 1, 2)
    assert isinstance(caught.value, OutcomeUnknown)
    assert len(caught.value.event_ids) == 2
    assert [event.version for event in await accounts(log).history("a")] == [1, 2, 3][: 2 + goes_on]
    async with APP.in_memory() as jet:
        with pytest.raises(SaveTorn):
            await jet.resolve(caught.value)


@pytest.mark.parametrize("last", [2, 4])
async def test_a_repeated_command_of_a_whole_save_gets_its_result_even_in_a_longer_restored_batch(last: int) -> None:
    log = await saved(1, 2)
    await accounts(log).execute("b", Account.deposit, 3, 4)
    log.batch(range(1, last + 1), ends=True)
    repeated = await accounts(log).command("c").execute("a", Account.deposit, 1, 2)
    assert (repeated.version, repeated.position, len(repeated.events)) == (2, 2, 2)


def test_a_save_of_many_aggregates_names_some_of_them() -> None:
    subjects = [f"bank.account.{number}" for number in range(1_000)]
    for error in (OutcomeUnknown(subjects, subjects, "no answer", ()), SaveTorn(subjects, subjects)):
        assert "bank.account.9 and 990 more" in str(error)
