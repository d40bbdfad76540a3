"""What the console tells of a real fleet, read from its events: moves, dead letters, jobs, lags, outages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.conftest import Kit, open_kit
from tests.integration.console.looking import console_of, events_of
from tests.integration.fleet import FLEET, PARTITIONS, running

import parti
from parti.embedded import Server
from parti.jetstream.kv import Bucket
from parti.jobs import Job, JobApp
from parti.model.fleet import MemberRecord, decode

pytestmark = pytest.mark.usefixtures("no_settings_of_this_machine")


async def test_a_browser_that_comes_later_sees_the_same_as_one_that_has_followed(kit: Kit) -> None:
    async with running(kit, 1) as fleet, console_of(kit) as console, events_of(console) as first:
        await first.until(lambda picture: len(picture["partitions"]) == len(PARTITIONS))
        await fleet.join()
        await fleet.settles()

        def shared(picture: dict[str, dict[str, Any]]) -> bool:
            owners = {shown[0] for shown in picture["partitions"].values() if shown[1] == "owned"}
            # First owners, and then half of them again.
            return len(owners) == 2 and len(picture["moves"]) >= 12 and picture["fleet"]["moving"] == 0

        await first.until(shared)
        async with events_of(console) as second:
            await second.until(shared)
            assert second.names == ["snapshot"]
            for section in ("partitions", "moves"):
                assert second.picture[section] == first.picture[section]
            assert second.picture["workers"].keys() == first.picture["workers"].keys()
        causes = [move[4] for move in first.picture["moves"].values()]
        assert causes.count("new") == len(PARTITIONS)
        assert causes.count("join") == len(PARTITIONS) // 2
        assert first.names[0] == "snapshot"
        assert set(first.names[1:]) == {"delta"}


async def test_a_page_has_the_picture_in_it_and_gets_only_what_comes_after(kit: Kit) -> None:
    async with running(kit, 1), console_of(kit) as console:
        page = (await console.ask("/")).body
        first = json.loads(page.partition('id="picture">')[2].partition("</script>")[0])
        assert len(first["picture"]["workers"]) == 1
        async with events_of(console, since=first["at"]) as events:
            events.picture = first["picture"]
            known = set(first["picture"]["points"])
            await events.until(lambda picture: set(picture["points"]) > known)
            assert set(events.names) <= {"delta", ""}
        for unknown in ("another-1", first["at"].partition("-")[0] + "-999999", "x"):
            async with events_of(console, since=unknown) as events:
                await events.until(lambda picture: bool(picture["workers"]))
                assert events.names[0] == "snapshot"


async def test_no_secret_of_the_fleet_is_in_the_events(kit: Kit) -> None:
    async with running(kit, 1), console_of(kit) as console:
        entry = await Bucket(kit.api, f"b{kit.root}").get("ids.worker-0")
        assert entry
        token = decode(entry.value, MemberRecord).token
        assert len(token) > 8
        async with events_of(console) as events:
            await events.until(lambda picture: bool(picture["workers"]))
            assert "worker-0" in str(events.picture)
            assert token not in str(events.picture)


async def test_dead_letters_are_listed_without_their_payloads_and_vanish_when_they_are_removed(kit: Kit) -> None:
    async def reject(message: parti.Message) -> None:
        raise parti.Reject("no such order: 4711")

    app = kit.app(reject, PARTITIONS, **FLEET)
    async with app.running(), console_of(kit) as console, events_of(console) as events:
        await kit.publish(["p1", "p2"], data=b"what nobody may see")
        await events.until(lambda picture: len(picture["letters"]) == 2)
        letter = events.picture["letters"]["1"]
        assert letter[1:8] == ["p1", kit.stream, 1, kit.subject("p1"), "no such order: 4711", 1, "worker-0"]
        assert events.picture["fleet"]["letters"] == {"stream": f"d{kit.root}", "total": 2}
        assert "what nobody" not in str(events.picture)
        await kit.api.call(f"STREAM.MSG.DELETE.d{kit.root}", {"seq": 1})
        await events.until(lambda picture: list(picture["letters"]) == ["2"])


async def test_jobs_are_shown_once_there_are_any(kit: Kit) -> None:
    gate = asyncio.Event()

    async def work(job: Job) -> None:
        job.progress(40, "half-way")
        await gate.wait()

    settings = {name: kit.settings[name] for name in ("nats", "prefix", "dead_letter_stream", "dead_letter_subject")}
    jobs = JobApp(stream=f"J{kit.stream}", subject=f"j{kit.root}.>", report_interval_s=0.05, **settings)
    jobs.handler(work)
    async with running(kit, 1), console_of(kit) as console, events_of(console) as events:
        await events.until(lambda picture: bool(picture["points"]))
        assert not events.picture["fleet"]["jobs"]
        try:
            async with jobs.running(log_level="error"):
                await kit.api.publish(f"j{kit.root}.work", b"{}")
                await events.until(lambda picture: [job["percent"] for job in picture["jobs"].values()] == [40.0])
                (job,) = events.picture["jobs"].values()
                assert (job["state"], job["phrase"]) == ("running", "half-way")
                gate.set()
                await events.until(lambda picture: [job["state"] for job in picture["jobs"].values()] == ["done"])
                assert events.picture["fleet"]["jobs"]["counts"]["done"] == 1
        finally:
            for name in (f"J{kit.stream}", f"KV_w{kit.root}-jobs"):
                await kit.delete_stream(name)


async def test_a_server_that_is_away_is_said_and_taken_back(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    kit = await open_kit(server, stream_name)
    await kit.create_stream(storage="file")
    async with running(kit, 1), console_of(kit) as console, events_of(console) as events:
        await events.until(lambda picture: picture["fleet"]["link"].get("up") is True)
        server.kill_sync()
        await events.until(lambda picture: picture["fleet"]["link"]["up"] is False)
        link = events.picture["fleet"]["link"]
        assert link["connected"] is False
        assert link["since"]
        assert link["reason"]
        async with events_of(console) as late:  # who comes now sees what was known, and that it is old
            await late.next()
            await late.until(lambda picture: picture["fleet"]["link"]["up"] is False)
            assert len(late.picture["partitions"]) == len(PARTITIONS)
        server.restart_sync()
        await events.until(lambda picture: picture["fleet"]["link"]["up"] is True)
    await kit.connection.close()


async def test_rate_and_lag_are_measured_from_the_start(kit: Kit) -> None:
    async with running(kit, 1), console_of(kit) as console, events_of(console) as events:
        await events.until(lambda picture: len(picture["points"]) >= 3)
        assert all(value == [0.0, 0] for value in events.picture["points"].values())
        assert events.picture["fleet"]["lag"] == 0
