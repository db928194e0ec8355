"""Nothing in the repository belongs to one machine or one network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

# The character classes keep this file from matching its own patterns.
FORBIDDEN = {
    "a package registry's host": r"[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.org|[d]ebian\.org",
    "a path of one machine": r"/[r]oot/|/[h]ome/(?!eventjet\b)\w+/|/[U]sers/\w+/|/[w]ork/(main|shared)\b",
    "a private key": r"-----BEGIN [A-Z ]*[P]RIVATE KEY-----",
}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_registry_a_machine_or_a_key() -> None:
    patterns = {name: re.compile(pattern) for name, pattern in FORBIDDEN.items()}
    lines = [
        f"{path.relative_to(ROOT)}:{number} names {name}"
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        for name, pattern in patterns.items()
        if pattern.search(line)
    ]
    assert lines == []


def test_pinned_versions_are_plain() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert lines == sorted(lines)
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.!+-]*", line) for line in lines)
