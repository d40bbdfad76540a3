"""The stream of marks beside a dead-letter stream, which keeps what became of letters that were sent back.

Guards that no letter is sent without a place for its mark. Leaders make the stream together with the dead-letter
stream, so that an operator, who may make no stream, finds it.
"""

from __future__ import annotations

import shlex
from typing import Any

from parti.errors import ConfigError, PermissionDenied
from parti.jetstream.api import JetStreamApi
from parti.model.letter_mark import KEEP_S, mark_subject, marks_stream

_NANOSECONDS = 1_000_000_000


async def ensure_marks(api: JetStreamApi, letters: str) -> None:
    """Make the stream of marks of this dead-letter stream when it is missing.

    Raises `ConfigError` when the name is taken, or when the stream is missing and this account may not make it.
    """
    name, subject = marks_stream(letters), mark_subject(letters, "*")
    replicas = (await api.stream_config(letters)).get("num_replicas", 1)
    try:
        info = await api.ensure_stream(_config(name, subject, replicas))
    except PermissionDenied as error:
        if error.subject != f"$JS.API.STREAM.CREATE.{name}":
            raise
        raise ConfigError(
            f"stream {name!r}, which keeps what was sent back, is missing and this account may not make it; start a "
            f"worker that may lead, or have an admin run: {_command(name, subject, replicas)}"
        ) from None
    if subject not in info.subjects:
        raise ConfigError(f"stream {name!r} does not take {subject!r}, so marks of replays cannot be kept; rename it")


def _config(name: str, subject: str, replicas: int) -> dict[str, Any]:
    return {
        "name": name,
        "description": "which dead letters were sent back to their streams",
        "subjects": [subject],
        "retention": "limits",
        "storage": "file",
        "max_msgs_per_subject": 1,
        "max_age": KEEP_S * _NANOSECONDS,
        "num_replicas": replicas,
        "allow_direct": True,
    }


def _command(name: str, subject: str, replicas: int) -> str:
    """The same for people."""
    kept = ["--max-msgs-per-subject", "1", "--max-age", f"{KEEP_S // 86_400}d", "--replicas", str(replicas)]
    return shlex.join(["nats", "stream", "add", name, "--subjects", subject, *kept, "--defaults"])
