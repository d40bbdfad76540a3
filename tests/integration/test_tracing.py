"""Traces go from whoever publishes to whoever handles, over processes and connections, and hold no payloads."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.integration.conftest import Kit, eventually
from tests.integration.jobs.kit import JobKit

import parti
from parti.config import load_settings
from parti.errors import ConfigError
from parti.jobs import Job
from parti.telemetry import tracing
from parti.telemetry.tracing import publishing

SECRET = b"the-payload-of-a-message"
PUBLISHER = """
import asyncio, json, sys
import nats
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from parti.telemetry.tracing import publishing

async def main(url, subject, payload):
    trace.set_tracer_provider(TracerProvider())
    client = await nats.connect(url)
    with trace.get_tracer("shop").start_as_current_span("order") as order:
        with publishing(subject, {"Kind": "order"}) as headers:
            sent = trace.get_current_span().get_span_context()
            await client.jetstream().publish(subject, payload.encode(), headers=headers)
    await client.close()
    print(json.dumps({"trace": order.get_span_context().trace_id, "span": sent.span_id, "headers": headers}))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Where all spans of this process go: it has one provider, set up once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[Callable[[], Sequence[ReadableSpan]]]:
    exporter.clear()
    yield exporter.get_finished_spans
    exporter.clear()


async def publish_elsewhere(kit: Kit, subject: str) -> dict[str, Any]:
    """Publish from another process; returns its trace and span."""
    command = [sys.executable, "-c", PUBLISHER, kit.url, subject, SECRET.decode()]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


def context(span: ReadableSpan) -> Any:
    assert span.context
    return span.context


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "function"])
async def test_a_handler_goes_on_with_the_trace_of_another_process(
    kit: Kit, spans: Callable[[], Sequence[ReadableSpan]], plain: bool
) -> None:
    seen: list[tuple[int, str]] = []

    def note(message: parti.Message) -> None:
        inside = trace.get_current_span().get_span_context()
        with publishing("next.subject") as headers:
            seen.append((inside.span_id, headers["traceparent"]))
        if message.attempt == 1:
            raise RuntimeError("not yet")

    async def handle(message: parti.Message) -> None:
        await asyncio.sleep(0)
        note(message)

    async with kit.app(note if plain else handle, ["a"], tracing=True).running() as worker:
        sent = await publish_elsewhere(kit, kit.subject("a"))
        await eventually(lambda: worker.finished == 1)
    failed, done = [span for span in spans() if span.kind is SpanKind.CONSUMER]
    for span in (failed, done):
        assert context(span).trace_id == sent["trace"]
        assert span.parent
        assert (span.parent.span_id, span.parent.is_remote) == (sent["span"], True)
        assert span.name == f"process {kit.stream}"
    assert dict(done.attributes or {}) == {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.destination.name": kit.subject("a"),
        "messaging.destination.partition.id": "a",
        "parti.stream": kit.stream,
        "parti.sequence": 1,
        "parti.attempt": 2,
        "parti.worker": "one",
        "parti.fence": 0,
    }
    assert (failed.attributes or {})["parti.attempt"] == 1
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "RuntimeError")
    (event,) = failed.events
    assert (event.attributes or {})["exception.message"] == "not yet"
    assert (done.status.status_code, len(done.events)) == (StatusCode.UNSET, 0)
    # What the handler publishes is part of the same trace, below its own span.
    assert [span_id for span_id, _ in seen] == [context(failed).span_id, context(done).span_id]
    producers = [span for span in spans() if span.kind is SpanKind.PRODUCER]
    assert [span.parent and span.parent.span_id for span in producers] == [span_id for span_id, _ in seen]
    assert all(f"-{sent['trace']:032x}-" in header for _, header in seen)
    assert SECRET.decode() not in "".join(span.to_json() for span in spans())
    assert sent["headers"]["Kind"] == "order"


async def test_a_message_without_a_trace_begins_one_and_a_timeout_is_an_error(
    kit: Kit, spans: Callable[[], Sequence[ReadableSpan]]
) -> None:
    async def handle(message: parti.Message) -> None:
        if message.data == b"slow" and message.attempt == 1:
            await asyncio.Event().wait()

    async with kit.app(handle, ["a"], tracing=True, handler_timeout_s=0.2).running() as worker:
        await kit.publish(["a"])
        await kit.publish(["a"], data=b"slow")
        await eventually(lambda: worker.finished == 2)
    first, late, again = spans()
    assert [span.parent for span in (first, late, again)] == [None] * 3
    assert (late.status.status_code, late.status.description) == (StatusCode.ERROR, "CancelledError")
    assert again.status.status_code is StatusCode.UNSET


async def test_a_dead_letter_keeps_the_trace(kit: Kit) -> None:
    async def handle(message: parti.Message) -> None:
        raise parti.Reject("no")

    async with kit.app(handle, ["a"], tracing=True).running() as worker:
        with publishing(kit.subject("a")) as headers:
            await kit.api.publish(kit.subject("a"), SECRET, headers=headers)
        await eventually(lambda: worker.finished == 1)
    (letter,) = await kit.dead_letters()
    assert f"traceparent: {headers['traceparent']}" in base64.b64decode(letter["hdrs"]).decode()


async def test_jobs_are_traced_too(
    kit: Kit, spans: Callable[[], Sequence[ReadableSpan]], no_settings_of_this_machine: None
) -> None:
    jobs = JobKit(kit)

    async def handle(job: Job) -> None:
        if job.attempt == 1:
            raise RuntimeError("again")

    async with jobs.app(handle, tracing=True, max_capacity=5).running() as worker:
        sent = await publish_elsewhere(kit, jobs.subject)
        await eventually(lambda: worker.finished == 1)
    await jobs.clean_up()
    failed, done = spans()
    assert {context(span).trace_id for span in (failed, done)} == {sent["trace"]}
    assert [(span.attributes or {})["parti.attempt"] for span in (failed, done)] == [1, 2]
    assert failed.status.status_code is StatusCode.ERROR


async def test_without_tracing_the_handler_itself_is_called(
    kit: Kit, spans: Callable[[], Sequence[ReadableSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(message: parti.Message) -> None:
        pass

    def must_not(*_: Any) -> None:
        raise AssertionError("nothing of OpenTelemetry is touched")

    monkeypatch.setattr("parti.worker.reader.traced", must_not)
    async with kit.app(handle, ["a"]).running() as worker:
        await kit.publish(["a"])
        await eventually(lambda: worker.finished == 1)
    assert not spans()


def test_tracing_is_off_unless_it_is_asked_for(no_settings_of_this_machine: None) -> None:
    assert load_settings({}).tracing is False
    with pytest.raises(ConfigError, match="tracing"):
        load_settings({"tracing": "perhaps"})


async def test_tracing_without_opentelemetry_is_refused(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)

    async def handle(message: parti.Message) -> None:
        pass

    with pytest.raises(ConfigError, match=r"install the extra: parti\[otel\]"):
        await kit.app(handle, ["a"], tracing=True).worker().start()
    with pytest.raises(ConfigError, match=r"parti\[otel\]"), publishing("a"):
        pass
