"""Which of a worker's consumers carries which subject.

A worker that may have several consumers (`consumer_shards`) shares its subjects out among them, by number: 1 is
`<prefix>-<workerID>`, the others have their number appended. A subject stays where it is for as long as it is
carried: to move it between two consumers of one worker would be a move like any other, with nothing gained. So shards
fill up from the first to the last, and one that has run empty is filled again before a further one is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

MOST_SHARDS = 64


def place(subjects: Iterable[str], now: Mapping[str, int], *, cap: int, shards: int) -> dict[str, int]:
    """The number of the shard that each subject belongs to, given where those are that are carried `now`.

    No shard gets a subject beyond `cap` unless all of them are full: then the emptiest takes it, since what is
    carried for a while only (for a move) must not be refused. A shard that had more, or whose number is above
    `shards`, keeps what it has and gets nothing.
    """
    wanted = set(subjects)
    placed = {subject: now[subject] for subject in wanted if subject in now}
    taken = Counter(placed.values())
    first = 1
    for subject in sorted(wanted - placed.keys()):
        while first <= shards and taken[first] >= cap:
            first += 1
        number = first if first <= shards else min(range(1, shards + 1), key=lambda n: (taken[n], n))
        placed[subject] = number
        taken[number] += 1
    return placed
