"""What can go wrong between eventjet and a NATS server, as errors of its tree.

StoreError
├── Forbidden
│   └── Unauthorized     the server does not let these credentials in
├── StoreUnavailable     no answer in time
│   ├── LinkLost         the connection broke, or went silent
│   ├── LinkClosed       this side closed the link, perhaps from another thread
│   └── NoResponders     nobody listens on the subject
├── ApiRefused           JetStream answered with an error
├── Evicted              the consumer was deleted, moved or shut down under a waiting pull
└── DeliveryGap          a delivery does not follow the one before it
"""

from __future__ import annotations

from typing import Any

from eventjet.errors import Forbidden, StoreError, StoreUnavailable, Unreachable

_SWITCHED_OFF = (10039, 10076)
_PASSING = (10005, 10023)  # no peers for placement, no resources: a cluster that just lost a server says so


class Unauthorized(Forbidden):
    """The server does not let these credentials in."""


class ConnectionLost(StoreUnavailable):
    """The connection broke or went silent; what was sent last may or may not have arrived."""


class ConnectionClosed(StoreUnavailable):
    """This side closed the link."""

    def __init__(self) -> None:
        super().__init__("The link to NATS", "it was closed by this process")


class NoResponders(StoreUnavailable):
    """Nobody listens on the subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(subject, "nobody listens there, so the stream, the consumer or JetStream itself is missing")


class ApiRefused(StoreError):
    """JetStream answered with an error."""

    def __init__(self, subject: str, code: int, err_code: int, description: str) -> None:
        self.subject = subject
        self.code = code
        self.err_code = err_code
        self.description = description
        super().__init__(
            f"JetStream refused {subject}: {description} ({code}, {err_code}). "
            "Compare the request with the stream by `eventjet doctor`."
        )


class Evicted(StoreError):
    """The consumer was deleted, moved or shut down under a waiting pull."""

    def __init__(self, consumer: str, reason: str) -> None:
        self.consumer = consumer
        self.reason = reason
        super().__init__(
            f"Consumer {consumer!r} ended the pull: {reason}. Check that the lease is still held before pulling again."
        )


class DeliveryGap(StoreError):
    """A delivery does not follow the one before it: a rival pulls from the same consumer, or something was lost."""

    def __init__(self, consumer: str, position: int, reason: str) -> None:
        self.consumer = consumer
        self.position = position
        self.reason = reason
        super().__init__(
            f"Consumer {consumer!r} delivered position {position}, but {reason}. "
            "Give the lease up and start again from the stored position."
        )


def api_fault(subject: str, error: dict[str, Any]) -> Exception:
    """The error for the `error` object of a JetStream answer."""
    code = int(error.get("code", 0))
    err_code = int(error.get("err_code", 0))
    description = str(error.get("description", "no description"))
    if err_code in _SWITCHED_OFF:
        return Unreachable("JetStream", description, "Switch it on in the server's config and for this account.")
    if code == 503 or err_code in _PASSING:
        return StoreUnavailable(subject, f"{description} ({err_code})")
    return ApiRefused(subject, code, err_code, description)


def server_fault(text: str, peer: str) -> Exception:
    """The error for a `-ERR` line; all but permissions violations end the connection."""
    reason = text.strip("' ")
    lowered = reason.lower()
    if lowered.startswith("permissions violation"):
        subject = reason.split('"')[1] if reason.count('"') > 1 else "a subject"
        return Forbidden(subject, f"{'publishing' if 'publish' in lowered else 'subscribing'} there is not permitted")
    if "authorization" in lowered or lowered.endswith(("authentication expired", "authentication revoked")):
        return Unauthorized(f"the connection to {peer}", reason)
    return ConnectionLost(f"NATS at {peer}", f"the server said {reason!r}")
