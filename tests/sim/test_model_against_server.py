"""The model is held to the real nats-server: the same operations on both, and the same answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.sim.backends import Model, Real
from tests.sim.differential import check_seeds
from tests.sim.run import Run, Setup

from parti.embedded import Server

LENGTH = 60
MILLISECOND = 10**6


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_operations_get_the_same_answers(nats_server: Server, first: int) -> None:
    assert not check_seeds(nats_server.url, range(first, first + 10), LENGTH)


@pytest.fixture
def start(nats_server: Server) -> Iterator[Callable[[Setup], Run]]:
    """Begins a run with a stream of its own."""
    real = Real(nats_server.url)
    runs: list[Run] = []

    def begin(setup: Setup) -> Run:
        run = Run(Model(), real, setup, live=True)
        run.begin()
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.end()
    real.close()


LIMITS = Setup("limits", "memory", -1, -1)
QUEUE = Setup("workqueue", "memory", -1, -1)
BUCKET = Setup("limits", "memory", 1, -1)


def make_consumer(run: Run, name: str, roots: tuple[str, ...], **config: Any) -> None:
    given = {
        "name": name,
        "durable_name": name,
        "ack_policy": "explicit",
        "ack_wait": 300 * MILLISECOND,
        "filter_subjects": [run.subject(root) for root in roots],
        **config,
    }
    run.call(f"CONSUMER.CREATE.{run.name}.{name}", {"stream_name": run.name, "config": given})


def pull(run: Run, name: str, **request: Any) -> None:
    """A pull on an inbox of its own; what comes at once is compared."""
    inbox = f"_INBOX.{run.name}.pull{run.step}"
    run.step += 1
    run.tell(f"$JS.API.CONSUMER.MSG.NEXT.{run.name}.{name}", json.dumps(request).encode(), inbox)


def test_what_is_not_acknowledged_in_time_comes_again_in_order(start: Callable[[Setup], Run]) -> None:
    run = start(LIMITS)
    # Long enough that a busy machine does not wait for a further round.
    make_consumer(run, "A", ("x",), ack_wait=1_200 * MILLISECOND)
    for _ in range(4):
        run.publish("x", 1, "")
    pull(run, "A", batch=20, expires=60_000 * MILLISECOND)
    run.acknowledge(1, b"+ACK")
    run.wait(0.6)
    run.acknowledge(0, b"+WPI")
    run.wait(0.88)  # Two of them are overdue, the first is being worked on.
    run.info("A")
    run.wait(0.6)
    run.info("A")
    assert len(run.delivered("A")) == 4 + 2 + 1


def test_a_delayed_negative_acknowledgement_waits(start: Callable[[Setup], Run]) -> None:
    run = start(QUEUE)
    make_consumer(run, "A", ("x",), ack_wait=60_000 * MILLISECOND)
    run.publish("x", 1, "")
    pull(run, "A", batch=20, expires=60_000 * MILLISECOND)
    run.acknowledge(0, b'-NAK {"delay": 300000000}')
    run.wait(0.2)
    assert len(run.delivered("A")) == 1
    run.wait(0.25)
    assert len(run.delivered("A")) == 2


def test_a_pull_beats_and_expires(start: Callable[[Setup], Run]) -> None:
    run = start(LIMITS)
    make_consumer(run, "A", ("x",))
    pull(run, "A", batch=3, expires=700 * MILLISECOND, idle_heartbeat=300 * MILLISECOND)
    run.wait(0.45)
    run.publish("x", 1, "")
    run.wait(0.4)
    run.info("A")


def test_a_filter_update_is_noticed_by_the_next_heartbeat_of_a_standing_pull(start: Callable[[Setup], Run]) -> None:
    run = start(LIMITS)
    make_consumer(run, "A", ("x",))
    pull(run, "A", batch=3, expires=60_000 * MILLISECOND, idle_heartbeat=400 * MILLISECOND)
    # The cursor has not passed these: the consumer is not told of messages that its filter does not match.
    run.publish("y", 1, "")
    run.publish("y", 1, "")
    make_consumer(run, "A", ("x", "y"))
    run.wait(0.2)
    assert not run.delivered("A")
    run.wait(0.4)
    assert len(run.delivered("A")) == 2


def test_a_key_with_a_ttl_leaves_a_marker_that_a_watch_sees(start: Callable[[Setup], Run]) -> None:
    run = start(BUCKET)
    run.watch("W", 5)
    header = b"NATS/1.0\r\nNats-TTL: 1s\r\n\r\n"
    run.request(run.subject("x"), b"lease", header)
    run.wait(0.8)
    assert len(run.delivered("W")) == 1
    run.wait(0.8)
    assert len(run.delivered("W")) == 2
    run.read("last", "x", 0, 0)
    run.compare_and_set("x", 0, "")
    run.info("")


def test_an_ephemeral_consumer_ends_when_nobody_listens(start: Callable[[Setup], Run]) -> None:
    run = start(BUCKET)
    run.subscribe("_INBOX.there", 7)
    config = {
        "name": "W",
        "deliver_subject": "_INBOX.there",
        "deliver_policy": "last_per_subject",
        "ack_policy": "none",
        "max_deliver": 1,
        "filter_subjects": [run.subject("x")],
        "idle_heartbeat": 300 * MILLISECOND,
        "flow_control": True,
        "inactive_threshold": 500 * MILLISECOND,
        "mem_storage": True,
        "num_replicas": 1,
    }
    run.call(f"CONSUMER.CREATE.{run.name}.W", {"stream_name": run.name, "config": config, "action": "create"})
    run.wait(0.45)
    run.publish("x", 1, "")
    run.wait(0.45)
    run.unsubscribe(7)
    run.wait(0.3)
    run.names()
    run.wait(0.5)
    run.names()
    run.info("W")


@pytest.fixture
def restartable(nats_server_factory: Callable[..., Server]) -> Iterator[Callable[[str], tuple[Run, Server]]]:
    """Begins a run on a file stream of a server of its own."""
    runs: list[Run] = []

    def begin(retention: str) -> tuple[Run, Server]:
        server = nats_server_factory()
        model, setup = Model(time.time()), Setup(retention, "file", -1, -1)
        run = Run(model, Real(server.url), setup, live=True)
        run.begin()
        runs.append(run)
        return run, server

    yield begin
    for run in runs:
        run.real.close()


def restart(run: Run, server: Server, *, lose_from_s: float | None = None) -> None:
    """A SIGKILL and a new start."""
    server.kill_sync()
    run.keep_time()
    run.model.restart(lose_s=0.0 if lose_from_s is None else run.model.now_s - lose_from_s)
    run.real.close()
    server.restart_sync()
    run.real = Real(server.url)
    run.resubscribe()


RETENTIONS = ("limits", "workqueue", "interest")


@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_restart_forgets_the_hidden_cursor(
    restartable: Callable[[str], tuple[Run, Server]], retention: str
) -> None:
    run, server = restartable(retention)
    make_consumer(run, "A", ("x",), ack_wait=60_000 * MILLISECOND)
    make_consumer(run, "B", ("y",), ack_wait=60_000 * MILLISECOND)
    for root in ("x", "y", "y", "x", "y"):
        run.publish(root, 1, "")
    pull(run, "A", batch=20, expires=60_000 * MILLISECOND)
    run.acknowledge(0, b"+ACK")
    run.delete_consumer("B")
    make_consumer(run, "A", ("x", "y"), ack_wait=60_000 * MILLISECOND)
    pull(run, "A", batch=20, expires=60_000 * MILLISECOND)
    run.info("A")
    run.wait(0.3)  # Acknowledgements of the last moments would be lost.
    restart(run, server)
    run.info("A")
    run.info("")
    pull(run, "A", batch=20, expires=60_000 * MILLISECOND)
    run.info("A")
    run.info("")


@pytest.mark.parametrize("retention", RETENTIONS)
def test_acknowledgements_of_the_last_moments_are_lost_but_deleted_messages_stay_deleted(
    restartable: Callable[[str], tuple[Run, Server]], retention: str
) -> None:
    run, server = restartable(retention)
    make_consumer(run, "A", ("x",), ack_wait=60_000 * MILLISECOND)
    for _ in range(4):
        run.publish("x", 1, "")
    pull(run, "A", batch=4, expires=60_000 * MILLISECOND)
    run.wait(0.3)
    run.acknowledge(0, b"+ACK")  # Written at once, because nothing was for a while; the next one waits for 100 ms.
    lose_from_s = run.model.now_s
    run.acknowledge(1, b"+ACK")
    restart(run, server, lose_from_s=lose_from_s)
    pull(run, "A", batch=4, expires=60_000 * MILLISECOND)
    run.info("")
    pending = run.call(f"CONSUMER.INFO.{run.name}.A")["num_ack_pending"]
    assert pending == (3 if retention == "limits" else 2)


def test_after_a_restart_messages_are_overdue_by_their_age(
    restartable: Callable[[str], tuple[Run, Server]],
) -> None:
    run, server = restartable("limits")
    make_consumer(run, "A", ("x",), ack_wait=3_000 * MILLISECOND)
    run.publish("x", 1, "")
    run.wait(1.5)
    pull(run, "A", batch=1, expires=60_000 * MILLISECOND)
    run.wait(0.3)
    restart(run, server)
    pull(run, "A", batch=4, expires=60_000 * MILLISECOND)
    run.wait(1.4)  # 3.2 s after it was stored, 1.7 s after it was delivered.
    assert len(run.delivered("A")) == 2
