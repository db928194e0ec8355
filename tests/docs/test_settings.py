"""The page of settings has every field of `Settings`: its keyword, its variable and its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from eventjet.settings import Settings, SettingsOverrides

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")

OBJECTS = ("tls", "user_jwt_cb", "signature_cb")
"""Settings that no variable can have."""


def written(default: object) -> str:
    if default is None:
        return "–"
    return f"`{','.join(default) if isinstance(default, tuple) else default}`"


def test_the_page_lists_every_setting_as_it_is_declared() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `(EVENTJET_\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    names = [each.name for each in fields(Settings)]
    assert listed == [
        (each.name, f"EVENTJET_{each.name.upper()}", written(each.default))
        for each in fields(Settings)
        if each.name not in OBJECTS
    ]
    assert all(f"`{name}`" in PAGE for name in OBJECTS)
    assert list(get_type_hints(SettingsOverrides)) == names


def test_the_page_names_every_variable_that_the_code_reads() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"""envvar="(EVENTJET_\w+)"|environ[.\[]\w*\(?"(EVENTJET_\w+)""", sources))
    named = {first or second for first, second in read}
    assert named >= {"EVENTJET_APP", "EVENTJET_WORKER_HTTP", "EVENTJET_FAILPOINT"}
    assert [name for name in sorted(named - {"EVENTJET_FAILPOINT_LOG"}) if f"`{name}`" not in PAGE] == []
