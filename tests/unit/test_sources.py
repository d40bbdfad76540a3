"""Partition sources without a server: what users may pass, what comes out of it, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from parti.coordination.sources import (
    Callback,
    Discovered,
    FromKey,
    Mapped,
    PartitionSource,
    SourceContext,
    SourceReader,
    Static,
    as_source,
    resolve,
)
from parti.errors import ConfigError, OverlappingSubjects, SourceFailed, SubjectMismatch
from parti.model.mapping import SubjectMapping
from parti.model.partition import PartitionLike, Template

TOOLS = Template("dc.{tool}.{chamber}")
NO_SERVER = cast(Any, None)
CONTEXT = SourceContext(api=NO_SERVER, bucket=NO_SERVER, stream="DC", template=TOOLS)
MAPPING = SubjectMapping("orders.*", "orders.$1.{{partition(4,1)}}")


class Tools:
    """A source of somebody's own."""

    def __init__(self, partitions: Sequence[PartitionLike] = ("e1.c1",)) -> None:
        self.refresh_s: float | None = 1.0
        self.partitions = partitions
        self.error: Exception | None = None

    async def load(self, context: SourceContext) -> Sequence[PartitionLike]:
        if self.error:
            raise self.error
        return self.partitions


def outcome(reader: SourceReader) -> tuple[bool, str | None]:
    return reader.changed, reader.last_error


def ids(values: Sequence[PartitionLike]) -> list[str]:
    return [p.id for p in resolve(TOOLS, values)]


# ── from values to partitions ─────────────────────────────────────────────────────────────────────────────────────


def test_values_of_any_form_become_partitions_each_once_in_natural_order() -> None:
    values: list[Any] = ["e10.c1", ["e2", "c1"], {"tool": "e2", "chamber": "c10"}, ("e2", "c9"), "e2.c1"]
    values.append(TOOLS.partition("e10.c1"))
    assert ids(values) == ["e2.c1", "e2.c9", "e2.c10", "e10.c1"]
    assert ids([]) == []


def test_the_result_does_not_depend_on_the_order_of_the_values() -> None:
    values = [f"e{i}.c{i % 7:02}" for i in range(50)] + ["e1.c1", "e01.c1", "e001.c1"]
    assert ids(values) == ids(values[::-1])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("e1", "'e1'"),
        ("e1.c1.x", "'e1.c1.x'"),
        (["e1", "c 1"], "'c 1'"),
        ({"tool": "e1"}, "{'tool': 'e1'}"),
        (7, "7"),
        (None, "None"),
        (b"e1.c1", "b'e1.c1'"),
    ],
)
def test_a_value_that_does_not_fit_is_named_in_one_line(value: Any, named: str) -> None:
    with pytest.raises(SubjectMismatch) as caught:
        resolve(TOOLS, ["e2.c2", value])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "pair"),
    [
        (["e1.c1", "*.c1"], ("e1.c1", "*.c1")),
        (["*.c1", "e1.*"], ("*.c1", "e1.*")),
        (["e1.c1", "*.*"], ("e1.c1", "*.*")),
        (["*.c2", "e3.c1", "e4.c2"], ("*.c2", "e4.c2")),
    ],
)
def test_partitions_that_share_a_message_are_refused_by_name(values: list[str], pair: tuple[str, str]) -> None:
    with pytest.raises(OverlappingSubjects) as caught:
        resolve(TOOLS, values)
    assert all(repr(one) in str(caught.value) for one in pair)


def test_partitions_with_wildcards_that_share_no_message_are_fine() -> None:
    assert ids(["*.c2", "*.c10", "e1.c1", "e2.c1"]) == ["*.c2", "*.c10", "e1.c1", "e2.c1"]
    assert [p.id for p in resolve(Template("dc.all"), ["dc.all"])] == ["dc.all"]


def test_thousands_of_partitions_with_wildcards_are_checked_in_no_time() -> None:
    values = [f"*.c{i}" for i in range(10_000)] + [f"e{i}.x{i}" for i in range(10_000)]
    begin = time.process_time()
    assert len(resolve(TOOLS, values)) == 20_000
    with pytest.raises(OverlappingSubjects, match=r"'\*\.c9999' and 'e1\.c9999'"):
        resolve(TOOLS, [*values, "e1.c9999"])
    # Comparing all pairs would take minutes; this takes about a second.
    assert time.process_time() - begin < 15


# ── what users may pass ───────────────────────────────────────────────────────────────────────────────────────────


def test_everything_a_user_may_pass_becomes_its_source() -> None:
    own = Tools()
    assert isinstance(as_source(None), Discovered)
    assert as_source(own) is own
    mapped = as_source(MAPPING)
    assert isinstance(mapped, Mapped)
    assert mapped.mapping is MAPPING
    assert isinstance(as_source(lambda: ["e1.c1"]), Callback)
    assert isinstance(as_source(["e1.c1"]), Static)
    for source in (Static([]), Discovered(), FromKey("partitions"), Callback(list), Mapped(MAPPING)):
        assert isinstance(source, PartitionSource)
        assert as_source(source) is source


async def test_an_iterator_is_used_up_once_and_its_list_kept() -> None:
    source = as_source(f"e1.c{i}" for i in range(3))
    assert [list(await source.load(CONTEXT)) for _ in range(2)] == [["e1.c0", "e1.c1", "e1.c2"]] * 2
    assert source.refresh_s is None


@pytest.mark.parametrize(
    "value", ["e1.c1", b"e1", {"tool": "e1", "chamber": "c1"}, 7, TOOLS.partition("a.b"), Discovered]
)
def test_anything_else_is_refused_in_one_line(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^partitions is the ") as caught:
        as_source(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make", [Discovered, partial(FromKey, "k"), partial(Callback, list), partial(Mapped, MAPPING)]
)
@pytest.mark.parametrize("refresh_s", [0, -1.0, float("nan")])
def test_a_refresh_must_be_a_time(make: Any, refresh_s: float) -> None:
    with pytest.raises(ConfigError, match="refresh_s is"):
        make(refresh_s=refresh_s)


@pytest.mark.parametrize("key", ["", "a b", "a..b", ".a", "a.*", "é"])
def test_a_key_must_be_one_that_a_bucket_takes(key: str) -> None:
    with pytest.raises(ConfigError, match="is not a key"):
        FromKey(key)


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Registry:
    async def __call__(self) -> list[str]:
        return ["e1.c1"]

    async def tools(self, context: SourceContext) -> list[str]:
        return [f"{context.stream}.c1"]


async def of_context(context: SourceContext) -> list[str]:
    return [f"{context.stream}.c1"]


async def of_prefix(prefix: str, context: SourceContext) -> list[str]:
    return [f"{prefix}.{context.stream}"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Registry(), "e1.c1"),
        (Registry().tools, "DC.c1"),
        (of_context, "DC.c1"),
        (lambda context: [f"{context.stream}.c2"], "DC.c2"),
        (lambda: of_context(CONTEXT), "DC.c1"),
        (lambda: iter(["e1.c3"]), "e1.c3"),
        (lambda limit=10: [f"e1.c{limit}"], "e1.c10"),
        (partial(of_prefix, "p"), "p.DC"),
        ({"e1.c4": 1}.keys, "e1.c4"),
    ],
)
async def test_a_function_is_called_as_it_is_written(function: Any, expected: str) -> None:
    assert list(await Callback(function).load(CONTEXT)) == [expected]


async def test_a_plain_function_does_not_run_on_the_event_loop() -> None:
    names: list[str] = []

    def slow() -> list[str]:
        names.append(threading.current_thread().name)
        return []

    await Callback(slow).load(CONTEXT)
    assert names != [threading.current_thread().name]


def test_a_function_with_two_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes 2 arguments"):
        Callback(lambda a, b: [])


@pytest.mark.parametrize("returned", [None, "e1.c1", {"tool": "e1"}, 7])
async def test_a_function_that_returns_no_list_has_failed(returned: Any) -> None:
    with pytest.raises(SourceFailed, match=r"expected a list of partitions"):
        await Callback(lambda: returned).load(CONTEXT)


async def test_what_a_function_raises_is_told_in_one_line() -> None:
    async def broken() -> list[str]:
        raise RuntimeError("no database\nat all")

    with pytest.raises(SourceFailed, match=r"broken failed: RuntimeError: no database at all$"):
        await Callback(broken).load(CONTEXT)


async def test_a_function_that_does_not_come_back_is_not_called_again_until_it_has() -> None:
    release, calls = threading.Event(), 0

    def stuck() -> list[str]:
        nonlocal calls
        calls += 1
        if calls > 1:
            release.wait(30)
        return [f"e1.c{calls}"]

    source = Callback(stuck)
    reader = SourceReader(source, CONTEXT)
    first = await reader.read()
    reader.timeout_s = 0.05
    try:
        assert await reader.read() == first
        assert reader.last_error == "Callback(" + source._name + ", refresh_s=5.0) did not answer within 0.05 s"
        assert await reader.read() == first
        assert "the call before has not come to an end" in str(reader.last_error)
        assert calls == 2
    finally:
        release.set()
    reader.timeout_s = 10.0
    async with asyncio.timeout(10):
        while reader.last_error:
            await asyncio.sleep(0.01)
            await reader.read()
    assert calls > 2
    assert reader.changed


# ── reading again and again ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_first_reading_raises_what_went_wrong() -> None:
    source = Tools(["e1"])
    reader = SourceReader(source, CONTEXT)
    with pytest.raises(SubjectMismatch):
        await reader.read()
    source.error = ValueError("odd")
    with pytest.raises(SourceFailed, match="failed: ValueError: odd"):
        await reader.read()
    source.error, source.partitions = None, ["e1.c1"]
    assert [p.id for p in await reader.read()] == ["e1.c1"]
    assert reader.changed


async def test_a_change_is_told_once_in_one_line() -> None:
    source = Tools(["e1.c1", "e1.c2"])
    reader = SourceReader(source, CONTEXT)
    with capture_logs() as logs:
        await reader.read()
        assert outcome(reader) == (True, None)
        source.partitions = ["e1.c2", "e1.c1", "e1.c1"]
        await reader.read()
        assert outcome(reader) == (False, None)
        source.partitions = ["e1.c2", "e1.c3"]
        await reader.read()
        assert outcome(reader) == (True, None)
    assert [line["event"] for line in logs] == ["partitions changed"] * 2
    assert (logs[1]["added"], logs[1]["removed"], logs[1]["partitions"]) == (["e1.c3"], ["e1.c1"], 2)


@pytest.mark.parametrize(
    ("error", "partitions"),
    [
        (SourceFailed("gone"), ["e1.c1"]),
        (OSError("gone"), ["e1.c1"]),
        (None, ["e1"]),
        (None, ["e1.c1", "*.c1"]),
        (None, cast(Any, None)),
    ],
)
async def test_a_failing_reading_keeps_the_last_list_and_is_told_once(
    error: Exception | None, partitions: list[str]
) -> None:
    source = Tools(["e1.c1", "e1.c2"])
    reader = SourceReader(source, CONTEXT)
    good = await reader.read()
    source.error, source.partitions = error, partitions
    with capture_logs() as logs:
        assert [await reader.read() for _ in range(3)] == [good] * 3
        changed, reason = outcome(reader)
        assert not changed
        assert reason
        source.error, source.partitions = None, ["e1.c9"]
        assert [p.id for p in await reader.read()] == ["e1.c9"]
    assert outcome(reader) == (True, None)
    assert [line["log_level"] for line in logs] == ["error", "info", "info"]


async def test_a_reading_that_is_cancelled_is_no_failure() -> None:
    async def never() -> list[str]:
        await asyncio.Event().wait()
        return []

    reader = SourceReader(Callback(never), CONTEXT)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert reader.last_error is None
