"""Processes that keep read models up to date."""
