"""Rows of `format("jetstream")`: their schema, and how chunks of messages become Arrow batches.

No Python runs for each row: sequences and times are parsed by Arrow's own reader, and the keys of a subject template
are worked out once for each subject of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from parti.errors import SubjectMismatch
from parti.jetstream.ranges import Chunk
from parti.model.headers import parse_all_headers
from parti.model.partition import Template
from parti.model.safe_text import text_of
from parti.spark.options import HeaderForm, SourceOptions

_TIME = pa.timestamp("us", tz="UTC")
_HEADER_TYPES: dict[HeaderForm, Any] = {
    "raw": pa.binary(),
    "parsed": pa.map_(pa.string(), pa.list_(pa.string())),
}
_HEADER_DDL: dict[HeaderForm, str] = {"raw": "binary", "parsed": "map<string, array<string>>"}
_DOTS = pa_csv.ParseOptions(delimiter=".", quote_char=False)
_TOKENS = ("delivered", "seq", "place", "stamp", "pending")
_NAMES = {
    9: ("js", "ack", "stream", "consumer", *_TOKENS),
    11: ("js", "ack", "domain", "account", "stream", "consumer", *_TOKENS),
    12: ("js", "ack", "domain", "account", "stream", "consumer", *_TOKENS, "mark"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns a read has."""

    stream: str
    headers: HeaderForm = "none"
    payload: bool = True
    template: str | None = None

    @classmethod
    def of(cls, options: SourceOptions) -> Layout:
        """The layout that options ask for."""
        return cls(options.stream, options.headers, options.payload, options.template)

    @property
    def ddl(self) -> str:
        """The schema, as Spark writes it."""
        columns = ["stream string", "seq bigint", "subject string", "timestamp timestamp"]
        if self.headers != "none":
            columns.append(f"headers {_HEADER_DDL[self.headers]}")
        if self.payload:
            columns.append("payload binary")
        if self.template:
            columns += [f"`{key}` string" for key in Template(self.template).keys]
        return ", ".join(columns)


class BatchMaker:
    """Turns chunks into Arrow batches of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._template = Template(layout.template) if layout.template else None

    def make(self, chunk: Chunk) -> pa.RecordBatch:
        """One batch with all messages of a chunk."""
        layout = self._layout
        seqs, stamps_us = _numbers(chunk)
        subjects = _texts(chunk.subjects)
        columns: list[Any] = [pa.repeat(layout.stream, len(chunk)), seqs, subjects, stamps_us.cast(_TIME)]
        names = ["stream", "seq", "subject", "timestamp"]
        if layout.headers != "none":
            names.append("headers")
            columns.append(pa.array(_headers(chunk, layout.headers), _HEADER_TYPES[layout.headers]))
        if layout.payload:
            names.append("payload")
            columns.append(pa.array(chunk.payloads, pa.binary()))
        if self._template is not None:
            names += self._template.keys
            columns += self._keys(subjects)
        return pa.RecordBatch.from_arrays(columns, names=names)

    def _keys(self, subjects: Any) -> list[Any]:
        template = self._template
        assert template is not None
        encoded = subjects.dictionary_encode()
        found: list[list[str | None]] = [[] for _ in template.keys]
        for subject in encoded.dictionary.to_pylist():
            try:
                values: tuple[str | None, ...] = tuple(template.parse(subject).keys.values())
            except SubjectMismatch:
                values = (None,) * len(template.keys)
            for column, value in zip(found, values, strict=True):
                column.append(value)
        return [pc.take(pa.array(column, pa.string()), encoded.indices) for column in found]


def _texts(values: list[bytes]) -> Any:
    """Strings; bytes that are not UTF-8, which the server does not forbid, become `\\xNN`."""
    try:
        return pa.array(values, pa.string())
    except pa.ArrowInvalid:
        return pa.array([text_of(value) for value in values], pa.string())


def _numbers(chunk: Chunk) -> tuple[Any, Any]:
    """Sequences, and times in microseconds."""
    if not chunk.replies:
        return pa.array(chunk.seqs, pa.int64()), pa.array(chunk.stamps_us, pa.int64())
    names = list(_NAMES[chunk.replies[0].count(b".") + 1])
    table = pa_csv.read_csv(
        pa.BufferReader(b"\n".join(chunk.replies)),
        read_options=pa_csv.ReadOptions(use_threads=False, column_names=names),
        parse_options=_DOTS,
        convert_options=pa_csv.ConvertOptions(
            column_types={"seq": pa.int64(), "stamp": pa.int64()}, include_columns=["seq", "stamp"]
        ),
    ).combine_chunks()
    seqs, stamps_ns = (table.column(name).chunk(0) for name in ("seq", "stamp"))
    return seqs, pc.divide(stamps_ns, 1000)


def _headers(chunk: Chunk, form: HeaderForm) -> Iterator[Any]:
    if form == "raw":
        yield from chunk.headers
        return
    for block in chunk.headers:
        yield list(parse_all_headers(block).items()) if block else []
