"""One program a subject of a benchmark, each in a process of its own; prints one line of JSON."""
