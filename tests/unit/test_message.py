"""Messages, acknowledgement subjects and header blocks."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from parti.model.headers import parse_headers, parse_reply, status_of
from parti.model.message import Message, Ownership, StoredMessage
from parti.model.partition import Template

SHORT = b"$JS.ACK.DC.parti-w0.2.345.67.1700000000123456789.8"
LONG = b"$JS.ACK.hub.AHASH.DC.parti-w0.2.345.67.1700000000123456789.8"


def a_message(header: bytes | None = None) -> Message:
    partition = Template("dc.{tool}.{chamber}.completion").partition("etch1.c3")
    ownership = Ownership(partition, "DC", "w0", fence=4)
    return Message(partition.subject, b"secret payload", 345, ownership, SHORT, header, 1_700_000_001.5)


def test_a_message_carries_what_the_issue_promises() -> None:
    message = a_message(b"NATS/1.0\r\nTrace: t-1\r\n\r\n")
    assert (message.subject, message.data, message.seq) == ("dc.etch1.c3.completion", b"secret payload", 345)
    assert dict(message.headers) == {"Trace": "t-1"}
    assert (message.stream, message.worker_id, message.attempt, message.fence) == ("DC", "w0", 1, 4)
    assert (message.partition.id, dict(message.partition.keys)) == ("etch1.c3", {"tool": "etch1", "chamber": "c3"})
    assert message.received_at == datetime.fromtimestamp(1_700_000_001.5, UTC)
    assert abs(message.published_at.timestamp() - 1_700_000_000.123456) < 1e-5
    assert message.published_at.tzinfo is UTC
    assert message.deliveries == 2
    assert message.header == b"NATS/1.0\r\nTrace: t-1\r\n\r\n"


def test_the_context_holds_everything_but_payload_and_headers() -> None:
    message = a_message(b"NATS/1.0\r\nAuthorization: hidden\r\n\r\n")
    message.attempt = 3
    context = message.context
    assert (context.partition_id, context.seq, context.attempt, context.fence) == ("etch1.c3", 345, 3, 4)
    assert (context.subject, context.stream, context.worker_id) == (message.subject, "DC", "w0")
    assert (context.received_at, context.published_at) == (message.received_at, message.published_at)
    assert dict(context.keys) == {"tool": "etch1", "chamber": "c3"}
    for text in (repr(context), repr(message)):
        assert "secret" not in text
        assert "hidden" not in text


def test_headers_are_the_publishers_without_the_pin_of_the_server() -> None:
    assert dict(a_message(b"NATS/1.0\r\nTrace: t-1\r\nNats-Pin-Id: abc\r\n\r\n").headers) == {"Trace": "t-1"}
    assert dict(a_message(b"NATS/1.0\r\nNats-Pin-Id: abc\r\n\r\n").headers) == {}


def test_no_headers_are_an_empty_mapping_that_cannot_be_changed() -> None:
    headers = a_message().headers
    assert dict(headers) == {}
    with pytest.raises(TypeError):
        headers["a"] = "b"  # type: ignore[index]


@pytest.mark.parametrize("reply", [SHORT, LONG, LONG + b".random"])
def test_both_forms_of_an_acknowledgement_subject(reply: bytes) -> None:
    info = parse_reply(reply)
    assert (info.deliveries, info.stream_seq, info.consumer_seq) == (2, 345, 67)
    assert (info.timestamp_ns, info.pending) == (1700000000123456789, 8)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"_INBOX.abc",
        b"$JS.ACK.DC.w0.2.345.67.17",
        b"$JS.ACK.hub.DC.w0.2.345.67.17.8",
        b"$JS.FC.DC.w0.2.345.67.17.8",
        b"$JS.ACK.DC.w0.two.345.67.17.8",
    ],
)
def test_anything_else_is_no_acknowledgement_subject(reply: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_reply(reply)


def test_of_a_repeated_header_the_first_value_counts() -> None:
    assert parse_headers(b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB:3\r\nEmpty:\r\n\r\n") == {"A": "1", "B": "3", "Empty": ""}


def test_header_values_keep_their_colons_and_inner_spaces() -> None:
    assert parse_headers(b"NATS/1.0\r\nUrl:  http://x:1/a b \r\n\r\n") == {"Url": "http://x:1/a b"}


@pytest.mark.parametrize("line", [b"nocolon", b":novalue", b"  : blank name", b""])
def test_malformed_header_lines_are_left_out(line: bytes) -> None:
    assert parse_headers(b"NATS/1.0\r\n" + line + b"\r\nGood: 1\r\n\r\n") == {"Good": "1"}


def test_header_bytes_that_are_not_utf8_do_not_raise() -> None:
    assert parse_headers(b"NATS/1.0\r\nA: \xff\r\n\r\n") == {"A": "\ufffd"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", (100, "Idle Heartbeat")),
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 409 Batch Completed\r\nNats-Pending-Messages: 1\r\n\r\n", (409, "Batch Completed")),
        (b"NATS/1.0\r\nA: 404\r\n\r\n", (0, "")),
        (b"NATS/1.0 abc\r\n\r\n", (0, "")),
        (b"", (0, "")),
    ],
)
def test_the_status_line(block: bytes, expected: tuple[int, str]) -> None:
    assert status_of(block) == expected


def test_a_message_was_published_at_the_same_moment_however_it_was_read() -> None:
    """The id of a dead letter is made of it: two owners must not store the same one twice."""
    owner = Ownership(Template("dc.{p}").partition("a"), "DC", "w0")
    for nanoseconds in (1795018345948244499, 1795018345948244500, 1795018345948244999, 1795018345000000001):
        stamp = datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        stored_at = datetime.fromisoformat(f"{stamp}.{nanoseconds % 10**9:09d}Z")
        delivered = Message("dc.a", b"", 7, owner, b"$JS.ACK.DC.c.1.7.7.%d.0" % nanoseconds)
        stored = StoredMessage("dc.a", b"", 7, owner, stored_at=stored_at)
        assert delivered.published_at == stored.published_at
