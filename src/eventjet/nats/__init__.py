"""The NATS protocol, servers and logins, and the client of an application's event loop, which is built on nats-py."""
