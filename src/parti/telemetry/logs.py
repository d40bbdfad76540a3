"""Logging set-up: structured lines on stderr; what others wrote is made safe before anything of it is written."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from parti.errors import ConfigError
from parti.model.safe_text import HIDDEN, log_value, many_lines

_HANDLER_NAME = "parti"
_SECRET_KEY = re.compile(
    r"pass(word|wd|phrase)|secret|credential|authorization|jwt|nkey|api_?key|private_?key"
    r"|(token|seed|creds|pwd)s?$|(^|_)(token|seed|creds|pwd|pass)s?(_|$)"
)
_NOT_SECRET_KEY = re.compile(r"fence_?token|_(file|path)$")
_PAYLOAD_KEYS = frozenset({"payload", "body"})
_MAX_DEPTH = 6
_MAX_VALUE = 4_000
_MAX_TRACEBACK = 16_000
_MAX_BITS = 256
_LINES = frozenset({"exception", "stack"})
"""Fields that may have several lines."""


def configure_logging(
    level: str = "info",
    format: Literal["auto", "console", "json"] = "auto",
    *,
    stream: TextIO | None = None,
) -> None:
    """Send all logs of this process, structlog's and the standard library's, to stderr through the redaction.

    `auto` means console lines on a terminal and JSON lines elsewhere. Calling it again replaces the earlier set-up
    and leaves handlers of others alone. Raises `ConfigError` for a level that does not exist.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level={level!r}: must be debug, info, warning, error or critical")
    stream = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_process,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    hiding: list[Processor] = [
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,  # before redact: exceptions quote URLs
        redact,
    ]
    handler = logging.StreamHandler(stream)
    handler.name = _HANDLER_NAME
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *hiding,
                *_renderers(format, stream),
            ],
        )
    )
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.name == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    structlog.configure(
        # Hidden here already, because handlers that others put on the root logger see these events as well.
        processors=[*shared, *hiding, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=False,  # so that a later call reaches loggers already in use
    )


_process: dict[str, str] = {}


def name_process(**fields: str) -> None:
    """Add these fields to every line of this process, as far as a line has none of its own of that name."""
    _process.update(fields)


def forget_process() -> None:
    """Take back what `name_process` has added."""
    _process.clear()


def _add_process(_: object, __: str, event: EventDict) -> EventDict:
    return {**_process, **event}


def _renderers(format: str, stream: TextIO) -> list[Processor]:
    tty = stream.isatty()
    if format == "console" or (format == "auto" and tty):
        # No locals in tracebacks: they hold payloads and settings.
        return [structlog.dev.ConsoleRenderer(colors=tty, exception_formatter=structlog.dev.plain_traceback)]
    return [_lead, structlog.processors.JSONRenderer(ensure_ascii=False)]


def _lead(_: object, __: str, event: EventDict) -> EventDict:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event", "logger") if key in event}
    return first | dict(event)


def redact(_: object, __: str, event: EventDict) -> EventDict:
    """Structlog processor that hides secrets, by the name of the field and inside any text, and makes texts safe.

    Texts are valid UTF-8 without control characters, and bounded (`parti.model.safe_text`).
    Fields named like a secret become `***`; URLs lose their user info; seeds and JWTs inside text become `***`;
    bytes become their size, payloads vanish. Values that JSON does not know become text, so that nothing is rendered
    unseen after this point. Redacting twice changes nothing more. File names (`*_file`, `*_path`) and `fence_token`
    are not secret.
    """
    return {_key(key): _clean(key, value, 0) for key, value in event.items()}


def _key(key: object) -> str:
    return log_value(str(key), _MAX_VALUE)


def _text(key: str, text: str) -> str:
    return many_lines(text, _MAX_TRACEBACK) if key in _LINES else log_value(text, _MAX_VALUE)


def _is_secret(key: str) -> bool:
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).lower().replace("-", "_")
    return bool(_SECRET_KEY.search(snake)) and not _NOT_SECRET_KEY.search(snake)


def _clean(key: str, value: object, depth: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if _is_secret(key):
        return HIDDEN
    if key in _PAYLOAD_KEYS:
        return "<not logged>"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, int | float):
        # Python writes no number of more than 4,300 digits.
        return value if isinstance(value, float) or value.bit_length() <= _MAX_BITS else "<a huge number>"
    return _text(key, value) if isinstance(value, str) else _clean_object(key, value, depth)


def _clean_object(key: str, value: object, depth: int) -> object:
    if depth >= _MAX_DEPTH:
        return "<too deep>"  # its text could hold secrets that only the field names tell
    if isinstance(value, Mapping):
        return {_key(k): _clean(str(k), v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(key, item, depth + 1) for item in value]
    try:
        return _text(key, repr(value) if isinstance(value, BaseException) else str(value))
    except Exception as error:  # a broken __str__ must not break the line
        return f"<{type(value).__name__}: {type(error).__name__}>"
