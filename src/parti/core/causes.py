"""Why a partition changed hands: one word for machines, one sentence for people.

The planner names the cause with each of its commands; the claim carries it while a move is under way, and the history
(`parti.model.history`) keeps it.
"""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """The planner's reasons, one word each."""

    NEW = "new"
    """Nobody has ever had it."""
    UNOWNED = "unowned"
    """Nobody had it: it was paused, or no longer wanted, and is wanted again."""
    RETURN = "return"
    """The same worker id, held by a new process."""
    JOIN = "join"
    """A worker that has only just come gets its share."""
    LEAVE = "leave"
    """The owner stopped in order."""
    CRASH = "crash"
    """The owner's lease ended without a word."""
    AWAY = "away"
    """The owner was expected back and did not come."""
    BALANCE = "balance"
    """Others had less."""
    LOAD = "load"
    """Others had less measured load."""
    PLACE = "place"
    """An operator wants it there."""
    DRAIN = "drain"
    """An operator wants its owner to have nothing."""
    PAUSE = "pause"
    """An operator wants nobody to handle it."""
    MIGRATION = "migration"
    """It goes back to the consumer that had it before the fleet."""
    RESUME = "resume"
    """It is wanted again before its owner had let go of it."""
    UNWANTED = "unwanted"
    """The source of partitions no longer names it."""
    GUEST = "guest"
    """A guest, such as a replay, gives it back."""
    FULL = "full"
    """Its owner came back with less room than it has partitions."""
    UNREADY = "unready"
    """Whoever was to get it could not take it, or did not get ready in time."""


_SENTENCES = {
    Cause.NEW: "it was new, and {target} was its first owner",
    Cause.UNOWNED: "nobody owned it",
    Cause.RETURN: "a new process holds the id {target} and goes on where the last one stopped",
    Cause.JOIN: "{target} had only just come and got its share",
    Cause.LEAVE: "{source} stopped in order",
    Cause.CRASH: "{source} was lost: its lease ended without a word",
    Cause.AWAY: "{source} was away and did not come back in time",
    Cause.BALANCE: "{source} had more than its share",
    Cause.LOAD: "{source} had more than its share of the load",
    Cause.PLACE: "an operator placed it on {target} ('parti move')",
    Cause.DRAIN: "an operator drained {source} ('parti drain')",
    Cause.PAUSE: "an operator paused it ('parti pause')",
    Cause.MIGRATION: "it went back to its old consumer ('parti migrate run --rollback')",
    Cause.RESUME: "it was wanted again before {target} had let go of it",
    Cause.UNWANTED: "the source of partitions no longer named it",
    Cause.GUEST: "{source}, a guest, gave it back",
    Cause.FULL: "{source} came back with room for fewer partitions",
    Cause.UNREADY: "whoever was to get it could not take it",
}


def sentence(cause: str, source: str, target: str, why: str = "") -> str:
    """Why a partition went from one worker to another; `why`, the planner's own words, where the word is unknown."""
    if cause not in set(Cause):
        return why or "no reason was recorded"
    text = _SENTENCES[Cause(cause)].format(source=source or "nobody", target=target or "nobody")
    # Only the planner's own words say who could not take it.
    return f"{text} ({why})" if cause == Cause.UNREADY and why else text
