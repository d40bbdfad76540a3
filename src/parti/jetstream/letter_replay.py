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

from parti.core.dead_letter import Letter, is_original, sendable_headers_of
from parti.errors import ConfigError, DecodeError, NotFound, PartiError, PermissionDenied
from parti.jetstream.api import StreamInfo
from parti.jetstream.letter_marks import ensure_marks
from parti.jetstream.letters import Letters
from parti.jetstream.scan import scan
from parti.model.fleet import decode, encode
from parti.model.letter_mark import LetterMark, mark_subject, marks_stream, replay_id
from parti.model.mapping import SubjectMapping
from parti.model.records import number_in
from parti.model.subjects import covers, within
from parti.setting_types import is_stream_name

_NO_MESSAGE, _NO_SEQUENCE, _NOT_DELETED = 10037, 10043, 10057
_AT_ONCE = 16
_NANOSECONDS = 1_000_000_000
_MARGIN_S = 5.0
_NOBODYS = ("$JS.", "$KV.", "$O.", "$SYS.")
_MOST_HEADERS = 65_535
"""Bytes of headers that a stream takes."""


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
        if stored.startswith(_NOBODYS):
            # A letter that somebody else wrote: whoever sends it may write where that one may not.
            raise ConfigError(f"{stored!r} is a subject of the server or of a bucket, and no message is sent there")
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
        await ensure_marks(self._api, self._letters.name)
        self._marks = await read_marks(self._letters)
        outcome, lanes = Outcome(), iter(_by_partition(chosen).values())
        for stream in {letter.stream for letter in chosen}:
            self._origins[stream] = await self._find(stream)

        async def send() -> None:
            for lane in lanes:
                await self._send_lane(lane, outcome, done)

        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
        return outcome

    @property
    def _all_marks(self) -> str:
        return mark_subject(self._letters.name, "*")

    async def _find(self, stream: str) -> _Origin | str:
        if not stream:
            return "it does not say which stream it came from"
        if not is_stream_name(stream):
            return f"its stream, {stream!r}, has a name that no stream can have"
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
                    if isinstance(error, PermissionDenied) and covers(self._all_marks, error.subject):
                        raise  # no letter can be sent without a mark
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
            await delete_letter(self._letters, letter)

    async def _publish(self, origin: _Origin, letter: Letter, mark: LetterMark | None) -> int:
        own, payload = await self._content(letter)
        subject = origin.subject_for(letter.subject)
        if mark and mark.state == "sending":
            message_id = mark.message_id
        else:
            message_id = replay_id(self._letters.name, self._letters.info.created, letter.seq)
            message_id += f":{mark.sent_as}" if mark else ""  # sent before, and again on purpose
            await self._note(letter, state="sending", after=origin.info.last_seq, message_id=message_id)
        headers = {
            **own,
            "Parti-Replay-Of": f"{self._letters.name}:{letter.seq}",
            "Nats-Msg-Id": message_id,
            "Nats-Expected-Stream": origin.info.name,
        }
        if 12 + sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items()) > _MOST_HEADERS:
            raise ConfigError(
                "its headers leave no room for those that a replay adds; publish it by other means, or purge it"
            )
        sent_as = await self._api.publish(subject, payload, headers=headers)
        await self._note(letter, state="sent", sent_as=sent_as, message_id=message_id)
        return sent_as

    async def _content(self, letter: Letter) -> tuple[dict[str, str], bytes]:
        """Headers and payload as the message had them; `ConfigError` when nobody has them any more."""
        found = await self._letters.get(letter.seq)
        if found is None:
            raise ConfigError("it is gone from the dead-letter stream")
        if "subject" in letter.cut:
            raise ConfigError(
                f"its subject, {letter.subject!r}, is no UTF-8 text or too long to be sent again; publish it by "
                f"other means, or purge it"
            )
        missing = " and ".join(sorted(letter.cut))
        if not missing:
            return letter.own_headers, found[1]
        original = await self._letters.original(letter)
        if original is None:
            place = "beside it in the dead-letter stream" if letter.original else f"in stream {letter.stream!r}"
            raise ConfigError(f"its {missing} was left {place} and is gone there")
        headers, complete = sendable_headers_of(original.header)
        if not complete:
            raise ConfigError("a header of it cannot be sent again as it was; publish it by other means, or purge it")
        return headers, original.data

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
                except DecodeError:
                    continue
                if number_in(seq) and mark.letters_created == letters.info.created:
                    marks[number_in(seq)] = mark
    except NotFound:
        return {}
    return marks


async def delete_letter(letters: Letters, letter: Letter) -> bool:
    """Remove a letter, and its original if that lies beside it; False when it was gone already."""
    removed = await _delete(letters, letter.seq)
    for seq in letter.original[1] if letter.original else ():
        # What somebody else wrote into a header is not believed: only originals go with a letter.
        stored = await letters.stored(letters.name, seq)
        if stored is not None and is_original(stored.subject):
            await _delete(letters, seq)
    return removed


async def _delete(letters: Letters, seq: int) -> bool:
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
