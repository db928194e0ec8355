"""The blocking reader of many messages, for workers, rebuilds, archives and Spark tasks."""
