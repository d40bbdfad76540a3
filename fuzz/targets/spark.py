"""The Spark source without Spark: messages to rows, options, offsets, filters, and what tables keep of commits."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from fuzz.feed import Feed
from fuzz.hostile import MANY_DIGITS
from fuzz.target import Target, WrongError
from parti.errors import PartiError
from parti.jetstream.chunks import Chunk
from parti.spark import commits
from parti.spark.options import SOURCE_OPTIONS, read_offset, read_source_options
from parti.spark.pushdown import Narrowing
from parti.spark.rows import BatchMaker, Layout
from parti.spark.source import lag_of

_LAYOUTS = (
    Layout("S"),
    Layout("S", "raw"),
    Layout("S", "parsed", template="dc.{tool}.{chamber}.done"),
    Layout("S", "parsed", payload=False, template="orders.{id}"),
)
_MAKERS = tuple(BatchMaker(layout) for layout in _LAYOUTS)
_REPLIES = (
    b"$JS.ACK.S.C.1.%d.3.1763467200000000000.5",
    b"$JS.ACK._.hash.S.C.1.%d.3.1763467200000000000.5",
    b"$JS.ACK.d.hash.S.C.1.%d.3.1763467200000000000.5.mark",
)
_FILTERS = ("EqualTo", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual", "In", "StringStartsWith")


def one(data: bytes) -> None:
    """One of the ways in which outside input reaches the source."""
    feed = Feed(data)
    (_rows, _options, _offset, _filter, _progress, _commit)[feed.byte() % 6](feed)


def _rows(feed: Feed) -> None:
    """Every message is one row, whatever it holds."""
    maker, layout = feed.pick(tuple(zip(_MAKERS, _LAYOUTS, strict=True)))
    reply, direct = feed.pick(_REPLIES), feed.flag()
    chunk = Chunk()
    while feed and len(chunk) < 20:
        subject = feed.chunk().translate(None, b" \t\r\n\0") or b"dc.a.b.done"
        chunk.subjects.append(subject)
        chunk.headers.append(b"NATS/1.0\r\n" + feed.chunk() + b"\r\n\r\n" if feed.flag() else None)
        chunk.payloads.append(feed.chunk())
        if direct:
            chunk.seqs.append(len(chunk))
            chunk.stamps_us.append(1_763_467_200_000_000)
        else:
            chunk.replies.append(reply % len(chunk))
    if not len(chunk):
        return
    batch = maker.make(chunk)
    batch.validate(full=True)
    if batch.num_rows != len(chunk) or batch.column("seq").to_pylist() != list(range(1, len(chunk) + 1)):
        raise WrongError("the rows are not the messages")
    if layout.payload and batch.column("payload").to_pylist() != chunk.payloads:
        raise WrongError("a payload is another one")


def _options(feed: Feed) -> None:
    given = {"stream": "S"}
    while feed and len(given) < 6:
        given[feed.pick(SOURCE_OPTIONS) if feed.flag() else feed.text()] = feed.text()
    try:
        options = read_source_options(given, streaming=feed.pick((None, True, False)))
    except PartiError as error:
        if "\n" in str(error):
            raise WrongError("a refusal is more than one line") from error
        return
    _ = (Layout.of(options).ddl, options.keys)


def _offset(feed: Feed) -> None:
    text = feed.rest().decode("utf-8", "replace").strip()
    try:
        read_offset("startingOffsets", text or "earliest")
    except PartiError:
        return


def _filter(feed: Feed) -> None:
    found = Narrowing()
    while feed:
        kind, attribute = feed.pick(_FILTERS), feed.pick((("seq",), ("timestamp",), ("subject",), ("a", "b")))
        values = (feed.text(), feed.number() - 1000, datetime(2026, 1, 1, tzinfo=UTC), [feed.text()], None)
        found, _ = found.take(kind, attribute, feed.pick(values) if kind != "In" else [feed.text(), feed.text()])


def _progress(feed: Feed) -> None:
    try:
        progress = json.loads(feed.rest())
    except (ValueError, RecursionError):
        return
    if isinstance(progress, dict) and isinstance(progress.get("sources", []), list):
        sources = [source for source in progress.get("sources", []) if isinstance(source, dict)]
        if all(_is_offset(source.get(name)) for source in sources for name in ("endOffset", "latestOffset")):
            lag_of({"sources": sources})


def _is_offset(offset: object) -> bool:
    """Offsets are written by the source alone: what Spark gives back has their shape."""
    return not isinstance(offset, dict) or isinstance(offset.get("next", 0), int)


def _commit(feed: Feed) -> None:
    try:
        commit = commits.decode(feed.rest().decode("utf-8", "replace"), "place")
    except PartiError:
        return
    commits.decode(commits.encode(commit), "place")


def seeds() -> list[bytes]:
    """Messages, options, offsets and commits that are right."""
    offsets = [b"earliest", b"latest", b"17", b"2026-11-16T08:00:00Z", MANY_DIGITS.encode()]
    progress = {"sources": [{"endOffset": {"created": "c", "missed": 0, "next": 5}, "latestOffset": {"next": 9}}]}
    commit = commits.encode(
        commits.Commit(
            first=1,
            last=2,
            rows=3,
            files=1,
            bytes=9,
            schema=(),
            written_at="t",
            written_by="w",
            merged=(),
            meta={"a": 1},
        )
    )
    rows = [
        bytes((0, layout, reply, flag)) + b"\x0bdc.a.b.done\1\4A: b\3abc" * 3
        for layout in range(4)
        for reply in range(3)
        for flag in (0, 1)
    ]
    named = [bytes((1, 1, number, kind, 5)) + b"abcde" for number in range(len(SOURCE_OPTIONS)) for kind in (0, 3, 7)]
    return [
        *rows,
        *named,
        *(b"\2" + offset for offset in offsets),
        *(bytes((3, kind, attribute, 7, 3)) + b"a.b\0\1" for kind in range(7) for attribute in range(4)),
        b"\4" + json.dumps(progress).encode(),
        b"\5" + commit.encode(),
    ]


TARGET = Target("spark", one, seeds)
