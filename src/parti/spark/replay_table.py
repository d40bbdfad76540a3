"""History, read again into a new table: a function makes rows of messages, and nobody else notices."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from parti.errors import ConfigError, ReplayFailed, SubjectMismatch
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.model.message import Message, Ownership, StoredMessage
from parti.model.partition import Partition, Template
from parti.spark.options import Offset, target_options
from parti.spark.planning import bounds, resolve
from parti.spark.replay import why_failed
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READER = "replay"
"""What messages name as their worker: nobody owns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequest:
    """What is read, what makes rows of it, and where they go."""

    target: Target
    stream: str
    handler: Callable[[Any], Any]
    output: str
    schema: str
    """Columns of the table, as Spark writes them."""
    batches: bool = False
    """The handler takes and returns Arrow batches."""
    template: str = ""
    """Subjects that do not fit it are left out; empty: each subject is a partition."""
    starting: Offset = "earliest"
    ending: Offset = "latest"

    def check(self) -> None:
        """Raise `ConfigError` for what can be known without Spark."""
        if inspect.iscoroutinefunction(self.handler):
            raise ConfigError("the function is async; a table needs a plain function that returns rows")
        if self.starting == "latest":
            raise ConfigError("--from latest: no history lies behind that; expected earliest, a sequence or a time")
        if self.template:
            Template(self.template)
        table = self.table(None)
        if table.commits():
            raise ConfigError(f"the table {table.path} exists already; name another --output, or delete it first")
        self.target.check()
        with BlockingClient.open(self.target, name="parti-replay") as client:
            client.stream_info(self.stream)

    def table(self, spark: SparkSession | None) -> Table:
        """The new table."""
        root, _, name = self.output.rstrip("/").rpartition("/")
        return Table(spark, root or ".", name)


def reprocess(spark: SparkSession, request: TableRequest) -> int:
    """Read, handle and commit; returns how many rows there are. Raises `ReplayFailed`, with no table left behind."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - importing this module imports no pyspark
    from pyspark.sql import types  # noqa: PLC0415
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    try:
        columns = types.StructType.fromDDL(request.schema)
    except PySparkException as error:
        raise ConfigError(f"--schema {request.schema!r}: {why_failed(error)}") from None
    if not isinstance(columns, types.StructType):
        raise ConfigError(f"--schema {request.schema!r}: expected columns, such as 'tool string, total double'")
    with BlockingClient.open(request.target, name="parti-replay") as client:
        info = client.stream_info(request.stream)
        start = resolve(client, request.stream, info, request.starting)
        # Fixed once: Spark may plan the read more than once, and the stream grows.
        end = min(resolve(client, request.stream, info, request.ending), bounds(info)[1] + 1)
    messages = (
        spark.read.format("jetstream")
        .options(**target_options(request.target))
        .option("stream", request.stream)
        .option("startingOffsets", max(1, start))
        .option("endingOffsets", max(1, end))
        .option("includeHeaders", "raw")
        .option("failOnDataLoss", "false")
        .load()
    )
    slots = max(1, int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
    rows = (
        messages.select("subject", "seq", "timestamp", "headers", "payload")
        .repartition(slots, "subject")
        .sortWithinPartitions("subject", "seq")
        .mapInArrow(partial(_make_rows, _Maker.of(request), to_arrow_schema(columns)), columns)
    )
    table = request.table(spark)
    try:
        table.commit(0, rows, {"stream": request.stream, "created": info["created"], "start": start, "end": end})
    except PySparkException as error:
        raise ReplayFailed(f"the table was not written: {why_failed(error)}") from error
    return table.read().count()


@dataclass(frozen=True, slots=True)
class _Maker:
    """What tasks need."""

    handler: Callable[[Any], Any]
    batches: bool
    stream: str
    template: str

    @classmethod
    def of(cls, request: TableRequest) -> _Maker:
        return cls(request.handler, request.batches, request.stream, request.template)


def _make_rows(maker: _Maker, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task."""
    template = Template(maker.template) if maker.template else None
    ownerships: dict[str, Ownership | None] = {}
    for batch in batches:
        if maker.batches:
            yield maker.handler(batch)
            continue
        rows: list[Mapping[str, Any]] = []
        for message in _messages(maker.stream, template, ownerships, batch):
            made = maker.handler(message)
            rows += [made] if isinstance(made, Mapping) else made or ()
        yield pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=schema)


def _messages(
    stream: str, template: Template | None, ownerships: dict[str, Ownership | None], batch: pa.RecordBatch
) -> Iterator[Message]:
    stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
    columns = (batch.column(name).to_pylist() for name in ("subject", "seq", "headers", "payload"))
    for subject, seq, header, payload, stamp_us in zip(*columns, stamps, strict=True):
        if subject not in ownerships:
            ownerships[subject] = _ownership(stream, template, subject)
        ownership = ownerships[subject]
        if ownership is None:
            continue
        stored_at = datetime.fromtimestamp(stamp_us / 1e6, UTC)
        yield StoredMessage(
            subject, payload, seq, ownership, header=header, received_s=time.time(), stored_at=stored_at
        )


def _ownership(stream: str, template: Template | None, subject: str) -> Ownership | None:
    if template is None:
        return Ownership(Partition(subject, subject, {}), stream, _READER)
    try:
        return Ownership(template.parse(subject), stream, _READER)
    except SubjectMismatch:
        return None
