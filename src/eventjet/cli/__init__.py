"""The command line: one file a command, and nothing heavy imported before a command runs."""
