"""Encode events to bytes and decode them, in wire format 1. PURE."""
