"""The model's answers on `$JS.…`: JetStream's request API, acknowledgements and pulls."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from parti.model.subjects import has_wildcard
from parti.sim import consumer_api, direct
from parti.sim.configs import stream_config
from parti.sim.filters import filter_of
from parti.sim.messages import RefusalError, timestamp
from parti.sim.streams import Stream

if TYPE_CHECKING:
    from parti.sim.server import ModelServer

_Body = Mapping[str, Any]
_TYPE = "io.nats.jetstream.api.v1."
_NO_MESSAGE = (404, 10037, "no message found")
_BAD_REQUEST = (400, 10003, "bad request")
_NEVER = "0001-01-01T00:00:00Z"
_MAX_SUBJECTS = 100_000


def handle(server: ModelServer, subject: str, payload: bytes, reply: str, header: bytes | None) -> bool:
    """Do what a message on `$JS.…` asks for; False when nobody listens there."""
    tokens = subject.split(".")
    if tokens[1] == "ACK":
        consumer = consumer_api.find(server, tokens[2], tokens[3])
        if consumer is None or not consumer.acks:
            return False
        consumer.take_ack(int(tokens[5]), int(tokens[6]), payload, reply)
        return True
    if tokens[1] == "FC":
        consumer = consumer_api.find(server, tokens[2], tokens[3])
        if consumer is not None:
            consumer.push.take_answer(subject)
        return consumer is not None
    if tokens[1] != "API":
        raise NotImplementedError(f"the model does not know {subject!r}")
    verb = ".".join(tokens[2:5]) if tokens[3:5] == ["MSG", "NEXT"] else ""
    if verb == "CONSUMER.MSG.NEXT":
        consumer = consumer_api.find(server, tokens[5], tokens[6])
        if consumer is not None and reply:
            consumer.pulls.add(payload, reply)
        return consumer is not None
    if tokens[2:4] == ["DIRECT", "GET"]:
        return direct.read(server, tokens, payload, reply)
    if header and b"Nats-" in header:
        raise NotImplementedError("the model knows no headers of API requests")
    _call(server, tokens[2:], payload, reply)
    return True


def _call(server: ModelServer, tokens: list[str], payload: bytes, reply: str) -> None:
    for length in (3, 2, 1):
        verb = ".".join(tokens[:length])
        if verb in _VERBS:
            break
    else:
        raise NotImplementedError(f"the model does not know $JS.API.{'.'.join(tokens)}")
    kind, function = _VERBS[verb]
    body = msgspec.json.decode(payload) if payload else {}
    try:
        answer = function(server, tokens[length:], body)
    except RefusalError as refusal:
        answer = {"error": refusal.answer}
    if answer is not None and reply:
        server.send(reply, reply, "", None, msgspec.json.encode({"type": _TYPE + kind, **answer}))


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
    stream = consumer_api.stream_named(server, tokens[0])
    may_change = {"allow_msg_ttl", "subject_delete_marker_ttl", "allow_atomic", "allow_direct", "deny_delete"}
    changed = {k for k in config.keys() | stream.config.keys() if config.get(k) != stream.config.get(k)}
    if changed - may_change:
        raise NotImplementedError(f"the model does not change {sorted(changed - may_change)} of a stream")
    stream.configure(config)
    return _stream_answer(stream)


def _stream_info(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    stream = consumer_api.stream_named(server, tokens[0])
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
    consumer_api.stream_named(server, tokens[0]).delete()
    return {"success": True}


def _stream_purge(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    if body.get("seq") and body.get("keep"):
        raise RefusalError(*_BAD_REQUEST)
    stream, pattern = consumer_api.stream_named(server, tokens[0]), body.get("filter", "")
    if stream.config["storage"] == "file" and (has_wildcard(pattern) or (body.get("keep") and not pattern)):
        # The server then tells its consumers of a deleted subject by the name of the pattern, and they miscount.
        raise NotImplementedError("the model purges patterns of memory streams only")
    purged = stream.purge(pattern, before=int(body.get("seq", 0)), keep=int(body.get("keep", 0)))
    return {"success": True, "purged": purged}


def _message_delete(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    stream = consumer_api.stream_named(server, tokens[0])
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
    if not direct.names_one(body):
        raise RefusalError(*_BAD_REQUEST)
    message = direct.look_up(consumer_api.stream_named(server, tokens[0]), body)
    if message is None:
        raise RefusalError(*_NO_MESSAGE)
    found = {"subject": message.subject, "seq": message.seq}
    if message.header:
        found["hdrs"] = base64.b64encode(message.header).decode()
    if message.payload:
        found["data"] = base64.b64encode(message.payload).decode()
    return {"message": {**found, "time": timestamp(message.wall_ns)}}


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
    "CONSUMER.CREATE": ("consumer_create_response", consumer_api.create),
    "CONSUMER.INFO": ("consumer_info_response", consumer_api.info),
    "CONSUMER.NAMES": ("consumer_names_response", consumer_api.list_names),
    "CONSUMER.LIST": ("consumer_list_response", consumer_api.list_all),
    "CONSUMER.DELETE": ("consumer_delete_response", consumer_api.delete),
    "CONSUMER.RESET": ("consumer_reset_response", consumer_api.reset),
}
