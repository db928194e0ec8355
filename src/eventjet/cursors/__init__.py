"""How far reactors, processes and publications have come, in a key-value stream."""
