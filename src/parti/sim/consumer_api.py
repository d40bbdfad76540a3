"""The model's answers on `$JS.API.CONSUMER.…`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parti.sim.configs import consumer_config, refuse_update
from parti.sim.consumers import Consumer
from parti.sim.messages import RefusalError, timestamp
from parti.sim.streams import Stream

if TYPE_CHECKING:
    from parti.sim.server import ModelServer

_Body = Mapping[str, Any]


def find(server: ModelServer, stream: str, consumer: str) -> Consumer | None:
    """The consumer of that name, if there is one."""
    found = server.streams.get(stream)
    return found.consumers.get(consumer) if found else None


def stream_named(server: ModelServer, name: str) -> Stream:
    """The stream of that name, or the server's refusal."""
    stream = server.streams.get(name)
    if stream is None:
        raise RefusalError(404, 10059, "stream not found")
    return stream


def _named(server: ModelServer, tokens: list[str]) -> Consumer:
    consumer = stream_named(server, tokens[0]).consumers.get(tokens[1])
    if consumer is None:
        raise RefusalError(404, 10014, "consumer not found")
    return consumer


def _answer(consumer: Consumer) -> dict[str, Any]:
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
    if consumer.deliver_to and consumer.push.active:
        answer["push_bound"] = True
    return answer


def create(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    """Create a consumer, or change one."""
    if len(tokens) != 2:
        raise NotImplementedError("the model wants stream and consumer named in the subject, and no filter there")
    if body.get("stream_name") != tokens[0]:
        raise RefusalError(400, 10056, "stream name in subject does not match request")
    given = body["config"]
    if given.get("durable_name", tokens[1]) != tokens[1]:
        raise RefusalError(400, 10017, "consumer name in subject does not match durable name in request")
    if given.get("num_replicas", 0) > 1:
        raise RefusalError(500, 10074, "replicas > 1 not supported in non-clustered mode")
    stream, action = stream_named(server, tokens[0]), body.get("action", "")
    config = consumer_config({**given, "name": tokens[1]}, stream)
    found = stream.consumers.get(tokens[1])
    if found is not None:
        if action == "create" and found.config != config:
            raise RefusalError(400, 10148, "consumer already exists")
        _check_unique(stream, config)
        refuse_update(found.config, config)
        found.update(config)
        return _answer(found)
    if action == "update":
        raise RefusalError(400, 10149, "consumer does not exist")
    _check_new(stream, config)
    consumer = stream.consumers[config["name"]] = Consumer(server, stream, config)
    return _answer(consumer)


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


def info(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    """State and configuration of a consumer."""
    return _answer(_named(server, tokens))


def list_names(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    """Names of a stream's consumers."""
    names = sorted(stream_named(server, tokens[0]).consumers)
    offset = min(int(body.get("offset", 0)), len(names))
    return {"total": len(names), "offset": offset, "limit": 1024, "consumers": names[offset : offset + 1024]}


def list_all(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    """State and configuration of all consumers of a stream."""
    consumers = stream_named(server, tokens[0]).consumers
    answers = [_answer(consumers[name]) for name in sorted(consumers)]
    return {"total": len(answers), "offset": 0, "limit": 256, "consumers": answers}


def delete(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any]:
    """Delete a consumer."""
    _named(server, tokens).delete()
    return {"success": True}


def reset(server: ModelServer, tokens: list[str], body: _Body) -> dict[str, Any] | None:
    """Put a consumer to a sequence; None, which is no answer, when it does not exist."""
    consumer = find(server, tokens[0], tokens[1])
    if consumer is None:
        return None  # The server listens on everything below $JS.API, but nobody answers this.
    seq, policy = int(body.get("seq", 0)), consumer.config["deliver_policy"]
    if seq and policy == "by_start_sequence" and seq < consumer.config["opt_start_seq"]:
        raise RefusalError(400, 10204, "invalid reset: below start seq")
    if seq and policy not in {"all", "by_start_sequence"}:
        raise RefusalError(400, 10204, "invalid reset: not allowed")
    seq = consumer.reset(seq)
    return {**_answer(consumer), "reset_seq": seq}
