"""An application with large bodies, for tests and for the processes that they kill."""

from __future__ import annotations

from dataclasses import replace

from eventjet import App, Blob, aggregate, event


@event("document.filed")
class Filed:
    scan: Blob
    pages: tuple[Blob, ...] = ()


@event("document.noted")
class Noted:
    text: str


@aggregate("document")
class Document:
    scan: Blob | None = None

    def file(self, scan: Blob, pages: tuple[Blob, ...] = ()) -> Filed:
        return Filed(scan=scan, pages=pages)

    def scan_again(self) -> Filed:
        assert self.scan is not None
        return Filed(scan=self.scan)

    def note(self, text: str) -> Noted:
        return Noted(text=text)

    def evolve(self, event: Filed | Noted) -> Document:
        return replace(self, scan=event.scan) if isinstance(event, Filed) else self


def documents(name: str) -> App:
    """The application; its name is also that of its log."""
    return App(name, aggregates=[Document])
