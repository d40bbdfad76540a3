"""The dead-letter stream, which workers of partitions and of jobs share."""

from parti.jetstream.dead_letters import DeadLetterStream

__all__ = ["DeadLetterStream"]
