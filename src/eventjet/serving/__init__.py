"""Serve decisions as commands over NATS, by a NATS micro-service (ADR-32), and call them from other programs."""
