"""The Spark room: everything that runs on PySpark.

Lives here: finding a Java runtime, local sessions and, as they come, the JetStream source and sink, the
pipelines and the audit. May import model, core, config, errors and the readers of jetstream; nothing else of
parti imports it except the command line, so a worker never needs Java or the `spark` extra.
Invariant guarded here: importing this room imports no pyspark and starts no JVM; only `local_session` does.
"""
