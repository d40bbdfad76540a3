"""The hub of the console: all browsers get everything, and one that does not read is dropped."""

from __future__ import annotations

import asyncio

from parti.console.hub import Hub


async def test_every_browser_gets_every_event_in_order() -> None:
    hub = Hub(room=3)
    with hub.subscribed() as one, hub.subscribed() as other:
        for event in (b"1", b"2", b"3"):
            hub.publish(event)
        assert [await one.next() for _ in range(3)] == [b"1", b"2", b"3"]
        assert [await other.next() for _ in range(3)] == [b"1", b"2", b"3"]
    assert len(hub) == 0


async def test_a_browser_that_does_not_read_is_dropped_and_the_others_go_on() -> None:
    hub, told = Hub(room=2), asyncio.Event()
    with hub.subscribed(told.set) as slow, hub.subscribed() as quick:
        for number in range(10):
            hub.publish(b"%d" % number)
            assert await quick.next() == b"%d" % number
        assert told.is_set()
        assert slow.dropped
        assert await slow.next() is None  # and nothing of what waited
        assert hub.dropped == 1
        assert len(hub) == 1


async def test_who_waits_is_told_of_the_end() -> None:
    hub = Hub()
    with hub.subscribed() as browser:
        waiting = asyncio.create_task(browser.next())
        await asyncio.sleep(0)
        hub.close()
        assert await waiting is None
        assert hub.full  # nobody is let in any more


def test_there_is_room_for_so_many_browsers_only() -> None:
    hub = Hub(most=2)
    with hub.subscribed(), hub.subscribed():
        assert hub.full
    assert not hub.full
