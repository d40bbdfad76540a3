"""Where the list of partitions comes from: a fixed list, the stream's subjects, a key, a function, or a mapping.

A source gives values; `resolve` makes partitions of them, or refuses. `SourceReader` reads a source again and again
and keeps the last good list while it fails.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import structlog

from parti.errors import ConfigError, OverlappingSubjects, PartiError, SourceFailed, SubjectMismatch
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.kv import Bucket
from parti.jetstream.streams import check_mapping, list_subjects
from parti.model.mapping import SubjectMapping
from parti.model.partition import Partition, PartitionLike, Template
from parti.model.subjects import first_overlap, has_wildcard

_log = structlog.get_logger("parti.sources")

_LOGGED = 10
"""Most partitions named in one log line."""
_LONGEST_SUBJECT = 500
"""Bytes of a subject as it stands in a record. The progress of a worker has each of its subjects, and each id up to
three times: with the 500 of `max_subjects` it fits into one message of 1 MiB, the servers' default. A key of a record
has up to three times these bytes, and fits into a line of the protocol, of 4,096."""


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source may look at."""

    api: JetStreamApi
    bucket: Bucket
    stream: str
    template: Template


@runtime_checkable
class PartitionSource(Protocol):
    """Gives the list of partitions. Any object with these two members is one."""

    @property
    def refresh_s(self) -> float | None:
        """Seconds between two readings; None: one is enough."""

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        """Return all partitions, in any order; raise when they cannot be told."""
        ...


SourceFunction: TypeAlias = Callable[..., Iterable[PartitionLike] | Awaitable[Iterable[PartitionLike]]]
SourceLike: TypeAlias = PartitionSource | SubjectMapping | SourceFunction | Iterable[PartitionLike] | None


class Static:
    """A list that never changes."""

    refresh_s: float | None = None

    def __init__(self, partitions: Iterable[PartitionLike]) -> None:
        self.partitions = tuple(partitions)

    def __repr__(self) -> str:
        return f"Static({len(self.partitions)} partitions)"

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        """Return the list."""
        return self.partitions


class Mapped:
    """The slots of a stream's subject mapping.

    Raises `ConfigError` when the stream does not map like that, because then nobody would read what it stores. That
    is what it is read again for: the slots themselves never change. Where an account of the server does the mapping
    and not the stream, use `Static(mapping.partitions())`.
    """

    def __init__(self, mapping: SubjectMapping, refresh_s: float = 30.0) -> None:
        self.mapping = mapping
        self.refresh_s: float | None = _positive(refresh_s)
        self._partitions: tuple[Partition, ...] = ()

    def __repr__(self) -> str:
        return f"Mapped({self.mapping!r}, refresh_s={self.refresh_s})"

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        """Check the stream and return one partition for each slot."""
        if not self._partitions:
            self._partitions = tuple(await asyncio.to_thread(self.mapping.partitions, context.template))
        check_mapping(await context.api.stream_info(context.stream), self.mapping)
        return self._partitions


class Discovered:
    """Every subject in the stream that fits the template.

    A partition once found stays known, although its messages have expired, were purged, or were removed when they
    were acknowledged: it is likely to come back, and giving it up and taking it again would move it about. Two
    things forget: a stream that was made anew, and a new `Discovered`, which begins with what lies in the stream.
    Raises `ConfigError` on a stream with interest retention, which drops messages of subjects that nobody reads yet.
    """

    def __init__(self, refresh_s: float = 1.0) -> None:
        self.refresh_s: float | None = _positive(refresh_s)
        self._created = ""
        self._listed: StreamInfo | None = None
        """A state of the stream whose subjects are all known."""
        self._known: dict[str, Partition | None] = {}
        """By subject; None for one that cannot be a partition."""
        self._partitions: tuple[Partition, ...] = ()

    def __repr__(self) -> str:
        return f"Discovered(refresh_s={self.refresh_s})"

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        """Return all partitions found so far; the same tuple when there are no new ones."""
        if not context.template.keys:
            return (context.template.text,)
        info = await context.api.stream_info(context.stream)
        if info.retention == "interest":
            raise ConfigError(
                f"stream {info.name!r} has the retention 'interest' and drops messages of partitions that are not "
                f"known yet; list the partitions, or use a stream with the retention 'limits' or 'workqueue'"
            )
        if self._created != info.created:
            self._created, self._listed, self._known, self._partitions = info.created, None, {}, ()
        if self._listed and _no_new_subject(self._listed, info):
            self._listed = info
            return self._partitions
        listed = await list_subjects(context.api, context.stream, context.template.pattern)
        new = listed.subjects - self._known.keys()
        if new:
            self._known |= await asyncio.to_thread(_parse, new, context.template)
            self._partitions = tuple(p for p in self._known.values() if p)
        # The state from before the list was read: what came after it is looked for the next time.
        self._listed = info if listed.complete else None
        return self._partitions


def _no_new_subject(listed: StreamInfo, now: StreamInfo) -> bool:
    """Whether the stream cannot hold a subject that it did not hold before."""
    stored = now.last_seq - listed.last_seq
    if stored <= 0:
        return stored == 0
    # As many messages more as were stored: none was removed. So the same number of subjects is the same subjects.
    return now.messages - listed.messages == stored and now.num_subjects == listed.num_subjects


def _parse(subjects: Iterable[str], template: Template) -> dict[str, Partition | None]:
    found = {s: _partition_of(s, template) for s in subjects}
    odd = [s for s, partition in found.items() if partition is None]
    if odd:
        examples = sorted(odd)[:_LOGGED]
        _log.warning("subjects that cannot be partitions are ignored", count=len(odd), subjects=examples)
    return found


def _partition_of(subject: str, template: Template) -> Partition | None:
    """The partition of a subject that lies in the stream; None when it cannot be one."""
    # The server stores what clients publish on `orders.*` itself, and bytes that are no text reach us as U+FFFD.
    if has_wildcard(subject) or "\ufffd" in subject:
        return None
    try:
        partition = template.parse(subject)
    except SubjectMismatch:
        return None
    # A control character is six bytes in a record.
    return partition if len(msgspec.json.encode(subject)) - len('""') <= _LONGEST_SUBJECT else None


class FromKey:
    """A JSON list in a key of the control bucket: ids, or lists or objects of key values.

    Example:
        nats kv put parti partitions '["etch1.c1", ["etch1", "c2"], {"tool": "etch2", "chamber": "c1"}]'
    """

    def __init__(self, key: str, refresh_s: float = 5.0) -> None:
        if not re.fullmatch(r"[-/_=A-Za-z0-9]+(\.[-/_=A-Za-z0-9]+)*", key):
            raise ConfigError(f"{key!r} is not a key: use letters, digits, '-', '_', '/', '=' and single dots")
        self.key = key
        self.refresh_s: float | None = _positive(refresh_s)

    def __repr__(self) -> str:
        return f"FromKey({self.key!r}, refresh_s={self.refresh_s})"

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        """Read the key; raises `SourceFailed` when it is absent or holds anything else."""
        entry = await context.bucket.get(self.key)
        where = f"key {self.key!r} of bucket {context.bucket.name!r}"
        if entry is None or not entry.value:
            raise SourceFailed(f"{where} does not exist; put a JSON list of partitions there")
        try:
            values = json.loads(entry.value)
        except (ValueError, RecursionError) as error:
            raise SourceFailed(f"{where} is not JSON ({error}); expected a list of partitions") from None
        if not isinstance(values, list):
            raise SourceFailed(f"{where} holds {_kind(values)}, expected a JSON list of partitions")
        for index, value in enumerate(values):
            if not _is_partition(value):
                raise SourceFailed(
                    f"{where}: entry {index} is {json.dumps(value)[:80]}, expected an id, or a list or object of "
                    f"key values"
                )
        return [str(value) if isinstance(value, int) else value for value in values]


class Callback:
    """What a function returns: async or not, called without arguments or with the `SourceContext`.

    A plain function runs in a thread, so that it cannot stop the worker's heartbeats, and is not called again before
    it has come to an end. Whatever it raises becomes a `SourceFailed`.
    """

    def __init__(self, function: SourceFunction, refresh_s: float = 5.0) -> None:
        self.function: Callable[..., Any] = function
        self.refresh_s: float | None = _positive(refresh_s)
        call = function if inspect.isroutine(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._takes_context = _takes_argument(function)
        self._name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self._thread: asyncio.Future[Any] | None = None

    def __repr__(self) -> str:
        return f"Callback({self._name}, refresh_s={self.refresh_s})"

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        """Call the function."""
        arguments = (context,) if self._takes_context else ()
        try:
            values = await (self.function(*arguments) if self._is_async else self._call_in_thread(*arguments))
            if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
                raise TypeError(f"returned {_kind(values)}, expected a list of partitions")
            return list(values)
        except Exception as error:
            raise SourceFailed(f"function {self._name} failed: {type(error).__name__}: {_one_line(error)}") from error

    async def _call_in_thread(self, *arguments: SourceContext) -> Any:
        if self._thread and not self._thread.done():
            # Threads that never come back would use up those that name resolution needs to reconnect.
            raise TimeoutError("the call before has not come to an end")
        self._thread = asyncio.get_running_loop().run_in_executor(None, self.function, *arguments)
        self._thread.add_done_callback(lambda call: call.cancelled() or call.exception())
        values = await asyncio.shield(self._thread)
        return await values if inspect.isawaitable(values) else values


def as_source(value: SourceLike) -> PartitionSource:
    """Make a source of what a user gave: None, a source, a mapping, a function or a list of partitions."""
    if value is None:
        return Discovered()
    if isinstance(value, SubjectMapping):
        return Mapped(value)
    if isinstance(value, type):
        raise ConfigError(f"partitions is the class {value.__name__}; expected an instance: {value.__name__}(...)")
    if isinstance(value, str | bytes | Mapping | Partition):
        raise ConfigError(f"partitions is {_kind(value)} {value!r}; expected a list of partitions")
    if isinstance(value, PartitionSource):
        return value
    if callable(value):
        return Callback(value)
    if isinstance(value, Iterable):
        return Static(value)
    raise ConfigError(f"partitions is {_kind(value)} {value!r}; expected a list, a source, a mapping or a function")


def resolve(template: Template, values: Iterable[PartitionLike]) -> tuple[Partition, ...]:
    """Make partitions: each once, sorted by id with numbers in their natural order.

    Raises `SubjectMismatch` for a value that does not fit the template, `OverlappingSubjects` when a message could
    belong to two of them. Takes about 10 us for each, so call it in a thread when there may be many.
    """
    by_id: dict[str, Partition] = {}
    for value in values:
        if not isinstance(value, Partition | str | Mapping | list | tuple):
            raise SubjectMismatch(
                f"partition {value!r} is {_kind(value)}; expected an id, or a list or mapping of key values"
            )
        partition = template.partition(value)
        by_id[partition.id] = partition
    by_subject = {partition.subject: partition for partition in by_id.values()}
    pair = first_overlap(list(by_subject))
    if pair:
        one, other = by_subject[pair[0]], by_subject[pair[1]]
        raise OverlappingSubjects(
            f"partitions {one.id!r} and {other.id!r} overlap: a message could belong to both; "
            f"remove one of them or make the wildcard narrower"
        )
    return tuple(by_id[key] for key in sorted(by_id, key=_natural))


class SourceReader:
    """Reads one source and keeps its last good list.

    The first `read` raises when the source fails. Later ones return the list before, set `last_error`, and log one
    line for each new reason. A source that does not answer within `timeout_s` has failed.
    """

    def __init__(self, source: PartitionSource, context: SourceContext, *, timeout_s: float = 30.0) -> None:
        self.source = source
        self.refresh_s = source.refresh_s
        self.remembers = isinstance(source, Discovered)
        """Whether a partition that is claimed stays wanted although the source no longer names it."""
        self.changed = False
        """Whether the last reading gave other partitions than the one before it."""
        self.last_error: str | None = None
        self._context = context
        self.timeout_s = timeout_s
        self._values: Sequence[PartitionLike] | None = None
        self._partitions: tuple[Partition, ...] | None = None

    async def read(self) -> tuple[Partition, ...]:
        """Read the source and return the partitions that now are the last good ones."""
        self.changed = False
        try:
            partitions = await self._load()
        except PartiError as error:
            if self._partitions is None:
                raise
            self._failed(str(error))
            return self._partitions
        if self.last_error:
            self.last_error = None
            _log.info("partitions can be read again", source=repr(self.source))
        before, self._partitions = self._partitions, partitions
        if partitions != before:
            self.changed = True
            self._log_change(before or (), partitions)
        return partitions

    async def _load(self) -> tuple[Partition, ...]:
        try:
            async with asyncio.timeout(self.timeout_s):
                values = await self.source.load(self._context)
            if self._partitions is not None and values is self._values and isinstance(values, tuple):
                return self._partitions
            partitions = await asyncio.to_thread(resolve, self._context.template, values)
        except PartiError:
            raise
        except TimeoutError:
            raise SourceFailed(f"{self.source!r} did not answer within {self.timeout_s:g} s") from None
        except Exception as error:
            raise SourceFailed(f"{self.source!r} failed: {type(error).__name__}: {_one_line(error)}") from error
        self._values = values
        return partitions

    def _failed(self, reason: str) -> None:
        if reason != self.last_error:
            _log.error("partitions not read; keeping the last list", source=repr(self.source), error=reason)
        self.last_error = reason

    def _log_change(self, before: Iterable[Partition], after: Sequence[Partition]) -> None:
        old, new = {p.id for p in before}, {p.id for p in after}
        _log.info(
            "partitions changed",
            source=repr(self.source),
            partitions=len(new),
            added=sorted(new - old, key=_natural)[:_LOGGED],
            added_count=len(new - old),
            removed=sorted(old - new, key=_natural)[:_LOGGED],
            removed_count=len(old - new),
        )


def _positive(refresh_s: float) -> float:
    if not refresh_s > 0:
        raise ConfigError(f"refresh_s is {refresh_s!r}; expected a number of seconds above 0")
    return refresh_s


def _takes_argument(function: SourceFunction) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        p for p in parameters if p.default is p.empty and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}
    ]
    if len(needed) > 1:
        raise ConfigError(f"{function!r} takes {len(needed)} arguments; expected none, or one for the context")
    return bool(needed)


def _is_partition(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_word(v) for v in value.values())
    return all(_is_word(v) for v in value) if isinstance(value, list) else _is_word(value)


def _is_word(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _natural(partition_id: str) -> tuple[str, str]:
    return re.sub(r"[0-9]+", lambda number: number[0].zfill(20), partition_id), partition_id


def _kind(value: object) -> str:
    return f"the {type(value).__name__}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
