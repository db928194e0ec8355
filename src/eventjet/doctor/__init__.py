"""The checks of `eventjet doctor`: does an installation have what an event store needs? They change nothing."""
