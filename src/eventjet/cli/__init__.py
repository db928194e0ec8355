"""The command line. Heavy modules are imported only when a command runs."""
