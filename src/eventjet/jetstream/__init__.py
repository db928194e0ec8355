"""JetStream: the API as requests and answers, which answer to a publish counts, and the clients and readers."""
