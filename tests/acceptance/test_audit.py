"""`eventjet audit` as a program: what it says and how it ends."""

from __future__ import annotations

import json

from eventjet.nats.endpoint import Endpoint
from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Bank
from tests.acceptance.test_restore import name_of
from tests.logs import append


def test_audit_of_a_sound_log_and_of_one_with_foreign_events(bank: Program) -> None:
    bank("init")
    for number in range(3):
        Bank(bank).deposit(f"a-{number}", 1, 2)
    sound = bank("audit")
    assert sound.status == 0, sound.err
    assert "is sound: 9 events of 3 aggregates up to position 9, log " in " ".join(sound.out.split())
    garbage = [("account.a-1", b"NATS/1.0\r\n\r\n", b"\x1b[2Jhello")] * 7
    append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), garbage)
    broken = bank("audit")
    text = " ".join(broken.out.split())
    assert broken.status == 1
    assert "is NOT sound: 16 events" in text
    assert "Events cannot be decoded: 7 findings" in text
    assert f"10 {name_of(bank)}.account.a-1: " in text
    assert "and 2 more" in text
    assert "The way out: " in text
    assert max(map(len, broken.out.splitlines())) <= 80
    report = json.loads(bank("audit", "--json", "--examples", "1").out)
    assert (report["sound"], report["events"], report["archive"]) == (False, 16, None)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["level"], finding["count"]) == ("undecodable", "fault", 7)
    assert len(finding["examples"]) == 1
    assert finding["examples"][0]["first"] == 10
    assert finding["fix"]


def test_audit_of_a_missing_archive(bank: Program) -> None:
    bank("init")
    ended = bank("audit", "--archive", str(bank.folder / "nowhere"))
    assert (ended.status, ended.out) == (1, "")
    assert ended.is_one_paragraph()
    assert "there is no such folder. Name what `eventjet archive` made" in ended.message()
