"""`format("jetstream")`: a stream as a Spark table, in batch and streaming.

Offsets are sequences of the stream, kept in Spark's checkpoint and nowhere else: reads use no durable consumer and
leave nothing behind, and a batch that is run again reads the same sequences. The driver resolves where a read begins
and ends and what is gone; tasks read ranges.

Invariant guarded here: every sequence of a range is given out once, or reported as gone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from parti.errors import ConfigError, DataLost, PartiError
from parti.jetstream.blocking import BlockingClient, passes
from parti.jetstream.ranges import Range, RangeReader, Wanted
from parti.spark.options import SourceOptions, read_source_options
from parti.spark.planning import bounds, count, earlier, lost, missing_in, resolve, split, thins_by_design
from parti.spark.pushdown import Narrowing
from parti.spark.refusals import plainly
from parti.spark.rows import BatchMaker, Layout

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

FORMAT = "jetstream"
_PATIENCE_S = 60.0
_CLOCKS_DIFFER_S = 5.0
_ROWS_WORTH_A_TASK = 20_000
_T = TypeVar("_T")


@dataclass
class RangePartition(InputPartition):
    """One task's range."""

    start: int
    end: int
    created: str
    subjects: tuple[str, ...] = ()
    strict: bool = True
    """Fail when something of the range is gone."""


class JetStreamDataSource(DataSource):
    """What Spark creates for `format("jetstream")`."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    @plainly()
    def schema(self) -> str:
        """The columns; the server is asked here, so that `load()` fails at once when the stream cannot be read."""
        options = read_source_options(self._given)
        options.target.check()
        with BlockingClient.open(options.target, name="parti-spark-driver") as client:
            client.stream_info(options.stream)
        return Layout.of(options).ddl

    @plainly()
    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads a batch."""
        options = read_source_options(self._given, streaming=False)
        return NarrowingReader(options) if options.pushdown else JetStreamReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Reads micro-batches."""
        # Spark stumbles over an error here before it shows it: options are read when the first question comes.
        return JetStreamStreamReader(lambda: read_source_options(self._given, streaming=True))

    @plainly()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Publishes a batch."""
        from parti.spark.sink import JetStreamWriter  # noqa: PLC0415 - readers need no sink

        _refuse_overwrite(overwrite)
        return JetStreamWriter(self._given, schema)

    @plainly()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Publishes micro-batches."""
        from parti.spark.sink import JetStreamStreamWriter  # noqa: PLC0415

        _refuse_overwrite(overwrite)
        return JetStreamStreamWriter(self._given, schema)

    @property
    def _given(self) -> dict[str, str]:
        return dict(self.options)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise ConfigError("mode overwrite: a stream can only be added to; use mode('append')")


def _read(options: SourceOptions, partition: RangePartition) -> Iterator[Any]:
    """The rows of one range, as Arrow batches."""
    wanted = Wanted(
        stream=options.stream,
        created=partition.created,
        start=partition.start,
        end=partition.end,
        subjects=partition.subjects,
        payload=options.payload,
    )
    reader = RangeReader(options.target, wanted, name="parti-spark-task")
    maker = BatchMaker(Layout.of(options))
    with plainly():
        for chunk in reader.chunks():
            yield maker.make(chunk)
        if reader.missing:
            error = lost(options.stream, reader.missing, filtered=bool(partition.subjects))
            if partition.strict:
                raise error
            _tell(f"{error}".removesuffix("; set failOnDataLoss=false to go on without them"))


def _partitions(
    options: SourceOptions, info: Mapping[str, Any], ranges: Iterable[Range], subjects: tuple[str, ...]
) -> list[RangePartition]:
    strict = options.fail_on_data_loss and not thins_by_design(info["config"])
    return [RangePartition(start, end, info["created"], subjects, strict) for start, end in ranges]


def _tell(text: str) -> None:
    """A line on standard error, which is where Spark puts what Python workers have to say."""
    print(f"parti: {text}", file=sys.stderr, flush=True)


# ── batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class JetStreamReader(DataSourceReader):
    """A batch over a range of sequences that is fixed when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._narrowing = Narrowing()

    @plainly()
    def partitions(self) -> Sequence[InputPartition]:
        """Fix the range, look for what is gone, and cut it into tasks."""
        options, narrowing = self._options, self._narrowing
        with BlockingClient.open(options.target, name="parti-spark-driver") as client:
            info = client.stream_info(options.stream)
            first, last = bounds(info)
            start = resolve(client, options.stream, info, options.starting)
            end = min(resolve(client, options.stream, info, options.ending), last + 1)
            start = max(start, narrowing.first)
            if narrowing.last is not None:
                end = min(end, narrowing.last + 1)
            if narrowing.since is not None:
                since = earlier(narrowing.since, _CLOCKS_DIFFER_S)
                start = max(start, resolve(client, options.stream, info, since))
            if narrowing.until is not None:
                until = earlier(narrowing.until, -_CLOCKS_DIFFER_S)
                end = min(end, resolve(client, options.stream, info, until))
            _look_for_losses(client, options, info, start, end)
        subjects = options.subjects or narrowing.subjects
        parts = options.min_partitions or min(os.cpu_count() or 1, max(1, (end - start) // _ROWS_WORTH_A_TASK))
        ranges = split(max(start, first), end, parts=parts, most=options.max_records)
        return _partitions(options, info, ranges, subjects) or [RangePartition(1, 1, info["created"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one range; runs in a task."""
        assert isinstance(partition, RangePartition)
        return _read(self._options, partition)


class NarrowingReader(JetStreamReader):
    """A batch that reads no more than its filters want.

    Only on request, because of Spark 4.3: it keeps the partitions of the last filtered query on a DataFrame and uses
    them for the next query without a filter, which would then see only those rows. A reader that has this method is
    also refused where `spark.sql.python.filterPushdown.enabled` is off.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Use filters on seq, timestamp and subject; gives back those that Spark must look at again."""
        left = []
        for one in filters:
            attribute, value = getattr(one, "attribute", ()), getattr(one, "value", None)
            self._narrowing, exact = self._narrowing.take(type(one).__name__, attribute, value)
            if not exact:
                left.append(one)
        return left


def _look_for_losses(
    client: BlockingClient, options: SourceOptions, info: Mapping[str, Any], start: int, end: int
) -> int:
    """How many messages of `[start, end)` are gone; raises DataLost if they must not be."""
    missing = missing_in(client, options.stream, info, start, end)
    if missing and options.fail_on_data_loss and not thins_by_design(info["config"]):
        raise lost(options.stream, missing, filtered=bool(options.subjects))
    return count(missing)


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches; the offset is the first sequence that is not read yet.

    An offset also carries the creation time of the stream, so that a stream made anew is noticed, and how many
    messages were gone before they could be read. Offsets are compared as texts: keys are in order and nothing in
    them changes by itself.
    """

    def __init__(self, options: Callable[[], SourceOptions]) -> None:
        self._read_options = options
        self._client: BlockingClient | None = None
        self._bound: int | None = None
        self._begin_empty = False
        self._waits = False

    @cached_property
    def _options(self) -> SourceOptions:
        with plainly():
            return self._read_options()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""

        def find(client: BlockingClient) -> dict[str, Any]:
            info = client.stream_info(self._options.stream)
            return _offset(info["created"], 0, resolve(client, self._options.stream, info, self._options.starting))

        # Spark asks twice and remembers neither answer. "latest" would be another one the second time: an empty
        # first batch makes the first answer durable.
        self._begin_empty = self._options.starting == "latest"
        return self._ask(find)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends."""
        if self._begin_empty:
            self._begin_empty = False
            return start
        return self._ask(lambda client: self._latest(client, start, limit))

    def _latest(self, client: BlockingClient, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        options = self._options
        info = client.stream_info(options.stream)
        first, last = bounds(info)
        created, missed, begin = info["created"], int(start["missed"]), int(start["next"])
        if created != start["created"]:
            if options.fail_on_data_loss:
                raise DataLost(
                    f"stream {options.stream!r} was deleted and made anew since the checkpoint: what came after "
                    f"{begin - 1} is gone; set failOnDataLoss=false to read the new one from its beginning, or "
                    f"start with a new checkpoint"
                )
            begin = first
        elif last + 1 < begin:
            # A restored stream, or a server that is behind: wait rather than read other messages as these.
            if not self._waits:
                _tell(f"stream {options.stream!r} ends at {last}, before the query's {begin - 1}; waiting")
            self._waits = True
            return start
        self._waits = False
        end = last + 1 if self._bound is None else min(last + 1, max(begin, self._bound))
        if isinstance(limit, ReadMaxRows):
            end = min(end, begin + limit.max_rows)
        if end == begin and created == start["created"]:
            return start
        gone = _look_for_losses(client, options, info, begin, end)
        if gone:
            _tell(f"{gone} messages of stream {options.stream!r} between {begin} and {end - 1} are gone")
        return _offset(created, missed + gone, end)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """At most `maxOffsetsPerTrigger`."""
        most = self._options.max_offsets
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read what is there now, and no more."""
        self._bound = self._ask(lambda client: bounds(client.stream_info(self._options.stream))[1] + 1)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of the stream, for the query's progress: the difference to the end offset is the lag."""

        def find(client: BlockingClient) -> dict[str, Any]:
            info = client.stream_info(self._options.stream)
            return _offset(info["created"], 0, bounds(info)[1] + 1)

        return self._ask(find)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Cut a batch into tasks."""
        options = self._options

        def plan(client: BlockingClient) -> Sequence[InputPartition]:
            info = client.stream_info(options.stream)
            begin = int(start["next"]) if start["created"] == end["created"] else bounds(info)[0]
            if info["created"] != end["created"]:
                raise DataLost(
                    f"stream {options.stream!r} was deleted and made anew: this batch cannot be read again"
                )
            _look_for_losses(client, options, info, begin, int(end["next"]))
            size = int(end["next"]) - begin
            parts = options.min_partitions or min(os.cpu_count() or 1, max(1, size // _ROWS_WORTH_A_TASK))
            ranges = split(begin, int(end["next"]), parts=parts, most=options.max_records)
            return _partitions(options, info, ranges, options.subjects)

        return self._ask(plan)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one range; runs in a task."""
        assert isinstance(partition, RangePartition)
        return _read(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing depends on it: Spark calls it late, or never."""

    def stop(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    @plainly()
    def _ask(self, question: Callable[[BlockingClient], _T]) -> _T:
        """Ask the server; try again for a minute, because an error here would end the query."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if self._client is None:
                    self._client = BlockingClient.open(self._options.target, name="parti-spark-driver")
                return question(self._client)
            except PartiError as error:
                self.stop()
                if not passes(error) or time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.2)

    def __getstate__(self) -> dict[str, Any]:
        """What tasks get: no connection."""
        found = {name: value for name, value in self.__dict__.items() if name != "_read_options"}
        return {**found, "_options": self._options, "_client": None}


def _offset(created: str, missed: int, following: int) -> dict[str, Any]:
    return {"created": created, "missed": missed, "next": following}


def lag_of(progress: Mapping[str, Any]) -> int | None:
    """How many messages a query is behind, from its progress (`query.lastProgress`, as a mapping); None: unknown."""
    lags = []
    for source in progress.get("sources", ()):
        end, newest = source.get("endOffset"), source.get("latestOffset")
        if isinstance(end, Mapping) and isinstance(newest, Mapping) and "next" in end and "next" in newest:
            lags.append(max(0, int(newest["next"]) - int(end["next"])))
    return sum(lags) if lags else None
