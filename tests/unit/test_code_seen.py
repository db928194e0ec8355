"""Whether the code on the disk is still what this process has imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventjet.parallel.code_seen import CodeSeen


def test_a_file_that_was_changed_or_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "seen_here.py"
    file.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "seen_here", __import__("seen_here"))
    seen = CodeSeen.now()
    assert str(file) in seen.files
    assert seen.changed() is None
    file.write_text("VALUE = 22\n")
    assert seen.changed() == str(file)
    file.unlink()
    assert seen.changed() == str(file)
