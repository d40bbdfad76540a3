"""A migration's phases as a table, what an old consumer's state says of what is finished, and how it comes back.

    planned ──shadow──> shadow ──validate──> validated ──switch──> switched ──cleanup──> cleaned
       ^                   │                     │                    │                     │
       └───────────────────┴──────rollback───────┴────────────────────┴─────────────────────┘

    any ──abandon──> abandoned ──shadow──> shadow, or ──rollback──> planned

Each action can be done again: it goes on where it stopped. What was begun and has not ended has to be ended, or taken
back, before anything else is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from parti.errors import ConfigError
from parti.model.migration import Action, Phase

_STEPS: Mapping[Phase, Mapping[Action, Phase]] = {
    "planned": {"shadow": "shadow"},
    "shadow": {"shadow": "shadow", "validate": "validated"},
    "validated": {"shadow": "shadow", "validate": "validated", "switch": "switched"},
    "switched": {"switch": "switched", "validate": "switched", "cleanup": "cleaned"},
    "cleaned": {"validate": "cleaned", "cleanup": "cleaned"},
    "abandoned": {"shadow": "shadow"},
}
TABLE: Mapping[Phase, Mapping[Action, Phase]] = {
    phase: {**steps, "rollback": "planned", "abandon": "abandoned"} for phase, steps in _STEPS.items()
}
"""Where an action leads, by where the migration stands."""
ACTIONS: tuple[Action, ...] = get_args(Action)
_ALWAYS: tuple[Action, ...] = ("rollback", "abandon")
"""Possible in every phase, whatever was begun."""
FOREVER = datetime(2200, 1, 1, tzinfo=UTC)
"""Until when an old consumer is paused whose partition the fleet has."""


def next_phase(phase: Phase, doing: Action | Literal[""], action: Action) -> Phase:
    """Where an action leads to; raises `ConfigError` when it is not its turn."""
    if doing and action not in {doing, *_ALWAYS}:
        raise ConfigError(
            f"'{doing}' was begun and has not ended; end it with {_command(doing)}, or take everything back with "
            f"{_command('rollback')}"
        )
    found = TABLE[phase].get(action)
    if found is None:
        turn = " or ".join(_command(a) for a in _STEPS[phase])
        raise ConfigError(f"the migration is {_said(phase)}, so it is not the time for '{action}'; expected {turn}")
    return found


def _command(action: Action) -> str:
    return f"'parti migrate run --{'' if action in _ALWAYS else 'phase '}{action}'"


def _said(phase: Phase) -> str:
    return {"planned": "planned, or was rolled back", "shadow": "in its shadow phase"}.get(phase, phase)


# ── what an old consumer has finished ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer as the server describes it."""

    name: str
    config: Mapping[str, Any]
    subjects: tuple[str, ...]
    ack_floor: int
    delivered: int
    """The last stream sequence that it delivered."""
    ack_pending: int
    pending: int
    deliveries: int = 0
    redelivered: int = 0
    paused: bool = False

    @property
    def lag_msgs(self) -> int:
        """Messages that it has not finished."""
        return self.pending + self.ack_pending

    @property
    def stopped(self) -> bool:
        """Whether it delivers nothing until somebody resumes it: a pause for a while ends by itself."""
        until = self.config.get("pause_until")
        return self.paused and bool(until) and datetime.fromisoformat(str(until)) >= FOREVER

    @property
    def gave_up(self) -> bool:
        """Whether it has stopped trying some messages: nothing is in flight, and still the floor is behind."""
        return not self.ack_pending and self.ack_floor < self.delivered

    @property
    def position(self) -> int | None:
        """Everything on its subject below this is finished; None while messages are in flight.

        Measured on nats-server 2.15.1: with nothing in flight, all it has delivered is acknowledged, or given up
        after `max_deliver`, which is final for this consumer too. With messages in flight, the server tells how many
        but not which, and only what is at or below the floor is certain.
        """
        return None if self.ack_pending else max(self.delivered, self.ack_floor) + 1


# ── the way back ──────────────────────────────────────────────────────────────────────────────────────────────────

_SERVERS_OWN = frozenset({"pause_until"})
_NOT_RESET = frozenset({"new", "last", "last_per_subject"})


def is_reset(config: Mapping[str, Any]) -> bool:
    """Whether the server lets RESET move such a consumer to a sequence (nats-server 2.15: error 10204)."""
    return config.get("deliver_policy", "all") not in _NOT_RESET


def restored_config(config: Mapping[str, Any], position: int) -> dict[str, Any]:
    """The configuration of an old consumer that is made anew, to go on at a position.

    As it was, except where its deliver policy knows no way to a position: then it starts by sequence.
    """
    kept = {k: v for k, v in config.items() if k not in _SERVERS_OWN}
    if "metadata" in kept:
        own = {k: v for k, v in kept["metadata"].items() if not k.startswith("_nats.")}
        kept = {k: v for k, v in kept.items() if k != "metadata"} | ({"metadata": own} if own else {})
    kept.setdefault("name", kept.get("durable_name"))
    if is_reset(kept):
        return kept
    kept.pop("opt_start_time", None)
    return kept | {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, position)}
