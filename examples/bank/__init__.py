"""The tutorial's bank."""
