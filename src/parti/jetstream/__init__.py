"""Everything that talks to NATS: connection, protocol reader, JetStream API, key-value, pull engine.

The only package that imports `nats`. It carries out what `core` decides and knows nothing of handlers or lanes.
Guards the difference between "no", "unreachable" and "unknown": they are three errors, never one.
"""
