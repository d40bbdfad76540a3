"""How what runs on Spark is cut off when its process was asked to leave: soon, and without Spark's laments."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.1


class UntilAsked:
    """A block in which an error, once `asked` is set, is taken for the end that was asked for and goes no further."""

    def __init__(self, asked: threading.Event) -> None:
        self._asked = asked

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, Exception) and self._asked.is_set()


@contextmanager
def interrupted_by(asked: threading.Event, spark: SparkSession) -> Iterator[threading.Event]:
    """End all queries and jobs of a session when `asked` is set, as soon as Spark allows, until the block ends.

    What was cut off raises where it was waited for; see `UntilAsked`. The event that is given is set a moment after
    `asked`: when Spark has been told to be silent for the rest of its life, so that a query may be stopped in the
    middle of a batch.
    """
    silent, over = threading.Event(), threading.Event()

    def interrupt() -> None:
        while not asked.wait(_POLL_S):
            if over.is_set():
                return
        _silence(spark)
        silent.set()
        # Again and again, since the next job may be about to begin.
        while not over.wait(_POLL_S):
            with suppress(Exception):
                for query in spark.streams.active:
                    query.stop()
                spark.interruptAll()

    thread = threading.Thread(target=interrupt, name="parti-interruption", daemon=True)
    thread.start()
    try:
        yield silent
    finally:
        over.set()
        thread.join()


def _silence(spark: SparkSession) -> None:
    # Where Python calls Java or the other way round, each end logs what the interrupted other one raises.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    with suppress(Exception):  # a session of Spark Connect has no JVM here
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        # Not only its log: it passes on the last words of the Python processes that it started, too.
        jvm.java.lang.System.err.close()
