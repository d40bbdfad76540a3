"""Numbers in headers that are too long to be any, and subjects that are no UTF-8: no reason to raise."""

from __future__ import annotations

import socket

import msgspec
import pytest

from parti.errors import ConnectionFailed
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.direct import DirectAnswer
from parti.model.headers import status_of
from parti.model.job import JobRecord, JobState, decode_job, encode_job
from parti.model.safe_text import text_of

LONG = b"9" * 5_000


def test_a_status_has_three_digits() -> None:
    assert status_of(b"NATS/1.0 " + LONG + b"\r\n\r\n") == (0, "")
    assert status_of(b"NATS/1.0 409 Server Shutdown\r\n\r\n") == (409, "Server Shutdown")


@pytest.mark.parametrize("name", [b"Nats-Sequence", b"Nats-Last-Sequence"])
def test_a_direct_answer_with_an_endless_number_is_given_up(name: bytes) -> None:
    block = (
        b"NATS/1.0\r\nNats-Stream: S\r\nNats-Subject: a\r\nNats-Sequence: 1\r\n"
        b"Nats-Time-Stamp: 2026-11-18T12:00:00Z\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
    )
    begin = block.index(name + b": ") + len(name) + 2
    answer = DirectAnswer("S", 1, 10)
    answer.take(block[:begin] + LONG + block[block.index(b"\r\n", begin) :], b"")
    assert answer.done
    assert answer.trouble
    assert not answer.messages


@pytest.mark.parametrize("sid", [b"x", LONG])
def test_the_blocking_client_refuses_a_subscription_that_is_no_number(sid: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, BlockingClient(ours, {}, b"") as client:
        theirs.sendall(b"MSG a " + sid + b" 2\r\nok\r\n")
        with pytest.raises(ConnectionFailed, match="cannot be read"):
            client.next_delivery(1.0)


def test_the_record_of_a_job_whose_subject_is_no_utf_8_can_be_written() -> None:
    record = JobRecord(stream="S", seq=1, subject=text_of(b"j.\xff"), published_ns=1, state=JobState.RUNNING)
    assert decode_job(encode_job(record)) == record
    assert decode_job(encode_job(msgspec.structs.replace(record, error="\ud800"))) is not None
