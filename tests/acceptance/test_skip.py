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
    report = json.loads(bank("skip", str(last), "--reason", "a stray answer", "--yes", "--json").out)
    assert report == {"position": last, "skipped": True, "recorded": True}
    assert "was skipped already" in bank("skip", str(last), "--reason", "again", "--yes").out
    assert "skipped: a stray answer" in " ".join(bank("history", "account", "a-1").out.split())
    assert "unreadable" not in bank("tail").out
    Bank(bank).deposit("a-1", 2)
    sound = bank("audit")
    assert sound.status == 0, sound.out
    assert "Events are skipped: 1 finding" in sound.out
    again = "account.a-1", block("account.deposited", version=1), b'{"amount":"1"}'
    forged = append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), [again])
    skipped = bank("skip", str(forged), "--reason", "a version that was there before", "--yes")
    assert skipped.status == 0, skipped.err
    Bank(bank).deposit("a-1", 3)
    refused = bank("skip", str(last + 1), "--reason", "no", "--yes")
    assert "stays" in " ".join(refused.err.split())


def test_an_event_of_a_renamed_aggregate_is_not_skipped(bank: Program) -> None:
    bank("init")
    position = Bank(bank).deposit("a-1", 1)
    endpoint = Endpoint((bank.environ["EVENTJET_SERVERS"],))
    stray = append(endpoint, name_of(bank), [("account.a-1", b"", b"+ACK")])
    file = bank.folder / "bank.py"
    file.write_text(file.read_text().replace('@aggregate("account")', '@aggregate("konto")'))
    refused = bank("skip", str(position), "--reason", "it stops a projection", "--yes")
    assert refused.status != 0
    assert "does not declare its aggregate 'account'" in refused.message()
    assert "give it its name back, whatever its class is called: @aggregate('account')" in refused.message()
    assert bank("skip", str(stray), "--reason", "a stray answer", "--yes").status == 0
    file.write_text(file.read_text().replace('@aggregate("konto")', '@aggregate("account")'))
    assert [event.get("skipped") for event in json.loads(bank("history", "account", "a-1", "--json").out)].count(
        None
    ) == 2


def test_an_event_that_only_this_release_refuses_is_skipped_with_a_warning(bank: Program) -> None:
    bank("init")
    position = Bank(bank).deposit("a-1", 1)
    file = bank.folder / "bank.py"
    file.write_text(
        file.read_text().replace("class Deposited:\n    amount: Decimal", "class Deposited:\n    amount: bool")
    )
    history = bank("history", "account", "a-1")
    assert "unreadable" in history.out
    refused = bank("skip", str(position), "--reason", "it stops a projection")
    assert refused.status == 2
    for part in ("a release of this app recorded", "made decisions and rows from it", "Nothing was recorded"):
        assert part in " ".join(refused.err.split())
    stray = append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), [("account.a-2", b"", b"+ACK")])
    assert "recorded" not in bank("skip", str(stray), "--reason", "a stray answer", "--yes").err
