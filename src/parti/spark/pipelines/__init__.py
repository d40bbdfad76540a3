"""The lake pipeline: bronze (raw), silver (typed, clean), ledger; gold is written by `parti.spark.gold`.

Lives here: the settings of `[pipeline]`, the types that a payload is declared with, the ingest query, the step from
bronze to silver, compaction and what `parti pipeline` shows. May import what the Spark room may.
Invariant guarded here: a step that is killed at any moment and run again leaves each message exactly once in each
table, because what it has read is written down by the very commit that holds what it wrote.
"""
