"""Who is there, who leads, who owns what: the fleet's agreement, over one key-value bucket.

May import core, strategies, model, jetstream and telemetry; knows nothing of consumers and handlers: those hang on
the hooks of `manager.Manager`.

Invariants guarded here: a write of somebody whose lease has ended has no effect; terms, incarnations and fence
tokens only grow; a partition is given to a worker only when the one before has let go of it or can no longer act.
"""
