"""Two pull engines of workers on one consumer: the pinned one reads on from the position, the other waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.integration.conftest import eventually
from tests.integration.priority.kit import GROUP, GroupKit

from parti.config import Settings
from parti.core.priority import Policy, PriorityGroup, PullOptions
from parti.jetstream.connection import Connection
from parti.jetstream.priority import unpin
from parti.jetstream.pull import PullEngine, PullTuning
from parti.jetstream.pull_group import PullGroup
from parti.jetstream.wire import Wire
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics

TUNING = PullTuning(batch=10, max_bytes=0, expires_s=10.0, heartbeat_s=2.0, limit=200)


@dataclass
class Shared:
    """What both know: the position, and who handled what."""

    position: int = 1
    handled: list[tuple[str, int]] = field(default_factory=list)


class Engine:
    """One worker's engine: it acknowledges nothing, since the position says what is finished."""

    def __init__(self, name: str, group: GroupKit, shared: Shared) -> None:
        self.name = name
        self.reasons: list[str] = []
        self.held = 0
        self.finished = 0
        self._kit = group
        self._shared = shared
        self.metrics = Metrics(name)
        self.group = PullGroup(PullOptions(GROUP), self.metrics)
        self.group.adopt(PriorityGroup(GROUP, Policy.PINNED, timeout_s=1.0))

    async def start(self) -> None:
        self.connection = await Connection.open(Settings(nats=(self._kit.kit.url,)), name=self.name)
        self.engine = PullEngine(
            self.connection,
            Wire(self.connection.client),
            self,
            TUNING,
            self.metrics,
            Health(),
            stream=self._kit.stream,
            consumer=self._kit.consumer,
            prepare=self._prepare,
            group=self.group,
        )
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        await self.connection.close()

    async def _prepare(self, reason: str) -> bool:
        self.reasons.append(f"{'pinned' if self.group.pin_id else 'waiting'}: {reason}")
        if self.group.pin_id:
            await self._kit.kit.api.reset_consumer(self._kit.stream, self._kit.consumer, self._shared.position)
        return True

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        assert self.group.pin_id
        self._shared.handled.append((self.name, seq))
        self._shared.position = seq + 1


async def test_the_next_engine_goes_on_at_the_position_in_order_and_repeats_nothing(group: GroupKit) -> None:
    await group.make(PriorityGroup(GROUP, Policy.PINNED, timeout_s=1.0), max_ack_pending=10_000)
    shared = Shared()
    first, second = Engine("first", group, shared), Engine("second", group, shared)
    await first.start()
    try:
        sent = sorted(await group.publish(50))
        await eventually(lambda: len(shared.handled) == 50)
        await second.start()
        await group.standing(3)
        sent += sorted(await group.publish(50))
        await eventually(lambda: len(shared.handled) == 100)
        # It dies without a word: the pin ends by its timeout. What was on its way to it comes again by RESET.
        await first.stop()
        sent += sorted(await group.publish(50))
        await eventually(lambda: len(shared.handled) == 150)
    finally:
        await second.stop()
    assert [seq for _, seq in shared.handled] == sent
    assert {name for name, _ in shared.handled[:100]} == {"first"}
    assert {name for name, _ in shared.handled[100:]} == {"second"}
    assert first.reasons == ["waiting: start", "pinned: pinned"]
    assert second.reasons == ["waiting: start", "pinned: pinned"]


async def test_an_engine_that_loses_its_pin_handles_nothing_more_until_it_has_another(group: GroupKit) -> None:
    await group.make(PriorityGroup(GROUP, Policy.PINNED, timeout_s=60.0), max_ack_pending=10_000)
    shared = Shared()
    first, second = Engine("first", group, shared), Engine("second", group, shared)
    await first.start()
    try:
        sent = sorted(await group.publish(10))
        await eventually(lambda: len(shared.handled) == 10)
        await second.start()
        await group.standing(3)
        await unpin(group.kit.api, group.stream, group.consumer, GROUP)
        sent += sorted(await group.publish(10))
        await eventually(lambda: len(shared.handled) == 20)
        await eventually(lambda: any("pinned no more" in reason for reason in first.reasons))
        assert [seq for _, seq in shared.handled] == sent
        assert {name for name, _ in shared.handled[10:]} == {"second"}
        await second.stop()
        await unpin(group.kit.api, group.stream, group.consumer, GROUP)
        sent += sorted(await group.publish(10))
        await eventually(lambda: len(shared.handled) == 30)
    finally:
        await first.stop()
    assert [seq for _, seq in shared.handled] == sent
    assert [reason.partition(":")[0] for reason in first.reasons] == ["waiting", "pinned", "waiting", "pinned"]
    assert (first.metrics.pins_taken.value, first.metrics.pins_lost.value) == (2, 1)
