"""The answer to a batched direct get, fed by hand: whatever is lost or forged, what comes out is a prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.jetstream.backlog import DirectBatch

T = TypeVar("T")

BARE = b"NATS/1.0\r\n\r\n"
STAMP = "2026-11-16T05:49:26.772432975Z"


def message(
    seq: int, before: int, pending: int = 0, *, user: bytes = BARE, stream: str = "S", subject: str = "s.1"
) -> bytes:
    """A header block as nats-server 2.15 writes it: its own lines in place of the end of the publisher's block."""
    lines = (
        f"Nats-Stream: {stream}\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\nNats-Time-Stamp: {STAMP}\r\n"
        f"Nats-Num-Pending: {pending}\r\nNats-Last-Sequence: {before}\r\n\r\n"
    )
    return user[:-2] + lines.encode()


def end(last: int, pending: int = 0) -> bytes:
    return b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n" % (pending, last)


def answer_of(seqs: list[int], pending: int = 0) -> list[bytes]:
    """A whole answer with these messages."""
    before = [0, *seqs]
    blocks = [message(seq, before[i], len(seqs) - i - 1 + pending) for i, seq in enumerate(seqs)]
    return [*blocks, end(before[-1], pending)]


def feed(blocks: list[bytes | None], *, seq: int = 1, up_to: int = 1 << 60) -> DirectBatch:
    async def run() -> DirectBatch:
        batch = DirectBatch("S", seq, up_to)
        for block in blocks:
            batch.take(block, b"data")
        return batch

    return in_a_loop(run)


def in_a_loop(run: Callable[[], Coroutine[None, None, T]]) -> T:
    return asyncio.run(run())


def seqs_of(batch: DirectBatch) -> list[int]:
    return [stored.seq for stored in batch.messages]


def test_a_whole_answer() -> None:
    batch = feed([*answer_of([3, 8, 9])])
    assert seqs_of(batch) == [3, 8, 9]
    assert batch.ended.done()
    assert batch.at_end
    assert not batch.trouble
    first = batch.messages[0]
    assert (first.subject, first.data, first.header) == ("s.1", b"data", None)
    assert first.stored_at == datetime(2026, 11, 16, 5, 49, 26, 772432, tzinfo=UTC)


def test_an_answer_with_more_behind_it_is_not_the_end() -> None:
    batch = feed([*answer_of([3, 8], pending=5)])
    assert seqs_of(batch) == [3, 8]
    assert batch.ended.done()
    assert not batch.at_end
    assert not batch.trouble


def test_nothing_found_is_the_end_for_the_one_who_says_so() -> None:
    batch = feed([b"NATS/1.0 404 Message Not Found\r\n\r\n"])
    assert batch.at_end
    assert not batch.messages
    assert not batch.trouble


@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 408 Empty Request\r\n\r\n",
        b"NATS/1.0 413 Too Many Results\r\n\r\n",
        b"NATS/1.0\r\nSomething: else\r\n\r\n",
        None,
        b"",
        message(1, 0, stream="MIRROR"),
        message(4, 3),
        message(1, 0, user=b"NATS/1.0\r\nA: b"),
        message(1, 0, user=b"NATS/1.0 204 EOB\r\nA: b"),
        message(1, 0, user=b"NATS/1.0\r\nNats-Stream: xx"),
        end(7),
    ],
)
def test_what_cannot_be_trusted_ends_the_batch(block: bytes | None) -> None:
    batch = feed([block, *answer_of([1, 2])])
    assert not batch.messages
    assert not batch.at_end
    assert batch.ended.done()
    assert batch.trouble


def test_a_message_before_the_one_asked_for_is_not_believed() -> None:
    batch = feed([*answer_of([4, 9])], seq=5)
    assert not batch.messages
    assert batch.trouble


def test_messages_above_the_bound_are_dropped_and_end_the_batch() -> None:
    blocks = answer_of([1, 5, 6, 9], pending=3)
    batch = feed([*blocks[:3]], up_to=5)
    assert seqs_of(batch) == [1, 5]
    assert batch.ended.done()
    assert batch.at_end


def test_a_message_that_cannot_be_decoded_is_a_hole() -> None:
    async def run() -> DirectBatch:
        batch = DirectBatch("S", 1, 99)
        one, two, three, last = answer_of([1, 2, 3])
        batch.take(one, b"")
        batch.take(two.replace(STAMP.encode(), b"yesterday"), b"")
        batch.take(three, b"")
        batch.take(last, b"")
        return batch

    batch = in_a_loop(run)
    assert seqs_of(batch) == [1]
    assert batch.trouble


@given(
    seqs=st.lists(st.integers(1, 200), min_size=1, max_size=12, unique=True).map(sorted),
    kept=st.lists(st.booleans(), min_size=13, max_size=13),
    pending=st.integers(0, 2),
)
def test_whatever_is_lost_on_the_way_the_rest_is_a_prefix(seqs: list[int], kept: list[bool], pending: int) -> None:
    blocks = answer_of(seqs, pending)
    whole = all(kept[: len(blocks)])
    batch = feed([block for block, keep in zip(blocks, kept, strict=False) if keep])
    got = seqs_of(batch)
    assert got == seqs[: len(got)]
    # Only a batch that came whole counts as one, and only then may it be the end.
    clean = batch.ended.done() and not batch.trouble
    assert clean == whole
    assert batch.at_end == (whole and not pending)
    if whole:
        assert got == seqs


@given(
    first_line=st.sampled_from(
        [b"NATS/1.0", b"NATS/1.0 204 EOB", b"NATS/1.0 404 Message Not Found", b"NATS/1.0 503"]
    ),
    lines=st.lists(
        st.one_of(
            st.binary(max_size=20).filter(lambda line: b"\r" not in line and b"\n" not in line),
            st.sampled_from(message(9, 8).split(b"\r\n")[1:]),
        ),
        max_size=12,
    ),
)
def test_a_publishers_header_comes_out_as_it_went_in(first_line: bytes, lines: list[bytes]) -> None:
    user = b"\r\n".join([first_line, *lines]) + b"\r\n\r\n"
    batch = feed([message(5, 0, user=user, subject="s.real"), end(5)])
    (stored,) = batch.messages
    assert (stored.seq, stored.subject) == (5, "s.real")
    assert (stored.header or BARE) == user
    assert batch.at_end
