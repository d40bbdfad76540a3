"""Traces from publish to handler, with OpenTelemetry (extra `parti[otel]`); off unless the setting `tracing` is on.

The trace travels in the message's headers (W3C `traceparent`, or whatever propagator the process has chosen): a
publisher puts it there inside `publishing`, a worker with `tracing` handles each message in a span below it. Where
spans go is the user's business: set up a `TracerProvider` with an exporter, before or after the worker starts.

Guarantees: a worker that does not trace calls the handler itself, with nothing in between; spans hold where a message
comes from, never payloads or headers; a span never changes what becomes of its message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, cast

from parti.errors import ConfigError
from parti.model.message import Message
from parti.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_H = TypeVar("_H", bound=Callable[..., Any])


def check_tracing() -> None:
    """Raise `ConfigError` when OpenTelemetry is not installed."""
    if find_spec("opentelemetry") is None:
        raise ConfigError("tracing needs OpenTelemetry, which is not installed; install the extra: parti[otel]")


@contextmanager
def publishing(subject: str, headers: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """A span around the publishing of one message; gives the headers to publish it with, `headers` included.

    Inside a handler that is traced the span is below that of the handler, so that a chain of apps is one trace.

    Example:
        with publishing("orders.eu.ada") as headers:
            await jetstream.publish("orders.eu.ada", payload, headers=headers)
    """
    check_tracing()
    from opentelemetry import propagate  # noqa: PLC0415 - an extra
    from opentelemetry.trace import SpanKind  # noqa: PLC0415

    attributes = {
        "messaging.system": "nats",
        "messaging.operation.type": "send",
        "messaging.destination.name": subject,
    }
    with _tracer().start_as_current_span("send", kind=SpanKind.PRODUCER, attributes=attributes):
        carrier = dict(headers or {})
        propagate.inject(carrier)
        yield carrier


def traced(
    handler: _H,
    message_of: Callable[[Any], Message] = lambda message: cast("Message", message),
    attempt_of: Callable[[Any], int] | None = None,
) -> _H:
    """The handler inside a span of its own for each call; a coroutine function stays one.

    `message_of` tells the message of what the handler gets, `attempt_of` the attempt, if that is not the message's.
    Whatever the handler raises is recorded in the span and raised on.
    """
    check_tracing()
    handling = _handling()

    def attempt(given: Any) -> int:
        return attempt_of(given) if attempt_of else message_of(given).attempt

    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004

        async def call(given: Any) -> Any:
            with handling(message_of(given), attempt(given)):
                return await handler(given)

        return cast("_H", call)

    def call_plain(given: Any) -> Any:
        with handling(message_of(given), attempt(given)):
            return handler(given)

    return cast("_H", call_plain)


def _handling() -> Callable[[Message, int], AbstractContextManager[Any]]:
    """The span of one call of a handler; what is the same for all of them is looked up once."""
    from opentelemetry import propagate  # noqa: PLC0415 - an extra
    from opentelemetry.trace import SpanKind, StatusCode  # noqa: PLC0415

    tracer = _tracer()

    @contextmanager
    def handling(message: Message, attempt: int) -> Iterator[None]:
        with tracer.start_as_current_span(
            f"process {message.stream}",
            context=propagate.extract(message.headers),
            kind=SpanKind.CONSUMER,
            attributes={
                "messaging.system": "nats",
                "messaging.operation.type": "process",
                "messaging.destination.name": message.subject,
                "messaging.destination.partition.id": message.partition.id,
                "parti.stream": message.stream,
                "parti.sequence": message.seq,
                "parti.attempt": attempt,
                "parti.worker": message.worker_id,
                "parti.fence": message.fence,
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException as error:  # a handler that is cancelled because of its timeout, too
                span.record_exception(error)
                span.set_status(StatusCode.ERROR, type(error).__name__)
                raise

    return handling


def _tracer() -> Tracer:
    from opentelemetry import trace  # noqa: PLC0415 - an extra

    return trace.get_tracer("parti", __version__)
