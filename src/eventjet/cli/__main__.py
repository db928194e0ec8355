"""`python -m eventjet.cli`: the program, where its script is not on the PATH."""

from __future__ import annotations

from eventjet.cli.entry import run

run()
