"""`eventjet unique` as a program: it claims an older log, reports shared values, and finds what is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.nats.endpoint import Endpoint
from tests.acceptance.conftest import Program
from tests.logs import append, block, fresh_name

APP = """
from eventjet import App
from tests.contracts.unique_contract import User

app = App("{name}", aggregates=[User])
"""


@pytest.fixture
def name() -> str:
    return fresh_name("club")


@pytest.fixture
def club(eventjet_nats: NatsServer, tmp_path: Path, name: str) -> Program:
    (tmp_path / "club.py").write_text(APP.format(name=name))
    root = str(Path(__file__).parents[2])
    environ = {"EVENTJET_APP": "club:app", "EVENTJET_SERVERS": eventjet_nats.url, "PYTHONPATH": root, "COLUMNS": "80"}
    return Program(tmp_path, environ)


def record(club: Program, name: str, user: str, email: str) -> None:
    """Write an event as a release without the constraint does."""
    body = json.dumps({"email": email}).encode()
    append(Endpoint((club.environ["EVENTJET_SERVERS"],)), name, [(f"user.{user}", block("user.called"), body)])


def test_an_older_log_is_claimed_and_shared_values_are_reported(club: Program, name: str) -> None:
    assert club("init").status == 0, "there is nothing to claim yet"
    for user, email in (("ada", "ada@x"), ("bob", "bob@x"), ("twin", "ADA@x")):
        record(club, name, user, email)
    ready = club("init")
    assert ready.status == 1
    assert "`eventjet unique build user email` has run" in " ".join(ready.out.split())
    refused = club("unique", "build", "user")
    assert refused.status == 1
    assert "user email is NOT kept yet: 3 aggregates with 3 values" in refused.out
    assert "  - ada, twin" in refused.out
    assert "user phone is kept" in refused.out
    begun = club("unique", "build", "user", "email", "--keep-shared")
    assert (begun.status, begun.out.splitlines()[0]) == (0, "user email is kept: 3 aggregates with 3 values")
    assert club("init").status == 0
    record(club, name, "twin", "new@x")
    checked = club("unique", "check", "--json")
    assert checked.status == 1
    email, phone = json.loads(checked.out)
    assert email["missing"]["examples"] == email["stale"]["examples"] == ["user 'twin'"], checked.out
    assert phone["built"]
    assert club("unique", "build", "user", "email").status == 0
    sound = club("unique", "check")
    assert sound.status == 0, sound.out
    history = club("history", "eventjet_unique", "user-email")
    assert "eventjet.unique_built" in history.out
    audited = club("audit")
    assert audited.status == 0, audited.out
    assert "`eventjet unique check` compares" in " ".join(audited.out.split())


def test_unknown_names_are_reported(club: Program) -> None:
    for arguments, reason in (
        (("build", "nobody"), "has no aggregate 'nobody'"),
        (("check", "user", "name"), "has no unique name. It has email, phone."),
    ):
        refused = club("unique", *arguments)
        assert refused.status == 2
        assert refused.is_one_paragraph()
        assert reason in refused.message()
