"""What a priority group adds to a pull engine: fields of its requests, the pin, and the pulls that keep it.

The server takes a pin away from a client that has *sent* no pull with its id for the group's timeout. Neither a pull
that stands nor messages that flow count (nats-server 2.15.1): a quiet stream, a long batch and full hands would all
cost the pin. So a pinned client sends, after a third of that time, a pull that can bring nothing: it has room for one
byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import structlog

from parti.core.pin import Pin, PinChange
from parti.core.priority import DEFAULT_TIMEOUT_S, Policy, PriorityGroup, PullOptions
from parti.jetstream.wire import Wire, pub
from parti.model.headers import split_pin, status_of
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.pull_group")

_KEEP_SHARE = 1 / 3
_KEEPING = {"batch": 1, "max_bytes": 1, "expires": 1_000_000}


class PullGroup:
    """The group that an engine's pulls belong to; `adopt` tells what the consumer really has.

    `on_change` is called on the event loop for each pin that is taken or lost; it must be quick, and what it raises
    is logged.
    """

    def __init__(
        self, options: PullOptions, metrics: Metrics, *, on_change: Callable[[PinChange], None] = lambda change: None
    ) -> None:
        self.options = options
        self.pin: Pin | None = None
        """Only with the policy `pinned_client`."""
        self.moved: Callable[[str], None] = lambda reason: None
        """Called when a pin was lost."""
        self._keep_s = DEFAULT_TIMEOUT_S * _KEEP_SHARE
        self._pulled_s = 0.0
        self._metrics = metrics
        self._on_change = on_change
        self._keeping = b""
        self._keeping_inbox = b""
        self._kept_with = ""

    def adopt(self, group: PriorityGroup | None) -> None:
        """Follow what the consumer has; between two sessions only."""
        if group is None or group.policy is not Policy.PINNED:
            self.pin = None
            self._note(())
            return
        self.pin = self.pin or Pin()
        self._keep_s = (group.timeout_s or DEFAULT_TIMEOUT_S) * _KEEP_SHARE

    @property
    def waiting(self) -> bool:
        """Whether somebody else may be pinned: of several pulls without an id all but one would stand for nothing."""
        return self.pin is not None and not self.pin.id

    @property
    def pin_id(self) -> str:
        """The id that pulls are sent with; empty: none."""
        return self.pin.id if self.pin is not None else ""

    def fields(self, now_s: float) -> dict[str, Any]:
        """What a pull says that is sent now."""
        self._pulled_s = now_s
        return self.options.fields(self.pin_id)

    # ── the pin ───────────────────────────────────────────────────────────────────────────────────────────────

    def on_message(self, header: bytes | None) -> bool:
        """A message came on a pull without an id; whether it pins this client."""
        return self.pin is not None and self._note(self.pin.on_message(split_pin(header or b"")[1]))

    def on_messages(self) -> None:
        """Messages came: if pulls carry an id, it is good."""
        if self.pin is not None and not self.pin.sure:
            self.pin.on_message(self.pin.id)

    def on_status(self, code: int, text: str, sent_id: str) -> bool:
        """A pull was answered with a status; whether the pin was lost by it."""
        return self.pin is not None and self._note(self.pin.on_status(code, text, sent_id))

    def leave(self) -> None:
        """This client pulls no more."""
        if self.pin is not None:
            self._note(self.pin.on_leave())

    def on_reconnect(self) -> None:
        """The connection broke, or is back."""
        if self.pin is not None:
            self.pin.on_reconnect()

    def _note(self, changes: tuple[PinChange, ...]) -> bool:
        pin_id = self.pin_id
        self._metrics.pinned.value = float(bool(pin_id))
        for change in changes:
            (self._metrics.pins_taken if change.taken else self._metrics.pins_lost).inc()
            word = "pinned" if change.taken else "pinned no more"
            _log.info(word, group=self.options.group, pin=change.pin_id, reason=change.reason)
            try:
                self._on_change(change)
            except Exception:
                _log.exception("a callback of a pin failed", group=self.options.group)
        return bool(changes)

    # ── keeping it ────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, wire: Wire) -> None:
        """Subscribe, on the present connection, for answers to the pulls that keep the pin."""
        self.deafen(wire)
        if self.pin is not None:
            inbox = wire.new_inbox()
            self._keeping_inbox = inbox.encode()
            self._keeping = wire.subscribe(inbox, self._on_kept)

    def deafen(self, wire: Wire) -> None:
        """End that subscription."""
        if self._keeping:
            wire.unsubscribe(self._keeping)
            self._keeping = b""

    def keep(self, wire: Wire, next_subject: bytes, now_s: float) -> None:
        """Say that this client is there, if nothing has said so for a while."""
        if self.pin_id and self._keeping and now_s - self._pulled_s >= self._keep_s:
            body = {**_KEEPING, **self.fields(now_s)}
            self._kept_with = self.pin_id
            wire.write(pub(next_subject, json.dumps(body).encode(), self._keeping_inbox))

    def _on_kept(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
        code, text = status_of(header or b"")
        if self.on_status(code, text, self._kept_with):
            self.moved(f"{code} {text}".strip())
