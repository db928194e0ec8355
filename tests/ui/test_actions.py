"""Every action in a browser, and its effect on the database and the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from eventjet.dev.nats import NatsServer
from tests.ui.acted import LAST, Books, books_in, confirm, leaving
from tests.ui.conftest import Watched, serving_process

_BOUND_S = 90.0


@pytest.fixture(params=["postgresql", "sqlite"])
def books(request: pytest.FixtureRequest, eventjet_nats: NatsServer, tmp_path: Path) -> Books:
    url = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        url = str(request.getfixturevalue("eventjet_database"))
    return books_in(tmp_path, eventjet_nats.url, url)


@pytest.fixture
def ledger(eventjet_nats: NatsServer, tmp_path: Path) -> Books:
    """Books on SQLite alone."""
    return books_in(tmp_path, eventjet_nats.url, f"sqlite:///{tmp_path}/read.db")


def until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + _BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {_BOUND_S:g} s: {description}"
        time.sleep(0.1)


def caught_up(books: Books) -> bool:
    return books.rows("select position from eventjet_projection where state = 'active'") == [(LAST,)]


def resolutions(books: Books) -> dict[int, str]:
    query = "select position, resolution from eventjet_quarantine where resolution <> 'blocked' order by position"
    return dict(books.rows(query))


def test_a_worker_carries_out_retries_and_drops_of_quarantined_events(page: Page, books: Books) -> None:
    with books.console("--allow-actions") as url, leaving(page):
        with books.working():
            until(lambda: caught_up(books), "the worker took all events")
        page.goto(f"{url}/quarantine")
        expect(page.locator("tbody tr")).to_have_count(2)
        expect(page.locator("tbody tr").first).to_contain_text("ValueError: no 666")
        page.get_by_role("link", name="3", exact=True).click()
        expect(page.locator("pre.json")).to_contain_text('"amount": "666"')
        expect(page.locator("main ol li")).to_have_count(2)
        page.locator("summary").click()
        expect(page.locator("details pre")).to_contain_text("raise ValueError")

        page.goto(f"{url}/quarantine")
        page.get_by_label("position 3", exact=True).check()
        page.get_by_role("button", name="Drop the chosen").click()
        expect(page.locator("main")).to_contain_text("A rebuild will leave it out too.")
        expect(page.locator("main")).to_contain_text("2 events that wait behind them go on")
        confirm(page, "Drop")
        # No worker runs, and the page says so as the command does.
        expect(page.locator("main")).to_contain_text("No worker has carried it out yet. One of balances will")
        assert resolutions(books) == {3: "dropped", 4: "retry", 7: "quarantined"}
        with books.working():
            expect(page.locator("main")).to_contain_text("3: dropped, and it blocks nothing any more")
            until(lambda: resolutions(books) == {3: "dropped", 7: "quarantined"}, "what waited was taken")
        books.mend()
        page.goto(f"{url}/quarantine?name=balances")
        page.get_by_role("link", name="Retry all").click()
        confirm(page, "Retry")
        with books.working():
            expect(page.locator("main")).to_contain_text("7: taken, and it blocks nothing any more")
        assert resolutions(books)[7] == "retried"
        page.goto(f"{url}/quarantine")
        expect(page.locator("main")).to_contain_text("Nothing is quarantined.")
    actions = books.actions()
    assert [action[:3] for action in actions] == [("drop", "balances", "done"), ("retry", "balances", "done")]
    assert all(actor for *_, actor in actions)
    assert books.details("drop") == {"positions": [3]}


def test_a_worker_heeds_that_its_read_model_is_paused_and_resumed(page: Page, ledger: Books) -> None:
    with ledger.console("--allow-actions") as url, leaving(page), ledger.working():
        until(lambda: caught_up(ledger), "the worker took all events")
        page.goto(f"{url}/actions/new?action=resume&name=balances")
        expect(page.locator("main")).to_contain_text("It is not paused.")
        expect(page.locator("main form")).to_have_count(0)
        page.goto(f"{url}/actions/new?action=pause&name=balances")
        expect(page.locator("main")).to_contain_text("Readers go on seeing the rows as they are then")
        expect(page.locator("main")).to_contain_text("quarantined at position 10")
        confirm(page, "Pause")
        expect(page.locator("main")).to_contain_text("balances revision 1 is paused at position 10")
        assert ledger.rows("select state, owner from eventjet_projection") == [("paused", None)]
        page.goto(f"{url}/actions/new?action=resume&name=balances")
        confirm(page, "Resume")
        expect(page.locator("main")).to_contain_text("balances revision 1 goes on from position 10")
        until(lambda: caught_up(ledger), "a worker took it again")
        page.goto(f"{url}/actions?target=balances")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.goto(f"{url}/actions?target=movements")
        expect(page.locator("tbody tr")).to_have_count(0)


def test_a_rebuild_and_a_verification_run_and_show_their_results(page: Page, ledger: Books) -> None:
    with ledger.console("--allow-actions") as url, leaving(page):
        with ledger.working():
            until(lambda: caught_up(ledger), "the worker took all events")
        ledger.change("update balances set amount = '999' where account_id = 'a-3'")
        page.goto(f"{url}/jobs")
        page.get_by_label("balances revision 1").check()
        page.get_by_role("button", name="Verify").click()
        confirm(page, "Verify")
        expect(page.locator("main")).to_contain_text("balances at position 10: 1 difference in 3 rows")
        row = page.locator("tr", has_text="a-3")
        expect(row).to_contain_text("999")
        expect(row).to_contain_text("never equal")
        page.get_by_role("link", name="Rebuild balances").click()
        expect(page.locator("main")).to_contain_text("10 events, positions 1 to 10")
        confirm(page, "Rebuild")
        expect(page.locator("main")).to_contain_text("swapped in at position 10")
        assert ledger.rows("select amount from balances where account_id = 'a-3'")[0][0] != "999"
        assert ledger.rows("select generation from eventjet_projection") == [(2,)]
        assert ledger.rows("select * from eventjet_rebuild") == []
    assert [action[:3] for action in ledger.actions()] == [
        ("verify", "balances", "done"),
        ("rebuild", "balances", "done"),
    ]


@pytest.fixture
def swapping(eventjet_nats: NatsServer, eventjet_database: str, tmp_path: Path) -> Iterator[Books]:
    """Books on PostgreSQL, rebuilt once, with a reader who keeps another rebuild from swapping."""
    books = books_in(tmp_path, eventjet_nats.url, eventjet_database)
    assert books.program("rebuild", "balances", "--engine", "local").status == 0
    with books.read_meanwhile():
        yield books


def begin_rebuild(page: Page, url: str) -> str:
    """Begin a rebuild that waits for the reader; return its id."""
    page.goto(f"{url}/actions/new?action=rebuild&name=balances&engine=local")
    confirm(page, "Rebuild")
    expect(page.locator("tr", has_text="swap")).to_contain_text("going on")
    return page.url.rpartition("id=")[2]


def leftovers(books: Books) -> list[object]:
    spaces = "select nspname from pg_namespace where nspname like 'ej\\_%'"
    return [*books.rows("select * from eventjet_rebuild"), *books.rows(spaces)]


def test_a_job_is_cancelled_and_leaves_nothing_behind(page: Page, swapping: Books) -> None:
    with swapping.console("--allow-actions") as url, leaving(page):
        job = begin_rebuild(page, url)
        other = page.context.new_page()
        other.goto(f"{url}/actions/new?action=verify&name=balances")
        confirm(other, "Verify")
        expect(other.locator("main")).to_contain_text("A rebuild of balances runs already.")
        other.close()
        page.get_by_role("link", name="Cancel").click()
        expect(page.locator("main")).to_contain_text("No live read model is changed.")
        confirm(page, "Cancel")
        expect(page.locator("main")).to_contain_text("The rebuild of balances is stopping.")
        page.goto(f"{url}/jobs/one?id={job}")
        expect(page.get_by_role("status")).to_have_text("cancelled")
        until(lambda: swapping.actions()[0][2] == "cancelled", "its end is recorded")
    assert leftovers(swapping) == []
    assert swapping.rows("select generation from eventjet_projection") == [(2,)]
    assert [action[::2] for action in swapping.actions()] == [
        ("rebuild", "cancelled"),
        ("verify", "refused"),
        ("cancel", "done"),
    ]


def test_a_console_that_ends_cancels_its_jobs_and_logs_it(page: Page, swapping: Books) -> None:
    program = swapping.program
    with serving_process(program.folder, program.environ, "--allow-actions") as (url, process):
        begin_rebuild(page, url)
        page.close()
        process.terminate()
        assert process.wait(_BOUND_S) == 0
    assert "clearing away what was begun: 1 action" in (program.folder / "ui.log").read_text()
    assert [action[::2] for action in swapping.actions()] == [("rebuild", "cancelled")]
    assert leftovers(swapping) == []


def test_an_action_of_a_killed_console_is_shown_as_unfinished(watched: Watched, swapping: Books) -> None:
    program, page = swapping.program, watched.page
    with serving_process(program.folder, program.environ, "--allow-actions") as (url, process):
        job = begin_rebuild(page, url)
        page.goto("about:blank")
        process.kill()
        process.wait(_BOUND_S)
    assert [action[::2] for action in swapping.actions()] == [("rebuild", "begun")]
    with swapping.console() as url, leaving(page):
        page.goto(f"{url}/actions")
        expect(page.locator("tbody tr")).to_contain_text("ago, and no end of it is recorded")
        page.goto(f"{url}/jobs/one?id={job}")
        expect(page.locator("main")).to_contain_text("was killed meanwhile")


def test_a_revision_is_promoted_and_readers_see_it(page: Page, ledger: Books) -> None:
    ledger.program("rebuild", "balances", "--engine", "local")
    file = ledger.program.folder / "bank.py"
    file.write_text(file.read_text().replace('@projection("balances"', '@projection("balances", revision=2'))
    assert ledger.program("init").status == 0
    assert ledger.program("rebuild", "balances", "--engine", "local").status == 0
    where = "select revision, location from eventjet_projection order by revision"
    assert ledger.rows(where)[1] != (2, "")
    with ledger.console("--allow-actions") as url, leaving(page):
        page.goto(f"{url}/actions/new?action=promote&name=balances")
        expect(page.locator("main")).to_contain_text("The tables of revision 1 become inactive and are kept")
        confirm(page, "Promote")
        expect(page.locator("main")).to_contain_text(
            "balances revision 2 has the table balances; revision 1 is inactive now"
        )
        page.goto(f"{url}/actions/new?action=promote&name=balances")
        expect(page.locator("main")).to_contain_text("Revision 2 is what readers see already.")
    assert ledger.rows(where)[1] == (2, "")
    assert [action[:3] for action in ledger.actions()] == [("promote", "balances", "done")]


def test_a_form_that_is_sent_twice_has_one_effect(page: Page, ledger: Books) -> None:
    with ledger.console("--allow-actions") as url, leaving(page):
        page.goto(f"{url}/actions/new?action=pause&name=balances")
        form = page.locator("main form")
        fields = {
            field.get_attribute("name") or "": field.get_attribute("value") or ""
            for field in form.locator("input").all()
        }
        page.locator("main form button").dblclick()
        expect(page.locator("main")).to_contain_text("is paused at position 0")
        first = page.url
        ledger.program("resume", "balances")
        again = page.request.post(f"{url}/actions/new", form=fields, headers={"origin": url})
        assert (again.status, again.url) == (200, first)
    assert ledger.rows("select state from eventjet_projection") == [("new",)]
    assert len(ledger.actions()) == 1


def test_an_action_that_cannot_be_recorded_is_refused(page: Page, ledger: Books, watched: Watched) -> None:
    with ledger.console("--allow-actions") as url, leaving(page):
        page.goto(f"{url}/actions/new?action=pause&name=balances")
        ledger.change("drop table eventjet_action")
        confirm(page, "Pause")
        expect(page.locator("main")).to_contain_text("Nothing was done, since it could not be recorded.")
    assert ledger.rows("select count(*) from eventjet_projection where state = 'paused'") == [(0,)]
    assert all("503" in complaint for complaint in watched.complaints)
    watched.complaints.clear()
