"""Outside text of any kind is safe once it has passed through `safe_text`; dead letters of any message are sound."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.dead_letter import Letter, is_original, sendable_headers_of, write_letter
from parti.core.retry import describe
from parti.core.tracebacks import traceback_of
from parti.model.headers import parse_headers
from parti.model.message import Ownership, StoredMessage
from parti.model.partition import Partition
from parti.model.safe_text import (
    abbreviate,
    escape,
    escape_line,
    is_plain,
    log_value,
    many_lines,
    may_be_bytes,
    one_line,
    text_of,
    without_secrets,
)

# Every code point, lone surrogates included, and pieces that mean something to a terminal, a URL or a header.
PIECES = st.sampled_from(
    [
        *("\x1b[2J", "\x9b31m", "\u202e", "\u2028", "\r\n", "\ud800", "\t", " ", "\x00"),
        *("nats://u:p@h", "a:b@c", "@", "://"),
    ]
)
TEXTS = st.lists(PIECES | st.text(st.characters(), max_size=20), max_size=30).map("".join)
FORBIDDEN = {"Cc", "Cs", "Zl", "Zp"}
BIDIRECTIONAL = {"\u061c", "\u200e", "\u200f", *map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))}


def is_safe(text: str, allowed: str = "") -> bool:
    text.encode()
    return not any(c not in allowed and (unicodedata.category(c) in FORBIDDEN or c in BIDIRECTIONAL) for c in text)


@settings(deadline=None, max_examples=examples_of(500))
@given(TEXTS, st.integers(1, 200))
def test_text_on_one_line_is_safe_bounded_and_stays_as_it_is(text: str, most: int) -> None:
    for made in (one_line(text, most), log_value(text, most)):
        assert is_safe(made)
        assert len(made) <= most
    once = one_line(text.replace("@", ""), most)
    assert one_line(once, most) == once
    assert is_safe(escape_line(text))
    assert is_plain(escape_line(text))


@settings(deadline=None, max_examples=examples_of(500))
@given(TEXTS, st.integers(1, 200))
def test_text_of_many_lines_is_safe_but_for_its_newlines(text: str, most: int) -> None:
    made = many_lines(text, most)
    assert is_safe(made, "\n")
    assert len(made) <= most
    once = many_lines(text.replace("@", ""), most)
    assert many_lines(once, most) == once
    assert is_safe(escape(text), "\n\t")


@settings(deadline=None, max_examples=examples_of(300))
@given(st.text(st.characters(codec="ascii", categories=["L", "N", "Z", "P"])))
def test_plain_text_is_not_changed(text: str) -> None:
    assert escape_line(text) == text


@settings(deadline=None, max_examples=examples_of(300))
@given(st.binary(max_size=100))
def test_any_bytes_are_text_and_it_is_known_whether_exactly(data: bytes) -> None:
    text = text_of(data)
    assert text.encode() == data or may_be_bytes(text)


SECRETS = st.text(st.characters(codec="ascii", categories=["L", "N"], exclude_characters="h"), min_size=6)


@settings(deadline=None, max_examples=examples_of(300))
@given(SECRETS, st.sampled_from(["nats", "https", "postgresql+asyncpg"]), st.integers(0, 3000), st.integers(20, 600))
def test_no_password_of_a_url_survives_wherever_the_text_is_cut(
    secret: str, scheme: str, before: int, most: int
) -> None:
    secret = f"Q{secret}Q"
    parameters = f"{scheme}://host/x?user=me&password={secret}", f"host with url: /x?Access_Token={secret}&a=b"
    users = f"{scheme}://me:{secret}@host/x", f"{scheme}://{secret}@host", f"me:{secret[:100]}@host:5432"
    others = f'password="{secret} and {secret}"', f"//me:{secret}@host", f"jdbc:oracle:thin:me/{secret}@host"
    for url in (*users, *parameters, *others):
        text = f"{'word ' * before}cannot reach {url} now"
        for made in (without_secrets(text), one_line(text, most), many_lines(text, most)):
            assert secret[:6] not in made


def test_a_password_as_long_as_the_whole_text_does_not_survive() -> None:
    assert "pppp" not in one_line("nats://me:" + "p" * 100_000 + "@host")


@settings(deadline=None, max_examples=examples_of(200))
@given(TEXTS, st.integers(40, 300))
def test_abbreviations_are_plain_bounded_and_tell_texts_apart(text: str, most: int) -> None:
    short = abbreviate(text, most)
    assert is_plain(short)
    assert len(short.encode()) <= most
    assert abbreviate(text + "x", most) != short


@settings(deadline=None, max_examples=examples_of(200))
@given(TEXTS)
def test_an_exception_with_any_text_is_described_and_traced(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any text is what this is about
        raise ValueError(text)
    assert is_safe(describe(caught.value))
    trace = traceback_of(caught.value)
    assert is_safe(trace, "\n")
    assert "test_safe_text_properties.py" in trace


# ── dead letters ──────────────────────────────────────────────────────────────────────────────────────────────────

LINES = st.lists(
    st.tuples(
        st.binary(max_size=30) | st.sampled_from([b"Trace", b"Nats-Msg-Id", b"parti-CUT", b"Parti-Payload", b"a b"]),
        st.binary(max_size=200) | st.integers(1000, 40_000).map(lambda n: b"v" * n),
    ),
    max_size=6,
)


def header_block(lines: list[tuple[bytes, bytes]]) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(name + b": " + value + b"\r\n" for name, value in lines) + b"\r\n"


@settings(deadline=None, max_examples=examples_of(400))
@given(
    subject=st.binary(max_size=60) | st.integers(900, 5000).map(lambda n: b"root." + b"x" * n),
    lines=LINES,
    size=st.integers(0, 70_000),
    max_payload=st.sampled_from([2_048, 8_192, 65_536, 1_048_576]),
    reason=TEXTS,
    kept=st.booleans(),
)
def test_there_is_a_letter_that_a_server_takes_for_any_message(
    subject: bytes, lines: list[tuple[bytes, bytes]], size: int, max_payload: int, reason: str, kept: bool
) -> None:
    block, data = header_block(lines), b"d" * size
    name = text_of(subject)
    ownership = Ownership(Partition(name, name, {}), "STREAM", "worker-0")
    at = datetime(2026, 11, 18, 12, 0, 0, 123456, UTC)
    message = StoredMessage(name, data, 7, ownership, header=block, stored_at=at)
    written = write_letter(
        message, reason, root="parti.dlq", max_payload=max_payload, kept=kept, traceback=f"File x\n{reason}"
    )
    # As a server counts: one line for the publish, one block of headers, and both with the payload.
    assert written.subject.startswith("parti.dlq.STREAM.")
    assert len(written.subject.encode()) <= 1_000
    assert is_safe(written.subject)
    assert " " not in written.subject
    assert not {"*", ">", ""} & set(written.subject.split("."))  # within a word they are letters as others
    letter = written.referring_to(range(10, 10 + len(written.originals))) if written.originals else written
    sent = b"NATS/1.0\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in letter.headers.items()) + b"\r\n"
    assert len(sent) <= 65_535
    assert len(sent) + len(letter.payload) <= max_payload
    assert all(0 < len(part) <= max_payload for part in written.originals)
    # As it is read back.
    found = Letter(1, at, parse_headers(sent))
    assert (found.stream, found.origin_seq, found.worker) == ("STREAM", 7, "worker-0")
    assert is_safe(found.error)
    assert is_safe(found.traceback, "\n")
    if "subject" not in found.cut:
        assert found.subject.encode() == subject
    if "payload" not in found.cut:
        assert letter.payload == data
    if "headers" not in found.cut:
        assert found.own_headers == sendable_headers_of(block)[0]
        assert sendable_headers_of(block)[1]
    if not kept and {"payload", "headers"} & found.cut:
        assert found.original is not None
        length, where = found.original
        whole = b"".join(written.originals)
        assert (len(where), whole[:length], whole[length:]) == (len(written.originals), block, data)
        assert is_original(written.originals_subject)
    else:
        assert found.original is None
