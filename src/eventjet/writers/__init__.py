"""One batch of events into rows and checkpoint, in one transaction."""
