"""JetStream: its API as requests and answers, whose answer to a publish counts, and the client of an application."""
