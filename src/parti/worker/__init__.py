"""The worker: from deliveries to handler calls, acknowledgements, positions and dead letters.

`app` is what users write. `consumer` keeps the durable consumer of a worker right, or its `shards` (each of them a
`vehicle`); its parts are `cargo` (what is to be carried), `handling` (what is owned), `sessions` (how a consumer gets
to its place), `updates` and `succession` (after an earlier run). `lanes` and `runners` call handlers in order;
`roster` knows which partitions have a lane, `floors` how far they have got, `failures` what was not handled, and
`pauses` lets one stand still. `progress` keeps the positions. Imports core, jetstream and telemetry. Guards Order and
NoLoss on this side of the connection: a message leaves only by being handled or dead-lettered.
"""
