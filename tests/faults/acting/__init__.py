"""Apps that act, killed while they do: what a process of workers runs, and the count at the end."""
