"""The older way, to migrate from: one durable consumer per partition, read with plain nats-py, without parti."""
