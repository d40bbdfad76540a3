"""The model's answers on `$JS.…`: JetStream's request API, acknowledgements and pulls."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from parti.model.subjects import has_wildcard
from parti.sim.configs import consumer_config, refuse_update, stream_config
from parti.sim.consumers import Consumer
from parti.sim.filters import filter_of
from parti.sim.streams import SECOND_NS, Message, RefusalError, Stream

if TYPE_CHECKING:
    from parti.sim.server import ModelServer

_Body = Mapping[str, Any]
_TYPE = "io.nats.jetstream.api.v1."
_NO_STREAM = (404, 10059, "stream not found")
_NO_CONSUMER = (404, 10014, "consumer not found")
_NO_MESSAGE = (404, 10037, "no message found")
_BAD_REQUEST = (400, 10003, "bad request")
_NEVER = "0001-01-01T00:00:00Z"
_MAX_SUBJECTS = 100_000
_MAX_DIRECT_BYTES = 64 * 1024 * 1024


def handle(server: ModelServer, subject: str, payload: bytes, reply: str, header: bytes | None) -> bool:
    """Do what a message on `$JS.…` asks for; False when nobody listens there."""
    tokens = subject.split(".")
    if tokens[1] == "ACK":
        consumer = _find(server, tokens[2], tokens[3])
        if consumer is None or not consumer.acks:
            return False
        consumer.take_ack(int(tokens[5]), int(tokens[6]), payload, reply)
        return True
    if tokens[1] == "FC":
        consumer = _find(server, tokens[2], tokens[3])
        if consumer is not None:
            consumer.take_flow_answer(subject)
        return consumer is not None
    if tokens[1] != "API":
        raise NotImplementedError(f"the model does not know {subject!r}")
    verb = ".".join(tokens[2:5]) if tokens[3:5] == ["MSG", "NEXT"] else ""
    if verb == "CONSUMER.MSG.NEXT":
        consumer = _find(server, tokens[5], tokens[6])
        if consumer is not None and reply:
            consumer.pulls.add(payload, reply)
        return consumer is not None
    if tokens[2:4] == ["DIRECT", "GET"]:
        return _direct_get(server, tokens, payload, reply)
    if header and b"Nats-" in header:
        raise NotImplementedError("the model knows no headers of API requests")
    _call(server, tokens[2:], payload, reply)
    return True


def _find(server: ModelServer, stream: str, consumer: str) -> Consumer | None:
    found = server.streams.get(stream)
    return found.consumers.get(consumer) if found else None


def _call(server: ModelServer, tokens: list[str], payload: bytes, reply: str) -> None:
    for length in (3, 2, 1):
        verb = ".".join(tokens[:length])
        if verb in _VERBS:
            break
    else:
        raise NotImplementedError(f"the model does not know $JS.API.{'.'.join(tokens)}")
    kind, function = _VERBS[verb]
    body = json.loads(payload) if payload else {}
    try:
        answer = function(server, tokens[length:], body)
    except RefusalError as refusal:
        answer = {"error": refusal.answer}
    if answer is not None and reply:
        text = json.dumps({"type": _TYPE + kind, **answer}, separators=(",", ":"))
        server.send(reply, reply, "", None, text.encode())


def timestamp(wall_ns: int) -> str:
    """A time as the server writes it: nanoseconds, without zeros at the end."""
    whole, fraction = divmod(wall_ns, SECOND_NS)
    seconds = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{seconds}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def _stream(server: ModelServer, name: str) -> Stream:
    stream = server.streams.get(name)
    if stream is None:
        raise RefusalError(*_NO_STREAM)
    return stream


def _consumer(server: ModelServer, tokens: list[str]) -> Consumer:
    consumer = _stream(server, tokens[0]).consumers.get(tokens[1])
    if consumer is None:
        raise RefusalError(*_NO_CONSUMER)
    return consumer


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────


def _account_info(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    consumers = sum(len(s.consumers) for s in server.streams.values())
    return {
        "memory": 0,
        "storage": 0,
        "streams": len(server.streams),
        "consumers": consumers,
        "limits": {},
        "api": {},
    }


def _stream_answer(stream: Stream) -> dict[str, Any]:
    messages = stream.messages
    deleted = stream.last - stream.first + 1 - len(messages) if messages else 0
    state = {
        "messages": len(messages),
        "first_seq": stream.first,
        "first_ts": timestamp(messages[stream.first].wall_ns) if messages else _NEVER,
        "last_seq": stream.last,
        "consumer_count": len(stream.consumers),
    }
    if stream.by_subject:
        state["num_subjects"] = len(stream.by_subject)
    if deleted:
        state["num_deleted"] = deleted
    return {"config": stream.config, "created": timestamp(stream.created_ns), "state": state}


def _stream_create(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    config = stream_config(body)
    if config["name"] != tokens[0]:
        raise RefusalError(400, 10056, "stream name in subject does not match request")
    found = server.streams.get(tokens[0])
    if found is not None:
        if found.config != config:
            raise RefusalError(400, 10058, "stream name already in use with a different configuration")
        return {**_stream_answer(found), "did_create": True}
    if any(s.takes.collides(config["subjects"]) for s in server.streams.values()):
        raise RefusalError(400, 10065, "subjects overlap with an existing stream")
    stream = Stream(server, config)
    server.add_stream(stream)
    return {**_stream_answer(stream), "did_create": True}


def _stream_update(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    config = stream_config(body)
    stream = _stream(server, tokens[0])
    may_change = {"allow_msg_ttl", "subject_delete_marker_ttl", "allow_atomic", "allow_direct", "deny_delete"}
    changed = {k for k in config.keys() | stream.config.keys() if config.get(k) != stream.config.get(k)}
    if changed - may_change:
        raise NotImplementedError(f"the model does not change {sorted(changed - may_change)} of a stream")
    stream.configure(config)
    return _stream_answer(stream)


def _stream_info(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    stream = _stream(server, tokens[0])
    answer: dict[str, Any] = {"total": 0, "offset": 0, "limit": 0, **_stream_answer(stream)}
    if pattern := body.get("subjects_filter"):
        totals = {s: len(stream.by_subject[s]) for s in sorted(stream.subjects_in(filter_of((pattern,))))}
        offset = int(body.get("offset", 0))
        if totals:
            answer |= {"total": len(totals), "offset": offset, "limit": _MAX_SUBJECTS}
            page = dict(list(totals.items())[offset : offset + _MAX_SUBJECTS])
            if page:
                answer["state"]["subjects"] = page
    return answer


def _stream_names(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    if body:
        raise NotImplementedError("the model lists all streams, without a filter")
    names = sorted(server.streams)
    return {"total": len(names), "offset": 0, "limit": 1024, "streams": names or None}


def _stream_delete(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    stream = _stream(server, tokens[0])
    for consumer in list(stream.consumers.values()):
        consumer.delete()
    server.drop_stream(stream)
    return {"success": True}


def _stream_purge(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    if body.get("seq") and body.get("keep"):
        raise RefusalError(*_BAD_REQUEST)
    stream, pattern = _stream(server, tokens[0]), body.get("filter", "")
    if stream.config["storage"] == "file" and has_wildcard(pattern):
        # The server then tells its consumers of a deleted subject by the name of the pattern, and they miscount.
        raise NotImplementedError("the model purges patterns of memory streams only")
    purged = stream.purge(pattern, before=int(body.get("seq", 0)), keep=int(body.get("keep", 0)))
    return {"success": True, "purged": purged}


def _message_delete(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    stream = _stream(server, tokens[0])
    if stream.config["deny_delete"]:
        raise RefusalError(500, 10057, "message delete not permitted")
    seq = int(body["seq"])
    if stream.config["storage"] == "file" and seq > stream.last:
        raise RefusalError(500, 10057, "stream store EOF")
    if not stream.remove(seq):
        raise RefusalError(400, 10043, f"sequence {seq} not found")
    return {"success": True}


def _message_get(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    if unknown := body.keys() - {"seq", "last_by_subj", "next_by_subj"}:
        raise NotImplementedError(f"the model does not know {sorted(unknown)} in a request for a message")
    if not _asks_for_one(body):
        raise RefusalError(*_BAD_REQUEST)
    message = _look_up(_stream(server, tokens[0]), body)
    if message is None:
        raise RefusalError(*_NO_MESSAGE)
    found = {"subject": message.subject, "seq": message.seq}
    if message.header:
        found["hdrs"] = base64.b64encode(message.header).decode()
    if message.payload:
        found["data"] = base64.b64encode(message.payload).decode()
    return {"message": {**found, "time": timestamp(message.wall_ns)}}


def _asks_for_one(body: _Body) -> bool:
    """Whether a request names a sequence, or a subject, or both where that makes sense."""
    seq, last, following = body.get("seq", 0), body.get("last_by_subj"), body.get("next_by_subj")
    return bool(seq or last or following) and not (last and (seq or following))


def _look_up(stream: Stream, body: _Body) -> Message | None:
    seq, following = int(body.get("seq", 0)), body.get("next_by_subj")
    if following:
        return stream.next_match(filter_of((following,)), seq)
    return stream.messages.get(seq) if seq else stream.last_match(filter_of((body["last_by_subj"],)))


# ── direct reads ──────────────────────────────────────────────────────────────────────────────────────────────


def _direct_get(server: ModelServer, tokens: list[str], payload: bytes, reply: str) -> bool:
    stream = server.streams.get(tokens[4])
    if stream is None or not stream.config["allow_direct"]:
        return False
    if len(tokens) > 5:
        if payload:
            raise NotImplementedError("the model reads by subject without a body")
        body: _Body = {"last_by_subj": ".".join(tokens[5:])}
    else:
        body = json.loads(payload) if payload else {}
    if unknown := body.keys() - {"seq", "last_by_subj", "next_by_subj", "batch", "max_bytes"}:
        raise NotImplementedError(f"the model does not know {sorted(unknown)} in a direct read")
    if not body.get("seq") and not body.get("last_by_subj") and not body.get("next_by_subj"):
        _status(server, reply, "408 Empty Request")
    elif not _asks_for_one(body) or (body.get("last_by_subj") and body.get("batch")):
        _status(server, reply, "408 Bad Request")
    elif body.get("batch"):
        _direct_batch(stream, body, reply)
    else:
        message = _look_up(stream, body)
        if message is None:
            _status(server, reply, "404 Message Not Found")
        else:
            _send_direct(stream, message, reply, "")
    return True


def _status(server: ModelServer, reply: str, status: str) -> None:
    server.send(reply, reply, "", f"NATS/1.0 {status}\r\n\r\n".encode(), b"")


def _direct_batch(stream: Stream, body: _Body, reply: str) -> None:
    pattern, seq = body.get("next_by_subj"), int(body.get("seq", 0))
    wanted = filter_of((pattern,) if pattern else ())
    most, room = int(body["batch"]), int(body.get("max_bytes", 0)) or _MAX_DIRECT_BYTES
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
        _send_direct(stream, message, reply, f"Nats-Num-Pending: {ahead}\r\nNats-Last-Sequence: {last}\r\n")
        last, seq, sent = message.seq, message.seq + 1, sent + 1
        size += len(message.subject) + len(message.header or b"") + len(message.payload)
    _status(stream.server, reply, f"204 EOB\r\nNats-Num-Pending: {ahead}\r\nNats-Last-Sequence: {last}")


def _send_direct(stream: Stream, message: Message, reply: str, extra: str) -> None:
    about = (
        f"Nats-Stream: {stream.name}\r\nNats-Subject: {message.subject}\r\nNats-Sequence: {message.seq}\r\n"
        f"Nats-Time-Stamp: {timestamp(message.wall_ns)}\r\n{extra}\r\n"
    )
    start = message.header[:-2] if message.header else b"NATS/1.0\r\n"
    stream.server.send(reply, reply, "", start + about.encode(), message.payload)


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _consumer_answer(consumer: Consumer) -> dict[str, Any]:
    consumer.correct_count()
    if not consumer.deliver_to:
        consumer.pulls.check(ended=False)
    state = consumer.stored
    delivered = (state.delivered, state.delivered_seq)
    if consumer.in_memory and delivered == (0, 0):
        # A memory store that has nothing counts as none, and then the hidden cursor shows.
        delivered = (consumer.number - 1, consumer.cursor - 1)
    answer: dict[str, Any] = {
        "stream_name": consumer.stream.name,
        "name": consumer.name,
        "created": timestamp(consumer.created_ns),
        "config": consumer.config,
        "delivered": {"consumer_seq": delivered[0], "stream_seq": delivered[1]},
        "ack_floor": {"consumer_seq": state.floor, "stream_seq": state.floor_seq},
        "num_ack_pending": len(consumer.pending),
        "num_redelivered": len(consumer.redelivered),
        "num_waiting": len(consumer.pulls.waiting),
        "num_pending": max(0, consumer.unseen),
    }
    if consumer.deliver_to and consumer.active:
        answer["push_bound"] = True
    return answer


def _consumer_create(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    if len(tokens) != 2:
        raise NotImplementedError("the model wants stream and consumer named in the subject, and no filter there")
    if body.get("stream_name") != tokens[0]:
        raise RefusalError(400, 10056, "stream name in subject does not match request")
    given = body["config"]
    if given.get("durable_name", tokens[1]) != tokens[1]:
        raise RefusalError(400, 10017, "consumer name in subject does not match durable name in request")
    if given.get("num_replicas", 0) > 1:
        raise RefusalError(500, 10074, "replicas > 1 not supported in non-clustered mode")
    stream, action = _stream(server, tokens[0]), body.get("action", "")
    config = consumer_config({**given, "name": tokens[1]}, stream)
    found = stream.consumers.get(tokens[1])
    if found is not None:
        if action == "create" and found.config != config:
            raise RefusalError(400, 10148, "consumer already exists")
        _check_unique(stream, config)
        refuse_update(found.config, config)
        found.update(config)
        return _consumer_answer(found)
    if action == "update":
        raise RefusalError(400, 10149, "consumer does not exist")
    _check_new(stream, config)
    consumer = stream.consumers[config["name"]] = Consumer(server, stream, config)
    return _consumer_answer(consumer)


def _check_unique(stream: Stream, config: _Body) -> None:
    """Raise when two consumers of a work-queue would get the same messages."""
    one = config.get("filter_subject")
    patterns = (one,) if one else tuple(config.get("filter_subjects") or ())
    others = (c for c in stream.consumers.values() if c.name != config["name"])
    if stream.retention == "workqueue" and any(patterns and c.filter.collides(patterns) for c in others):
        raise RefusalError(400, 10100, "filtered consumer not unique on workqueue stream")


def _check_new(stream: Stream, config: _Body) -> None:
    if stream.retention != "workqueue":
        return
    if config["ack_policy"] != "explicit":
        raise RefusalError(400, 10098, "workqueue stream requires explicit ack")
    if config["deliver_policy"] != "all":
        raise RefusalError(400, 10101, "consumer must be deliver all on workqueue stream")
    if stream.consumers and not config.get("filter_subject") and not config.get("filter_subjects"):
        raise RefusalError(400, 10099, "multiple non-filtered consumers not allowed on workqueue stream")
    _check_unique(stream, config)


def _consumer_info(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    return _consumer_answer(_consumer(server, tokens))


def _consumer_names(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    names = sorted(_stream(server, tokens[0]).consumers)
    return {"total": len(names), "offset": 0, "limit": 1024, "consumers": names}


def _consumer_list(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    consumers = _stream(server, tokens[0]).consumers
    answers = [_consumer_answer(consumers[name]) for name in sorted(consumers)]
    return {"total": len(answers), "offset": 0, "limit": 256, "consumers": answers}


def _consumer_delete(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    _consumer(server, tokens).delete()
    return {"success": True}


def _consumer_reset(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any] | None:
    consumer = _find(server, tokens[0], tokens[1])
    if consumer is None:
        return None  # Nobody answers, although the server listens on everything below $JS.API.
    seq, policy = int(body.get("seq", 0)), consumer.config["deliver_policy"]
    if seq and policy == "by_start_sequence" and seq < consumer.config["opt_start_seq"]:
        raise RefusalError(400, 10204, "invalid reset: below start seq")
    if seq and policy not in {"all", "by_start_sequence"}:
        raise RefusalError(400, 10204, "invalid reset: not allowed")
    seq = consumer.reset(seq)
    return {**_consumer_answer(consumer), "reset_seq": seq}


_Function = Callable[["ModelServer", list[str], _Body], dict[str, Any] | None]
_VERBS: dict[str, tuple[str, _Function]] = {
    "INFO": ("account_info_response", _account_info),
    "STREAM.CREATE": ("stream_create_response", _stream_create),
    "STREAM.UPDATE": ("stream_update_response", _stream_update),
    "STREAM.INFO": ("stream_info_response", _stream_info),
    "STREAM.NAMES": ("stream_names_response", _stream_names),
    "STREAM.DELETE": ("stream_delete_response", _stream_delete),
    "STREAM.PURGE": ("stream_purge_response", _stream_purge),
    "STREAM.MSG.GET": ("stream_msg_get_response", _message_get),
    "STREAM.MSG.DELETE": ("stream_msg_delete_response", _message_delete),
    "CONSUMER.CREATE": ("consumer_create_response", _consumer_create),
    "CONSUMER.INFO": ("consumer_info_response", _consumer_info),
    "CONSUMER.NAMES": ("consumer_names_response", _consumer_names),
    "CONSUMER.LIST": ("consumer_list_response", _consumer_list),
    "CONSUMER.DELETE": ("consumer_delete_response", _consumer_delete),
    "CONSUMER.RESET": ("consumer_reset_response", _consumer_reset),
}
