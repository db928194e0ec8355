"""The NATS client: one protocol and one API layer under a blocking connection and the loop's connection."""
