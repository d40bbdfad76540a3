"""The pin machine against a model of a server: several clients, events that come late, every kind of switch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.trials import examples_of

from parti.core.pin import Pin, PinChange, PinState
from parti.model.headers import split_pin

NAMES = ("a", "b")
CLIENTS = st.sampled_from(NAMES)
IDS = st.text("abcXYZ019", min_size=1, max_size=22)


@dataclass
class Client:
    """A client that pulls without end, as the engine does, and hears of things late, sometimes in another order."""

    pin: Pin = field(default_factory=Pin)
    on_its_way: list[tuple[Any, ...]] = field(default_factory=list)
    changes: list[PinChange] = field(default_factory=list)
    told_lost: set[str] = field(default_factory=set)

    def hear(self, index: int = 0) -> None:
        kind, *said = self.on_its_way.pop(index)
        changes = self.pin.on_message(*said) if kind == "message" else self.pin.on_status(*said)
        if kind == "status" and said[0] == 423:
            assert all(change.pin_id == said[2] for change in changes), "a pin was lost for another's refusal"
        self.changes += changes
        self.told_lost |= {change.pin_id for change in changes if not change.taken}


class Server:
    """Pins as nats-server 2.15.1 does: lazily, at the next message."""

    def __init__(self) -> None:
        self.pin = ""
        self.waiting: deque[list[str]] = deque()
        self._next = 0

    def pull(self, client: str, sent_id: str, clients: dict[str, Client]) -> None:
        if self.pin and sent_id and sent_id != self.pin:
            clients[client].on_its_way.append(("status", 423, "Nats-Pin-Id mismatch", sent_id))
        else:
            self.waiting.append([client, sent_id])

    def publish(self, clients: dict[str, Client]) -> None:
        for _ in range(len(self.waiting)):
            client, sent_id = waiting = self.waiting.popleft()
            if not self.pin and not sent_id:
                self._next += 1
                self.pin = f"pin-{self._next}"
            elif sent_id != self.pin or not self.pin:
                if sent_id:
                    clients[client].on_its_way.append(("status", 423, "Nats-Wrong-Pin-Id", sent_id))
                else:
                    self.waiting.append(waiting)
                continue
            clients[client].on_its_way.append(("message", self.pin))
            return


class PinnedGroup(RuleBasedStateMachine):
    """Clients pull with what they know; the server switches when it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.clients = {name: Client() for name in NAMES}
        self.given: set[str] = set()

    @rule(name=CLIENTS)
    def pull(self, name: str) -> None:
        client = self.clients[name]
        assert client.pin.id not in client.told_lost
        self.server.pull(name, client.pin.id, self.clients)

    @rule()
    def publish(self) -> None:
        self.server.publish(self.clients)
        self.given.add(self.server.pin)

    @rule(name=CLIENTS)
    def pull_and_publish(self, name: str) -> None:
        self.pull(name)
        self.publish()

    @rule()
    def unpin_or_time_out(self) -> None:
        self.server.pin = ""

    @rule()
    def change_leader(self) -> None:
        self.server.pin = ""
        for name, sent_id in self.server.waiting:
            self.clients[name].on_its_way.append(("status", 409, "Leadership Change", sent_id))
        self.server.waiting.clear()

    @rule(name=CLIENTS)
    def reconnect(self, name: str) -> None:
        client = self.clients[name]
        client.on_its_way.clear()
        self.server.waiting = deque(each for each in self.server.waiting if each[0] != name)
        client.pin.on_reconnect()
        assert client.pin.state is (PinState.UNSURE if client.pin.id else PinState.UNPINNED)

    @precondition(lambda self: any(client.on_its_way for client in self.clients.values()))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        """In any order: inside a cluster, messages and statuses may come by different ways."""
        client = data.draw(st.sampled_from([client for client in self.clients.values() if client.on_its_way]))
        client.hear(data.draw(st.integers(0, len(client.on_its_way) - 1)))

    @invariant()
    def what_changed_fits_what_is_believed(self) -> None:
        for client in self.clients.values():
            held = ""
            for change in client.changes:
                assert bool(held) is not change.taken, "taken and lost take turns"
                assert change.taken or change.pin_id == held, "only what is held can be lost"
                held = change.pin_id if change.taken else ""
            assert client.pin.id == held
            assert held not in client.told_lost
            assert not held or held in self.given

    def teardown(self) -> None:
        """Once everybody has been heard, and has pulled and heard again, one client is pinned, and knows it."""
        for _ in range(4):
            for name, client in self.clients.items():
                while client.on_its_way:
                    client.hear()
                self.server.pull(name, client.pin.id, self.clients)
            if all(client.pin.id != self.server.pin for client in self.clients.values()):
                self.server.pin = ""  # nobody pulls with it: it times out
            self.server.publish(self.clients)
        for client in self.clients.values():
            while client.on_its_way:
                client.hear()
        believers = [client.pin.id for client in self.clients.values() if client.pin.id]
        assert believers == [self.server.pin]


TestPinnedGroup = PinnedGroup.TestCase
TestPinnedGroup.settings = settings(max_examples=examples_of(120), stateful_step_count=40, deadline=None)


@given(
    pin_id=IDS,
    forged=st.none() | IDS,
    other=st.binary(max_size=20).filter(lambda b: b"\r" not in b and b"\n" not in b),
)
def test_only_the_id_that_the_server_has_put_last_is_read(pin_id: str, forged: str | None, other: bytes) -> None:
    block = b"NATS/1.0\r\nX: " + other + b"\r\n"
    if forged is not None:
        block += b"Nats-Pin-Id: " + forged.encode() + b"\r\n"
    assert split_pin(block + b"\r\n")[1] == (forged or "")
    assert split_pin(block + b"Nats-Pin-Id: " + pin_id.encode() + b"\r\n\r\n") == (block + b"\r\n", pin_id)


@given(st.binary(max_size=40))
def test_any_block_of_bytes_can_be_looked_at(block: bytes) -> None:
    assert split_pin(block) == (block, "")
