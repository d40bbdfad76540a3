"""The protocol, pure: events in, decisions out.

No asyncio, no nats, no clock and no randomness in here: time and random numbers are passed in. Whatever can be
decided is decided here, in functions that a test runs ten thousand times a second; `jetstream` and `worker`
only carry the decisions out. Imports `model` and `errors`.
"""
