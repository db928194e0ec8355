"""Subscriptions: what follows the log with a checkpoint or a cursor and handles its events."""
