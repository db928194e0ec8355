"""NATS: its protocol, servers and logins, and what an application's loop sends and hears over nats-py."""
