"""`parti dev demo`: a fleet of real processes takes load, grows, loses a worker and lets one go; then the proof.

`command` is the command. `story` tells the chapters, with the `fleet` of worker processes, each of which runs `app`,
and the `traffic` that is published; `stage` is what goes on, `screen` draws it. `notes` are what handlers wrote down,
`check` judges them, `proof` has Spark audit the ledger, `report` adds the story to its page, `summary` sums up.

Guards its own honesty: every figure of the result comes from the stored stream and from what handlers or the ledger
recorded, never from a counter of the workers; where Java is there two witnesses are heard, and judged by different
code.
"""
