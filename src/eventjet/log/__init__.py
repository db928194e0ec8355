"""The log: where events are stored, and how the outcome of a save is decided."""
