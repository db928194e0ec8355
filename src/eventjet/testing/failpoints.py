"""Failpoints for an application's own fault tests: see `eventjet.failpoints`."""

from eventjet.failpoints import NAMES, FailpointError

__all__ = ["NAMES", "FailpointError"]
