"""`eventjet init` over a stream that another program declared anew, as a subscriber of FastStream does by default."""

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
    """What another program leaves of the stream's configuration."""
    _, name = stream_of(bank)
    found = ask(bank, stream_info(name)).config
    lost = {"allow_atomic": False, "allow_direct": False, "discard": "old", "max_msg_size": -1, "metadata": {}}
    ask(bank, call(f"STREAM.UPDATE.{name}", {**found, **lost}))


def state(bank: Program) -> StreamState:
    return ask(bank, stream_info(stream_of(bank)[1]))


def filled(bank: Program) -> str:
    """A log with an event, and a read model of it; the log's identity."""
    log = json.loads(bank("init", "--json").out)["log"]
    endpoint, name = stream_of(bank)
    event = block("account.opened", Nats_Expected_Last_Subject_Sequence="0")
    assert append(endpoint, name, [("account.a", event, b'{"owner":"ada"}')]) == 1
    return log


def test_what_another_program_changed_is_named_and_healed(bank: Program) -> None:
    log = filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    declared_anew(bank)
    told = bank("init")
    assert (told.status, told.is_one_paragraph()) == (3, True)
    assert "carries no log identity" in told.said()
    assert "`eventjet init --repair`" in told.said()
    healed = bank("init", "--repair")
    assert healed.status == 0, healed.err
    said = " ".join(healed.out.split())
    for change in (f"it is the log {log} again", "allow_atomic is ", "allow_direct is ", "discard is 'old'"):
        assert change in said
    assert f"is ready: log {log}" in said
    assert json.loads(bank("init", "--json").out)["repaired"] == []
    assert state(bank).metadata[IDENTITY] == log


def test_an_identity_that_nothing_tells_has_to_be_named(bank: Program) -> None:
    log = filled(bank)
    declared_anew(bank)
    unknown = bank("init", "--repair")
    assert unknown.status == 2
    assert "no checkpoint of this database says which log it is" in unknown.said()
    assert IDENTITY not in state(bank).metadata
    assert bank("init", "--log", log).status == 2
    assert bank("init", "--repair", "--log", log).status == 0
    assert state(bank).metadata[IDENTITY] == log
    assert bank("init", "--repair", "--log", str(uuid4())).status == 2


def test_an_identity_that_the_read_models_tell_is_not_exchanged_for_another(bank: Program) -> None:
    log = filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    declared_anew(bank)
    refused = bank("init", "--repair", "--log", str(uuid4()))
    assert (refused.status, refused.is_one_paragraph()) == (2, True)
    assert f"so it is the log {log}, and --log names another. Leave it out." in refused.said()
    assert IDENTITY not in state(bank).metadata
    assert bank("init", "--repair", "--log", log).status == 0


def test_init_makes_no_empty_log_where_one_was_lost(bank: Program) -> None:
    log = filled(bank)
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    endpoint, name = stream_of(bank)
    ask(bank, call(f"STREAM.DELETE.{name}"))
    for refused in (bank("init"), bank("init", "--repair")):
        assert (refused.status, refused.is_one_paragraph()) == (3, True)
        assert f"has read models of the log {log}, up to position 1." in refused.said()
        assert "`eventjet restore` brings it back" in refused.said()
        assert "`eventjet init --reset balances`" in refused.said()
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


def test_no_repair_is_advised_for_a_log_that_was_sealed(bank: Program) -> None:
    filled(bank)
    _, name = stream_of(bank)
    for stream in (name, f"KV_{name}_snapshots"):
        config: dict[str, Any] = ask(bank, stream_info(stream)).config
        ask(bank, call(f"STREAM.UPDATE.{stream}", {**config, "sealed": True}))
    looked = bank("init")
    said = " ".join(looked.out.split())
    assert looked.status == 1
    for stream in (name, f"KV_{name}_snapshots"):
        assert (
            f"{stream} is sealed, and that cannot be undone. If a mirror of it was promoted, set EVENTJET_SER" in said
        )
    for line in ("init", "doctor", "status"):
        printed = bank(line)
        assert "--repair" not in printed.out + printed.err


def test_one_server_refuses_replicas_and_the_way_out_is_their_number(bank: Program) -> None:
    filled(bank)
    refused = bank("init", "--repair", EVENTJET_REPLICAS="3")
    assert (refused.status, refused.is_one_paragraph()) == (3, True)
    assert "the server would not change num_replicas: replicas > 1 not supported" in refused.said()
    assert "Set EVENTJET_REPLICAS to 1, or name the servers of a cluster." in refused.said()


def test_a_loss_is_told_until_it_is_accepted(bank: Program) -> None:
    filled(bank)
    endpoint, name = stream_of(bank)
    append(endpoint, name, [("account.b", block("account.opened"), b'{"owner":"bob"}')])
    found = ask(bank, stream_info(name)).config
    ask(bank, call(f"STREAM.UPDATE.{name}", {**found, "discard": "old", "max_msgs": 1}))
    lost = bank("init", "--repair")
    assert lost.status == 1
    assert "position 1 from its beginning are gone" in " ".join(lost.out.split())
    assert state(bank).config["max_msgs"] == -1
    assert bank("init", "--repair", "--accept-loss").status == 0
    assert bank("init").status == 0
    for told in (
        bank("rebuild", "balances", "--engine", "local", "--dry-run"),
        bank("rebuild", "balances", "--engine", "local"),
    ):
        assert told.status == 0
        assert "The log begins at position 2: rows hold nothing of what came before." in " ".join(told.out.split())


def test_init_is_not_ready_for_a_release_that_calls_an_aggregate_otherwise(bank: Program) -> None:
    filled(bank)
    source = bank.folder / "bank.py"
    source.write_text(source.read_text().replace('@aggregate("account"', '@aggregate("acct"'))
    told = bank("init", EVENTJET_DATABASE=f"sqlite:///{bank.folder}/other.db")
    assert told.status == 1
    said = " ".join(told.out.split())
    assert "is not ready" in said
    assert "has events of 1 'account'" in said
    assert "`retired_aggregates`" in said
    assert "created table" not in said
    assert [one["check"] for one in json.loads(bank("doctor", "--json").out)["found"] if "'account'" in one["what"]]
