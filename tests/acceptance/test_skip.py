"""`eventjet skip` as a program: garbage is skipped for good, and the aggregate is shown and goes on."""

from __future__ import annotations

import json

from eventjet.nats.endpoint import Endpoint
from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Bank
from tests.acceptance.test_restore import name_of
from tests.logs import append, block


def test_garbage_is_skipped_and_its_aggregate_goes_on(bank: Program) -> None:
    bank("init")
    Bank(bank).deposit("a-1", 1)
    last = append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), [("account.a-1", b"", b"+ACK")])
    assert "unreadable" in bank("history", "account", "a-1").out
    assert bank("audit").status == 1
    for position, reason in ((1, "can be read"), (99, "nothing at position")):
        refused = bank("skip", str(position), "--reason", "no", "--yes")
        assert refused.status == 2
        assert reason in " ".join(refused.err.split())
    said = json.loads(bank("skip", str(last), "--reason", "a stray answer", "--yes", "--json").out)
    assert said == {"position": last, "void": True, "recorded": True}
    assert "was skipped already" in bank("skip", str(last), "--reason", "again", "--yes").out
    assert "skipped: a stray answer" in " ".join(bank("history", "account", "a-1").out.split())
    assert "unreadable" not in bank("tail").out
    Bank(bank).deposit("a-1", 2)
    sound = bank("audit")
    assert sound.status == 0, sound.out
    assert "Events are skipped: 1 finding" in sound.out
    again = "account.a-1", block("account.deposited", version=1), b'{"amount":"1"}'
    forged = append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), [again])
    voided = bank("skip", str(forged), "--reason", "a version that was there before", "--yes")
    assert voided.status == 0, voided.err
    Bank(bank).deposit("a-1", 3)
    refused = bank("skip", str(last + 1), "--reason", "no", "--yes")
    assert "stays" in " ".join(refused.err.split())
