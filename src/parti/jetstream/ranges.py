"""Reads a range of sequences from a stream, in order, complete, and without leaving anything behind.

Two ways, chosen by the stream's retention and by `read_by` of the target:

- limits: an ephemeral pull consumer without acknowledgements, in memory, on one replica; it is deleted at the end and
  forgotten by the server a minute after a reader that died.
- work-queue and interest: batched direct gets, because a consumer would count as interest or be refused. The same for
  a user who may not make consumers.

Guarantees: messages come in order, each once; whatever the range no longer holds is told (`missing`). "There is no
more" is believed from the stream's leader only: a replica that lags says so too early. A connection that breaks is
opened again, and the reading goes on behind the last message.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

from parti.errors import PartiError
from parti.jetstream.blocking import BlockingClient, passes
from parti.jetstream.chunks import Chunk, Range, Wanted, sequence_of
from parti.jetstream.direct_ranges import DirectRange
from parti.jetstream.leaders import check_same
from parti.jetstream.pulled_ranges import PulledRange
from parti.jetstream.target import Target
from parti.model.safe_text import text_of
from parti.model.subjects import covers

__all__ = ["Chunk", "Range", "RangeReader", "Wanted", "sequence_of"]

_PATIENCE_S = 60.0
_PAUSE_S = 0.2


class RangeReader:
    """Reads one range; iterate over `chunks()` once."""

    def __init__(self, target: Target, wanted: Wanted, *, name: str = "parti-spark-reader") -> None:
        self.next = wanted.start
        """Everything below has been given out, or is missing."""
        self.rows = 0
        self.missing: list[Range] = []
        """Sequences of the range that the stream no longer holds; unknown (empty) where the server filtered."""
        self.server_filters = False
        self._target = target
        self._wanted = wanted
        self._name = name
        self._progress_s = time.monotonic()

    def chunks(self) -> Generator[Chunk, None, None]:
        """The messages of the range; raises `NotFound` when the stream was made anew, StreamNotFound when it is gone.

        A server that cannot be reached is tried again for a minute; then ConnectionFailed or RequestTimeout.
        """
        self._progress_s = time.monotonic()
        while self.next < self._wanted.end:
            try:
                yield from self._read()
            except PartiError as error:
                if not passes(error) or time.monotonic() - self._progress_s > _PATIENCE_S:
                    raise
                time.sleep(_PAUSE_S)

    def _read(self) -> Iterator[Chunk]:
        with BlockingClient.open(self._target, name=self._name) as control:
            info = control.stream_info(self._wanted.stream)
            check_same(info, self._wanted.stream, self._wanted.created)
            source: PulledRange | DirectRange
            by_consumer = self._target.read_by == "consumers"
            if by_consumer and info["config"].get("retention", "limits") == "limits":
                source = PulledRange(self._target, control, self._wanted, self.next, info, self._name)
            else:
                source = DirectRange(control, self._wanted, self.next, info)
            self.server_filters = source.server_filters
            try:
                yield from self._take(source)
            finally:
                source.close()

    def _take(self, source: PulledRange | DirectRange) -> Iterator[Chunk]:
        wanted = self._wanted
        check_subjects = bool(wanted.subjects) and not source.server_filters
        for chunk, following in source.read():
            if not source.server_filters:
                self._note_missing(chunk, following)
            self.next = following
            self._progress_s = time.monotonic()
            found = chunk.keep(self._is_wanted) if check_subjects else chunk
            if len(found):
                self.rows += len(found)
                yield found
        if not source.server_filters and self.next < wanted.end:
            self.missing.append((self.next, wanted.end))
        self.next = wanted.end

    def _is_wanted(self, subject: bytes) -> bool:
        name = text_of(subject)
        return any(covers(pattern, name) for pattern in self._wanted.subjects)

    def _note_missing(self, chunk: Chunk, following: int) -> None:
        if following - self.next == len(chunk):
            return
        expected = self.next
        for seq in chunk.seqs or map(sequence_of, chunk.replies):
            if seq > expected:
                self.missing.append((expected, seq))
            expected = seq + 1
        if following > expected:
            self.missing.append((expected, following))
