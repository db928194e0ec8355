"""Draw `docs/images/demo.svg`: the last screen of a real `eventjet demo`, as a terminal of 80 columns shows it."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parents[2] / "docs/images/demo.svg"
LINES = 24
_FORMAT_WITHOUT_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def screen_of(command: list[str]) -> str:
    """Return the text on a terminal when the program has ended; a progress bar that was overwritten is not on it."""
    printed = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        printed.extend(data)
        return data

    os.environ.update(COLUMNS="80", LINES="50", TERM="xterm-256color")
    if pty.spawn(command, read):
        sys.exit("the program failed, so there is no picture")
    rows: list[str] = []
    row = 0
    for line in re.split(r"\r?\n", printed.decode()):
        for part in re.split(r"(\x1b\[\d*A)", line):
            if up := re.fullmatch(r"\x1b\[(\d*)A", part):
                row = max(row - int(up[1] or 1), 0)
                continue
            text = re.sub(r"\x1b\[\??\d*[KlhJ]", "", part).split("\r")[-1]
            rows[row : row + 1] = [text] if text or row >= len(rows) else [rows[row]]
        row += 1
    return "\n".join(rows)


def draw(text: str) -> str:
    """Return an SVG that names no font on the web."""
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi(text))
    return _FORMAT_WITHOUT_FONTS.sub("", console.export_svg(title="eventjet demo", theme=MONOKAI))


if __name__ == "__main__":
    screen = screen_of([sys.executable, "-m", "eventjet.cli", "demo"])
    PICTURE.write_text(draw("\n".join(screen.rstrip().split("\n")[-LINES:])), encoding="utf-8")
