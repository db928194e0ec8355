"""Subscriptions: what follows the log with a checkpoint or a cursor, and does something of each event."""
