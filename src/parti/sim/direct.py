"""Reads of the model's streams by sequence or subject: from the leader, or direct, single or in batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from parti.sim.filters import filter_of
from parti.sim.messages import Message, timestamp
from parti.sim.streams import Stream

if TYPE_CHECKING:
    from parti.sim.server import ModelServer

_Body = Mapping[str, Any]
_MAX_BYTES = 64 * 1024 * 1024


def names_one(body: _Body) -> bool:
    """Whether a request names a sequence, or a subject, or both where that makes sense."""
    seq, last, following = body.get("seq", 0), body.get("last_by_subj"), body.get("next_by_subj")
    return bool(seq or last or following) and not (last and (seq or following))


def look_up(stream: Stream, body: _Body) -> Message | None:
    """The message that a request names."""
    seq, following = int(body.get("seq", 0)), body.get("next_by_subj")
    if following:
        return stream.next_match(filter_of((following,)), seq)
    return stream.messages.get(seq) if seq else stream.last_match(filter_of((body["last_by_subj"],)))


def read(server: ModelServer, tokens: list[str], payload: bytes, reply: str) -> bool:
    """Answer a direct read; False when nobody listens there: no such stream, or it does not allow them."""
    stream = server.streams.get(tokens[4])
    if stream is None or not stream.config["allow_direct"]:
        return False
    if len(tokens) > 5:
        if payload:
            raise NotImplementedError("the model reads by subject without a body")
        body: _Body = {"last_by_subj": ".".join(tokens[5:])}
    else:
        body = msgspec.json.decode(payload) if payload else {}
    if unknown := body.keys() - {"seq", "last_by_subj", "next_by_subj", "batch", "max_bytes"}:
        raise NotImplementedError(f"the model does not know {sorted(unknown)} in a direct read")
    if not body.get("seq") and not body.get("last_by_subj") and not body.get("next_by_subj"):
        _status(server, reply, "408 Empty Request")
    elif not names_one(body) or (body.get("last_by_subj") and body.get("batch")):
        _status(server, reply, "408 Bad Request")
    elif body.get("batch"):
        _read_batch(stream, body, reply)
    else:
        message = look_up(stream, body)
        if message is None:
            _status(server, reply, "404 Message Not Found")
        else:
            _send(stream, message, reply, "")
    return True


def _status(server: ModelServer, reply: str, status: str) -> None:
    server.send(reply, reply, "", f"NATS/1.0 {status}\r\n\r\n".encode(), b"")


def _read_batch(stream: Stream, body: _Body, reply: str) -> None:
    pattern, seq = body.get("next_by_subj"), int(body.get("seq", 0))
    wanted = filter_of((pattern,) if pattern else ())
    most, room = int(body["batch"]), int(body.get("max_bytes", 0)) or _MAX_BYTES
    ahead, last, sent, size = stream.count_from(wanted, seq), 0, 0, 0
    while sent < most and size < room:
        message = stream.next_match(wanted, seq)
        if message is None:
            if not sent:
                _status(stream.server, reply, "404 Message Not Found")
                return
            if most == 1:
                raise AssertionError("a batch of one ends with its message")
            break
        ahead = max(0, ahead - 1)
        _send(stream, message, reply, f"Nats-Num-Pending: {ahead}\r\nNats-Last-Sequence: {last}\r\n")
        last, seq, sent = message.seq, message.seq + 1, sent + 1
        size += len(message.subject) + len(message.header or b"") + len(message.payload)
    _status(stream.server, reply, f"204 EOB\r\nNats-Num-Pending: {ahead}\r\nNats-Last-Sequence: {last}")


def _send(stream: Stream, message: Message, reply: str, extra: str) -> None:
    about = (
        f"Nats-Stream: {stream.name}\r\nNats-Subject: {message.subject}\r\nNats-Sequence: {message.seq}\r\n"
        f"Nats-Time-Stamp: {timestamp(message.wall_ns)}\r\n{extra}\r\n"
    )
    start = message.header[:-2] if message.header else b"NATS/1.0\r\n"
    stream.server.send(reply, reply, "", start + about.encode(), message.payload)
