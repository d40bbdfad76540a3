"""What the model of the server promises to the simulation, without a server to compare it with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from parti.jetstream.kv import epoch_base
from parti.sim.server import Delivery, ModelClient, ModelServer

SECOND = 10**9


class Site:
    """A model with a clock, and one client that keeps what it gets."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 0.0
        self.server = ModelServer(lambda: self.now_s, **options)
        self.got: list[Delivery] = []
        self.client = self.connect()

    def connect(self) -> ModelClient:
        client = self.server.connect(self.got.append)
        client.subscribe("_INBOX.*", b"1")
        return client

    def ask(self, subject: str, body: Any = None, *, header: dict[str, str] | None = None) -> list[Delivery]:
        """Send a request; everything that follows at once."""
        self.got.clear()
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.client.publish(subject, payload, reply="_INBOX.a", header=block(header) if header else None)
        return list(self.got)

    def call(self, verb: str, body: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask(f"$JS.API.{verb}", body)[0].payload)
        return answer

    def stream(self, **config: Any) -> None:
        given = {"name": "S", "subjects": ["s.>"], "storage": "file", "allow_direct": True, **config}
        assert "error" not in self.call("STREAM.CREATE.S", given)

    def consumer(self, name: str, *subjects: str, **config: Any) -> dict[str, Any]:
        given = {"name": name, "durable_name": name, "ack_policy": "explicit", "filter_subjects": subjects, **config}
        return self.call(f"CONSUMER.CREATE.S.{name}", {"stream_name": "S", "config": given})

    def publish(self, *subjects: str) -> None:
        for subject in subjects:
            self.client.publish(subject, b"x")

    def pull(self, name: str, **request: Any) -> list[Delivery]:
        return self.ask(f"$JS.API.CONSUMER.MSG.NEXT.S.{name}", {"batch": 100, **request})

    def wait(self, seconds: float) -> list[Delivery]:
        """Let time pass as an event loop would: from one due time to the next."""
        self.got.clear()
        end_s = self.now_s + seconds
        while (due_s := self.server.next_due_s()) is not None and due_s <= end_s:
            assert due_s >= self.now_s, "what is due lies in the past"
            self.now_s = due_s
            self.server.advance()
        self.now_s = end_s
        self.server.advance()
        return list(self.got)


def block(headers: dict[str, str]) -> bytes:
    return ("NATS/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n").encode()


def seqs(deliveries: list[Delivery]) -> list[int]:
    """Stream sequences of the messages among them."""
    return [int(d.reply.split(b".")[5]) for d in deliveries if d.reply.startswith(b"$JS.ACK.")]


def statuses(deliveries: list[Delivery]) -> list[str]:
    return [d.header.decode().split("\r\n")[0][9:] for d in deliveries if d.header and not d.reply]


@pytest.fixture
def site() -> Site:
    return Site()


# ── core ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_nobody_hears_says_so(site: Site) -> None:
    assert statuses(site.ask("nobody", b"?")) == ["503"]
    assert statuses(site.ask("$JS.API.CONSUMER.MSG.NEXT.S.none", b"")) == ["503"]


def test_messages_reach_exact_and_wildcard_subscriptions_until_they_end(site: Site) -> None:
    for sid, pattern in ((b"2", "a.b"), (b"3", "a.*"), (b"4", "a.>"), (b"5", "a.b.>")):
        site.client.subscribe(pattern, sid)
    site.client.publish("a.b", b"x")
    assert sorted(d.sid for d in site.got) == [b"2", b"3", b"4"]
    site.client.unsubscribe(b"3")
    site.got.clear()
    site.client.publish("a.b.c", b"x")
    assert sorted(d.sid for d in site.got) == [b"4", b"5"]
    site.client.close()
    site.got.clear()
    site.server.connect(site.got.append).publish("a.b", b"x")
    assert not site.got


def test_what_is_delivered_may_publish_at_once(site: Site) -> None:
    heard: list[bytes] = []

    def answer(delivery: Delivery) -> None:
        heard.append(delivery.payload)
        if delivery.reply:
            other.publish(delivery.reply.decode(), b"pong")

    other = site.server.connect(answer)
    other.subscribe("service", b"1")
    assert [d.payload for d in site.ask("service", b"ping")] == [b"pong"]
    assert heard == [b"ping"]


@pytest.mark.parametrize(
    ("subject", "body"),
    [
        ("$JS.API.STREAM.SNAPSHOT.S", b"{}"),
        ("$JS.API.STREAM.CREATE.T", b'{"name": "T", "subjects": ["t"], "max_age": 5}'),
        ("$JS.API.CONSUMER.CREATE.S.A", b'{"stream_name": "S", "config": {"backoff": [1]}}'),
        ("$JS.API.CONSUMER.CREATE.S.A", b'{"stream_name": "S", "config": {"ack_policy": "all"}}'),
        ("$JS.API.CONSUMER.MSG.NEXT.S.A", b'{"batch": 1, "group": "g"}'),
        ("$JS.API.DIRECT.GET.S", b'{"multi_last": ["s.a"]}'),
        ("$JS.ACK.S.A.1.1.1.1.0", b"+NXT"),
    ],
)
def test_what_parti_does_not_use_is_refused_loudly(site: Site, subject: str, body: bytes) -> None:
    site.stream()
    site.consumer("A", "s.a")
    with pytest.raises(NotImplementedError):
        site.client.publish(subject, body, reply="_INBOX.a")


def test_unknown_headers_are_refused_loudly(site: Site) -> None:
    site.stream()
    with pytest.raises(NotImplementedError):
        site.ask("s.a", b"x", header={"Nats-Rollup": "sub"})


# ── the hidden cursor ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_pull_moves_the_cursor_past_what_a_later_filter_would_match(site: Site) -> None:
    site.stream()
    site.consumer("A", "s.a")
    site.publish("s.b", "s.b")
    assert not seqs(site.pull("A"))
    site.consumer("A", "s.a", "s.b")
    assert not seqs(site.pull("A"))
    site.publish("s.b")
    assert seqs(site.got) == [3]
    site.call("CONSUMER.RESET.S.A", {"seq": 1})
    assert seqs(site.got) == [1, 2, 3]


def test_a_restart_forgets_the_cursor_pulls_connections_and_ephemeral_consumers(site: Site) -> None:
    site.stream()
    site.consumer("A", "s.a")
    ephemeral = {"name": "E", "ack_policy": "explicit", "inactive_threshold": 60 * SECOND}
    site.call("CONSUMER.CREATE.S.E", {"stream_name": "S", "config": ephemeral})
    site.publish("s.b", "s.b")
    site.pull("A", expires=60 * SECOND)
    site.consumer("A", "s.a", "s.b")
    before = site.client
    site.server.restart()
    assert not before.connected
    site.client = site.connect()
    assert site.call("CONSUMER.NAMES.S")["consumers"] == ["A"]
    site.publish("s.b")
    assert not seqs(site.got), "the pull was forgotten"
    assert seqs(site.pull("A")) == [1, 2, 3]


def test_a_restart_takes_back_the_acknowledgements_of_the_last_moments(site: Site) -> None:
    site.stream()
    site.consumer("A", "s.a")
    site.publish("s.a", "s.a", "s.a")
    replies = [d.reply.decode() for d in site.pull("A")]
    site.wait(1.0)
    site.client.publish(replies[0], b"+ACK")
    site.wait(0.2)
    site.client.publish(replies[1], b"+ACK")
    site.server.restart(lose_unsynced_acks_s=0.1)
    site.client = site.connect()
    info = site.call("CONSUMER.INFO.S.A")
    assert info["ack_floor"]["stream_seq"] == 1
    assert info["num_ack_pending"] == 2


def test_memory_streams_do_not_survive_a_restart(site: Site) -> None:
    site.stream(storage="memory")
    site.server.restart()
    site.client = site.connect()
    assert site.call("STREAM.INFO.S")["error"]["err_code"] == 10059


# ── work-queues and interest ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step_down", [False, True])
def test_unfinished_messages_of_an_added_subject_below_the_floor_are_deleted(step_down: bool) -> None:
    site = Site()
    site.stream(retention="workqueue")
    site.consumer("A", "s.a")
    site.publish("s.b", "s.b", "s.a")
    for delivery in site.pull("A", expires=60 * SECOND):
        site.client.publish(delivery.reply.decode(), b"+ACK")
    site.consumer("A", "s.a", "s.b")
    assert site.call("STREAM.INFO.S")["state"]["messages"] == 2
    if step_down:
        site.got.clear()
        site.server.step_down()
        assert statuses(site.got) == ["409 Leadership Change"]
    else:
        site.wait(31.0)
    assert site.call("STREAM.INFO.S")["state"]["messages"] == 0


def test_a_reset_to_the_position_keeps_them() -> None:
    site = Site()
    site.stream(retention="workqueue")
    site.consumer("A", "s.a")
    site.publish("s.b", "s.b", "s.a")
    for delivery in site.pull("A", batch=1):  # No pull stands after it: one would move the cursor on at once.
        site.client.publish(delivery.reply.decode(), b"+ACK")
    site.call("CONSUMER.RESET.S.A", {"seq": 1})
    site.consumer("A", "s.a", "s.b")
    site.server.step_down()
    assert seqs(site.pull("A")) == [1, 2]


def test_where_consumers_are_replicated_the_floor_follows_the_cursor() -> None:
    site = Site(replicated=True)
    site.stream(retention="workqueue")
    site.consumer("A", "s.a")
    site.publish("s.a", "s.b", "s.b")
    for delivery in site.pull("A", expires=60 * SECOND):
        site.client.publish(delivery.reply.decode(), b"+ACK")
    site.consumer("A", "s.a", "s.b")
    site.server.step_down()
    assert site.call("STREAM.INFO.S")["state"]["messages"] == 0


def test_overlapping_filters_of_a_work_queue_are_refused(site: Site) -> None:
    site.stream(retention="workqueue")
    site.consumer("A", "s.a", "s.b")
    assert site.consumer("B", "s.b")["error"]["err_code"] == 10100
    assert "error" not in site.consumer("B", "s.c")
    assert site.consumer("B", "s.c", "s.a")["error"]["err_code"] == 10100
    assert site.consumer("B", "s.c", "s.>")["error"]["err_code"] == 10138


def test_interest_that_ends_deletes(site: Site) -> None:
    site.stream(retention="interest")
    site.consumer("A", "s.a", "s.b")
    site.consumer("B", "s.b")
    site.publish("s.a", "s.b", "s.c")
    assert site.call("STREAM.INFO.S", {"subjects_filter": ">"})["state"]["subjects"] == {"s.a": 1, "s.b": 1}
    site.consumer("A", "s.b")
    assert site.call("STREAM.INFO.S", {"subjects_filter": ">"})["state"]["subjects"] == {"s.b": 1}


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_plans_nothing_is_due(site: Site) -> None:
    assert site.server.next_due_s() is None
    site.stream()
    assert site.server.next_due_s() is None


def test_a_pull_beats_until_it_expires(site: Site) -> None:
    site.stream()
    site.consumer("A", "s.a")
    site.pull("A", expires=5 * SECOND, idle_heartbeat=2 * SECOND)
    assert site.server.next_due_s() == 2.0
    assert statuses(site.wait(5.5)) == ["100 Idle Heartbeat", "100 Idle Heartbeat", "408 Request Timeout"]


def test_redelivery_comes_after_the_ack_wait_and_in_order(site: Site) -> None:
    site.stream()
    site.consumer("A", "s.a", ack_wait=10 * SECOND)
    site.publish("s.a", "s.a", "s.a")
    replies = [d.reply.decode() for d in site.pull("A", expires=100 * SECOND)]
    site.wait(6.0)
    site.client.publish(replies[1], b"+WPI")
    assert seqs(site.wait(5.0)) == [1, 3]
    site.client.publish(replies[0], b"+ACK")
    assert seqs(site.wait(6.0)) == [2]


def test_a_key_with_a_ttl_becomes_a_marker_and_then_nothing(site: Site) -> None:
    site.stream(max_msgs_per_subject=1, allow_msg_ttl=True, subject_delete_marker_ttl=60 * SECOND, discard="new")
    site.ask("s.key", b"value", header={"Nats-TTL": "2s"})
    site.wait(1.9)
    assert site.call("STREAM.MSG.GET.S", {"last_by_subj": "s.key"})["message"]["seq"] == 1
    site.wait(0.4)
    marker = site.call("STREAM.MSG.GET.S", {"last_by_subj": "s.key"})["message"]
    assert marker["seq"] == 2
    assert "data" not in marker
    site.wait(61.0)
    assert site.call("STREAM.MSG.GET.S", {"last_by_subj": "s.key"})["error"]["err_code"] == 10037


def test_pulls_beyond_the_limit_get_an_answer_only_without_heartbeats(site: Site) -> None:
    site.stream()
    site.consumer("A", "s.a", max_waiting=1)
    assert not site.pull("A", expires=60 * SECOND)
    assert statuses(site.pull("A", expires=60 * SECOND)) == ["409 Exceeded MaxWaiting"]
    assert not site.pull("A", expires=60 * SECOND, idle_heartbeat=SECOND)


def test_a_push_consumer_waits_until_the_other_side_has_what_was_sent(site: Site) -> None:
    site.stream(max_msgs_per_subject=1)
    config = {
        "name": "W",
        "deliver_subject": "_INBOX.w",
        "deliver_policy": "last_per_subject",
        "ack_policy": "none",
        "filter_subjects": ["s.>"],
        "idle_heartbeat": SECOND,
        "flow_control": True,
        "inactive_threshold": 5 * SECOND,
    }
    site.call("CONSUMER.CREATE.S.W", {"stream_name": "S", "config": config})
    site.got.clear()
    for number in range(40):
        site.client.publish(f"s.{number}", b"x" * 100_000)
    question = next(d.reply.decode() for d in site.got if d.reply.startswith(b"$JS.FC."))
    assert len(seqs(site.got)) == 21, "two megabytes, and the message that exceeds them"
    assert b"Nats-Consumer-Stalled: " + question.encode() in (site.wait(1.1)[0].header or b"")
    site.got.clear()
    site.client.publish(question, b"")
    assert seqs(site.got) == list(range(22, 41))


def test_a_message_id_is_known_for_two_minutes(site: Site) -> None:
    site.stream()

    def send() -> Any:
        return json.loads(site.ask("s.a", b"x", header={"Nats-Msg-Id": "1"})[0].payload)

    assert send() == {"stream": "S", "seq": 1}
    site.wait(100)
    assert send() == {"stream": "S", "seq": 1, "duplicate": True}
    site.wait(30)
    assert send() == {"stream": "S", "seq": 2}


def test_streams_made_anew_at_the_same_moment_differ(site: Site) -> None:
    made = []
    for _ in range(2):
        site.stream()
        made.append(site.call("STREAM.INFO.S")["created"])
        site.call("STREAM.DELETE.S")
    assert epoch_base(made[0]) < epoch_base(made[1])


# ── the same again ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_operations_give_the_same_deliveries() -> None:
    def run(choose: Callable[[random.Random], Site]) -> list[Delivery]:
        rng = random.Random(5)
        site = choose(rng)
        site.stream(retention="workqueue")
        site.consumer("A", "s.a", "s.b", ack_wait=SECOND, inactive_threshold=60 * SECOND)
        everything: list[Delivery] = []
        for _ in range(200):
            site.publish(f"s.{rng.choice('abc')}")
            everything += site.pull("A", expires=2 * SECOND) if rng.random() < 0.3 else site.wait(rng.random())
            for delivery in list(site.got):
                if delivery.reply and rng.random() < 0.5:
                    site.client.publish(delivery.reply.decode(), b"+ACK")
        return everything

    first, second = (run(lambda rng: Site(chance=random.Random(rng.random()))) for _ in range(2))
    assert len(first) > 100
    assert first == second
