"""The error for what a NATS server said: in JetStream's answer, or in a `-ERR` line."""

from __future__ import annotations

from typing import Any

from eventjet.errors import ApiRefused, ConnectionLost, Forbidden, StoreUnavailable, Unauthorized, Unreachable

_SWITCHED_OFF = (10039, 10076)
_PASSING = (10005, 10023)  # no peers for placement, no resources: a cluster that just lost a server says so


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
