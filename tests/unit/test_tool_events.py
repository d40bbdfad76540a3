"""The example's events: the same from the same seed, skewed, in bursts, with the faults that were asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from examples import tool_events
from examples.tool_events import EVENT_TIME, KEY, START, STREAM, WAFERS, Event, generate, name_tool, publish_events

from parti.config import load_settings
from parti.embedded import Server
from parti.errors import ConfigError, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection


def flawless(count: int, *, tools: int = 50, seed: int = 1, skew: float = 1.1) -> Iterator[Event]:
    return generate(count, tools=tools, seed=seed, skew=skew, late_ratio=0, malformed_ratio=0, duplicate_ratio=0)


def tool(event: Event) -> str:
    return event.subject.split(".")[1]


def age(event: Event) -> timedelta:
    return event.at - datetime.fromisoformat(json.loads(event.payload)[EVENT_TIME])


def well_formed(event: Event) -> bool:
    try:
        found = json.loads(event.payload)
        datetime.fromisoformat(found[EVENT_TIME])
        return type(found["lot"]) is str and type(found["wafer"]) is int and type(found["step"]) is int
    except (ValueError, KeyError):
        return False


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    assert list(generate(500, seed=7)) == list(generate(500, seed=7))
    mine, other = ({event.payload for event in flawless(500, seed=seed)} for seed in (7, 8))
    assert len(mine) == 500
    assert not mine & other


def test_fewer_events_are_the_beginning_of_more() -> None:
    assert list(generate(100)) == list(generate(1000))[:100]


def test_an_event_is_what_the_schema_says() -> None:
    first = next(generate(1))
    assert set(json.loads(first.payload)) == {column.split()[0].rstrip(":") for column in COLUMNS}
    assert first.subject.startswith("dc.")
    assert first.subject.endswith(".completion")
    assert len(first.subject.split(".")) == 4
    assert first.headers["traceparent"].startswith("00-00000001")
    assert first.at >= START


COLUMNS = ("lot", "wafer", "recipe", "step", "started_at", "finished_at", "status", "measurements")


def test_a_payload_has_about_256_bytes() -> None:
    sizes = [len(event.payload) for event in generate(2000, malformed_ratio=0)]
    assert 245 < sum(sizes) / len(sizes) < 275


def test_work_is_skewed_as_zipf_says() -> None:
    share = Counter(tool(event) for event in flawless(60_000, tools=20, skew=1.0))
    harmonic = sum(1 / rank for rank in range(1, 21))
    assert share[name_tool(0)] / 60_000 == pytest.approx(1 / harmonic, rel=0.2)
    assert share[name_tool(0)] > 1.4 * share[name_tool(1)]
    alike = Counter(tool(event) for event in flawless(60_000, tools=20, skew=0.0))
    assert max(alike.values()) < 1.6 * min(alike.values())


def test_lots_are_25_wafers_of_one_tool_in_order_over_all_chambers() -> None:
    lots: dict[str, list[Event]] = {}
    for event in flawless(5000):
        lots.setdefault(json.loads(event.payload)["lot"], []).append(event)
    whole = [events for events in lots.values() if len(events) == WAFERS]
    assert len(whole) > 150
    for events in whole:
        assert [json.loads(event.payload)["wafer"] for event in events] == list(range(1, WAFERS + 1))
        assert len({tool(event) for event in events}) == 1
        assert len({event.subject for event in events}) == 4


def test_events_come_in_bursts_and_at_the_asked_rate() -> None:
    at = [event.at for event in generate(20_000, rate=500)]
    assert at == sorted(at)
    assert 20_000 / (at[-1] - at[0]).total_seconds() == pytest.approx(500, rel=0.1)
    busy = Counter(int(each.timestamp() * 20) for each in at)
    empty = int(at[-1].timestamp() * 20) - int(at[0].timestamp() * 20) + 1 - len(busy)
    assert max(busy.values()) > 3 * 25
    assert empty > len(busy) / 10


def test_some_events_are_late_by_minutes_the_others_by_seconds() -> None:
    ages = [age(event) for event in generate(20_000, late_ratio=0.05, malformed_ratio=0, duplicate_ratio=0)]
    late = [each for each in ages if each >= timedelta(minutes=2)]
    assert len(late) / len(ages) == pytest.approx(0.05, rel=0.15)
    assert max(late) <= timedelta(minutes=30)
    assert all(timedelta() < each < timedelta(seconds=3) for each in ages if each < timedelta(minutes=2))


def test_as_many_as_asked_for_are_malformed_in_different_ways() -> None:
    events = list(generate(20_000, malformed_ratio=0.05, late_ratio=0, duplicate_ratio=0))
    broken = [event for event in events if not well_formed(event)]
    assert len(broken) / len(events) == pytest.approx(0.05, rel=0.15)
    kinds = Counter(_fault(event.payload) for event in broken)
    assert set(kinds) == {"bytes", "cut off", "missing", "wrong type"}
    assert min(kinds.values()) > 100


def _fault(payload: bytes) -> str:
    try:
        found = json.loads(payload)
    except UnicodeDecodeError:
        return "bytes"
    except ValueError:
        return "cut off" if payload.startswith(b"{") else "bytes"
    return "missing" if not {*KEY, EVENT_TIME} <= found.keys() else "wrong type"


def test_duplicates_repeat_a_recent_event_under_an_id_of_their_own() -> None:
    events = list(generate(20_000, duplicate_ratio=0.05, late_ratio=0, malformed_ratio=0, msg_ids=True))
    seen: dict[bytes, int] = {}
    distances = []
    for number, event in enumerate(events):
        if event.payload in seen:
            distances.append(number - seen[event.payload])
            assert events[seen[event.payload]].subject == event.subject
        seen.setdefault(event.payload, number)
    assert len(distances) / len(events) == pytest.approx(0.05, rel=0.15)
    assert max(distances) < 1000
    assert len({event.headers["Nats-Msg-Id"] for event in events}) == 20_000
    keys = [tuple(json.loads(payload)[name] for name in KEY) for payload in seen]
    assert len(set(keys)) == len(keys)


def test_headers_carry_an_id_only_where_it_is_asked_for() -> None:
    assert set(next(generate(1)).headers) == {"traceparent"}
    assert set(next(generate(1, msg_ids=True)).headers) == {"traceparent", "Nats-Msg-Id"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": -1}, "count is -1"),
        ({"tools": 0}, "tools is 0: expected 1 to"),
        ({"chambers": 0}, "chambers is 0: expected 1 to"),
        ({"skew": -1.0}, "skew is -1"),
        ({"late_ratio": 1.5}, "late_ratio is 1.5: expected a share from 0 to 1"),
        ({"late_ratio": 0.5, "malformed_ratio": 0.6}, "more than 1 together"),
        ({"rate": 0.0}, "rate is 0"),
        ({"start": datetime(2026, 1, 1)}, "expected a time with its time zone"),
    ],
)
def test_senseless_arguments_are_refused_at_once(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        generate(**{"count": 1, **wrong})  # type: ignore[arg-type]


async def read_all(url: str, stream: str) -> list[tuple[str, bytes]]:
    connection = await Connection.open(load_settings({"nats": url}), name="test")
    try:
        api = JetStreamApi(connection)
        last = (await api.stream_info(stream)).last_seq
        found = [await api.next_on_subject(stream, ">", seq) for seq in range(1, last + 1)]
        return [(each.subject, each.data) for each in found if each]
    finally:
        await connection.close()


async def test_what_is_published_lies_in_the_stream_in_order(nats_server_factory: Callable[..., Server]) -> None:
    url = nats_server_factory().url
    events = list(generate(700, duplicate_ratio=0.1, msg_ids=True))
    told: list[int] = []
    assert await publish_events(url, events, on_progress=told.append) == 700
    assert await read_all(url, STREAM) == [(event.subject, event.payload) for event in events]
    assert told == sorted(told)
    assert told[-1] == 700
    assert await publish_events(url, events) == 0, "the ids are the same, so the stream takes none again"


async def test_a_stream_that_does_not_take_the_events_is_left_alone(nats_server: Server, stream_name: str) -> None:
    connection = await Connection.open(load_settings({"nats": nats_server.url}), name="test")
    try:
        await JetStreamApi(connection).ensure_stream({"name": stream_name, "subjects": [f"{stream_name}.>"]})
        with pytest.raises(ConfigError, match=r"the events need dc\.\*\.\*\.completion; name another stream"):
            await publish_events(nats_server.url, generate(10), stream=stream_name)
        assert (await JetStreamApi(connection).stream_info(stream_name)).messages == 0
    finally:
        await connection.close()


async def test_a_refused_event_ends_the_publishing(nats_server_factory: Callable[..., Server]) -> None:
    url = nats_server_factory().url
    connection = await Connection.open(load_settings({"nats": url}), name="test")
    try:
        config = {"name": STREAM, "subjects": ["dc.*.*.completion"], "max_msg_size": 100}
        await JetStreamApi(connection).ensure_stream(config)
    finally:
        await connection.close()
    with pytest.raises(PartiError, match=r"the server refused an event: .*message size exceeds maximum"):
        await publish_events(url, generate(10))


def test_the_command_publishes_and_says_so(
    nats_server_factory: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    url = nats_server_factory().url
    arguments = ["publish", "--server", url, "--count", "300", "--rate", "3000", "--seed", "3", "--tools", "5"]
    assert tool_events.main(arguments) == 0
    assert capsys.readouterr().out.startswith("300 events stored in DC, ")
    assert tool_events.main(arguments) == 0
    assert capsys.readouterr().out.startswith("0 events stored in DC, ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--count", "many"], "Invalid value for '--count'"),
        (["--tools", "0"], "tools is 0: expected 1 to 100000"),
        (["--stream", "a.b"], "stream is 'a.b': expected a name without spaces, dots, * and >"),
        (["--server", "http://127.0.0.1"], "must start with nats:// or tls://"),
        (["--speed", "1"], "No such option"),
    ],
)
def test_bad_input_is_one_line(arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool_events.main(["publish", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("tool_events: ")
    assert said in complaint
    assert complaint.count("\n") == 1


def test_a_time_that_is_given_is_where_the_events_begin() -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    assert timedelta() <= next(generate(1, start=start)).at - start < timedelta(minutes=1)
