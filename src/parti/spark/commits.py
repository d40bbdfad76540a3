"""What the commits of a lake table mean: names, ranges, merged schemas and which of them to put together.

A commit covers a range of batches, both ends included, and lies in a directory named after it. Decides without I/O;
`parti.spark.tables` does the work. Invariant guarded here: of commits that cover the same batch at most one is live,
so every row counts once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parti.errors import ConfigError

FORMAT = 1
META_FILE = "_meta.json"
_DIGITS = 12
_NAME = re.compile(rf"commit=(\d{{{_DIGITS}}})-(\d{{{_DIGITS}}})")
_OWN = frozenset(
    ("format", "first", "last", "rows", "files", "bytes", "schema", "written_at", "written_by", "merged")
)

Field = Mapping[str, Any]
"""One column of a schema, as Spark writes it in JSON: name, type, nullable, metadata."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a table: the batches it covers, what it holds and what its writer noted."""

    first: int
    last: int
    rows: int = 0
    files: int = 0
    bytes: int = 0
    schema: tuple[Field, ...] = field(default=(), compare=False)
    written_at: str = ""
    written_by: str = ""
    merged: tuple[tuple[int, int, int], ...] = ()
    """First batch, last batch and rows of the commits that compaction put together here."""
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the writer noted: offsets, watermark, the batches of the table it came from."""

    @property
    def directory(self) -> str:
        """Name of its directory, `commit=<first>-<last>`: readers that know partitions get a column `commit`."""
        return f"commit={self.span}"

    @property
    def span(self) -> str:
        """Its batches as a word that sorts like the numbers."""
        return span(self.first, self.last)

    def covers(self, other: Commit) -> bool:
        """Whether every batch of the other is one of this."""
        return self.first <= other.first and other.last <= self.last

    def meets(self, other: Commit) -> bool:
        """Whether the two have a batch in common."""
        return self.first <= other.last and other.first <= self.last


def span(first: int, last: int) -> str:
    """A range of batches as a word that sorts like the numbers."""
    return f"{first:0{_DIGITS}d}-{last:0{_DIGITS}d}"


def range_of(directory: str) -> tuple[int, int] | None:
    """The batches of a directory by its name; None if it is no commit."""
    found = _NAME.fullmatch(directory)
    return (int(found[1]), int(found[2])) if found else None


def as_range(batch: int | tuple[int, int]) -> tuple[int, int]:
    """One batch id, or a first and a last one, as a range; raises ConfigError for what is none."""
    first, last = batch if isinstance(batch, tuple) else (batch, batch)
    if not 0 <= first <= last < 10**_DIGITS:
        raise ConfigError(f"batches {first} to {last} are no range; expected 0 <= first <= last")
    return first, last


# ── what is live ──────────────────────────────────────────────────────────────────────────────────────────────────


def live(table: str, commits: Iterable[Commit]) -> tuple[Commit, ...]:
    """The commits that count, by batch: those that lie in a larger one are left out.

    Compaction puts the larger one in place before it takes the smaller ones away, so both may be there for a moment.
    """
    kept: list[Commit] = []
    for commit in sorted(commits, key=lambda c: (c.first, -c.last)):
        if kept and kept[-1].covers(commit):
            continue
        if kept and kept[-1].meets(commit):
            raise ConfigError(
                f"table {table}: commits {kept[-1].span} and {commit.span} overlap, and neither holds the other; "
                f"move one of the two directories away"
            )
        kept.append(commit)
    return tuple(kept)


def dead(commits: Iterable[Commit], alive: Iterable[Commit]) -> tuple[Commit, ...]:
    """The commits that do not count."""
    ranges = {(c.first, c.last) for c in alive}
    return tuple(c for c in commits if (c.first, c.last) not in ranges)


def replaced(table: str, commits: Iterable[Commit], new: Commit) -> tuple[Commit, ...]:
    """The commits that a new one takes the place of; raises ConfigError if it would tear one apart."""
    gone = []
    for commit in commits:
        if new.covers(commit):
            gone.append(commit)
        elif new.meets(commit):
            raise ConfigError(
                f"table {table}: batches {new.span} are part of commit {commit.span}, which cannot be replaced in "
                f"part; start the table anew in another lake directory"
            )
    return tuple(gone)


# ── what is written down ──────────────────────────────────────────────────────────────────────────────────────────


def encode(commit: Commit) -> str:
    """The commit as the text of its `_meta.json`."""
    if clash := _OWN.intersection(commit.meta):
        raise ConfigError(f"meta of a commit may not contain {', '.join(sorted(clash))}; the table writes those")
    own = {
        "format": FORMAT,
        "first": commit.first,
        "last": commit.last,
        "rows": commit.rows,
        "files": commit.files,
        "bytes": commit.bytes,
        "schema": list(commit.schema),
        "written_at": commit.written_at,
        "written_by": commit.written_by,
        **({"merged": [list(part) for part in commit.merged]} if commit.merged else {}),
    }
    return json.dumps({**own, **commit.meta}, indent=1) + "\n"


def decode(text: str, place: str) -> Commit:
    """Read a `_meta.json`; raises ConfigError for one that is damaged or from a later format."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ConfigError(f"{place} has format {found['format']}, expected {FORMAT}; use a newer parti")
        return Commit(
            first=int(found["first"]),
            last=int(found["last"]),
            rows=int(found["rows"]),
            files=int(found["files"]),
            bytes=int(found["bytes"]),
            schema=tuple(found["schema"]),
            written_at=found["written_at"],
            written_by=found["written_by"],
            merged=tuple((int(a), int(b), int(n)) for a, b, n in found.get("merged", ())),
            meta={key: value for key, value in found.items() if key not in _OWN},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(f"{place} cannot be read; restore it or move the commit's directory away") from None


def merge_meta(commits: Sequence[Commit]) -> dict[str, Any]:
    """What the notes of several commits say together.

    `offsets` reach from the first start to the last end, `source` from the first to the last batch, `counts` add up,
    names that end in `_min` and `_max` are the least and the greatest, of everything else the newest holds.
    """
    together: dict[str, Any] = {}
    for commit in commits:
        for key, value in commit.meta.items():
            before = together.get(key)
            if before is None or value is None:
                together[key] = before if value is None else value
            elif key == "offsets":
                together[key] = {**value, "start": before.get("start")}
            elif key == "source":
                together[key] = {**value, "first": before["first"]}
            elif key == "counts":
                together[key] = {name: before.get(name, 0) + value.get(name, 0) for name in {**before, **value}}
            elif key.endswith("_min"):
                together[key] = min(before, value)
            elif key.endswith("_max"):
                together[key] = max(before, value)
            else:
                together[key] = value
    return together


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────────────────────


def merge_schema(table: str, old: Sequence[Field], new: Sequence[Field]) -> tuple[Field, ...]:
    """The columns of both, the new ones last; raises ConfigError where a column is gone or has another type.

    Whether a column may be null plays no part: columns that are added later are null in older rows.
    """
    known, offered = {c["name"]: c for c in old}, {c["name"]: c for c in new}
    for name, column in known.items():
        if name not in offered:
            raise ConfigError(
                f"table {table} has a column {name!r} that is now missing; columns can be added but not removed: "
                f"declare it again, or begin a new lake directory"
            )
        before, after = type_text(column["type"]), type_text(offered[name]["type"])
        if before != after:
            raise ConfigError(
                f"table {table}: column {name!r} is {before} and cannot become {after}; give the column of the new "
                f"type another name, or begin a new lake directory"
            )
    added = [c for name, c in offered.items() if name not in known]
    return (*old, *added)


def type_text(kind: Any) -> str:
    """A type of Spark's JSON form as people write it: `map<string,double>`."""
    if isinstance(kind, str):
        return {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{type_text(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{type_text(kind['keyType'])},{type_text(kind['valueType'])}>"
    if kind["type"] == "struct":
        return f"struct<{','.join(c['name'] + ':' + type_text(c['type']) for c in kind['fields'])}>"
    return str(kind["type"])


# ── compaction ────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_compaction(
    commits: Sequence[Commit], target_bytes: int, boundaries: Iterable[int] = ()
) -> list[tuple[Commit, ...]]:
    """Groups of neighbouring commits to put together, each at most `target_bytes` large.

    A boundary is a batch up to which somebody has read the table: nothing is put together across it, or what was read
    could no longer be told from what was not. The newest commit stays alone, since a restarted query may repeat it.
    """
    fences = sorted(set(boundaries))
    groups: list[tuple[Commit, ...]] = []
    group: list[Commit] = []
    size = 0
    for commit in commits[:-1]:
        fenced = bool(group) and any(group[-1].last <= fence < commit.first for fence in fences)
        if fenced or size + commit.bytes > target_bytes:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(commit)
        size += commit.bytes
    groups.append(tuple(group))
    return [g for g in groups if len(g) > 1]


def plan_reading(commits: Sequence[Commit], after: int, most_rows: int) -> list[tuple[Commit, ...]]:
    """Groups of commits that come after a batch, each at most `most_rows` large, or a single commit."""
    groups: list[list[Commit]] = []
    rows = 0
    for commit in commits:
        if commit.last <= after:
            continue
        if groups and rows + commit.rows <= most_rows:
            groups[-1].append(commit)
        else:
            groups.append([commit])
            rows = 0
        rows += commit.rows
    return [tuple(group) for group in groups]
