"""Metrics, health, the HTTP endpoint and logs."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import socket
import threading
import time
import timeit
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.pace import unhindered_s

from parti.errors import ConfigError
from parti.telemetry import Health, Metrics, MetricsServer, configure_logging
from parti.telemetry.http import HttpLimits
from parti.telemetry.metrics import PULL_STATUS
from parti.telemetry.reference import metrics_reference
from parti.version import __version__

SECRET = "hunter2-very-secret"

# Promises to dashboards and alerts: changing a line here is a breaking change for operators.
PROMISED = [
    "parti_acks_total counter worker",
    "parti_assignment_changes_total counter worker",
    "parti_build_info gauge worker version",
    "parti_claim_failures_total counter worker",
    "parti_claims_given_total counter worker kind",
    "parti_connection_state gauge worker state",
    "parti_consumer_duplicate_subjects_total counter worker",
    "parti_consumer_inflight gauge worker",
    "parti_consumer_inflight_limit gauge worker",
    "parti_consumer_lag gauge worker",
    "parti_consumer_messages_total counter worker",
    "parti_consumer_recreated_total counter worker",
    "parti_consumer_redeliveries_total counter worker",
    "parti_consumer_resets_total counter worker reason",
    "parti_consumer_skipped_total counter worker",
    "parti_consumer_subject_count gauge worker",
    "parti_consumer_subject_limit gauge worker",
    "parti_consumer_update_changes_total counter worker change",
    "parti_consumer_update_duration_seconds histogram worker",
    "parti_consumer_update_failures_total counter worker",
    "parti_consumer_update_skipped_total counter worker",
    "parti_consumer_wide_filter gauge worker",
    "parti_dead_letters_total counter worker",
    "parti_elections_total counter worker role",
    "parti_fleet_moving_partitions gauge worker",
    "parti_fleet_partitions gauge worker",
    "parti_fleet_state gauge worker state",
    "parti_fleet_unowned_partitions gauge worker",
    "parti_fleet_workers gauge worker",
    "parti_handler_failures_total counter worker outcome",
    "parti_handler_latency_seconds histogram worker",
    "parti_handler_running gauge worker",
    "parti_history_lost_total counter worker",
    "parti_hook_failures_total counter worker",
    "parti_jobs_duration_seconds histogram worker",
    "parti_jobs_ended_total counter worker outcome",
    "parti_jobs_heartbeats_total counter worker",
    "parti_jobs_held gauge worker",
    "parti_jobs_recognised_total counter worker",
    "parti_jobs_record_writes_total counter worker",
    "parti_jobs_running gauge worker",
    "parti_jobs_slot_queue gauge worker",
    "parti_jobs_slot_wait_seconds histogram worker",
    "parti_jobs_slots gauge worker",
    "parti_jobs_slots_used gauge worker",
    "parti_lane_count gauge worker",
    "parti_lane_depth gauge worker",
    "parti_lane_parked_total counter worker",
    "parti_leading gauge worker",
    "parti_lease_losses_total counter worker cause",
    "parti_lease_renewals_total counter worker",
    "parti_ledger_bytes_total counter worker",
    "parti_ledger_failures_total counter worker",
    "parti_ledger_flush_seconds histogram worker",
    "parti_ledger_rows_total counter worker",
    "parti_mirror_bytes gauge worker",
    "parti_mirror_inside gauge worker",
    "parti_mirror_limit_bytes gauge worker",
    "parti_mirror_moves_total counter worker move",
    "parti_move_seconds histogram worker",
    "parti_partition_messages_total counter worker partition",
    "parti_pin_switches_total counter worker",
    "parti_pinned gauge worker",
    "parti_pins_lost_total counter worker",
    "parti_pins_taken_total counter worker",
    "parti_progress_failures_total counter worker",
    "parti_progress_writes_total counter worker",
    "parti_pull_batch_size gauge worker",
    "parti_pull_credit gauge worker",
    "parti_pull_healthy gauge worker",
    "parti_pull_missed_heartbeats_total counter worker",
    "parti_pull_requests_total counter worker",
    "parti_pull_status_total counter worker status",
    "parti_reconnects_total counter worker",
    "parti_records_refused_total counter worker kind",
    "parti_stalled gauge worker",
    "parti_stalls_total counter worker kind",
    "parti_standby gauge worker",
    "parti_started_timestamp_seconds gauge worker",
    "parti_state_bytes_total counter worker",
    "parti_state_failures_total counter worker",
    "parti_state_seconds histogram worker",
    "parti_task_deaths_total counter worker task",
]


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Scrape, parse, and return {(name, label value besides worker, ...): value}."""
    found = {}
    for family in parse_text(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            assert sample.labels["worker"] == metrics.worker_id
            rest = tuple(value for label, value in sample.labels.items() if label != "worker")
            found[(sample.name, *rest)] = sample.value
    return found


def test_the_promised_metrics_are_declared() -> None:
    declared = [" ".join((each.name, each.kind, *each.labels)) for each in Metrics("w").declared]
    assert sorted(declared) == PROMISED


def test_the_exposition_keeps_the_promised_names_types_and_labels() -> None:
    metrics = Metrics("w", per_partition=True)
    metrics.resets.inc("gone")
    metrics.task_deaths.inc("parking")
    metrics.partition_messages.inc("orders.1")
    exposed = set()
    for family in parse_text(generate_latest(metrics.registry).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le", "worker"}
        exposed.add(" ".join((name, family.type, "worker", *labels)))
    assert sorted(exposed) == PROMISED


def test_counters_gauges_and_labels_are_exported() -> None:
    metrics = Metrics("w-1")
    metrics.messages.value += 3
    metrics.acks.inc()
    metrics.update_changes.inc("added", 2)
    metrics.pull_status.inc(PULL_STATUS[409])
    metrics.pull_status.inc(PULL_STATUS.get(499, "other"))
    metrics.inflight.value = 7
    metrics.set_probe("parti_lane_depth", lambda: 41)
    found = samples(metrics)
    assert found["parti_consumer_messages_total",] == 3
    assert found["parti_acks_total",] == 1
    assert found["parti_consumer_update_changes_total", "added"] == 2
    assert found["parti_consumer_update_changes_total", "removed"] == 0
    assert found["parti_pull_status_total", "conflict"] == 1
    assert found["parti_pull_status_total", "other"] == 1
    assert found["parti_consumer_inflight",] == 7
    assert found["parti_lane_depth",] == 41
    assert found["parti_build_info", __version__] == 1


def broken_probe() -> float:
    raise RuntimeError("broken")


def test_a_failing_probe_costs_only_its_own_sample() -> None:
    metrics = Metrics("w")
    metrics.set_probe("parti_lane_depth", broken_probe)
    for _ in range(2):
        found = samples(metrics)
        assert ("parti_lane_depth",) not in found
        assert ("parti_lane_count",) in found
    for name in ("parti_acks_total", "nothing"):
        with pytest.raises(KeyError, match=name):
            metrics.set_probe(name, lambda: 1)


def test_histogram_buckets_are_cumulative_and_include_their_bound() -> None:
    metrics = Metrics("w")
    for value in (0.00005, 0.0001, 0.3, 0.5, 1000.0):
        metrics.handler_latency.observe(value)
    found = samples(metrics)
    name = "parti_handler_latency_seconds"
    buckets = {float(key[1]): value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert (buckets[0.0001], buckets[0.25], buckets[0.5], buckets[60.0]) == (2, 2, 4, 4)
    assert buckets[float("inf")] == found[f"{name}_count",] == 5
    assert found[f"{name}_sum",] == pytest.approx(1000.80015)
    assert list(buckets.values()) == sorted(buckets.values())


def test_the_connection_state_is_one_of_three() -> None:
    metrics = Metrics("w")
    for state in ("connected", "suspended", "lost"):
        metrics.connection_state.set(state)
        found = samples(metrics)
        assert [k[1] for k, v in found.items() if k[0] == "parti_connection_state" and v == 1] == [state]
    with pytest.raises(ValueError, match="no state 'unsure'"):
        metrics.connection_state.set("unsure")


def test_partitions_are_counted_only_when_asked_for() -> None:
    quiet, loud = Metrics("w"), Metrics("w", per_partition=True)
    for metrics in (quiet, loud):
        lane_counter = metrics.partition_messages.child("orders.1")
        lane_counter.value += 5
    assert not any(key[0] == "parti_partition_messages_total" for key in samples(quiet))
    assert samples(loud)["parti_partition_messages_total", "orders.1"] == 5
    loud.partition_messages.remove("orders.1")
    assert ("parti_partition_messages_total", "orders.1") not in samples(loud)


def test_the_metrics_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_reference(), "run: python docs/generate.py"


def test_hot_path_cost_is_printed() -> None:
    metrics = Metrics("w")

    def per_message() -> None:
        metrics.messages.value += 1
        metrics.handler_latency.observe(0.0123)

    rounds = 20_000
    best = min(timeit.repeat(per_message, number=rounds, repeat=5)) / rounds
    print(f"counter + histogram: {best * 1e9:.0f} ns per message (aim: below 1500)")
    assert metrics.messages.value == sum(metrics.handler_latency.counts) == 5 * rounds


def test_health_tells_its_reasons_and_every_change() -> None:
    health, seen, healthy = Health(), list[dict[str, str]](), [True]
    health.on_change(lambda current: seen.append(dict(current.reasons)))
    health.on_change(lambda current: healthy.append(current.healthy))
    assert health.healthy
    before = health.reasons
    health.clear("pull")
    health.raise_signal("pull", f"lost nats://u:{SECRET}@h")
    health.raise_signal("pull", f"lost nats://u:{SECRET}@h")
    health.raise_signal("update", "3 failures")
    health.raise_signal("pull", "still lost")
    health.clear("pull")
    health.clear("update")
    assert dict(before) == {}
    assert healthy == [True, False, False, False, False, True]
    assert seen == [
        {"pull": "lost nats://h"},
        {"pull": "lost nats://h", "update": "3 failures"},
        {"update": "3 failures", "pull": "still lost"},
        {"update": "3 failures"},
        {},
    ]


def test_a_failing_callback_does_not_stop_the_others() -> None:
    health, seen = Health(), []

    def broken(_: Health) -> None:
        raise RuntimeError("broken")

    health.on_change(broken)
    health.on_change(lambda current: seen.append(current.healthy))
    health.raise_signal("pull", "lost")
    assert seen == [False]


def test_health_changes_from_several_threads_are_all_kept() -> None:
    health = Health()
    names = [[f"{group}-{n}" for n in range(200)] for group in range(4)]

    def raise_all(mine: list[str]) -> None:
        for name in mine:
            health.raise_signal(name, "x")

    threads = [threading.Thread(target=raise_all, args=(mine,)) for mine in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(health.reasons) == {name for mine in names for name in mine}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(Metrics("w"), Health()) as running:
        yield running


def request(server: MetricsServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


def test_metrics_are_served_as_text_and_as_openmetrics(server: MetricsServer) -> None:
    status, kind, body = request(server, "/metrics?x=1")
    assert status == 200
    assert kind.startswith("text/plain")
    assert any(family.name == "parti_acks" for family in parse_text(body))
    status, kind, body = request(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert kind.startswith("application/openmetrics-text")
    assert any(family.name == "parti_acks" for family in parse_openmetrics(body))  # type: ignore[no-untyped-call]
    assert request(server, "/metrics", Accept="text/plain; version=abc")[0] == 200


def test_healthz_follows_health() -> None:
    health = Health()
    with MetricsServer(Metrics("w"), health) as server:
        status, kind, body = request(server, "/healthz")
        assert (status, kind, json.loads(body)) == (200, "application/json", {"state": "healthy", "reasons": {}})
        health.raise_signal("pull", "no heartbeat for 4 s")
        status, _, body = request(server, "/healthz")
        assert status == 503
        assert json.loads(body) == {"state": "unhealthy", "reasons": {"pull": "no heartbeat for 4 s"}}
        assert request(server, "/healthz", "HEAD")[::2] == (503, "")


def test_other_paths_are_not_found(server: MetricsServer) -> None:
    for path in ("/", "/metrics/x", "//[", "/healthz/../metrics"):
        assert request(server, path)[0] == 404
    assert request(server, "/metrics", "POST")[0] == 501


def test_a_port_in_use_is_a_config_error_and_a_stopped_server_frees_it(server: MetricsServer) -> None:
    second = MetricsServer(Metrics("w"), Health(), "127.0.0.1", server.port)
    with pytest.raises(ConfigError, match=rf"metrics_port={server.port} .*in use.*choose another port"):
        second.start()
    second.stop()
    server.stop()
    server.stop()
    with second:
        second.start()
        assert request(second, "/healthz")[0] == 200


def test_an_unusable_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"metrics_host='192\.0\.2\.1'"):
        MetricsServer(Metrics("w"), Health(), "192.0.2.1").start()


def test_a_client_that_says_nothing_does_not_hold_up_others_or_stop(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        assert request(server, "/healthz")[0] == 200
        server.stop()


def trickle(connection: socket.socket, byte: bytes) -> None:
    """Send the same byte again and again until the other end has enough; an assertion error when it never has."""
    until = time.monotonic() + 20
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < until:
            connection.sendall(byte)
            time.sleep(0.05)
        raise AssertionError("the connection was never closed")


@pytest.mark.parametrize(
    ("first", "byte"),
    [(b"", b""), (b"GET /metrics", b"x"), (b"GET /metrics HTTP/1.1\r\nX: ", b"x"), (b"POST /metrics", b"x")],
    ids=["silent", "line", "header", "post"],
)
def test_a_request_that_is_not_complete_in_time_is_given_up(first: bytes, byte: bytes) -> None:
    limits = HttpLimits(request_s=0.3)
    with (
        MetricsServer(Metrics("w"), Health(), limits=limits) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow,
    ):
        slow.sendall(first)
        if byte:
            trickle(slow, byte)
        else:
            assert slow.recv(1) == b""
        assert request(server, "/healthz")[0] == 200


def test_many_half_open_connections_keep_no_probe_out_and_no_more_threads_than_allowed() -> None:
    log = io.StringIO()
    configure_logging("info", "json", stream=log)
    before = threading.active_count()
    with MetricsServer(Metrics("w"), Health()) as server, contextlib.ExitStack() as opened:
        for _ in range(300):
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        for path in ("/healthz", "/metrics", "/healthz"):
            began_s = unhindered_s()
            assert request(server, path)[0] == 200
            assert unhindered_s() - began_s < 1.0
        assert threading.active_count() - before <= 2 * HttpLimits().connections + 1
    assert len(log.getvalue().splitlines()) < 10


class Slow(Health):
    """Health that is told only when it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    @property
    def reasons(self) -> Mapping[str, str]:
        self.entered.set()
        self.go_on.wait(20)
        return {}


def is_full_with_one(server: MetricsServer, health: Slow) -> None:
    """While one connection is being answered the next is refused; after that there is room again."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as first:
        first.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert health.entered.wait(20)
        try:
            assert request(server, "/metrics")[::2] == (503, "too many connections; wait\n")
        finally:
            health.go_on.set()
        with first.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.0 200")  # to its end: by then the connection counts no more
    assert request(server, "/metrics")[0] == 200


def test_when_all_connections_are_being_answered_a_new_one_is_refused_in_a_line() -> None:
    health = Slow()
    with MetricsServer(Metrics("w"), health, limits=HttpLimits(connections=1)) as server:
        is_full_with_one(server, health)


def test_a_connection_that_gets_no_thread_is_closed_and_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    health = Slow()
    with MetricsServer(Metrics("w"), health, limits=HttpLimits(connections=1)) as server:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", refuse)
            with pytest.raises(ConnectionError):
                request(server, "/metrics")
        is_full_with_one(server, health)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    structlog.reset_defaults()


def log_json(level: str = "info", **fields: object) -> dict[str, Any]:
    stream = io.StringIO()
    configure_logging(level, "json", stream=stream)
    structlog.get_logger("parti.test").info("event", **fields)
    line: dict[str, Any] = json.loads(stream.getvalue())
    return line


def test_json_lines_carry_time_level_logger_and_fields() -> None:
    line = log_json(partition="orders.1", position=7, ratio=0.5, none=None, flag=True)
    assert list(line)[:4] == ["timestamp", "level", "event", "logger"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["logger"]) == ("info", "event", "parti.test")
    assert (line["partition"], line["position"], line["ratio"]) == ("orders.1", 7, 0.5)
    assert (line["none"], line["flag"]) == (None, True)


@pytest.mark.parametrize(
    ("stream", "format", "is_json"),
    [
        (io.StringIO(), "auto", True),
        (Terminal(), "auto", False),
        (Terminal(), "json", True),
        (io.StringIO(), "console", False),
    ],
)
def test_auto_is_console_on_a_terminal(
    stream: io.StringIO, format: Literal["auto", "console", "json"], is_json: bool
) -> None:
    configure_logging("info", format, stream=stream)
    structlog.get_logger().info("hello", url=f"nats://u:{SECRET}@h")
    assert stream.getvalue().startswith("{") is is_json
    assert "hello" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_logs_go_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    structlog.get_logger().info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "hello"


def test_the_level_filters_and_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "json", stream=first)
    log = structlog.get_logger("parti.test")
    log.debug("hidden")
    assert first.getvalue() == ""
    configure_logging("DEBUG", "json", stream=second)
    log.debug("shown")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    with pytest.raises(ConfigError, match="log_level='loud'"):
        configure_logging("loud")


@pytest.mark.parametrize(
    "key",
    [
        *("password", "PASSWORD", "nats_password", "dbPassword", "token", "authToken", "access_token", "tokens"),
        *("seed", "nkey_seed", "jwt", "userJwt", "creds", "credentials", "Authorization", "api_key", "api-key"),
        *("secret", "client_secret_value", "passphrase", "pwd", "privateKey"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"inner": v}, lambda v: v.encode()])
def test_fields_named_like_secrets_are_hidden(key: str, wrap: Any) -> None:
    assert log_json(**{key: wrap(SECRET)})[key] == "***"
    assert log_json(outer={key: wrap(SECRET)})["outer"] == {key: "***"}


@pytest.mark.parametrize("key", ["fence_token", "fenceToken", "passed", "bypass", "credentials_file", "worker"])
def test_fields_that_only_resemble_secrets_are_shown(key: str) -> None:
    assert log_json(**{key: "7"})[key] == "7"


class Peculiar:
    def __str__(self) -> str:
        return f"at nats://u:{SECRET}@h"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_secrets_inside_any_value_are_removed() -> None:
    url = f"tls://u:{SECRET}@h:4222"
    seed = "SUAOPDFGV5LTWAZRNYJWJ5CNV2P7SOK2LRSKBMLE7TCBA2ERKBFCWVHLJQ"
    line = log_json(
        text=f"cannot reach {url}",
        many=[url, (url,), {"deep": {"er": [url]}}],
        keyed={url: 1},
        error=ValueError(f"bad {url}"),
        object=Peculiar(),
        broken=Broken(),
        note=f"seed {seed} and eyJabc.eyJdef.sig",
    )
    assert SECRET not in json.dumps(line)
    assert line["text"] == "cannot reach tls://h:4222"
    assert line["error"] == "ValueError('bad tls://h:4222')"
    assert line["broken"] == "<Broken: RuntimeError>"
    assert line["note"] == "seed *** and ***"


def test_handlers_of_others_see_no_secrets_either(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ConnectionError(f"nats://u:{SECRET}@h refused")
    except ConnectionError:
        log_json(url=f"nats://u:{SECRET}@h", password=SECRET, exc_info=True)
    assert "nats://h refused" in caplog.text
    assert SECRET not in caplog.text


def test_deep_and_circular_values_end_without_showing_secrets() -> None:
    value: dict[str, Any] = {"password": SECRET}
    value["again"] = value
    assert SECRET not in json.dumps(log_json(value=value))


def test_payloads_are_not_logged() -> None:
    line = log_json(data=b"private words", payload="private words", body={"a": "private words"})
    assert "private" not in json.dumps(line)
    assert (line["data"], line["payload"]) == ("<13 bytes>", "<not logged>")


@pytest.mark.parametrize("format", ["json", "console"])
def test_exceptions_and_foreign_loggers_pass_the_redaction(format: Literal["json", "console"]) -> None:
    stream = io.StringIO()
    configure_logging("info", format, stream=stream)
    try:
        local_secret = SECRET
        raise ConnectionError(f"nats://u:{local_secret}@h refused")
    except ConnectionError:
        structlog.get_logger().exception("connect failed")
        logging.getLogger("nats").exception("nats: %s", f"nats://u:{local_secret}@h")
    text = stream.getvalue()
    assert text.count("ConnectionError") >= 2
    assert text.count("nats://h") >= 3
    assert SECRET not in text


HOSTILE = "a\x1b[2J\x9b31m\u202e\ud800\x00b"


@pytest.mark.parametrize("format", ["json", "console"])
def test_what_others_wrote_cannot_steer_a_terminal_or_break_a_line(
    format: Literal["json", "console"], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    configure_logging("info", format, stream=stream)
    # pytest keeps what is logged as it was logged, and cannot report it from one process to another.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler for handler in root.handlers if handler.name == "parti"])
    log = structlog.get_logger("parti.test")
    log.info(f"event {HOSTILE}\nforged", error=f"{HOSTILE}\nforged", deep={HOSTILE: [HOSTILE]}, number=10**5000)
    try:
        raise ValueError(f"{HOSTILE}\nwith lines")
    except ValueError:
        log.exception("failed", **{HOSTILE: 1})
        logging.getLogger("other").exception("foreign %s", HOSTILE)
    stream.flush()
    text = raw.getvalue().decode()
    assert not set(text) & set("\x1b\x9b\u202e\x00")
    assert "a\\x1b[2J" in text.replace("\\\\", "\\")
    assert not any(line.startswith("forged") for line in text.splitlines())
    assert text.count("ValueError") >= 2


def test_values_are_bounded_with_a_mark() -> None:
    line = log_json(text="x" * 100_000, error=ValueError("y" * 100_000))
    assert len(json.dumps(line)) < 10_000
    assert line["text"].endswith("… (cut: 100,000 characters)")
