"""Decisions as commands over the wire: a NATS micro-service (ADR-32), and the typed caller of it."""
