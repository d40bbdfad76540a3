"""The dead-letter stream: where a message or job goes that no attempt could handle, with its story in the headers."""

from __future__ import annotations

import asyncio
import random

import structlog

from parti.config import Settings
from parti.core.dead_letter import dead_letter_subject, write_letter
from parti.errors import ConfigError
from parti.jetstream.api import JetStreamApi
from parti.model.message import Message
from parti.telemetry.health import Health

_log = structlog.get_logger("parti.deadletters")
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 5.0
_SIGNAL = "dead-letters"


class DeadLetterStream:
    """Publishes to `<subject>.<origin stream>.<origin subject>`.

    A message is de-duplicated by origin stream and sequence, so a retry after an unknown outcome adds nothing.
    While the stream does not take messages, `send` keeps trying and the lane waits: nothing is lost, and the
    health signal `dead-letters` says so.
    """

    def __init__(
        self, api: JetStreamApi, health: Health, *, subject: str, max_payload: int, omit_large: bool
    ) -> None:
        self._api = api
        self._health = health
        self._subject = subject
        self._max_payload = max_payload
        self._omit_large = omit_large

    @classmethod
    async def open(
        cls,
        api: JetStreamApi,
        health: Health,
        settings: Settings,
        *,
        max_payload: int,
        omit_large: bool,
    ) -> DeadLetterStream:
        """Open the stream that the settings name, creating it when it is missing.

        `omit_large`: a payload that leaves no room for the headers may be left out, because the origin keeps it.
        """
        stream, subject = settings.dead_letter_stream, settings.dead_letter_subject
        info = await api.ensure_stream(
            {"name": stream, "subjects": [f"{subject}.>"], "storage": "file", "num_replicas": settings.replicas}
        )
        if f"{subject}.>" not in info.subjects:
            raise ConfigError(
                f"stream {stream!r} exists but does not take {subject + '.>'!r}; "
                f"choose another dead_letter_stream or dead_letter_subject"
            )
        return cls(api, health, subject=subject, max_payload=max_payload, omit_large=omit_large)

    async def send(self, message: Message, reason: str) -> int:
        """Store the message as a dead letter; returns its sequence there, and only when the server has it."""
        headers, payload = write_letter(message, reason, max_payload=self._max_payload, omit_large=self._omit_large)
        delay = _RETRY_MIN_S
        while True:
            try:
                seq = await self._api.publish(dead_letter_subject(self._subject, message), payload, headers=headers)
                self._health.clear(_SIGNAL)
                return seq
            except Exception as error:  # whatever it is, the lane must not be left behind
                self._health.raise_signal(_SIGNAL, f"dead letters cannot be stored: {error}")
                _log.error("dead letter not stored, will try again", seq=message.seq, error=str(error), delay_s=delay)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, _RETRY_MAX_S)
