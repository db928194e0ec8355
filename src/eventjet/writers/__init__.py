"""Writers: they store the rows of one batch of events and advance the checkpoint in the same transaction."""
