"""The state of a stateful handler: the record that points at a snapshot, and how its chunks are named.

A snapshot is the state of one partition at one position, cut into chunks. Each chunk lies under a subject of its own:

    <root>.<partition>.<fence>-<position>-<id>.<number>

The partition is one token, so that no partition's chunks match the pattern of another's. The name carries fence and
position, so that whoever clears up can tell older from newer without reading anything else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from parti.model.fleet import key_of, name_of
from parti.model.records import TAG, Count, Moment, check_time

_NAME = re.compile(r"(\d{1,19})-(\d{1,19})-([0-9a-z]+)")


class StatePointer(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="state"
):
    """Which state of a partition counts, as stored in `state.<partition>`.

    Written by compare-and-set once every chunk is stored, so what it points at is whole. A new owner puts its own
    fence token in before it begins; from then on a late write of the owner before is refused.
    """

    partition: str
    fence: Count = 0
    """Fence token of the newest owner that has written the record; 0 when nothing is fenced (solo)."""
    position: Count = 0
    """Every message of the partition below it is in the state, none above."""
    stream_created: str = ""
    """Creation time of the stream that the position is in: sequences of a recreated stream mean nothing."""
    size: Count = 0
    """Bytes."""
    chunks: Count = 0
    digest: str = ""
    """SHA-256 of the bytes, in hex."""
    stream: str = ""
    """Stream that the chunks are in."""
    subject: str = ""
    """What the subjects of the chunks begin with; empty: the partition has an owner, but no state yet."""
    worker: str = ""
    """Who took the snapshot."""
    at: Moment

    def __post_init__(self) -> None:
        check_time(self.at)

    @property
    def holds_state(self) -> bool:
        """Whether there is a snapshot at all; an empty one counts."""
        return bool(self.subject)


@dataclass(frozen=True, slots=True)
class SnapshotName:
    """A snapshot by what is in the subjects of its chunks."""

    root: str
    partition: str
    fence: int
    position: int
    id: str

    @property
    def subject(self) -> str:
        """What the subjects of its chunks begin with."""
        return f"{self.root}.{token_of(self.partition)}.{self.fence}-{self.position}-{self.id}"


def state_key(partition: str) -> str:
    """The key of a partition's pointer in the bucket."""
    return key_of("state", partition)


def token_of(partition: str) -> str:
    """A partition id as one token of a subject."""
    return key_of("", partition)[1:].replace(".", "=2E")


def chunk_subject(subject: str, number: int) -> str:
    """The subject of a chunk; numbers begin at 0."""
    return f"{subject}.{number}"


def parse_chunk_subject(subject: str, root: str) -> SnapshotName | None:
    """Which snapshot a chunk belongs to; None when the subject is not one of ours."""
    rest = subject.removeprefix(f"{root}.")
    tokens = rest.split(".")
    if rest == subject or len(tokens) != 3 or not tokens[2].isdigit():
        return None
    match = _NAME.fullmatch(tokens[1])
    if not match:
        return None
    return SnapshotName(root, name_of(f".{tokens[0]}"), int(match[1]), int(match[2]), match[3])
