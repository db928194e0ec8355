"""PURE: events to bytes and back, in wire format 1."""
