"""What `eventjet doctor` looks at: server, streams, database and app against what an event store needs. Only looks."""
