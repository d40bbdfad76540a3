"""The windowed publisher: everything acknowledged, in order, once, and one clear error when it cannot be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.certs import Authority
from tests.integration.proxy import proxy_to

from parti.embedded import Cluster, Server
from parti.errors import ApiError, ConfigError, ConnectionFailed, PartiError, PermissionDenied, RequestTimeout
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.publishing import Outgoing, WindowedPublisher
from parti.jetstream.ranges import Chunk, RangeReader, Wanted
from parti.jetstream.target import Target
from parti.model.headers import parse_headers


@dataclass
class Stream:
    """A stream of the test's own, and what is in it."""

    target: Target
    name: str
    root: str

    def create(self, **config: Any) -> None:
        with BlockingClient.open(self.target, name="test") as client:
            body = {"name": self.name, "subjects": [f"{self.root}.>"], "storage": "memory", **config}
            client.api(f"STREAM.CREATE.{self.name}", body)

    def read(self) -> Chunk:
        """Every message, in order."""
        with BlockingClient.open(self.target, name="test") as client:
            info = client.stream_info(self.name)
        wanted = Wanted(stream=self.name, created=info["created"], start=1, end=int(info["state"]["last_seq"]) + 1)
        whole = Chunk()
        for chunk in RangeReader(self.target, wanted).chunks():
            whole.payloads += chunk.payloads
            whole.subjects += chunk.subjects
            whole.headers += chunk.headers
        return whole

    def messages(self, count: int, *, ids: str = "id", payload: bytes = b"%d") -> Iterator[Outgoing]:
        for number in range(count):
            msg_id = f"{ids}.{number}".encode() if ids else b""
            yield f"{self.root}.{number % 7}".encode(), payload.replace(b"%d", b"%d" % number), b"", msg_id

    def publish(self, messages: Iterator[Outgoing], **options: Any) -> WindowedPublisher:
        with WindowedPublisher(self.target, **options) as publisher:
            publisher.publish(messages)
            publisher.flush()
            return publisher


@pytest.fixture
def stream(nats_server: Server, stream_name: str) -> Iterator[Stream]:
    made = Stream(Target(servers=(nats_server.url,)), stream_name, stream_name)
    made.create()
    yield made
    with BlockingClient.open(made.target, name="test") as client:
        client.api(f"STREAM.DELETE.{made.name}")


def of(server: Server, **options: Any) -> Stream:
    return Stream(Target(servers=(server.url,), **options), "OWN", "own")


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("window", [1, 10, 4096])
def test_everything_is_stored_in_order(window: int, stream: Stream) -> None:
    count = 20_000 if window > 10 else 1000
    publisher = stream.publish(stream.messages(count), window=window)
    assert (publisher.published, publisher.stored, publisher.duplicates) == (count, count, 0)
    assert stream.read().payloads == numbers(count)


def test_no_more_than_the_window_is_unacknowledged(stream: Stream) -> None:
    most = 0
    with WindowedPublisher(stream.target, window=100) as publisher:

        def watched() -> Iterator[Outgoing]:
            nonlocal most
            for message in stream.messages(5000):
                most = max(most, len(publisher._pending))
                yield message

        publisher.publish(watched())
        publisher.flush()
    assert 50 < most <= 100


def test_ids_and_headers_and_the_expected_stream_are_stored(stream: Stream) -> None:
    subject = f"{stream.root}.x".encode()
    stream.publish(iter([(subject, b"one", b"Tool: a\r\nTool: b\r\n", b"id-1")]), stream=stream.name)
    stream.publish(iter([(subject, b"two", b"", b""), (subject, b"three", b"Tool: c\r\n", b"")]))
    found = stream.read()
    assert found.payloads == [b"one", b"two", b"three"]
    assert found.headers[1] is None
    assert found.headers[0] is not None
    assert found.headers[2] == b"NATS/1.0\r\nTool: c\r\n\r\n"
    assert parse_headers(found.headers[0]) == {
        "Nats-Expected-Stream": stream.name,
        "Tool": "a",
        "Nats-Msg-Id": "id-1",
    }


def test_what_the_stream_has_already_is_counted_and_not_stored_again(stream: Stream) -> None:
    stream.publish(stream.messages(500))
    again = stream.publish(stream.messages(1200))
    assert (again.stored, again.duplicates) == (700, 500)
    assert stream.read().payloads == numbers(1200)


def test_large_messages_do_not_block_while_acknowledgements_wait(stream: Stream) -> None:
    payload = b"%d " + b"x" * 900_000
    publisher = stream.publish(stream.messages(120, payload=payload))
    assert publisher.stored == 120
    assert [payload.split(b" ")[0] for payload in stream.read().payloads] == numbers(120)


def test_over_tls(nats_server_factory: Callable[..., Server], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server", "127.0.0.1")
    server = nats_server_factory(config=f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}" }}')
    stream = of(server, tls_ca=str(authority.path))
    stream.create()
    publisher = stream.publish(stream.messages(5000, payload=b"%d " + b"x" * 2000))
    assert publisher.stored == 5000
    assert [payload.split(b" ")[0] for payload in stream.read().payloads] == numbers(5000)


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_server_loses_and_repeats_nothing(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory()
    stream = of(server)
    stream.create(storage="file")
    count, kills = 40_000, 3
    reached = [threading.Event() for _ in range(kills)]

    def watched() -> Iterator[Outgoing]:
        for number, message in enumerate(stream.messages(count)):
            for kill, event in enumerate(reached):
                if number == (kill + 1) * count // (kills + 1):
                    event.set()
            yield message

    def kill() -> None:
        for event in reached:
            assert event.wait(30)
            server.kill_sync()
            server.restart_sync()

    killer = threading.Thread(target=kill)
    killer.start()
    publisher = stream.publish(watched())
    killer.join()
    assert publisher.reconnects >= kills
    assert publisher.stored + publisher.duplicates == count
    assert stream.read().payloads == numbers(count)


async def test_a_lost_acknowledgement_is_asked_for_again(nats_server: Server, stream: Stream) -> None:
    async with proxy_to(nats_server.port) as proxy:
        near = Stream(Target(servers=(proxy.url,)), stream.name, stream.root)
        # One acknowledgement in the middle never comes, all others do.
        proxy.lose(lambda line: b".700 " in line and proxy.lost == 0)
        publisher = await asyncio.to_thread(near.publish, near.messages(2000), ack_wait_s=0.3)
        assert proxy.lost == 1
    assert (publisher.reconnects, publisher.stored, publisher.duplicates) == (1, 1999, 1)
    assert stream.read().payloads == numbers(2000)


async def test_acknowledgements_that_never_come_end_in_one_error(nats_server: Server, stream: Stream) -> None:
    async with proxy_to(nats_server.port) as proxy:
        near = Stream(Target(servers=(proxy.url,)), stream.name, stream.root)
        proxy.lose(lambda line: line.startswith(b"MSG"))
        with pytest.raises(RequestTimeout) as raised:
            await asyncio.to_thread(near.publish, near.messages(3), ack_wait_s=0.2, patience_s=0.5)
    line = one_line(raised.value)
    assert line.startswith(f"row 1 (subject '{stream.root}.0') and 2 more were not acknowledged within 0.5 s")


@pytest.mark.slow
def test_a_lost_stream_leader_loses_and_repeats_nothing(nats_cluster: Cluster) -> None:
    stream = Stream(Target(servers=tuple(server.url for server in nats_cluster.servers)), "OWN", "own")
    stream.create(storage="file", num_replicas=3)
    count, half = 6000, threading.Event()

    def watched() -> Iterator[Outgoing]:
        for number, message in enumerate(stream.messages(count)):
            if number == count // 2:
                half.set()
            yield message

    def kill() -> None:
        with BlockingClient.open(stream.target, name="test") as client:
            leader = client.stream_info("OWN")["cluster"]["leader"]
        assert half.wait(30)
        next(server for server in nats_cluster.servers if server.name == leader).kill_sync()

    killer = threading.Thread(target=kill)
    killer.start()
    publisher = stream.publish(watched(), ack_wait_s=2.0)
    killer.join()
    assert publisher.stored + publisher.duplicates == count
    assert sorted(stream.read().payloads) == sorted(numbers(count))


def test_a_server_that_takes_fewer_at_a_time_gets_them_again(nats_server_factory: Callable[..., Server]) -> None:
    stream = of(nats_server_factory(config="jetstream { max_buffered_msgs: 500 }"))
    stream.create(storage="file")
    publisher = stream.publish(stream.messages(5000))
    assert publisher.stored + publisher.duplicates == 5000
    assert sorted(stream.read().payloads) == sorted(numbers(5000))
    assert publisher._window < 4096


# ── what cannot be stored ─────────────────────────────────────────────────────────────────────────────────────────


def one_line(error: BaseException) -> str:
    assert isinstance(error, PartiError)
    assert "\n" not in str(error)
    return str(error)


def refused(into: Stream, messages: list[Outgoing], kind: type[PartiError], **options: Any) -> str:
    with pytest.raises(kind) as raised:
        into.publish(iter(messages), **options)
    return one_line(raised.value)


def test_a_subject_without_a_stream(stream: Stream) -> None:
    good, bad = f"{stream.root}.a".encode(), f"no{stream.root}".encode()
    line = refused(stream, [(good, b"", b"", b""), (bad, b"", b"", b"")], ConfigError)
    assert line.startswith(f"row 2 (subject 'no{stream.root}') was not stored: no stream has this subject")
    assert len(stream.read().payloads) == 1


def test_a_subject_of_another_stream(stream: Stream) -> None:
    line = refused(stream, [(f"{stream.root}.a".encode(), b"", b"", b"")], ApiError, stream="OTHER")
    assert line.startswith(f"row 1 (subject '{stream.root}.a') was not stored: expected stream does not match")
    assert "another stream stores this subject" in line


def test_a_full_stream(nats_server_factory: Callable[..., Server]) -> None:
    stream = of(nats_server_factory())
    stream.create(max_bytes=10_000, discard="new")
    messages = list(stream.messages(50, payload=b"%d" + b"x" * 1000))
    line = refused(stream, messages, ApiError)
    stored = len(stream.read().payloads)
    assert 0 < stored < 10
    assert line.startswith(f"row {stored + 1} (subject 'own.{stored % 7}') was not stored: maximum bytes exceeded")
    assert "raise its max_bytes" in line


def test_a_message_larger_than_the_stream_takes(nats_server_factory: Callable[..., Server]) -> None:
    stream = of(nats_server_factory())
    stream.create(max_msg_size=100)
    line = refused(stream, [(b"own.a", b"x" * 101, b"", b"")], ApiError)
    assert line.startswith("row 1 (subject 'own.a') was not stored: message size exceeds maximum allowed")
    assert "max_msg_size" in line


def test_a_message_larger_than_the_server_takes(stream: Stream) -> None:
    line = refused(stream, [(f"{stream.root}.a".encode(), b"x" * (1 << 20), b"A: b\r\n", b"")], ConfigError)
    assert "1,048,594 bytes with headers are more than the server takes (1,048,576)" in line
    assert stream.read().payloads == []


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (b"a b", "white space"),
        (b"a\r\nPUB x 0\r\n\r\n", "white space"),
        (b"a..b", "empty token"),
        (b"", "empty token"),
        (b"a.*", "wildcard"),
        (b"\xff", "UTF-8"),
        (b"a\x00b", "control characters"),
        (b"a" * 3000, "at most 2,048"),
    ],
)
def test_a_bad_subject(subject: bytes, said: str, stream: Stream) -> None:
    line = refused(stream, [(subject, b"", b"", b"")], ConfigError)
    assert line.startswith("row 1 (")
    assert said in line


def test_a_message_id_with_a_line_break(stream: Stream) -> None:
    line = refused(stream, [(f"{stream.root}.a".encode(), b"", b"", b"a\r\nNats-Rollup: all")], ConfigError)
    assert "line break" in line


def test_a_subject_that_may_not_be_published(nats_server_factory: Callable[..., Server]) -> None:
    users = (
        'authorization { users: [{user: all, password: a}, {user: few, password: a, permissions: {publish: "x"}}] }'
    )
    server = nats_server_factory(config=users)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_PASSWORD", "a")
        of(server, user="all", password_env="TEST_PASSWORD").create()
        stream = of(server, user="few", password_env="TEST_PASSWORD")
        line = refused(stream, list(stream.messages(3)), PermissionDenied)
    assert "may not publish to 'own.0'" in line


def test_a_server_that_is_not_there(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory()
    stream = of(server, connect_timeout_s=0.3)
    server.stop_sync()
    line = refused(stream, list(stream.messages(3)), ConnectionFailed, patience_s=0.1)
    assert "could not connect within 0.3 s" in line
