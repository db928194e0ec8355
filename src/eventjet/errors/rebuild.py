"""What stops a rebuild, an archive or a restore."""

from __future__ import annotations

from eventjet.errors.base import EventjetError
from eventjet.errors.projection import Revision


class RebuildError(EventjetError):
    """A rebuild stopped; the live read model is untouched."""


class ArchiveBroken(RebuildError):
    """An archive cannot be trusted as it stands; nothing was made from it."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(
            f"The archive {url} cannot be used: {reason}. Make it again with `eventjet archive`, or go without it."
        )


class RebuildRefused(RebuildError):
    """The plan names something a swap cannot carry."""

    def __init__(self, projection: str, reason: str, remedy: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(f"Projection {projection!r} cannot be rebuilt: {reason}. {remedy}")


class RowsRefused(RebuildError):
    """A rule of the database forbids rows that the log gives."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"The database refused rows of {projection!r} as the log gives them: {reason}. The live table is "
            "untouched. Fix the projection, or the rule of its table, and run the rebuild again; a worker would stop "
            "at the event in question and name it."
        )


class VerificationFailed(RebuildError):
    """What was loaded is not what was folded; the shadow was not swapped in."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"The rebuild of {projection!r} was not swapped in: {reason}. The live table is untouched; run it again."
        )


class LeaseEnded(RebuildError):
    """Another run may have cleared this one's shadow away."""

    def __init__(self) -> None:
        super().__init__(
            "This rebuild was stopped for so long that its lease ended and its shadow may be gone. "
            "The live table is untouched; run it again."
        )


class QuarantineChanged(RebuildError):
    """People have resolved parked events since the shadow was made."""

    def __init__(self, resolved: Revision) -> None:
        self.projection = resolved.name
        super().__init__(
            f"Somebody decided about parked events of {resolved.name!r} while it was rebuilt, so what was made does "
            "not show it. Nothing was changed; run the rebuild again."
        )


class RevisionDropped(RebuildError):
    """Somebody dropped the revision that was being rebuilt."""

    def __init__(self, resolved: Revision) -> None:
        self.projection = resolved.name
        super().__init__(
            f"Revision {resolved.revision} of projection {resolved.name!r} was dropped while it was rebuilt, so "
            "there is nowhere to put what was made. Nothing was changed; run the rebuild again if it is wanted."
        )
