"""A list of tasks, kept as the events that happened to them."""
