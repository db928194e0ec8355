"""What holds for every page: who may look, what a form must carry, the headers, and what breaks."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from eventjet.console import Access, Level, console
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from examples.bank.app import bank
from tests.ui.acted import leaving
from tests.ui.conftest import serving

NOWHERE = Settings.load({"servers": "nats://127.0.0.1:1", "database": "sqlite:////nowhere/none.db"}, environ={})


def by_header(request: Request) -> tuple[Level, str]:
    level = request.headers.get("x-level", "forbidden")
    assert level in ("all", "read_only", "forbidden")
    return level, request.headers.get("x-actor", "")  # type: ignore[return-value]


def client(mounted: str = "", access: Access = by_header) -> httpx.AsyncClient:
    site = console(bank, settings=NOWHERE, access=access)
    asgi = httpx.ASGITransport(Starlette(routes=[Mount(mounted, site)]) if mounted else site)
    return httpx.AsyncClient(transport=asgi, base_url="http://console.example")


async def test_whoever_may_not_look_gets_one_page_and_nothing_else() -> None:
    answer = await client().get("/", headers={"x-level": "forbidden"})
    assert answer.status_code == 403
    assert "You may not look" in answer.text
    assert "bank" in answer.text


async def test_every_answer_forbids_what_is_not_the_consoles_own() -> None:
    for path in ("/", "/nothing", "/static/console.css"):
        answer = await client().get(path, headers={"x-level": "read_only"})
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_mounted_every_link_leads_below_where_it_is() -> None:
    answer = await client("/console").get("/console/", headers={"x-level": "read_only"})
    assert answer.status_code == 200
    links = [part.split('"')[0] for part in answer.text.split('href="')[1:] if not part.startswith("#")]
    assert links
    assert all(link.startswith("/console/") for link in links)


@pytest.mark.parametrize("said", ["all", ("everything", "ada"), ("all",), None])
async def test_an_access_function_that_says_nothing_known_lets_nobody_in(said: object) -> None:
    with pytest.raises(TypeError, match="Nobody is let in"):
        await client(access=lambda _request: said).get("/")  # type: ignore[arg-type,return-value]


def test_the_overview_is_live_in_a_browser(page: Page, nats: NatsServer, tmp_path: Path) -> None:
    environ = {"EVENTJET_SERVERS": nats.url, "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db"}
    with serving(tmp_path, environ, "--app", "eventjet.examples.bank.app:bank") as url, leaving(page):
        page.goto(f"{url}/")
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
