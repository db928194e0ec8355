"""The console as people use it: the real program, and a real Chromium that tests drive.

Playwright's sync API keeps a loop of its own in the thread of the tests. So these are plain functions, and code that
needs a loop runs in another thread (`in_thread`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

T = TypeVar("T")

PATIENCE_MS = 240_000
"""How long a page may take on a machine that is many times overloaded."""
_READY_S = 240.0


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result, run beside the loop of the browser."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that drive a browser as slow."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def chromium() -> str:
    """Return the path of Chromium; skip the test when there is none."""
    program = os.environ.get("EVENTJET_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no browser: install Debian's package chromium, or name one with EVENTJET_TEST_CHROMIUM")
    return program


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Chromium, headless: Debian's package `chromium`, or what `EVENTJET_TEST_CHROMIUM` names.

    A test has a browser of its own: while Playwright runs, no other test of this thread could have a loop.
    """
    program = chromium()
    with sync_playwright() as playwright:
        # Without a sandbox of its own: containers forbid it, and it only opens pages of these tests.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass(slots=True)
class Watched:
    """A page, and the complaints of its scripts and of the content policy."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """A new page; the test fails if there are complaints at the end."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    watched = Watched(context.new_page())

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watched.complaints.append(message.text)

    watched.page.on("console", heard)
    watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    yield watched
    context.close()
    assert watched.complaints == []


@pytest.fixture
def page(watched: Watched) -> Page:
    """The page of `watched`, for tests that do not look at complaints before the end."""
    return watched.page


@contextmanager
def serving(folder: Path, environ: Mapping[str, str], *options: str) -> Iterator[str]:
    """Run `eventjet ui` as a process; yield its URL without the last slash."""
    with serving_process(folder, environ, *options) as (url, _):
        yield url


@contextmanager
def serving_process(
    folder: Path, environ: Mapping[str, str], *options: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Do as `serving` does, and yield the process too, whose log is `ui.log` in the folder."""
    with (
        (folder / "ui.log").open("w+") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "eventjet.cli", "ui", "--port", "0", *options],
            cwd=folder,
            env={**{name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}, **environ},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        lines: list[str] = []
        out = process.stdout
        assert out is not None
        reading = threading.Thread(target=lambda: lines.append(out.readline()), daemon=True)
        reading.start()
        try:
            reading.join(_READY_S)
            log.seek(0)
            assert "".join(lines).startswith("http"), f"it said {lines} and {log.read()}"
            yield lines[0].strip().rstrip("/"), process
        finally:
            process.terminate()
            process.wait(_READY_S)
