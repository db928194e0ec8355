"""What came of a decision. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Committed(Generic[S, E]):
    """What came of a decision: `Repository.execute`, `Jet.transact`."""

    state: S
    """The state after its events."""
    events: tuple[E, ...]
    """What was recorded; empty when the decision was that nothing follows."""
    position: int
    """Position of the aggregate's last event; hand it to `caught_up` to read your write."""
    version: int
    """Version of the aggregate's last event."""
    app: str = field(repr=False)
    """Whose log that is."""
    log: str = field(default="", repr=False)
    """Its identity; empty where these credentials may not look at the stream."""
    confirmed: bool = True
    """Whether the answer rests on events that the log stored, as most of its replicas have to.

    False when nothing was recorded: the state was the newest by the word of the stream's leader, and one that is cut
    off from its replicas does not know that there is another.
    """

    @property
    def token(self) -> str:
        """App, position and log as text for an HTTP header; `caught_up` takes it in another process.

        For instance `bank:1234@0b6f3c1e-5d2a-4f0e-9a64-2f6a1c8e7d11`.
        """
        return f"{self.app}:{self.position}{self.log and '@'}{self.log}"
