"""Where Spark looks: with eventjet installed, `spark.read.format("jetstream")` needs no registration."""

from eventjet.spark.source import JetStreamSource as DefaultSource

__all__ = ["DefaultSource"]
