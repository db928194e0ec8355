"""What events lead to: reactors, the steps of processes, deadlines."""
