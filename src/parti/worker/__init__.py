"""The worker: from deliveries to handler calls, acknowledgements, positions and dead letters.

`app` is what users write, `consumer` keeps the durable consumer of a worker right, or its `shards` (each of them a
`vehicle`), `lanes` and `runners` call handlers in order, `progress` keeps the positions. Imports core, jetstream and
telemetry. Guards Order and NoLoss on this side of the connection: a message leaves only by being handled or
dead-lettered.
"""
