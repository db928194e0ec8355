"""`eventjet init` over a stream that another program declared again, as a subscriber of FastStream does by default."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from eventjet.errors import StreamMissing
from eventjet.jetstream.api import StreamState, call, stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.log.topology import IDENTITY
from eventjet.nats.endpoint import Endpoint
from tests.acceptance.conftest import Program
from tests.logs import append, block


def stream_of(bank: Program) -> tuple[Endpoint, str]:
    source = (bank.folder / "bank.py").read_text()
    return Endpoint((bank.environ["EVENTJET_SERVERS"],)), source.split('App("')[1].split('"')[0]


def ask(bank: Program, request: Any) -> Any:
    return ask_once(stream_of(bank)[0], request)


def declared_anew(bank: Program) -> None:
    """Change the stream's configuration to what another program would leave."""
    _, name = stream_of(bank)
    config = ask(bank, stream_info(name)).config
    lost = {"allow_atomic": False, "allow_direct": False, "discard": "old", "max_msg_size": -1, "metadata": {}}
    ask(bank, call(f"STREAM.UPDATE.{name}", {**config, **lost}))


def state(bank: Program) -> StreamState:
    return ask(bank, stream_info(stream_of(bank)[1]))


def filled(bank: Program) -> str:
    """Record an event and build a read model of it; return the log's identity."""
    log = json.loads(bank("init", "--json").out)["log"]
    endpoint, name = stream_of(bank)
    event = block("account.opened", Nats_Expected_Last_Subject_Sequence="0")
    assert append(endpoint, name, [("account.a", event, b'{"owner":"ada"}')]) == 1
    return log


def test_repair_restores_settings_that_another_program_changed(bank: Program) -> None:
    log = filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    declared_anew(bank)
    refused = bank("init")
    assert (refused.status, refused.is_one_paragraph()) == (3, True)
    assert "carries no log identity" in refused.message()
    assert "`eventjet init --repair`" in refused.message()
    healed = bank("init", "--repair")
    assert healed.status == 0, healed.err
    text = " ".join(healed.out.split())
    for change in (f"it is the log {log} again", "allow_atomic is ", "allow_direct is ", "discard is 'old'"):
        assert change in text
    assert f"is ready: log {log}" in text
    assert json.loads(bank("init", "--json").out)["repaired"] == []
    assert state(bank).metadata[IDENTITY] == log


def test_repair_needs_the_log_identity_when_nothing_records_it(bank: Program) -> None:
    log = filled(bank)
    declared_anew(bank)
    unknown = bank("init", "--repair")
    assert unknown.status == 2
    assert "no checkpoint of this database says which log it is" in unknown.message()
    assert IDENTITY not in state(bank).metadata
    assert bank("init", "--log", log).status == 2
    assert bank("init", "--repair", "--log", log).status == 0
    assert state(bank).metadata[IDENTITY] == log
    assert bank("init", "--repair", "--log", str(uuid4())).status == 2


def test_repair_refuses_an_identity_other_than_that_of_the_read_models(bank: Program) -> None:
    log = filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    declared_anew(bank)
    refused = bank("init", "--repair", "--log", str(uuid4()))
    assert (refused.status, refused.is_one_paragraph()) == (2, True)
    assert f"so it is the log {log}, and --log names another. Leave it out." in refused.message()
    assert IDENTITY not in state(bank).metadata
    assert bank("init", "--repair", "--log", log).status == 0


def test_init_makes_no_empty_log_in_place_of_a_lost_one(bank: Program) -> None:
    log = filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    endpoint, name = stream_of(bank)
    ask(bank, call(f"STREAM.DELETE.{name}"))
    for refused in (bank("init"), bank("init", "--repair")):
        assert (refused.status, refused.is_one_paragraph()) == (3, True)
        assert f"has read models of the log {log}, up to position 1." in refused.message()
        assert "`eventjet restore` brings it back" in refused.message()
        assert "`eventjet init --reset balances`" in refused.message()
    with pytest.raises(StreamMissing):
        ask_once(endpoint, stream_info(name))
    begun = bank("init", "--reset", "balances")
    assert begun.status == 0
    assert log not in begun.out


def test_init_says_that_the_tables_are_of_another_log(bank: Program) -> None:
    filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    _, name = stream_of(bank)
    ask(bank, call(f"STREAM.DELETE.{name}"))
    assert bank("init", EVENTJET_DATABASE=f"sqlite:///{bank.folder}/other.db").status == 0
    again = bank("init")
    assert again.status == 1
    assert "is not ready" in again.out
    assert "but it was made from the log" in " ".join(again.out.split())
    assert json.loads(bank("status", "--json").out)[0]["state"] == "failed"


def test_no_repair_is_advised_for_a_sealed_log(bank: Program) -> None:
    filled(bank)
    _, name = stream_of(bank)
    for stream in (name, f"KV_{name}_snapshots"):
        config: dict[str, Any] = ask(bank, stream_info(stream)).config
        ask(bank, call(f"STREAM.UPDATE.{stream}", {**config, "sealed": True}))
    result = bank("init")
    text = " ".join(result.out.split())
    assert result.status == 1
    for stream in (name, f"KV_{name}_snapshots"):
        assert (
            f"{stream} is sealed, and that cannot be undone. If a mirror of it was promoted, set EVENTJET_SER" in text
        )
    for line in ("init", "doctor", "status"):
        printed = bank(line)
        assert "--repair" not in printed.out + printed.err


def test_a_single_server_refuses_replicas_and_the_message_names_the_setting(bank: Program) -> None:
    filled(bank)
    refused = bank("init", "--repair", EVENTJET_REPLICAS="3")
    assert (refused.status, refused.is_one_paragraph()) == (3, True)
    assert "the server would not change num_replicas: replicas > 1 not supported" in refused.message()
    assert "Set EVENTJET_REPLICAS to 1, or name the servers of a cluster." in refused.message()


def test_a_loss_is_reported_until_it_is_accepted(bank: Program) -> None:
    filled(bank)
    endpoint, name = stream_of(bank)
    append(endpoint, name, [("account.b", block("account.opened"), b'{"owner":"bob"}')])
    config = ask(bank, stream_info(name)).config
    ask(bank, call(f"STREAM.UPDATE.{name}", {**config, "discard": "old", "max_msgs": 1}))
    lost = bank("init", "--repair")
    assert lost.status == 1
    assert "position 1 from its beginning are gone" in " ".join(lost.out.split())
    assert state(bank).config["max_msgs"] == -1
    assert bank("init", "--repair", "--accept-loss").status == 0
    assert bank("init").status == 0
    for rebuilt in (
        bank("rebuild", "balances", "--engine", "local", "--dry-run"),
        bank("rebuild", "balances", "--engine", "local"),
    ):
        assert rebuilt.status == 0
        assert "The log begins at position 2: rows hold nothing of what came before." in " ".join(rebuilt.out.split())


def test_init_is_not_ready_for_a_release_that_renamed_an_aggregate(bank: Program) -> None:
    filled(bank)
    source = bank.folder / "bank.py"
    source.write_text(source.read_text().replace('@aggregate("account"', '@aggregate("acct"'))
    result = bank("init", EVENTJET_DATABASE=f"sqlite:///{bank.folder}/other.db")
    assert result.status == 1
    text = " ".join(result.out.split())
    assert "is not ready" in text
    assert "has events of 1 'account'" in text
    assert "`retired_aggregates`" in text
    assert "created table" not in text
    assert result.err == ""  # the answer says it once
    assert json.loads(bank("init", "--json").out)["undeclared"] == []
    assert [
        finding["check"]
        for finding in json.loads(bank("doctor", "--json").out)["found"]
        if "'account'" in finding["what"]
    ]
