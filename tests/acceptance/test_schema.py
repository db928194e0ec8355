"""`eventjet schema` as a program: an export in git, a check of a change, and a check against a log."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from pydantic import BaseModel
from sarif_pydantic import Sarif

from eventjet.nats.endpoint import Endpoint
from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Bank
from tests.acceptance.test_restore import name_of
from tests.logs import append, block


def git(folder: Path, *arguments: str) -> None:
    own = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True)


def change(bank: Program, old: str, new: str) -> None:
    source = (bank.folder / "bank.py").read_text()
    assert old in source
    (bank.folder / "bank.py").write_text(source.replace(old, new))


def test_a_change_is_judged_against_a_commit_and_against_the_log(bank: Program) -> None:
    bank("init")
    Bank(bank).deposit("a-1", 1)
    git(bank.folder, "init", "--quiet")
    assert "new app.json" in bank("schema", "export", "--out", "schemas").out
    assert "nothing has changed" in bank("schema", "export", "--out", "schemas").out
    git(bank.folder, "add", "schemas")
    git(bank.folder, "commit", "--quiet", "--message", "Export")
    same = bank("schema", "check", "--against", "HEAD", "--against-log", "5")
    assert same.status == 0, same.out + same.err
    assert "can be read by this app" in same.out
    change(bank, '@event("account.deposited")', '@event("account.credited")')
    renamed = bank("schema", "check", "--against", "HEAD", "--against-log", "5", "--sarif", "found.sarif")
    assert renamed.status == 1, renamed.out + renamed.err
    assert '@event("account.credited", formerly=("account.deposited",))' in renamed.out
    assert "account.deposited schema 1 at position " in renamed.out
    written = (bank.folder / "found.sarif").read_text()
    assert unknown_in(Sarif.model_validate_json(written)) == {"columnKind"}  # of a run (3.14), which the models lack
    results = json.loads(written)["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results]
    assert places == ["bank.py"] * len(results)
    assert {result["ruleId"] for result in results} == {"breaks-old-events", "breaks-old-readers"}
    change(bank, '@event("account.credited")', '@event("account.credited", formerly=("account.deposited",))')
    report = json.loads(bank("schema", "check", "--against", "schemas", "--json").out)
    assert {event["event"]: event["verdict"] for event in report["events"]}["account.deposited"] == "breaks old readers"
    stopped = bank("schema", "check", "--against", "schemas", "--against-log", "5", "--readers-stopped")
    assert stopped.status == 0, stopped.out + stopped.err


def test_a_change_of_a_served_command_that_breaks_its_callers_is_reported(bank: Program) -> None:
    source = (bank.folder / "bank.py").read_text()
    declared = f'bank = App("{name_of(bank)}", aggregates=[Account], served=[served(Account, Account.deposit)])'
    (bank.folder / "bank.py").write_text(f"{source}\nfrom eventjet import served\n\n{declared}\n")
    bank("schema", "export", "--out", "schemas")
    same = bank("schema", "check", "--against", "schemas")
    assert (same.status, "1 command; safe" in same.out) == (0, True), same.out + same.err
    change(bank, "served(Account, Account.deposit)", 'served(Account, Account.deposit, name="pay_in")')
    broken = bank("schema", "check", "--against", "schemas", "--readers-stopped", "--sarif", "commands.sarif")
    assert broken.status == 1, broken.out + broken.err
    assert "breaks old callers   account.deposit (served)\n  - is no longer served" in broken.out
    (result,) = json.loads((bank.folder / "commands.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "breaks-old-callers"
    accepted = bank("schema", "check", "--against", "schemas", "--callers-changed", "--json")
    assert accepted.status == 0, accepted.out + accepted.err
    verdicts = {command["command"]: command["verdict"] for command in json.loads(accepted.out)["commands"]}
    assert verdicts == {"account.deposit": "breaks old callers", "account.pay_in": "safe"}


def unknown_in(value: object) -> set[str]:
    """Return the names that SARIF 2.1.0 does not have, by the models of another library."""
    if isinstance(value, list):
        return set().union(*map(unknown_in, value))
    if not isinstance(value, BaseModel):
        return set()
    known = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or {}).union(*map(unknown_in, known))


def test_init_names_events_that_this_release_cannot_read(bank: Program) -> None:
    assert bank("init").status == 0
    newer = "account.a-1", block("account.deposited", schema=7), b"{}"
    append(Endpoint((bank.environ["EVENTJET_SERVERS"],)), name_of(bank), [newer])
    result = bank("init")
    assert result.status == 1
    assert "'account.deposited' schema 7" in " ".join(result.out.split())
    assert "so a newer release recorded the event. Deploy that release here" in " ".join(result.out.split())


def test_schema_check_refuses_arguments_it_cannot_compare(bank: Program) -> None:
    for arguments, why in (
        (["--against", "nowhere"], "neither a folder, nor a file, nor a commit"),
        ([], "--against main, or --against-log 100"),
        (["--against-log", "1", "--sarif", "x"], "--sarif says more about --against"),
        (["--against", "bank.py"], "is not JSON"),
    ):
        ended = bank("schema", "check", *arguments)
        assert (ended.status, ended.is_one_paragraph()) == (2, True), ended.err
        assert why in ended.message()
