"""What operators ask and decide, as values that the command line prints and the console shows."""
