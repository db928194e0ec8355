"""What operators look at and decide, as values: the command line prints it, the console shows it."""
