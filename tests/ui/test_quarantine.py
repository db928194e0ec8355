"""The quarantines of reactors, and personal fields on the pages of quarantines and jobs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import text
from starlette.requests import Request

from eventjet.app import load_app
from eventjet.console import Level, console
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from eventjet.sql.database import Database
from tests.acceptance.conftest import Program, clean_environ
from tests.acceptance.office import Office
from tests.acceptance.test_personal import SECRET, SOURCE, _join
from tests.logs import fresh_name
from tests.ui.acted import confirm, leaving
from tests.ui.conftest import serving

_BOUND_S = 90.0


def aside(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function that runs a loop of its own beside the loop of the browser."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments).result()


@pytest.fixture
def office(tmp_path: Path, eventjet_nats: NatsServer) -> Office:
    name = fresh_name("office")
    environ = {
        **clean_environ(),
        "EVENTJET_APP": f"{name}:app",
        "EVENTJET_SERVERS": eventjet_nats.url,
        "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db",
    }
    office = Office(Program(tmp_path, environ), name, name, eventjet_nats.url)
    office.declare("reactors=[letters]")
    assert office("init").status == 0
    return office


def test_quarantined_events_of_a_reactor_are_retried_and_dropped(office: Office, page: Page, tmp_path: Path) -> None:
    office.breaks()
    positions = [aside(office.execute, "Box", box, "fill", 1) for box in ("b-1", "b-1", "b-2")]
    with office.working():
        office.quarantined("letters", 2)
    with serving(tmp_path, office.program.environ, "--allow-actions") as url, leaving(page):
        page.goto(f"{url}/quarantine")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.get_by_label("Choose all 2 on this page").check()
        page.get_by_role("button", name="Retry the chosen").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Retry 2 events of letters?")
        page.goto(f"{url}/quarantine?text=B-2")
        expect(page.locator("tbody tr")).to_have_count(1)
        page.get_by_role("link", name="Drop all that match").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Drop 1 event of letters?")
        expect(page.locator("main")).to_contain_text("These are all 1 that have 'B-2' in them.")
        answer = page.request.get(f"{url}/actions/new?action=drop&name=letters&all=1&text=b-9")
        assert (answer.status, "Nothing that is quarantined has &#39;b-9&#39; in it." in answer.text()) == (404, True)
        page.goto(f"{url}/quarantine")
        first = page.locator("tbody tr").first
        expect(first).to_contain_text("ValueError: no stamp")
        expect(first.locator("td").nth(5)).to_have_text("1")
        first.get_by_role("link").click()
        expect(page.locator("pre.json")).to_contain_text('"n": 1')
        expect(page.locator("main ol li")).to_have_count(1)

        answer = page.request.get(f"{url}/actions")
        assert "run `eventjet db upgrade`" in answer.text()
        assert office("db", "upgrade").status == 0
        office.mends()
        page.get_by_role("link", name="Retry").click()
        confirm(page, "Retry")
        expect(page.locator("main")).to_contain_text("No worker has carried it out yet")
        with office.working():
            expect(page.locator("main")).to_contain_text(f"{positions[0]}: taken, and it blocks nothing any more")
            (quarantined,) = office.quarantined("letters", 1)
            assert quarantined["position"] == positions[2]
        page.goto(f"{url}/actions/new?action=drop&name=letters&all=1")
        expect(page.locator("main")).to_contain_text("What it leads to will not happen")
        confirm(page, "Drop")
        expect(page.get_by_role("status")).to_have_text("done")
        assert [entry["resolution"] for entry in office.json("quarantine", "list", "letters", "--all")][-1] == "dropped"
        page.goto(f"{url}/actions/new?action=pause&name=letters")
        expect(page.locator("main")).to_contain_text("Nothing is lost; what events lead to happens later.")
        confirm(page, "Pause")
        expect(page.locator("main")).to_contain_text("letters is paused at position")
    (status,) = office.json("status")
    assert status["state"] == "paused"


def everybody(_request: Request) -> tuple[Level, str]:
    return "all", "ada"


@pytest.mark.slow
async def test_no_page_of_quarantines_and_jobs_shows_a_personal_field(
    tmp_path: Path, eventjet_nats: NatsServer
) -> None:
    name = fresh_name("people")
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("NAME", repr(name)), encoding="utf-8")
    settings = {"servers": eventjet_nats.url, "database": f"sqlite:///{tmp_path}/read.db"}
    environ = {"EVENTJET_SERVERS": settings["servers"], "EVENTJET_DATABASE": settings["database"]}
    people = Program(tmp_path, {**clean_environ(), **environ, "EVENTJET_APP": f"{name}:app"})
    assert people("init").status == 0
    await asyncio.to_thread(_join, people)
    worker = people.start("worker", "contacts", "parking", "mails", "visit")
    site = console(load_app(f"{name}:app", tmp_path), settings=Settings.load(settings, environ={}), access=everybody)
    browser = httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://console.example")
    texts: list[str] = []

    async def get(path: str) -> str:
        answer = await browser.get(path)
        assert answer.status_code in (200, 303, 404), (path, answer.text)
        texts.append(answer.text)
        return answer.text

    async def until(path: str, *wanted: str) -> None:
        deadline = time.monotonic() + _BOUND_S
        page = await get(path)
        while not all(text in page for text in wanted):
            assert time.monotonic() < deadline, page
            await asyncio.sleep(0.1)
            page = await get(path)

    try:
        async with site.router.lifespan_context(site):
            await until(
                "/quarantine",
                "Quarantined events of parking",
                "Quarantined events of mails",
                "Quarantined events of visit",
            )
            for source in ("parking", "mails", "visit"):
                for position in range(1, 6):
                    await get(f"/quarantine/one?name={source}&position={position}")
                await get(f"/actions/new?action=drop&name={source}&all=1")
            assert "&lt;personal&gt;" in "".join(texts)
            with Database(settings["database"]).sync_engine().begin() as connection:
                changed = connection.execute(text("update contacts set email = 'else'"))
                assert changed.rowcount
            for action in ("verify", "rebuild"):
                for source in ("contacts", "stopping", "byhand", "narrow"):
                    await _done(browser, action, source, until)
    finally:
        worker.kill()
        worker.communicate()
    every = "".join(texts)
    assert "Differences" in every
    assert SECRET not in every
    with Database(settings["database"]).sync_engine().connect() as connection:
        recorded = connection.execute(text("select * from eventjet_action")).all()
    assert recorded
    assert SECRET not in str(recorded)


async def _done(browser: httpx.AsyncClient, action: str, name: str, until: Callable[..., Any]) -> None:
    page = (await browser.get(f"/actions/new?action={action}&name={name}&engine=local")).text
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page))
    if not fields:  # it is refused before it is begun
        return
    answer = await browser.post("/actions/new", data=fields)
    assert answer.status_code == 303, answer.text
    job = answer.headers["location"].rpartition("=")[2]
    await until(f"/actions/one?id={job}", "for ")
    await until(f"/jobs/one?id={job}", "Phases")
