"""`eventjet audit` as a program: what it says and how it ends."""

from __future__ import annotations

import json

from eventjet.nats.endpoint import Endpoint
from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Bank
from tests.acceptance.test_restore import name_of
from tests.logs import append


def test_a_sound_log_and_one_that_another_program_wrote_to(bank: Program) -> None:
    bank("init")
    for number in range(3):
        Bank(bank).deposit(f"a-{number}", 1, 2)
    sound = bank("audit")
    assert sound.status == 0, sound.err
    assert "is sound: 9 events of 3 aggregates up to position 9, log " in " ".join(sound.out.split())
    garbage = [("account.a-1", b"NATS/1.0\r\n\r\n", b"\x1b[2Jhello")] * 7
    append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), garbage)
    broken = bank("audit")
    said = " ".join(broken.out.split())
    assert broken.status == 1
    assert "is NOT sound: 16 events" in said
    assert "Events cannot be decoded: 7 findings" in said
    assert f"10 {name_of(bank)}.account.a-1: " in said
    assert "and 2 more" in said
    assert "The way out: " in said
    assert max(map(len, broken.out.splitlines())) <= 80
    found = json.loads(bank("audit", "--json", "--examples", "1").out)
    assert (found["sound"], found["events"], found["archive"]) == (False, 16, None)
    (finding,) = found["findings"]
    assert (finding["kind"], finding["level"], finding["count"]) == ("undecodable", "fault", 7)
    assert len(finding["examples"]) == 1
    assert finding["examples"][0]["first"] == 10
    assert finding["fix"]


def test_an_archive_that_is_none(bank: Program) -> None:
    bank("init")
    ended = bank("audit", "--archive", str(bank.folder / "nowhere"))
    assert (ended.status, ended.out) == (1, "")
    assert ended.is_one_paragraph()
    assert "nothing is in it" in ended.said()
