"""Subject mapping on a real server: it and parti agree on every key, and its slots can be read like any partition."""

from __future__ import annotations

import asyncio
import random
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, becomes_pending, eventually

import parti
from parti.errors import ConfigError
from parti.jetstream.streams import ensure_mapped_stream, list_subjects
from parti.model.mapping import SubjectMapping

# A key may hold anything but white space and dots, as long as it is not a wildcard itself.
ASCII = string.ascii_letters + string.digits + "-_=/+!$%&@#~^|\\'\"`,;:?()[]{}<*"
UNICODE = "éßøñçæłğžàêАБвгдЖ你好世界東京한국語日本العربيةहिन्दीΩλπ√∞€😀🚚🧾"


def random_key(chance: random.Random) -> str:
    kind = chance.random()
    letters = UNICODE if kind < 0.2 else ASCII + UNICODE if kind < 0.3 else ASCII
    length = chance.randint(200, 900) if kind > 0.995 else chance.randint(2, 24)
    return "".join(chance.choices(letters, k=length))


def random_subjects(mapping: SubjectMapping, count: int) -> list[str]:
    chance = random.Random(mapping.partition_count)
    subjects: set[str] = set()
    while len(subjects) < count:
        subjects.add(".".join(random_key(chance) if t == "*" else t for t in mapping.source.split(".")))
    return sorted(subjects)


async def store(kit: Kit, subjects: Iterable[str]) -> None:
    """Publish without waiting for each, until all are stored."""
    count = (await kit.api.stream_info(kit.stream)).messages
    for subject in subjects:
        await kit.connection.publish(subject, b"x")
        count += 1
    await kit.connection.flush(30.0)

    async def stored() -> bool:
        return (await kit.api.stream_info(kit.stream)).messages == count

    await eventually(stored)


async def mapped_stream(kit: Kit, destination: str, source: str | None = None, **config: Any) -> SubjectMapping:
    """Replace the kit's stream by one that maps `<root>.*`."""
    await kit.delete_stream()
    mapping = SubjectMapping(source or f"{kit.root}.*", f"{kit.root}.{destination}")
    await ensure_mapped_stream(kit.api, kit.stream, mapping, replicas=1, storage="memory", **config)
    return mapping


async def test_the_server_and_parti_agree_on_100_000_keys(kit: Kit) -> None:
    mapping = await mapped_stream(kit, "{{wildcard(1)}}.{{partition(16,1)}}")
    published = random_subjects(mapping, 100_001)
    await store(kit, published)
    # More than the server lists at once, so this reads a second page as well.
    listed = await list_subjects(kit.api, kit.stream, ">")
    assert listed.complete
    computed = {mapping.apply(subject) for subject in published}
    assert len(computed) == len(published)
    assert len(listed.subjects ^ computed) == 0
    assert {mapping.partition_of(subject) for subject in published} == set(range(16))


@pytest.mark.parametrize(
    ("tokens", "destination"),
    [
        (2, "$2.$1.{{partition(1000,1,2)}}"),
        (3, "{{partition(7,3,1)}}.{{wildcard(2)}}.$1.x.$3"),
        (2, "$1.$2.{{partition(1000000,2,2,1)}}"),
        (2, "$1.{{ Partition( 97 ) }}.{{ Wildcard( 2 ) }}"),
    ],
)
async def test_they_agree_on_several_tokens_and_on_whole_subjects(kit: Kit, tokens: int, destination: str) -> None:
    mapping = await mapped_stream(kit, destination, source=f"{kit.root}.in{'.*' * tokens}")
    published = random_subjects(mapping, 25_000)
    await store(kit, published)
    listed = await list_subjects(kit.api, kit.stream, ">")
    assert len(listed.subjects) == 25_000
    assert len(listed.subjects ^ {mapping.apply(subject) for subject in published}) == 0


async def test_what_the_source_does_not_match_is_stored_as_it_is(kit: Kit) -> None:
    await kit.delete_stream()
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(4,1)}}}}")
    transform = {"src": mapping.source, "dest": mapping.destination}
    await kit.create_stream(subject_transform=transform)
    published = [f"{kit.root}.a", f"{kit.root}.a.b", f"{kit.root}.*"]
    await store(kit, published)
    listed = await list_subjects(kit.api, kit.stream, ">")
    assert listed.subjects == {mapping.apply(subject) or subject for subject in published}
    assert mapping.apply(published[2]) is None


async def test_the_mapped_stream_is_made_once_by_many_at_the_same_time(kit: Kit) -> None:
    await kit.delete_stream()
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(4,1)}}}}")
    calls = (ensure_mapped_stream(kit.api, kit.stream, mapping, replicas=1, retention="interest") for _ in range(20))
    infos = await asyncio.gather(*calls)
    assert len({info.created for info in infos}) == 1
    assert infos[0].subjects == (mapping.source,)
    assert infos[0].transform == (mapping.source, mapping.destination)
    assert infos[0].stored_subjects == (mapping.pattern,)
    assert (infos[0].retention, infos[0].storage, infos[0].allow_direct) == ("interest", "file", True)


async def test_a_stream_that_maps_the_same_is_taken_however_it_is_written(kit: Kit) -> None:
    mapping = await mapped_stream(kit, "{{wildcard(1)}}.{{partition(4,1)}}")
    same = SubjectMapping(mapping.source, f"{kit.root}.$1.{{{{ Partition(4, 1) }}}}")
    info = await ensure_mapped_stream(kit.api, kit.stream, same, replicas=1)
    assert info.transform == (mapping.source, mapping.destination)
    assert info.storage == "memory"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, "has no subject transform"),
        ({"subject_transform": {"src": "ROOT.*", "dest": "ROOT.$1.{{partition(8,1)}}"}}, "{{partition(8,1)}}"),
        ({"subject_transform": {"src": "ROOT.*", "dest": "ROOT.{{split(1,-)}}.x"}}, "{{split(1,-)}}"),
        (
            {"subject_transform": {"src": "ROOT.*", "dest": "ROOT.$1.{{partition(4,1)}}"}, "subjects": ["ROOT.a"]},
            "leaves out some of the mapping's source",
        ),
    ],
)
async def test_a_stream_that_maps_otherwise_is_refused_and_left_alone(
    kit: Kit, config: dict[str, Any], found: str
) -> None:
    given = {
        "subject_transform": {k: v.replace("ROOT", kit.root) for k, v in config["subject_transform"].items()}
        if "subject_transform" in config
        else None,
        "subjects": [s.replace("ROOT", kit.root) for s in config.get("subjects", ["ROOT.>"])],
    }
    await kit.delete_stream()
    await kit.create_stream(**given)
    before = await kit.api.stream_config(kit.stream)
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(4,1)}}}}")
    with pytest.raises(ConfigError) as caught:
        await ensure_mapped_stream(kit.api, kit.stream, mapping, replicas=1)
    assert found in str(caught.value)
    assert kit.stream in str(caught.value)
    assert "\n" not in str(caught.value)
    assert await kit.api.stream_config(kit.stream) == before


async def test_losing_the_race_to_another_configuration_is_judged_like_an_existing_stream(kit: Kit) -> None:
    await kit.delete_stream()
    mine = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(4,1)}}}}")
    theirs = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(5,1)}}}}")
    both = [ensure_mapped_stream(kit.api, kit.stream, m, replicas=1) for m in (mine, theirs)]
    results = await asyncio.gather(*both, return_exceptions=True)
    winner = (await kit.api.stream_info(kit.stream)).transform
    for mapping, result in zip((mine, theirs), results, strict=True):
        if winner == (mapping.source, mapping.destination):
            assert not isinstance(result, BaseException)
        else:
            assert isinstance(result, ConfigError)


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_consumers_filter_on_the_stored_subjects(kit: Kit, retention: str) -> None:
    mapping = await mapped_stream(kit, "$1.{{partition(4,1)}}", retention=retention)
    slots = [p.subject for p in mapping.partitions()]
    shares = {"one": slots[:1], "rest": slots[1:], "none": [mapping.source]}
    for name, subjects in shares.items():
        config = {"name": name, "durable_name": name, "ack_policy": "explicit", "filter_subjects": subjects}
        await kit.api.put_consumer(kit.stream, config, action="create")
    published = random_subjects(mapping, 200)
    await store(kit, published)
    expected = Counter("one" if mapping.partition_of(s) == 0 else "rest" for s in published)
    # The subjects that were published match nothing: the stream has only ever held the stored ones.
    await becomes_pending(kit.api, kit.stream, {"one": expected["one"], "rest": expected["rest"], "none": 0})
    assert expected["one"] > 0


async def test_a_worker_handles_the_slots_each_in_order(kit: Kit, record: Record) -> None:
    await kit.delete_stream()
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(8,1)}}}}")
    await kit.create_stream(subject_transform={"src": mapping.source, "dest": mapping.destination})
    keys = [f"key{number}" for number in range(50)]
    sent = await kit.publish(keys, each=4)
    subjects: dict[int, str] = {}

    async def handle(message: parti.Message) -> None:
        record.note(message)
        subjects[message.seq] = message.subject

    app = kit.app(handle, mapping.partitions(), subject=mapping.template)
    async with app.running():
        await record.reaches(200)
    by_slot: dict[str, list[int]] = {}
    for key, seqs in sent.items():
        by_slot.setdefault(f"*.{mapping.partition_of(kit.subject(key))}", []).extend(seqs)
        assert {subjects[seq] for seq in seqs} == {mapping.apply(kit.subject(key))}
    record.is_exactly(by_slot)
