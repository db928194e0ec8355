"""The database of the read models: dialects, checkpoints, where tables are, and the statements that change rows."""
