"""The database of the read models: dialects, checkpoints, locations of tables, and the statements that change rows."""
