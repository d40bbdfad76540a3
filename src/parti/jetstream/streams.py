"""Streams as partitions need them: with a subject mapping, and with a list of the subjects that lie in them."""

from __future__ import annotations

from dataclasses import dataclass

from parti.errors import ApiError, ConfigError, NotFound
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.model.mapping import SubjectMapping
from parti.model.subjects import within

_NAME_IN_USE = 10058


async def ensure_mapped_stream(
    api: JetStreamApi,
    name: str,
    mapping: SubjectMapping,
    *,
    replicas: int,
    retention: str = "limits",
    storage: str = "file",
) -> StreamInfo:
    """Return the stream that applies the mapping, creating it when it is missing.

    Any number of workers may call this at once. An existing stream is never changed; raises `ConfigError` when it
    maps otherwise or not at all.
    """
    try:
        info = await api.stream_info(name)
    except NotFound:
        info = await _create(
            api,
            {
                "name": name,
                "subjects": [mapping.source],
                "subject_transform": {"src": mapping.source, "dest": mapping.destination},
                "retention": retention,
                "storage": storage,
                "num_replicas": replicas,
                "allow_direct": True,
            },
        )
    check_mapping(info, mapping)
    return info


async def _create(api: JetStreamApi, config: dict[str, object]) -> StreamInfo:
    name = config["name"]
    try:
        await api.call(f"STREAM.CREATE.{name}", config)
    except ApiError as error:
        # Somebody was faster, with another configuration: let it be judged like any existing stream.
        if error.code != _NAME_IN_USE:
            raise
    return await api.stream_info(str(name))


def check_mapping(info: StreamInfo, mapping: SubjectMapping) -> None:
    """Raise `ConfigError` unless the stream stores its messages by this mapping."""
    expected = f"expected {mapping.source!r} to {mapping.destination!r}"
    advice = "parti does not change a stream that exists: correct the mapping or use another stream"
    if not info.transform or not info.transform[1]:
        raise ConfigError(f"stream {info.name!r} has no subject transform, {expected}; {advice}")
    source, destination = info.transform
    try:
        same = SubjectMapping(source, destination) == mapping
    except ConfigError:
        same = False
    if not same:
        raise ConfigError(f"stream {info.name!r} transforms {source!r} to {destination!r}, {expected}; {advice}")
    if not within(mapping.source, info.subjects):
        takes = ", ".join(info.subjects) or "nothing"
        raise ConfigError(
            f"stream {info.name!r} takes {takes}, which leaves out some of the mapping's source {mapping.source!r}; "
            f"add it to the stream's subjects"
        )


@dataclass(frozen=True, slots=True)
class SubjectList:
    """Subjects that lay in a stream; `complete` is false when they changed in a way that may have hidden some."""

    subjects: frozenset[str]
    complete: bool


async def list_subjects(api: JetStreamApi, stream: str, pattern: str) -> SubjectList:
    """The subjects that match `pattern` and have a message in the stream.

    The server gives 100,000 at a time, in alphabetical order: 2 ms for 2,000 subjects, 100 ms for 100,000.
    """
    found: set[str] = set()
    totals: set[int] = set()
    offset = 0
    while True:
        page = await api.call(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": offset})
        subjects = page["state"].get("subjects") or {}
        totals.add(page["total"])
        found.update(subjects)
        offset += len(subjects)
        if not subjects or offset >= page["total"]:
            # A subject that went away between two pages has moved the others up, one of them maybe past the edge.
            return SubjectList(frozenset(found), complete=len(totals) == 1)
