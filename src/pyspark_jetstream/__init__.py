"""Spark finds packages of this name by itself: `format("jetstream")` works wherever parti is installed."""

from parti.spark.source import JetStreamDataSource as DefaultSource

__all__ = ["DefaultSource"]
