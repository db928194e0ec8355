"""Who may look and who may act: each answer of `access`, forms of other sites, proxies, and secrets on pages."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.requests import Request

from eventjet.cli.ui import behind
from eventjet.console import Access, Level, console, live
from eventjet.console.action_kinds import ACTIONS
from eventjet.console.pages import PATHS
from eventjet.console.screens import ENDPOINTS
from eventjet.errors import UsageError
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from examples.bank.app import bank
from tests.acceptance.conftest import Program, clean_environ
from tests.ui.conftest import serving, serving_process

HOST = "http://console.example"
_OPERATIONS = """
OPERATORS = {"ada"}

def by_sign_on(request):
    user = request.headers.get("x-user", "")
    return ("all" if user in OPERATORS else "read_only" if user else "forbidden"), user

def nobody():
    return "all", ""
"""
SECRET = "c0rrect-h0rse"
LIVE = {name for name in PATHS if name.endswith("_live")}
PAGES = [name for name in ENDPOINTS if name not in LIVE]


def may(level: Level, actor: str = "ada") -> Access:
    return lambda _request: (level, actor)


async def slowly(request: Request) -> tuple[Level, str]:
    await asyncio.sleep(0)
    return ("all" if request.headers.get("x-user") == "ada" else "forbidden"), request.headers.get("x-user", "")


def settings(folder: Path) -> Settings:
    """Return settings with a real database and a server that does not run."""
    url = f"sqlite:///{folder}/read.db"
    create_tables(Database(url).sync_engine(), bank.projections.values())
    return Settings.load({"servers": "nats://127.0.0.1:1", "database": url}, environ={})


Open: TypeAlias = Callable[[Access], httpx.AsyncClient]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Open]:
    """A function that connects a client to a console of its own; they are closed at the end."""
    async with AsyncExitStack() as stack:

        def opened(access: Access) -> httpx.AsyncClient:
            site = console(bank, settings=settings(tmp_path), access=access)
            stack.push_async_callback(closed, site)
            return httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url=HOST)

        yield opened


@pytest.fixture
async def stack() -> AsyncGenerator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def closed(site: Starlette) -> None:
    async with site.router.lifespan_context(site):
        pass


def recorded_actions(folder: Path) -> list[Any]:
    with Database(f"sqlite:///{folder}/read.db").sync_engine().connect() as connection:
        rows = connection.execute(text("select actor, action, target, outcome from eventjet_action order by at"))
        return [tuple(row) for row in rows]


async def form(browser: httpx.AsyncClient, **headers: str) -> dict[str, str]:
    """Return the form that pauses the balances, as its page has it."""
    answer = await browser.get("/actions/new?action=pause&name=balances", headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', answer.text))


async def pausing(browser: httpx.AsyncClient, fields: dict[str, str], **headers: str) -> httpx.Response:
    return await browser.post("/actions/new", data=fields, headers={"origin": HOST, **headers})


async def test_an_action_is_recorded_with_the_actors_name(client: Open, tmp_path: Path) -> None:
    browser = client(slowly)
    answer = await pausing(browser, await form(browser, **{"x-user": "ada"}), **{"x-user": "ada"})
    assert answer.status_code == 303
    assert recorded_actions(tmp_path) == [("ada", "pause", "balances", "done")]
    result_page = await browser.get(answer.headers["location"], headers={"x-user": "ada"})
    assert "balances revision 1 is paused at position 0" in result_page.text


async def test_an_actors_name_is_escaped(client: Open, tmp_path: Path) -> None:
    browser = client(may("all", "<b>ada</b>\u202e\0" + "x" * 10_000))
    await pausing(browser, await form(browser))
    page = (await browser.get("/actions")).text
    assert "&lt;b&gt;ada&lt;/b&gt;\\x202e\\x00" in page
    assert "\u202e" not in page
    assert len(recorded_actions(tmp_path)[0][0]) < 300


async def test_a_form_without_its_token_is_refused(client: Open, tmp_path: Path) -> None:
    browser = client(may("all"))
    fields = await form(browser)
    token = fields.pop("csrf")
    for wrong in ({}, {"csrf": ""}, {"csrf": "?"}, {"csrf": "0" * 64}, {"csrf": token[:-1]}):
        answer = await pausing(browser, {**fields, **wrong})
        assert (answer.status_code, "is not of this console" in answer.text) == (403, True), wrong
    assert recorded_actions(tmp_path) == []


@pytest.mark.parametrize("cookie", ["", "?", "short", "é" * 64, "0" * 64])
async def test_a_foreign_cookie_is_refused(client: Open, tmp_path: Path, cookie: str) -> None:
    browser = client(may("all"))
    fields = await form(browser)
    browser.cookies.clear()
    headers = {} if not cookie else {"cookie": f"eventjet-console={cookie}"}
    guessed = {**fields, "csrf": fields["csrf"] if cookie == "0" * 64 else cookie or "?"}
    answer = await browser.post("/actions/new", data=guessed, headers=httpx.Headers(headers, encoding="utf-8"))
    assert answer.status_code == 403
    assert recorded_actions(tmp_path) == []


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "https://console.example.evil", "null", ""])
async def test_a_form_of_another_site_is_refused(client: Open, tmp_path: Path, origin: str) -> None:
    browser = client(may("all"))
    answer = await pausing(browser, await form(browser), origin=origin)
    assert (answer.status_code, "was sent from another site" in answer.text) == (403, True)
    assert recorded_actions(tmp_path) == []


async def test_a_reader_sees_no_actions_and_is_refused_them(client: Open, tmp_path: Path) -> None:
    acting, looking = client(may("all")), client(may("read_only"))
    fields = await form(acting)
    for name in PAGES:
        page = await looking.get(PATHS[name])
        assert 'method="post"' not in page.text, name
        assert PATHS["act"] not in page.text, name
    answer = await looking.get("/actions/new?action=pause&name=balances")
    assert answer.status_code == 403
    looking.cookies = acting.cookies
    answer = await pausing(looking, fields)
    assert (answer.status_code, "not act in it" in answer.text) == (403, True)
    assert recorded_actions(tmp_path) == []


async def test_a_visitor_without_access_gets_the_same_page_everywhere(client: Open, tmp_path: Path) -> None:
    browser = client(may("forbidden", "mallory"))
    for path in [*PATHS.values(), "/nothing"]:
        if path == PATHS["static"]:
            continue
        for method in ("GET", "POST", "HEAD", "DELETE"):
            answer = await browser.request(method, path)
            assert answer.status_code == 403, (method, path)
            assert "balances" not in answer.text
    assert (await browser.get("/static/nothing")).status_code == 404


async def test_every_answer_has_a_policy_of_own_content_only(client: Open) -> None:
    for path in ("/", "/nothing", "/static/console.css"):
        headers = (await client(may("read_only")).get(path)).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("answer", ["all", ("everything", "ada"), ("all",), None])
async def test_an_access_function_with_a_wrong_answer_admits_nobody(client: Open, answer: object) -> None:
    with pytest.raises(TypeError, match="Nobody is let in"):
        await client(lambda _request: answer).get("/")  # type: ignore[arg-type,return-value]


async def test_an_invalid_action_is_refused_with_a_reason(client: Open, tmp_path: Path) -> None:
    browser = client(may("all"))
    for query in (
        "",
        "action=explode&name=balances",
        "action=pause",
        "action=pause&name=nothing",
        "action=pause&name=" + "x" * 65,
        "action=pause&name=balances&revision=one",
        "action=retry&name=balances",
        "action=retry&name=balances&position=-1",
        "action=drop&name=balances&position=" + "9" * 30,
        "action=drop&name=balances&position=" + ",".join(map(str, range(1, 1_002))),
        "action=rebuild",
        "action=rebuild&name=balances&engine=magic",
        f"action=rebuild&name=balances&from_archive=s3://ada:{SECRET}@bucket/log",
        "action=rebuild&name=balances&from_archive=" + "x" * 2_000,
        "action=cancel",
        "action=cancel&job=x",
    ):
        answer = await browser.get(f"/actions/new?{query}")
        assert answer.status_code == 400, query
        assert SECRET not in answer.text
    for path in ("/actions?page=0", "/actions?page=x", "/actions/one", "/actions/one?id=x", "/jobs/one?id=x"):
        assert (await browser.get(path)).status_code == 400, path
    for path in (f"/actions/one?id={'0' * 32}", "/quarantine?name=nothing", "/quarantine/one?name=balances&position=3"):
        assert (await browser.get(path)).status_code == 404, path


async def test_an_action_is_refused_without_the_table_that_records_it(client: Open, tmp_path: Path) -> None:
    browser = client(may("all"))
    fields = await form(browser)
    with Database(f"sqlite:///{tmp_path}/read.db").sync_engine().begin() as connection:
        connection.execute(text("drop table eventjet_action"))
    answer = await pausing(browser, fields)
    assert (answer.status_code, "Nothing was done, since it could not be recorded" in answer.text) == (503, True)


async def test_a_live_page_ends_when_access_is_revoked(
    client: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_ACCESS_S", 0.0)
    levels: list[Level] = ["read_only"]
    browser = client(lambda _request: (levels[-1], "ada"))

    async def revoked() -> None:
        await asyncio.sleep(0.05)
        levels.append("forbidden")

    # httpx gives the answer when the page has ended.
    answer, _ = await asyncio.wait_for(asyncio.gather(browser.get(PATHS["overview_live"]), revoked()), 60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (await browser.get(PATHS["overview_live"])).status_code == 403


@pytest.mark.slow
async def test_no_page_shows_a_secret_of_the_settings(stack: AsyncExitStack) -> None:
    hidden = {
        "servers": f"nats://ada:{SECRET}@127.0.0.1:1",
        "database": f"postgresql://ada:{SECRET}@127.0.0.1:1/read?password={SECRET}",
    }
    site = console(bank, settings=Settings.load(hidden, environ={}), access=may("all"))
    await stack.enter_async_context(site.router.lifespan_context(site))
    browser = httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url=HOST)
    queries = [f"action={name}&name=balances&position=1&job={'0' * 32}" for name in ACTIONS]
    pages = [PATHS[name] for name in PAGES] + [f"{PATHS['act']}?{query}" for query in queries]
    pages += [f"{PATHS[name]}?name=balances&position=1&id={'0' * 32}" for name in PAGES]
    for path in pages:
        answer = await browser.get(path)
        assert answer.status_code != 500, path
        assert SECRET not in answer.text + str(answer.headers), path
    answer = await pausing(browser, await form(browser))
    assert answer.status_code == 503
    assert SECRET not in answer.text


async def test_mounted_in_fastapi_links_and_forms_stay_below_it(tmp_path: Path) -> None:
    site = console(bank, settings=settings(tmp_path), access=may("all"))

    @asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncGenerator[None]:
        async with site.router.lifespan_context(site):
            yield

    api = FastAPI(lifespan=lifespan)
    api.mount("/ops/console", site)
    browser = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="https://console.example")
    async with api.router.lifespan_context(api):
        page = await browser.get("/ops/console/actions/new?action=pause&name=balances")
        links = re.findall(r'(?:href|action|src)="(?!#)([^"]+)"', page.text)
        assert links
        assert all(link.startswith("/ops/console/") for link in links)
        assert "Path=/ops/console; HttpOnly; SameSite=Strict; Secure" in page.headers["set-cookie"]
        fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.text))
        answer = await browser.post(
            "/ops/console/actions/new", data=fields, headers={"origin": "https://console.example"}
        )
        assert answer.headers["location"].startswith("/ops/console/actions/one?id=")
    assert recorded_actions(tmp_path) == [("ada", "pause", "balances", "done")]


@pytest.mark.parametrize("path", ["/actions", "/ops/actions"], ids=["taken off", "left in front"])
async def test_links_and_the_cookie_behind_a_proxy_have_its_url(
    tmp_path: Path, stack: AsyncExitStack, path: str
) -> None:
    inner = console(bank, settings=settings(tmp_path), access=may("all"))
    await stack.enter_async_context(inner.router.lifespan_context(inner))
    site = behind(inner, "https://console.example/ops/")
    browser = httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url=HOST)
    page = await browser.get(path)
    assert page.status_code == 200
    assert 'href="/ops/quarantine"' in page.text
    assert "Path=/ops; HttpOnly; SameSite=Strict; Secure" in page.headers["set-cookie"]


@pytest.mark.parametrize("url", ["console.example", "ftp://console.example", f"https://ada:{SECRET}@console.example"])
async def test_an_invalid_public_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--public-url is no URL of a site") as raised:
        behind(console(bank, settings=Settings.load({}, environ={})), url)
    assert SECRET not in str(raised.value)


@pytest.mark.slow
def test_a_console_that_others_can_reach_needs_an_access_function(tmp_path: Path) -> None:
    program = Program(tmp_path, {**clean_environ(), "EVENTJET_APP": "eventjet.examples.bank.app:bank"})
    for options in (("--host", "0.0.0.0"), ("--public-url", "https://console.example")):
        refused = program("ui", *options)
        assert (refused.status, refused.out) == (2, "")
        assert "nothing would ask them who they are" in refused.message()
        assert refused.is_one_paragraph()
    both = program("ui", "--allow-actions", "--access", "eventjet.examples.bank.app:bank")
    assert both.status == 2


@pytest.mark.slow
def test_a_console_that_others_can_reach_asks_the_named_function(tmp_path: Path) -> None:
    (tmp_path / "operations.py").write_text(_OPERATIONS, encoding="utf-8")
    environ = {
        "EVENTJET_APP": "eventjet.examples.bank.app:bank",
        "EVENTJET_SERVERS": "nats://127.0.0.1:1",
        "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db",
        "EVENTJET_MONITORING": "",
    }
    public = ("--public-url", "https://console.example/ops")
    for options in (("--host", "0.0.0.0"), public, ("--host", "0.0.0.0", *public)):
        options = (*options, "--access", "operations:by_sign_on", "--monitoring", "http://127.0.0.1:1")
        with serving(tmp_path, environ, *options) as url:
            base = f"http://127.0.0.1:{url.rpartition(':')[2]}"
            host = "console.example" if "--public-url" in options else base.removeprefix("http://")
            with httpx.Client(base_url=base, headers={"host": host}) as ask:
                assert ask.get("/jobs").status_code == 403
                for user, may_act in (("ada", True), ("eve", False)):
                    page = ask.get("/actions/new?action=pause&name=balances", headers={"x-user": user})
                    assert (page.status_code == 200, 'method="post"' in page.text) == (may_act, may_act)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("operations:by_sign", "Did you mean 'by_sign_on'?"),
        ("operations:OPERATORS", "is not a function"),
        ("operation:by_sign_on", "There is no module 'operation'"),
        ("by_sign_on", "does not say what to import"),
        ("operations:nobody", "takes no request"),
    ],
)
def test_an_access_that_is_not_a_function_of_a_request_is_refused(tmp_path: Path, reference: str, reason: str) -> None:
    (tmp_path / "operations.py").write_text(_OPERATIONS, encoding="utf-8")
    program = Program(tmp_path, {**clean_environ(), "EVENTJET_APP": "eventjet.examples.bank.app:bank"})
    refused = program("ui", "--host", "0.0.0.0", "--access", reference)
    assert (refused.status, refused.out, refused.is_one_paragraph()) == (2, "", True)
    assert reason in refused.message()


@pytest.mark.slow
def test_unfinished_requests_are_ended_and_others_are_answered(tmp_path: Path) -> None:
    environ = {"EVENTJET_SERVERS": "nats://127.0.0.1:1", "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db"}
    halves = (
        b"",
        b"GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ",
        b"POST /actions/new HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nname=bal",
        b"GET /static/site.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /jobs HTTP/1.1\r\nHo",
    )
    with serving(tmp_path, environ, "--app", "eventjet.examples.bank.app:bank", "--allow-actions") as url:
        with ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 300))
                for _ in halves
            ]
            for connection, half in zip(sockets, halves, strict=True):
                connection.sendall(half)
            assert httpx.get(f"{url}/jobs").status_code == 200
            for connection in sockets:
                with suppress(ConnectionResetError):
                    while connection.recv(65_536):
                        pass
        assert httpx.get(f"{url}/jobs").status_code == 200
        log = (tmp_path / "ui.log").read_text(encoding="utf-8")
    assert "Traceback" not in log


@pytest.mark.slow
def test_more_unfinished_requests_than_open_files_do_not_block_others(tmp_path: Path) -> None:
    environ = {"EVENTJET_SERVERS": "nats://127.0.0.1:1", "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db"}
    with serving_process(tmp_path, environ, "--app", "eventjet.examples.bank.app:bank") as (url, process):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (512, 512))
        with ExitStack() as stack:
            for _ in range(700):
                address = ("127.0.0.1", int(url.rpartition(":")[2]))
                connection = stack.enter_context(socket.create_connection(address, 300))
                with suppress(ConnectionError):
                    connection.sendall(b"GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
            assert httpx.get(f"{url}/jobs", timeout=300).status_code == 200
        log = (tmp_path / "ui.log").read_text(encoding="utf-8")
    assert "Too many open files" not in log[:100_000]


async def test_live_pages_have_a_limit(tmp_path: Path, stack: AsyncExitStack) -> None:
    """All of them are requested in the same moment, and one more after they have ended."""
    site = console(bank, settings=settings(tmp_path))
    stack.push_async_callback(closed, site)
    browser = httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url=HOST, timeout=300)
    requests = [asyncio.create_task(browser.get("/live/overview")) for _ in range(live.STREAMS_MAX + 20)]
    while site.state.streams.open + sum(task.done() for task in requests) < len(requests):
        await asyncio.sleep(0.01)
    assert site.state.streams.open == live.STREAMS_MAX
    site.state.streams.end()
    statuses = [answer.status_code for answer in await asyncio.gather(*requests)]
    assert (statuses.count(200), statuses.count(503)) == (live.STREAMS_MAX, 20)
    assert site.state.streams.open == 0


@pytest.mark.slow
def test_a_request_with_a_foreign_host_name_is_refused(tmp_path: Path) -> None:
    """DNS rebinding: a local visitor's browser asks under the name of a site elsewhere."""
    environ = {"EVENTJET_SERVERS": "nats://127.0.0.1:1", "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db"}
    with serving(tmp_path, environ, "--app", "eventjet.examples.bank.app:bank", "--allow-actions") as url:
        assert httpx.get(f"{url}/jobs").status_code == 200
        for path in ("/jobs", "/actions/new?action=pause&name=balances"):
            answer = httpx.get(f"{url}{path}", headers={"host": "elsewhere.example"})
            assert (answer.status_code, "balances" in answer.text) == (400, False)
