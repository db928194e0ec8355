"""The log: where events are stored, and how a save learns what became of it."""
