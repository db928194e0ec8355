"""`make screenshots`: pictures of the console for the documentation, made of a real console (`docs/images/console`).

With a folder as argument it writes every screen, or those that are named after it, at 400 and 1,280 px, light and dark,
there instead: to be looked at.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.ui.branch import branch
from tests.ui.conftest import PATIENCE_MS, chromium, serving
from tests.ui.screens import SCREENS
from tests.ui.stage import Stage, planted, staged

PICTURES = Path(__file__).parents[2] / "docs/images/console"
_WIDTH, _HEIGHT = 1200, 800
_HEIGHT_MAX = 4_000
_SETTLED_MS = 1_500
"""How long live parts take to come."""


def main(folder: Path | None, names: Sequence[str]) -> None:
    """Make the pictures."""
    with staged() as stage:
        planted(stage)
        stage.start_worker()
        poison = asyncio.run(poison_of(stage))
        with serving(stage.folder, stage.environ, "--allow-actions") as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            # The overview last: its plots go over the last two minutes.
            for name, path in sorted(SCREENS.items(), key=lambda screen: screen[0] == "overview"):
                if names and name not in names:
                    continue
                where = url + path.replace("{poison}", str(poison))
                if folder is None:
                    _take(browser, where, PICTURES / f"{name}.png", _WIDTH, "light", whole=False)
                    continue
                for width in (400, 1280):
                    for scheme in ("light", "dark"):
                        _take(browser, where, folder / f"{name}-{width}-{scheme}.png", width, scheme)
            browser.close()


def _take(browser: Browser, url: str, file: Path, width: int, scheme: str, *, whole: bool = True) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(viewport={"width": width, "height": _HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.wait_for_timeout(_SETTLED_MS)
    if whole:
        # Not `full_page`: Chromium hangs on pages that are very long.
        height = page.evaluate("document.scrollingElement.scrollHeight")
        page.set_viewport_size({"width": width, "height": min(height, _HEIGHT_MAX)})
    page.screenshot(path=file)
    context.close()


async def poison_of(stage: Stage) -> int:
    """Return the position of the event that the balances cannot apply."""
    from eventjet.operations.quarantine import CommandConnections, Quarantine

    async with CommandConnections(branch, stage.settings) as connections:
        events, _ = await Quarantine(connections, "balances").listed()
    return events[0].position


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:])
