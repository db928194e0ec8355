"""What events lead to: reactors, the steps of processes, deadlines. Knows neither NATS nor SQL."""
