"""PURE: what an app writes and serves, exported, and what changes of it mean for events and readers that are there."""
