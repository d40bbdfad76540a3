"""What ledger tests share: a stream's ledger read back, and what must hold of it."""

from __future__ import annotations

import base64
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.integration.conftest import Kit, Sent

from parti.core.progress import Progress
from parti.errors import NotFound
from parti.model.ledger import LedgerBatch, LedgerRow, decode_batch, ledger_stream


@dataclass(frozen=True, slots=True)
class Entry:
    """A row, and who wrote it."""

    row: LedgerRow
    worker: str
    process: str
    closed: bool
    """The process stopped in good order."""


class Book:
    """Everything in a ledger."""

    def __init__(self, batches: Iterable[LedgerBatch]) -> None:
        self.batches = list(batches)
        self.chains: dict[str, list[LedgerBatch]] = defaultdict(list)
        for batch in self.batches:
            self.chains[batch.process].append(batch)
        self.entries = [
            Entry(row, batch.worker, batch.process, self.closed(batch.process))
            for batch in self.batches
            for row in batch.rows()
        ]

    def closed(self, process: str) -> bool:
        return any(batch.closed for batch in self.chains[process])

    @property
    def seqs(self) -> list[int]:
        return sorted(entry.row.seq for entry in self.entries)

    def of(self, seq: int) -> Entry:
        (found,) = [entry for entry in self.entries if entry.row.seq == seq]
        return found

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────

    def chains_are_whole(self) -> None:
        """Numbers without a hole and without a repetition; a last batch is the last.

        A crash may leave a hole among the last four: so many batches are on their way at once.
        """
        for process, batches in self.chains.items():
            numbers = sorted(batch.number for batch in batches)
            excused = 0 if self.closed(process) else 4
            missing = set(range(max(0, numbers[-1] - excused + 1))) - set(numbers)
            assert not missing, f"chain of {process} lacks {missing}"
            assert len(numbers) == len(set(numbers)), f"chain of {process} repeats: {numbers}"
            closed = [batch.number for batch in batches if batch.closed]
            assert closed in ([], [numbers[-1]]), f"chain of {process} goes on after its end: {closed} of {numbers}"

    def is_exactly(self, sent: Sent) -> None:
        """One row for each message, in its partition."""
        found: Sent = defaultdict(list)
        for entry in self.entries:
            found[entry.row.partition].append(entry.row.seq)
        assert {p: sorted(seqs) for p, seqs in found.items()} == {p: sorted(seqs) for p, seqs in sent.items()}

    def times_are_sensible(self, begin_us: int, end_us: int) -> None:
        slack_us = 2_000  # the wall clock is read at other moments than the one that handlers are timed with
        for entry in self.entries:
            row = entry.row
            times = (
                begin_us,
                row.received_us,
                row.started_us + slack_us,
                row.finished_us + slack_us,
                end_us + slack_us,
            )
            assert list(times) == sorted(times), f"{row}: {times}"

    def order_holds(self) -> None:
        """One at a time and in order, in each partition and process."""
        rows: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
        for entry in self.entries:
            rows[entry.process, entry.row.partition].append(entry.row)
        for found in rows.values():
            found.sort(key=lambda row: row.seq)
            for before, after in itertools.pairwise(found):
                assert before.finished_us <= after.started_us, f"{after} began before {before} ended"

    def only_crashes_repeat(self) -> int:
        """A second row needs a process before that did not stop in good order; returns how many messages have one."""
        seen: dict[int, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            seen[entry.row.seq].append(entry)
        repeated = [entries for entries in seen.values() if len(entries) > 1]
        for entries in repeated:
            assert len({entry.process for entry in entries}) == len(entries), f"one process recorded twice: {entries}"
            assert not any(entry.closed for entry in entries[:-1]), f"repeated without a crash: {entries}"
        return len(repeated)


async def read_book(kit: Kit, name: str | None = None) -> Book:
    """Read the ledger of the kit's stream; empty while there is none."""
    stream, batches = name or ledger_stream(kit.stream), []
    try:
        info = await kit.api.stream_info(stream)
    except NotFound:
        return Book([])
    for seq in range(info.first_seq, info.last_seq + 1):
        answer = await kit.api.call(f"STREAM.MSG.GET.{stream}", {"seq": seq})
        batches.append(decode_batch(base64.b64decode(answer["message"]["data"])))
    return Book(batches)


async def rows_below_the_position(kit: Kit, sent: Sent) -> tuple[set[int], set[int]]:
    """What a restart would take for finished, by the record or the ack floor; and which of it has no row."""
    info = await kit.consumer_info()
    progress = await kit.progress() or Progress(stream=kit.stream, stream_created="")
    known = progress.raised(info.subjects, info.ack_floor)
    below = {seq for p, seqs in sent.items() for seq in seqs if seq < known.position(p, kit.subject(p))}
    return below, below - set((await read_book(kit)).seqs)
