"""What the command line says of an app that acts, when something failed, waits, ended or is gone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.jetstream.client import connect
from eventjet.operations.roles import ADMIN, READER, roles_of, user_lines
from eventjet.settings import Settings
from eventjet.subscriptions import handlers
from tests.acceptance.conftest import Ended, Program, clean_environ
from tests.acceptance.office import Office
from tests.logs import fresh_name

PATIENTLY = ("--timeout", "100")


@pytest.fixture
def office(tmp_path: Path, eventjet_nats: NatsServer) -> Office:
    module = fresh_name("office")
    environ = {
        **clean_environ(),
        "EVENTJET_APP": f"{module}:app",
        "EVENTJET_SERVERS": eventjet_nats.url,
        "EVENTJET_DATABASE": f"sqlite:///{tmp_path / 'read.db'}",
    }
    return Office(Program(tmp_path, environ), module, fresh_name("office"), eventjet_nats.url)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_retry_that_fails_again_ends_at_once_with_events_blocked_behind(office: Office) -> None:
    office.declare("reactors=[letters]")
    office.breaks()
    office("init")
    with office.working():
        first = office.execute("Box", "b", "fill", 1)
        second = office.execute("Box", "b", "fill", 2)
        office.eventually(lambda: [entry for entry in office.json("quarantine", "list") if entry["blocked"] == 1])
        # It would take all of the bound if it waited for what is blocked.
        again = office("quarantine", "retry", "letters", str(first), "--timeout", "3000")
        assert (again.status, again.out) == (1, f"{first}: failed again: ValueError: no stamp\n")
        blocked = office("quarantine", "retry", "letters", str(second))
        assert (blocked.status, "waits behind a quarantined one of the same" in blocked.message()) == (2, True)
        dropped = office("quarantine", "drop", "letters", str(first), "--yes", *PATIENTLY)
        assert (dropped.status, "position 2, which it blocked, failed" in dropped.out) == (1, True)
    gone = office("quarantine", "retry", "letters", str(first))
    assert gone.status == 2
    assert f"position {first} of 'letters' was dropped already" in gone.message()
    assert "is not in the quarantine" in office("quarantine", "drop", "letters", "99", "--yes").message()


def test_a_retry_that_times_out_says_so_and_stays_listed(office: Office) -> None:
    office.declare("reactors=[letters]")
    office.breaks()
    office("init")
    with office.working():
        office.execute("Box", "b", "fill", 1)
        office.quarantined("letters", 1)
    waiting = office("quarantine", "retry", "letters", "1", "--timeout", "0.3")
    assert waiting.status == 1
    assert "1: to be tried again" in waiting.out
    assert "Not over within 0.3 s: a worker may still be at its tries" in flat(waiting.out)
    assert "see `eventjet quarantine list letters`" in flat(waiting.out)
    assert office("quarantine", "retry", "letters", "1", "--timeout", "0").status == 0
    assert "to be tried again; it failed with" in flat(office("quarantine", "list").out)
    assert "resolution  to be tried again, quarantined" in office("quarantine", "show", "letters", "1").out
    office.mends()
    with office.working():
        done = office("quarantine", "retry", "letters", "--all", *PATIENTLY)
    assert done.status == 0


def test_a_quarantined_event_is_shown_as_it_is_stored(office: Office) -> None:
    stream = f"{office.name}_post"

    async def ask(subject: str, body: object) -> None:
        client = await connect(Settings(servers=(office.url,)))
        try:
            await client.request(subject, b"" if body is None else json.dumps(body).encode())
        finally:
            await client.close()

    def send(subject: str, body: object) -> None:
        asyncio.run(ask(subject, body))

    office.declare("reactors=[letters, post]")
    office.breaks()
    send(f"$JS.API.STREAM.CREATE.{stream}", {"name": stream, "subjects": [f"{stream}.>"]})
    office("init")
    cloud = {"specversion": "1.0", "id": "m-1", "source": "s", "type": "door.rung", "data": {"n": 1}}
    with office.working():
        position = office.execute("Box", "b", "fill", 7)
        send(f"{stream}.a", cloud)
        office.quarantined("letters", 1)
        (rung,) = office.quarantined("post", 1)
    assert (rung["event_type"], rung["position"]) == ("message", 1)
    entry = office.json("quarantine", "show", "letters", str(position))
    assert (entry["payload"], entry["event_type"], entry["missing"]) == ({"n": 7}, "box.filled", None)
    assert '{"n": 7}' in office("quarantine", "show", "letters", str(position)).out
    post_entry = office.json("quarantine", "show", "post", "1")
    assert (post_entry["payload"], post_entry["event_type"]) == (cloud, "door.rung")
    send(f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": 1})
    gone = flat(office("quarantine", "show", "post", "1").out)
    assert f"the stream '{stream}' no longer has this event at position 1: nothing is there" in gone
    send(f"$JS.API.STREAM.DELETE.{stream}", None)
    assert office.json("quarantine", "show", "post", "1")["missing"] == f"the stream '{stream}' does not exist"
    send(f"$JS.API.STREAM.CREATE.{stream}", {"name": stream, "subjects": [f"{stream}.>"]})
    send(f"{stream}.a", cloud)
    another = office.json("quarantine", "show", "post", "1")
    assert (another["payload"], "another one is there" in another["missing"]) == (None, True)


def unwrapped(out: str) -> str:
    return " ".join(out.split())


UNFOLDED = (
    "Trip.evolve raised KeyError for Begun: 'never'. "
    "It takes every event in any state: return self where nothing changes"
)


def test_sync_names_processes_it_cannot_wake_and_wakes_the_others(office: Office) -> None:
    office.declare("processes=[Trip]")
    office("init")
    for name in ("a", "raise", "step", "unfolded"):
        office.execute("Trip", name, "begin", name)
    office.breaks()
    done = office("process", "sync", "trip")
    assert done.status == 1
    assert done.out.splitlines()[:3] == [
        "woke 1, which took 0 steps; 3 could not be woken",
        "trip 'raise': KeyError: 'oops'",
        "trip 'step': LookupError: no box",
    ]
    assert unwrapped(done.out).endswith(f"trip 'unfolded': {UNFOLDED}")
    nobody = office.json("process", "sync", "trip", "a", "nobody", status=1)
    assert (nobody["woken"], nobody["steps"], nobody["failed"]) == (1, 0, 1)
    assert nobody["examples"] == [{"id": "nobody", "reason": "there are no events of it"}]


def test_a_process_is_shown_in_plain_words(office: Office) -> None:
    office.declare("processes=[Trip]")
    office("init")
    for name in ("a", "raise", "step", "unfolded"):
        office.execute("Trip", name, "begin", name)
    office.breaks()
    process = office.json("process", "show", "trip", "a")
    assert {key: process[key] for key in ("process", "id", "version", "step", "quarantined")} == {
        "process": "trip",
        "id": "a",
        "version": 1,
        "step": None,
        "quarantined": None,
    }
    assert process["state"] == {"name": "a", "at": "2030-01-01T00:00:00Z", "weight": "2.50"}
    assert process["deadlines"] == [
        {"at": "2080-01-01T00:00:00Z", "decision": "end"},
        {"at": "2090-01-01T00:00:00Z", "decision": "give_up"},
    ]
    lines = office("process", "show", "trip", "a").out
    assert 'state     name: "a"' in lines
    assert "deadline  2090-01-01T00:00:00Z  give_up" in lines
    raised = office("process", "show", "trip", "raise")
    assert (raised.status, "fault     trip 'raise', its step: KeyError: 'oops'" in raised.out) == (1, True)
    assert f"its state: {UNFOLDED}" in unwrapped(office("process", "show", "trip", "unfolded").out)
    nobody = office("process", "show", "trip", "nobody")
    assert (nobody.status, nobody.out, nobody.err) == (1, "", "There are no events of trip nobody.\n")


def test_a_process_that_is_quarantined_or_paused_says_so(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "Retry", handlers.Retry)  # restored at the end, whatever the app's module sets
    office.declare("processes=[Trip]")
    office("init")
    office.breaks()
    source = office.program.folder / f"{office.module}.py"
    text = source.read_text(encoding="utf-8")
    fewer = "from eventjet.subscriptions import handlers\nhandlers.Retry = lambda: Retry(tries=1)\n\napp = App("
    source.write_text(text.replace("\napp = App(", f"\n{fewer}"), encoding="utf-8")
    with office.working():
        position = office.execute("Trip", "step", "begin", "step")
        office.quarantined("trip", 1)
        office("pause", "trip")
    process = office.json("process", "show", "trip", "step")
    assert process["step"] == 'box b: take("2.50")'
    assert process["quarantined"] == {"position": position, "reason": "LookupError: no box"}
    lines = flat(office("process", "show", "trip", "step").out)
    see = f"see `eventjet quarantine show trip {position}`"
    assert f"waits behind the quarantined event at position {position}: LookupError: no box; {see}" in lines
    assert "paused nothing of trip goes on until `eventjet resume trip`" in lines


def test_deadlines_that_are_overdue_are_listed(office: Office) -> None:
    office.declare("processes=[Trip]")
    office("init")
    office.execute("Trip", "far", "begin", "far")
    office.execute("Trip", "soon", "begin", "soon")
    assert office.json("process", "sync", "trip")["woken"] == 2
    overdue = office.eventually(lambda: [row for row in office.json("deadlines", "list") if row["due"]])
    assert [(deadline["id"], deadline["until"] > "2026") for deadline in overdue] == [("soon", True)]
    assert [(row["id"], row["due"]) for row in office.json("deadlines", "list")] == [("soon", True), ("far", False)]
    assert f"due since {overdue[0]['until']}, no worker has dealt with it" in flat(office("deadlines", "list").out)


@pytest.mark.slow
def test_a_killed_worker_is_not_called_the_owner(office: Office) -> None:
    office.declare("reactors=[letters], processes=[Trip]")
    office("init")

    def owners(key: str) -> list[str]:
        return [status[key] for status in office.json("status") if status[key] is not None]

    with office.working():
        (owner,) = set(office.eventually(lambda: names if len(names := owners("owner")) == 2 else []))
    assert office.eventually(lambda: names if len(names := owners("lost_owner")) == 2 else []) == [owner] * 2
    assert owners("owner") == []
    assert f"letters: its worker {owner} has not been seen for" in flat(office("status").out)


def test_an_app_that_declares_nothing_is_reported(office: Office) -> None:
    office.declare("")
    assert office("init").status == 0
    done = office("status")
    assert done.status == 0
    assert "declares nothing that could be looked at" in flat(done.out)
    assert office.json("status") == []


def test_an_app_without_cursors_is_initialised_by_its_own_admin(office: Office) -> None:
    """The roles of such an app may look at no cursors."""
    office.declare("")
    roles = [role for role in roles_of(office.name, ("box",), ()) if role.name in (ADMIN, READER)]
    users = "\n".join(map(user_lines, roles))
    secrets = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    with NatsServer(config=f"{secrets}authorization {{ timeout: 30, users: [\n{users}\n] }}") as server:

        def by(role: str, command: str) -> Ended:
            user = {"EVENTJET_USER": role, "EVENTJET_PASSWORD": role, "EVENTJET_INBOX_PREFIX": f"_INBOX_{role}"}
            return office.program(command, EVENTJET_SERVERS=server.url, **user)

        assert (by(ADMIN, "init").status, by(ADMIN, "init").status) == (0, 0)
        assert "declares nothing" in by(READER, "status").out


@pytest.mark.slow
def test_an_undeclared_cursor_is_reported_and_dropped(office: Office) -> None:
    office.declare("reactors=[letters], processes=[Trip]")
    office.breaks()
    office("init")
    declared = office("cursor", "drop", "letters", "--yes")
    assert (declared.status, "The app declares 'letters'" in declared.message()) == (2, True)
    with office.working():
        office.execute("Box", "b", "fill", 1)
        office.quarantined("letters", 1)
        office.declare("processes=[Trip]")
        refused = office("cursor", "drop", "letters", "--yes")
        assert (refused.status, "is at 'letters', and was seen" in refused.message()) == (2, True)
    report = office.json("init")
    assert report["undeclared"] == [{"name": "letters", "position": 1}]
    text = flat(office("init").out)
    assert "letters is no longer declared and stands at 1: `eventjet cursor set NEW 1` lets another go on there" in text
    office.eventually(lambda: [row for row in office.json("status") if row["lost_owner"] and row["name"] == "letters"])
    unanswered = office("cursor", "drop", "letters")
    assert (unanswered.status, "Nothing was removed" in unanswered.message()) == (2, True)
    assert office.json("cursor", "drop", "letters", "--yes") == {"name": "letters", "position": 1, "quarantined": 1}
    assert office.json("init")["undeclared"] == []
    assert office("cursor", "drop", "letters", "--yes").status == 2
    office.declare("reactors=[letters], processes=[Trip]")
    assert office.json("init")["cursors"] == {"letters": 1}
    assert office.json("quarantine", "list", "letters", "--all") == []


def test_what_init_has_not_made_is_named_and_no_empty_answer_is_given(office: Office) -> None:
    office.declare("processes=[Trip]")
    for command in (("process", "list", "trip"), ("cursor", "drop", "letters", "--yes")):
        refused = office(*command)
        assert (refused.status, refused.out) == (3, "")
        assert f"The stream {office.name!r}: it does not exist. Run `eventjet init` once" in refused.message()
    refused = office("deadlines", "list")
    assert (refused.status, refused.out) == (3, "")
    assert "it is not known which deadlines wait. Run `eventjet init`" in refused.message()
    office("init")
    assert office("deadlines", "list").out == "No process waits for a deadline.\n"


def test_instances_are_counted_and_listed_by_stage_and_age(office: Office) -> None:
    office.declare("processes=[Trip]")
    office("init")
    for name in ("a", "b"):
        office.execute("Trip", name, "begin", name)
    listed = office.json("process", "list", "trip")
    assert [(stage["stage"], stage["open"]) for stage in listed["stages"]] == [("trip.begun", 2)]
    assert [(each["id"], each["waits_for"]) for each in listed["instances"]] == [("a", "worker"), ("b", "worker")]
    assert [line.split()[::3] for line in office("process", "list", "trip").out.splitlines()[-2:]] == [
        ["a", "worker"],
        ["b", "worker"],
    ]
    first = flat(office("process", "list", "trip", "--stage", "trip.begun", "--limit", "1").out)
    assert "The 1 that are longest in their stage are listed, of 2." in first
    assert office.json("process", "list", "trip", "--all", "--older-than", "1h")["instances"] == []
    for options, remark in (
        (("--stage", "ended"), "None of them is in the stage 'ended'."),
        (("--older-than", "1h"), "None of them that is open has been in its stage for 1h or longer."),
        (("--older-than", "1h", "--all"), "None of them has been in its stage for 1h or longer."),
        (("--older-than", "1h", "--stage", "ended"), "None of them has been in the stage 'ended' for 1h or longer."),
    ):
        assert flat(office("process", "list", "trip", *options).out).endswith(remark)
    assert "Looked at 1 to 1 of 2 instances of trip" in flat(office("process", "list", "trip", "--look-at", "1").out)
