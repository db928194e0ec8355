"""The page about the packages names files that exist, and all packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "eventjet"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", PAGE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (SOURCE / name).is_file()] == []


def test_every_package_is_drawn() -> None:
    drawing = PAGE.split("```")[1]
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file() and not path.is_symlink()}
    assert rooms - set(re.findall(r"[a-z]+", drawing)) == set()
