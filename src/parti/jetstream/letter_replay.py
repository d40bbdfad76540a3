"""Sends dead letters back to the subjects that they came from: in order, none lost, none twice.

Each letter is marked before it is published and again when the origin has stored it; only then it is removed. Whoever
finds the first mark without the second looks into the origin, from where it ended before, for the message with the
letter's id. So a run that was killed at any moment can be repeated at any later time: the origin's own window for
duplicates is a second line of defence, not the first. Where the origin deletes what is handled, that look may come
too late; then nothing is sent, and the letter is reported as doubtful.

Order: the letters of one partition are sent one after the other, by their place in the origin. If one cannot be sent,
those behind it stay; other partitions go on.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from parti.core.dead_letter import Letter
from parti.errors import ConfigError, NotFound, PartiError
from parti.jetstream.api import StreamInfo
from parti.jetstream.letters import Letters
from parti.jetstream.scan import scan
from parti.model.fleet import decode, encode
from parti.model.letter_mark import KEEP_S, LetterMark, mark_subject, marks_stream, replay_id
from parti.model.mapping import SubjectMapping
from parti.model.subjects import within

_NO_MESSAGE, _NO_SEQUENCE, _NOT_DELETED = 10037, 10043, 10057
_AT_ONCE = 16
_NANOSECONDS = 1_000_000_000
_MARGIN_S = 5.0


@dataclass(slots=True)
class Outcome:
    """What became of the letters."""

    sent: dict[int, int] = field(default_factory=dict)
    """Letter by letter, the new sequence in the origin; those found sent by an earlier run included."""
    before: int = 0
    """How many of these an earlier run had sent."""
    failed: dict[int, str] = field(default_factory=dict)
    """Letters that are still where they were, and why."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """A stream that letters go back to."""

    info: StreamInfo
    duplicates_s: float
    """How long it recognises a message id."""

    def subject_for(self, stored: str) -> str:
        """Where to publish so that the message lies under `stored` again; `ConfigError` when nobody can tell."""
        if self.info.transform:
            source, destination = self.info.transform
            try:
                mapping = SubjectMapping(source, destination)
                subject = mapping.undo(stored)
                if subject is None and mapping.apply(stored) is None and within(stored, self.info.subjects):
                    subject = stored
            except ConfigError:
                subject = None
            if subject is None:
                raise ConfigError(
                    f"stream {self.info.name!r} maps subjects, and which one ends as {stored!r} cannot be told"
                )
            return subject
        if not within(stored, self.info.subjects):
            raise ConfigError(f"stream {self.info.name!r} no longer takes {stored!r}")
        return stored


class LetterReplay:
    """Sends letters of one dead-letter stream; `keep` leaves them there, marked as sent."""

    def __init__(self, letters: Letters, *, keep: bool, again: bool = False) -> None:
        """`again`: also those that are marked as sent, as new messages."""
        self._letters = letters
        self._api = letters.api
        self._keep = keep
        self._again = again
        self._marks: dict[int, LetterMark] = {}
        self._origins: dict[str, _Origin | str] = {}
        self._who = _who()

    async def run(self, chosen: Sequence[Letter], done: Callable[[int], None] = lambda number: None) -> Outcome:
        """Send these; `done` is told how many are dealt with, again and again.

        Raises when the marks cannot be kept: nothing has been sent then.
        """
        await self._ensure_marks()
        self._marks = await read_marks(self._letters)
        outcome, lanes = Outcome(), iter(_by_partition(chosen).values())
        for stream in {letter.stream for letter in chosen}:
            self._origins[stream] = await self._find(stream)

        async def send() -> None:
            for lane in lanes:
                await self._send_lane(lane, outcome, done)

        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
        return outcome

    async def _ensure_marks(self) -> None:
        name = marks_stream(self._letters.name)
        info = await self._api.ensure_stream(
            {
                "name": name,
                "description": "which dead letters were sent back to their streams",
                "subjects": [mark_subject(self._letters.name, "*")],
                "retention": "limits",
                "storage": "file",
                "max_msgs_per_subject": 1,
                "max_age": KEEP_S * _NANOSECONDS,
                "num_replicas": (await self._api.stream_config(self._letters.name)).get("num_replicas", 1),
                "allow_direct": True,
            }
        )
        if mark_subject(self._letters.name, "*") not in info.subjects:
            raise ConfigError(
                f"stream {name!r} belongs to somebody else, and marks of replays cannot be kept; rename it"
            )

    async def _find(self, stream: str) -> _Origin | str:
        if not stream:
            return "it does not say which stream it came from"
        try:
            info, config = await self._api.stream_info(stream), await self._api.stream_config(stream)
        except NotFound:
            return f"its stream {stream!r} is gone"
        return _Origin(info, config.get("duplicate_window", 0) / _NANOSECONDS)

    async def _send_lane(self, lane: Iterable[Letter], outcome: Outcome, done: Callable[[int], None]) -> None:
        blocked = ""
        for letter in lane:
            if blocked:
                outcome.failed[letter.seq] = f"{blocked}, and it comes later in the same partition"
            else:
                try:
                    await self._send(letter, outcome)
                except PartiError as error:
                    outcome.failed[letter.seq] = str(error)
                    # What can never be sent holds up nobody; what may be sent later must not be overtaken.
                    blocked = "" if isinstance(error, ConfigError) else f"letter {letter.seq} was not sent"
            done(1)

    # ── one letter ────────────────────────────────────────────────────────────────────────────────────────────

    async def _send(self, letter: Letter, outcome: Outcome) -> None:
        origin = self._origins[letter.stream]
        if isinstance(origin, str):
            raise ConfigError(origin)
        mark = self._marks.get(letter.seq)
        if mark and mark.state == "sent" and not self._again:
            sent_as = mark.sent_as
            outcome.before += 1
        elif mark and mark.state == "sending" and (found := await self._find_sent(origin, letter, mark)):
            sent_as = found
            outcome.before += 1
            await self._note(letter, state="sent", sent_as=found, message_id=mark.message_id)
        else:
            sent_as = await self._publish(origin, letter, mark)
        outcome.sent[letter.seq] = sent_as
        if not self._keep:
            await delete_letter(self._letters, letter.seq)

    async def _publish(self, origin: _Origin, letter: Letter, mark: LetterMark | None) -> int:
        subject, payload = origin.subject_for(letter.subject), await self._payload(letter)
        if mark and mark.state == "sending":
            message_id = mark.message_id
        else:
            message_id = replay_id(self._letters.name, self._letters.info.created, letter.seq)
            message_id += f":{mark.sent_as}" if mark else ""  # sent before, and again on purpose
            await self._note(letter, state="sending", after=origin.info.last_seq, message_id=message_id)
        headers = {
            **letter.own_headers,
            "Parti-Replay-Of": f"{self._letters.name}:{letter.seq}",
            "Nats-Msg-Id": message_id,
            "Nats-Expected-Stream": origin.info.name,
        }
        sent_as = await self._api.publish(subject, payload, headers=headers)
        await self._note(letter, state="sent", sent_as=sent_as, message_id=message_id)
        return sent_as

    async def _payload(self, letter: Letter) -> bytes:
        found = await self._letters.get(letter.seq)
        if found is None:
            raise ConfigError("it is gone from the dead-letter stream")
        if not letter.payload_left_out:
            return found[1]
        stored = await self._letters.stored(letter.stream, letter.origin_seq)
        if stored is None:
            raise ConfigError(f"its payload was left in stream {letter.stream!r} and is gone there")
        return stored.data

    async def _find_sent(self, origin: _Origin, letter: Letter, mark: LetterMark) -> int:
        """The sequence under which an earlier run has sent it; 0: it has not.

        Raises `ConfigError` when it may have been, but what was sent is no longer there to tell.
        """
        api, connection = self._api, self._letters.connection
        stored = scan(connection, api, origin.info.name, start=mark.after + 1, subjects=(letter.subject,))
        async with aclosing(stored) as messages:
            async for message in messages:
                if message.headers.get("Nats-Msg-Id") == mark.message_id:
                    return message.seq
        age_s = (datetime.now(UTC) - mark.at).total_seconds()
        removed = origin.info.retention != "limits" or origin.info.first_seq > mark.after + 1
        if removed and age_s > origin.duplicates_s - _MARGIN_S and not self._again:
            raise ConfigError(
                f"an earlier run may have sent it {age_s:.0f} s ago, and stream {origin.info.name!r} no longer holds "
                f"what would tell; look whether it was handled, then use --again to send it or purge it"
            )
        return 0

    async def _note(self, letter: Letter, **said: Any) -> None:
        mark = LetterMark(letters_created=self._letters.info.created, by=self._who, at=datetime.now(UTC), **said)
        await self._api.publish(mark_subject(self._letters.name, letter.seq), encode(mark))


def _by_partition(letters: Sequence[Letter]) -> Mapping[tuple[str, str], list[Letter]]:
    lanes: dict[tuple[str, str], list[Letter]] = {}
    for letter in sorted(letters, key=lambda letter: (letter.origin_seq, letter.seq)):
        lanes.setdefault((letter.stream, letter.partition), []).append(letter)
    return lanes


async def read_marks(letters: Letters) -> dict[int, LetterMark]:
    """The marks of the letters of this stream; none of another one that had its name."""
    marks: dict[int, LetterMark] = {}
    name = marks_stream(letters.name)
    try:
        async with aclosing(scan(letters.connection, letters.api, name, payload=True)) as found:
            async for message in found:
                seq = message.subject.rpartition(".")[2]
                try:
                    mark = decode(message.data, LetterMark)
                except (msgspec.ValidationError, msgspec.DecodeError):
                    continue
                if seq.isdecimal() and mark.letters_created == letters.info.created:
                    marks[int(seq)] = mark
    except NotFound:
        return {}
    return marks


async def delete_letter(letters: Letters, seq: int) -> bool:
    """Remove a letter; False when it was gone already."""
    try:
        await letters.api.call(f"STREAM.MSG.DELETE.{letters.name}", {"seq": seq, "no_erase": True})
    except PartiError as error:
        if getattr(error, "code", 0) in {_NO_MESSAGE, _NO_SEQUENCE, _NOT_DELETED}:
            return False
        raise
    return True


def _who() -> str:
    """Who works here, for those who read the marks later."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return socket.gethostname()
