"""The dead-letter stream: where a message or job goes that no attempt could handle, with its story in the headers."""

from __future__ import annotations

import asyncio
import random

import structlog

from parti.config import Settings
from parti.core.dead_letter import WrittenLetter, write_letter
from parti.errors import ApiError, ConfigError, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.letter_marks import ensure_marks
from parti.model.message import Message
from parti.telemetry.health import Health

_log = structlog.get_logger("parti.deadletters")
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 5.0
_SIGNAL = "dead-letters"
_TOO_LARGE = frozenset({10054, 10097})
"""The stream takes no message of this size, or no headers of this size."""
_SMALLEST = 4_096


class DeadLetterStream:
    """Publishes to `<subject>.<origin stream>.<origin subject>`; there is a letter for any message (`write_letter`).

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
        """Open the stream that the settings name, creating it when it is missing, and its marks if it may lead.

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
        if settings.may_lead:
            await _make_marks(api, stream)
        return cls(api, health, subject=subject, max_payload=max_payload, omit_large=omit_large)

    async def send(self, message: Message, reason: str, traceback: str = "") -> int:
        """Store the message as a dead letter; returns its sequence there, and only when the server has it."""
        delay, most = _RETRY_MIN_S, self._max_payload
        while True:
            try:
                letter = write_letter(
                    message,
                    reason,
                    root=self._subject,
                    max_payload=most,
                    kept=self._omit_large,
                    traceback=traceback,
                )
                seq = await self._store(letter)
                self._health.clear(_SIGNAL)
                return seq
            except Exception as error:  # whatever it is, the lane must not be left behind
                if isinstance(error, ApiError) and error.code in _TOO_LARGE:
                    most = max(_SMALLEST, most // 2)
                self._health.raise_signal(_SIGNAL, f"dead letters cannot be stored: {error}")
                _log.error("dead letter not stored, will try again", seq=message.seq, error=str(error), delay_s=delay)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, _RETRY_MAX_S)

    async def _store(self, letter: WrittenLetter) -> int:
        """Publish the original first, if the letter needs it: a letter that can be seen is complete."""
        stored = [await self._api.publish(letter.originals_subject, part) for part in letter.originals]
        if stored:
            letter = letter.referring_to(stored)
        return await self._api.publish(letter.subject, letter.payload, headers=letter.headers)


async def _make_marks(api: JetStreamApi, letters: str) -> None:
    """Make what operators need to send letters back. A worker does without, so nothing that fails here stops it."""
    try:
        await ensure_marks(api, letters)
    except PartiError as error:
        _log.warning("dead letters cannot be sent back yet", stream=letters, reason=str(error))
