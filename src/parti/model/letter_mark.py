"""What is noted of a dead letter that is sent back to its stream: before, so that it is not sent twice, and after."""

from __future__ import annotations

from typing import Literal

import msgspec

from parti.model.records import TAG, Count, Moment, check_time

MARKS_SUFFIX = "-replays"
KEEP_S = 30 * 86_400
"""How long a mark is kept."""


class LetterMark(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="letter-mark"
):
    """The newest word on one dead letter."""

    state: Literal["sending", "sent"]
    """`sending`: it is about to be published, or was, by a process that may have died since."""
    letters_created: str
    """Creation time of the dead-letter stream: sequences of one that was made anew mean other letters."""
    message_id: str = ""
    """What it is, or was, published as."""
    after: Count = 0
    """Last sequence of the origin before it was published."""
    sent_as: Count = 0
    """Its new sequence in the origin."""
    by: str = ""
    at: Moment

    def __post_init__(self) -> None:
        check_time(self.at)


def marks_stream(letters: str) -> str:
    """The stream that keeps the marks of a dead-letter stream."""
    return f"{letters}{MARKS_SUFFIX}"


def mark_subject(letters: str, seq: int | str) -> str:
    """Where the mark of one letter is."""
    return f"{marks_stream(letters)}.{seq}"


def replay_id(letters: str, created: str, seq: int) -> str:
    """The message id of a dead letter that is sent again: the same however often it is tried."""
    return f"parti-replay:{letters}:{created}:{seq}"
