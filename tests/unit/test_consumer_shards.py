"""A worker with several consumers: what one has delivered says nothing of the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.shards_bench import Server, World

from parti.core.progress import Progress
from parti.errors import ConfigError, PartiError, TooManySubjects
from parti.model.fleet import Grant
from parti.worker.starts import Granted

Make = Callable[..., World]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[World] = []

    def world(server: Server, record: Progress | None = None, **settings: Any) -> World:
        made.append(World(server, record, **settings))
        return made[-1]

    yield world
    for each in made:
        await each.stop()


async def after_a_crash(world: World, make: Make, *partitions: str) -> World:
    """The record is stored, the process dies, another one begins with the same handlers' memory."""
    record = world.record()
    await world.stop()
    again = make(world.server, record)
    again.handled = world.handled
    return await again.start(*partitions)


# ── the floor ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_shard_that_stalls_loses_nothing_when_the_process_dies(make: Make, retention: str) -> None:
    world = await make(Server(*"abababab", retention=retention)).start("a", "b")
    assert [shard.carried.subjects for shard in world.shards] == [("dc.a",), ("dc.b",)]
    world.serve(1)
    world.work()
    assert world.handled == [1, 3, 5, 7]
    assert world.position("b") <= 2
    again = await after_a_crash(world, make, "a", "b")
    await again.finish()
    assert sorted(again.handled) == list(range(1, 9))


async def test_a_stalled_shard_does_not_hold_back_the_positions_of_the_others(make: Make) -> None:
    world = await make(Server(*"abababab")).start("a", "b")
    world.serve(1)
    world.work()
    again = await after_a_crash(world, make, "a", "b")
    assert [shard.reached.next_seq for shard in again.shards] == [8, 1]
    assert again.server.consumers["parti-w0"].resets[-1] == 8
    await again.finish()
    assert again.handled == [1, 3, 5, 7, 2, 4, 6, 8]


async def test_a_shard_far_ahead_says_so_for_its_quiet_partitions_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parti.worker.consumer._FAR_AHEAD", 3)
    world = await make(Server(*"acacacac"), max_subjects=2).start("a", "b", "c")
    world.serve(1)
    world.work()
    record = world.record()
    assert {p: record.position(p, f"dc.{p}") for p in "abc"} == {"a": 8, "b": 8, "c": 1}
    again = make(world.server, record, max_subjects=2)
    await again.start("a", "b", "c")
    assert again.server.consumers["parti-w0"].resets[-1] == 8


async def test_a_quiet_shard_does_not_hold_back_the_floor_once_the_server_has_looked(make: Make) -> None:
    world = await make(Server(*"baaaaa")).start("a", "b")
    await world.finish()
    assert world.record().floor == 2
    world.heartbeat(2)
    world.heartbeat(1)
    assert world.record().floor == 7
    assert world.record().ahead == {}


async def test_a_new_session_of_one_shard_goes_back_for_its_own_messages_only(make: Make) -> None:
    world = await make(Server(*"abababab")).start("a", "b")
    world.serve(1)
    world.work()
    world.serve(2, 2)
    before = list(world.server.consumers["parti-w0"].resets)
    await world.break_session(2)
    assert world.server.consumers["parti-w0-2"].resets[-1] == 2
    assert world.server.consumers["parti-w0"].resets == before
    assert world.shards[0].engine._open
    await world.finish()
    assert sorted(world.handled) == list(range(1, 9))


async def test_a_lane_has_caught_up_when_its_own_shard_has(make: Make) -> None:
    world = await make(Server(*"abab", retention="workqueue")).start("a")
    world.serve(1)
    world.work()
    await world.update("a", "b")
    assert "b" in world.lanes.roster.behind()
    world.server.publish("a", "a")
    world.serve(1)
    world.work()
    world.lanes.floors.catch_up()
    assert world.record().behind["b"] <= 2
    world.serve(2)
    world.work()
    world.lanes.floors.catch_up()
    assert "b" not in world.lanes.roster.behind()
    assert world.handled == [1, 3, 5, 6, 2, 4]


# ── opening, emptying, filling ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_partition_that_opens_a_shard_gets_its_old_messages_and_the_new_ones(
    make: Make, retention: str
) -> None:
    world = await make(Server(*"abab", retention=retention)).start("a")
    await world.finish()
    await world.update("a", "b")
    world.server.publish("b", "a", "b")
    await world.finish()
    assert [seq for seq in world.handled if seq in (2, 4, 5, 7)] == [2, 4, 5, 7]
    assert sorted(world.handled) == list(range(1, 8))
    assert world.server.consumers["parti-w0-2"].filters == ["dc.b"]
    assert world.server.consumers["parti-w0-2"].config["metadata"]["parti.shard"] == "w0/2"
    marked = {"parti.prefix": "parti", "parti.fleet": "parti"}
    assert world.server.consumers["parti-w0"].config["metadata"] == marked


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_partitions_gained_by_several_shards_at_once_get_all_their_messages(make: Make, retention: str) -> None:
    world = await make(Server("a", retention=retention), max_subjects=1, consumer_shards=3).start("a")
    await world.finish()
    world.server.publish("b", "c")
    await world.update("a", "b", "c")
    await world.finish()
    await world.update("a")
    world.server.publish("b", "c")
    await world.update("b", "c")
    await world.finish()
    assert sorted(world.handled) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_shard_that_ran_empty_matches_nothing_and_is_filled_again(make: Make, retention: str) -> None:
    world = await make(Server(*"abcabc", retention=retention)).start("a", "b")
    await world.finish()
    await world.update("a")
    (placeholder,) = world.server.consumers["parti-w0-2"].filters
    assert "_none_parti-w0-2" in placeholder
    world.server.publish("b", "a", "c")
    await world.finish()
    await world.update("a", "c")
    world.server.publish("c", "a")
    await world.finish()
    await world.update("a", "b")
    await world.finish()
    assert sorted(world.handled) == list(range(1, 12))
    assert list(world.server.consumers) == ["parti-w0", "parti-w0-2"]


@pytest.mark.parametrize("shards", [1, 2])
async def test_an_empty_consumer_that_the_server_has_removed_is_made_again_when_it_is_needed(
    make: Make, shards: int
) -> None:
    """Nobody pulls from it, so nobody is told; the server removes what is unused for long."""
    world = await make(Server(*"ab"), consumer_shards=shards).start(*"ab"[: shards - 1])
    await world.finish()
    await world.update(*"ab"[: shards - 1], "c")
    await world.update(*"ab"[: shards - 1])
    world.server.consumers.pop("parti-w0" if shards == 1 else "parti-w0-2")
    world.server.publish("c")
    await world.update(*"ab"[: shards - 1], "c")
    await world.finish()
    assert 3 in world.handled


async def test_a_subject_stays_on_its_shard_when_there_is_room_before_it(make: Make) -> None:
    world = await make(Server(*"abc"), consumer_shards=3).start("a", "b", "c")
    await world.update("b", "c")
    await world.update("b", "c", "d")
    assert [shard.carried.subjects for shard in world.shards] == [("dc.d",), ("dc.b",), ("dc.c",)]


async def test_a_restart_finds_each_subject_where_it_was(make: Make) -> None:
    world = await make(Server(*"abc"), consumer_shards=3).start("a", "b", "c")
    await world.update("b", "c")
    await world.update("b", "c", "d")
    await world.stop()
    again = await make(world.server, world.record(), consumer_shards=3).start("b", "c", "d")
    assert [shard.carried.subjects for shard in again.shards] == [("dc.d",), ("dc.b",), ("dc.c",)]


async def test_a_shard_that_fails_leaves_the_others_with_the_new_set(make: Make) -> None:
    """Each shard has its part wholly or not at all, and nothing is lost either way."""
    world = await make(Server(*"abcd"), max_subjects=2, update_attempts=1).start("a", "b", "c")
    await world.finish()
    world.server.fail["parti-w0-2"] = 1
    with pytest.raises(PartiError):
        await world.update("a", "d")
    assert world.consumer.subjects == ("dc.a", "dc.c", "dc.d")
    world.server.publish(*"abcd")
    await world.finish()
    await world.update("a", "b", "c", "d")
    world.server.publish(*"abcd")
    await world.finish()
    assert sorted(world.handled) == list(range(1, 13))


async def test_fewer_shards_than_before_remove_what_is_too_many(make: Make) -> None:
    world = await make(Server(*"ababab", retention="workqueue")).start("a", "b")
    world.serve(1)
    world.work()
    record = world.record()
    await world.stop()
    again = make(world.server, record, max_subjects=2, consumer_shards=1)
    await again.start("a", "b")
    assert again.server.consumers["parti-w0"].filters == ["dc.a", "dc.b"]
    assert list(again.server.consumers) == ["parti-w0"]
    assert again.consumer.shards.alone


async def test_on_an_interest_stream_a_shard_too_many_is_read_until_it_is_empty(make: Make) -> None:
    world = await make(Server(*"ababab", retention="interest")).start("a", "b")
    world.serve(1)
    world.work()
    record = world.record()
    await world.stop()
    again = make(world.server, record, max_subjects=2, consumer_shards=1)
    again.handled = world.handled
    await again.start("a", "b")
    assert [shard.carried.subjects for shard in again.shards] == [("dc.a",), ("dc.b",)]
    await again.finish()
    assert sorted(again.handled) == list(range(1, 7))
    await again.update("a", "c")
    assert [shard.carried.subjects for shard in again.shards] == [("dc.a", "dc.c"), ()]
    record = again.record()
    await again.stop()
    await make(world.server, record, max_subjects=2, consumer_shards=1).start("a", "c")
    assert "parti-w0-2" in world.server.consumers, "nobody looks for it: the first consumer carries all"


# ── moves ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_granted_partition_is_fed_up_to_what_its_own_shard_has_let_pass(make: Make) -> None:
    """While `b` is another's, the second shard lets its messages go; the first one is far ahead or far behind."""
    world = await make(Server(*"abab")).start("a", granted=Granted({"a": Grant(fence_token=1, position=1)}, "t0"))
    world.consumer.grant(Granted({"a": Grant(fence_token=1, position=1)}, "t0", {"b": 2}))
    await world.update("a")
    assert [shard.carried.subjects for shard in world.shards] == [("dc.a",), ("dc.b",)]
    world.server.publish("b", "b", "a")
    world.serve(2)
    grants = {"a": Grant(fence_token=1, position=1), "b": Grant(fence_token=2, position=4)}
    world.consumer.grant(Granted(grants, "t0"))
    assert world.consumer.let_go(["a", "b"])
    world.server.publish("b")
    await world.finish()
    assert [seq for seq in world.handled if seq in (2, 4, 5, 6, 8)] == [4, 5, 6, 8]
    assert [seq for seq in world.handled if seq in (1, 3, 7)] == [1, 3, 7]


async def test_what_is_let_go_while_a_shard_is_being_changed_needs_an_update(make: Make) -> None:
    world = await make(Server(*"ab")).start("a", "b", granted=Granted({}, "t0"))
    async with world.shards[1].lock:
        assert not world.consumer.let_go(["a"])
    assert world.consumer.let_go(["a"])


# ── at the start ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_consumer_goes_back_for_partitions_that_the_record_does_not_know(make: Make) -> None:
    """The consumer may be gone while the record is there: it was on a hot mirror, or unused for long."""
    record = Progress(stream="DC", stream_created="t0", floor=7, covered=("dc.a",))
    for shards in (1, 2):
        world = make(Server(*"ababab"), record, max_subjects=2, consumer_shards=shards)
        await world.start("a", "b")
        assert world.position("b") <= 2


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_member_goes_on_where_each_partition_stands(make: Make, retention: str) -> None:
    grants = {"a": Grant(fence_token=1, position=3), "b": Grant(fence_token=1, position=2)}
    server = Server(*"ababab", retention=retention)
    if retention == "workqueue":
        del server.messages[1]
    world = await make(server).start("a", "b", granted=Granted(grants, "t0"))
    assert [server.consumers[shard.name].next for shard in world.shards] == [3, 2]
    await world.finish()
    assert sorted(world.handled) == [2, 3, 4, 5, 6]


async def test_a_stream_made_anew_is_noticed_by_one_shard_and_told_to_all(make: Make) -> None:
    world = await make(Server(*"abab")).start("a", "b")
    await world.finish()
    new = Server(*"ab")
    world.server.created, world.server.messages, world.server.last = "t1", new.messages, new.last
    world.server.consumers.clear()
    world.handled.clear()
    await world.break_session(1)
    await world.finish()
    assert sorted(world.handled) == [1, 2]
    assert world.record().stream_created == "t1"


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_consumer_that_is_another_workers_is_refused_by_both(make: Make) -> None:
    server = Server()
    await make(server, worker_id="w0-2", consumer_shards=1).start("c")
    with pytest.raises(ConfigError, match=r"'parti-w0-2' would be number 2 .*, but it is number 1 of worker 'w0-2'"):
        await make(server, worker_id="w0").start("a", "b")
    server.consumers.clear()
    await make(server, worker_id="w0").start("a", "b")
    with pytest.raises(ConfigError, match=r"would be number 1 of worker 'w0-2', but it is number 2 of worker 'w0'"):
        await make(server, worker_id="w0-2", consumer_shards=1).start("c")


async def test_a_worker_without_shards_leaves_alone_what_looks_like_its_shard(make: Make) -> None:
    server = Server()
    await make(server, worker_id="w0-2", consumer_shards=1).start("c")
    record = Progress(stream="DC", stream_created="t0", floor=1, covered=("dc.a", "dc.b"))
    await make(server, record, worker_id="w0", consumer_shards=1).start("a")
    assert server.consumers["parti-w0-2"].filters == ["dc.c"]


async def test_too_many_subjects_names_the_way_out(make: Make) -> None:
    world = make(Server(), max_subjects=2)
    with pytest.raises(TooManySubjects, match=r"5 subjects .* at most 4 .*max_subjects=2 x consumer_shards=2"):
        await world.start(*"abcde")


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_partition_that_was_still_behind_is_gone_back_for_after_a_restart(make: Make, shards: int) -> None:
    """Where finished messages are deleted, nothing is read from the stream: the consumer has to be set back again."""
    room = {"max_subjects": 2, "consumer_shards": shards}
    world = await make(Server(*"ababab", retention="workqueue"), **room).start("a")
    await world.finish()
    await world.update("a", "b")
    record = world.record()
    await world.stop()
    again = make(world.server, record, **room)
    await again.start("a", "b")
    await again.finish()
    assert again.handled == [2, 4, 6]
