"""Tracebacks of handlers tell the real error: of a group, of another process, of a cause that nobody raised."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from parti.core.retry import GiveUp, Reject, RetryPolicy, after_failure, describe
from parti.core.tracebacks import traceback_of


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def parse(text: str) -> int:
    return int(text)


def failing(text: str) -> BaseException:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        parse(text)
    return caught.value


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class SpeechlessGroup(ExceptionGroup[Exception]):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class LyingGroup(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> tuple[Exception, ...]:
        raise RuntimeError("nothing to be seen here")


class EndlessGroup(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> tuple[Exception, ...]:
        return (EndlessGroup("again", [ValueError("bad")]),) * 1_000_000


def nested(depth: int) -> Exception:
    error: Exception = ValueError("at the bottom")
    for _ in range(depth):
        error = ExceptionGroup("level", [error])
    return error


# ── one line ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ExceptionGroup("two failed", [ValueError("bad"), KeyError("k")]),
            "ExceptionGroup: two failed (2 sub-exceptions): first: ValueError: bad",
        ),
        (
            ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("no disk")])]),
            "ExceptionGroup: outer (1 sub-exception): first: OSError: no disk",
        ),
        (
            BaseExceptionGroup("ended", [KeyboardInterrupt()]),
            "BaseExceptionGroup: ended (1 sub-exception): first: KeyboardInterrupt",
        ),
        (
            ExceptionGroup("mute", [SpeechlessError()]),
            "ExceptionGroup: mute (1 sub-exception): first: SpeechlessError",
        ),
        (SpeechlessGroup("mute", [ValueError("bad")]), "SpeechlessGroup: first: ValueError: bad"),
        (LyingGroup("lies", [ValueError("bad")]), "LyingGroup: lies (1 sub-exception): first: ValueError: bad"),
        (EndlessGroup("lies", [ValueError("bad")]), "EndlessGroup: lies (1 sub-exception): first: ValueError: bad"),
    ],
    ids=["two", "nested", "base", "speechless", "speechless group", "lying", "endless"],
)
def test_a_group_is_described_with_its_first_error(error: BaseException, line: str) -> None:
    assert describe(error) == line
    assert after_failure(RetryPolicy(attempts=1), 1, error) == GiveUp("dead_letter", line)


def test_the_first_error_of_a_group_is_told_however_long_the_text_of_the_group_is() -> None:
    line = describe(ExceptionGroup("x" * 10_000, [ValueError("bad"), ValueError("worse")]))
    assert line.endswith("first: ValueError: bad")
    assert len(line) <= 500
    secret = "s3cret-never-shown" * 20
    assert "s3cret" not in describe(ExceptionGroup(f"nats://me:{secret}@h", [ValueError(f"password='{secret}'")]))


def test_a_group_of_thousands_of_levels_is_described_and_traced() -> None:
    error = nested(10_000)
    assert describe(error).startswith("ExceptionGroup: level (1 sub-exception): first: ExceptionGroup: level")
    assert len(traceback_of(raised(error))) <= 4_000


# ── tracebacks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_traceback_of_a_group_shows_where_its_errors_were_raised() -> None:
    errors = [failing("one"), failing("two"), failing("three"), failing("four")]
    text = traceback_of(raised(BaseExceptionGroup("four failed", errors)))
    for word in ("one", "two", "three"):
        assert f"ValueError: invalid literal for int() with base 10: '{word}'" in text
    assert "'four'" not in text
    assert text.count("in parse\n") == 3
    first = "ValueError: invalid literal for int() with base 10: 'one'"
    assert text.endswith(f"\nExceptionGroup: four failed (4 sub-exceptions): first: {first}")


def test_a_traceback_of_a_group_shows_what_led_to_its_errors() -> None:
    outer = ValueError("outer")
    outer.__cause__ = failing("inner")
    text = traceback_of(raised(ExceptionGroup("group", [ExceptionGroup("nested", [outer])])))
    assert text.index("'inner'") < text.index("outer")
    assert "in parse\n" in text


@pytest.mark.parametrize("kind", [LyingGroup, EndlessGroup])
def test_a_group_that_lies_about_its_errors_is_traced_all_the_same(kind: Callable[..., BaseException]) -> None:
    text = traceback_of(raised(kind("group", [failing("x"), SpeechlessError()])))
    assert "invalid literal" in text
    assert "SpeechlessError" in text
    assert len(text) <= 4_000


def test_errors_that_led_to_one_another_in_a_circle_are_traced_once_each() -> None:
    first, second = raised(ValueError("first")), raised(ValueError("second"))
    group = raised(BaseExceptionGroup("group", [first, second]))
    first.__cause__, second.__cause__, group.__cause__ = second, group, first
    text = traceback_of(group)
    assert text.count("\nValueError: first\n") == text.count("\nValueError: second\n") == 1
    assert text.count("\nExceptionGroup: ") == 1


def test_a_cause_that_was_never_raised_is_told_in_its_own_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("no answer") from OSError("the line is cut")
    text = traceback_of(caught.value)
    assert text.startswith("OSError: the line is cut\nTraceback (most recent call last):\n")
    assert text.endswith("RuntimeError: no answer")


def test_an_error_in_another_process_is_told_with_where_it_was_raised() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        error = pool.submit(parse, "x").exception()
    assert error is not None
    text = traceback_of(raised(error))
    assert "in parse\n" in text
    assert text.count("ValueError: invalid literal for int() with base 10: 'x'") == 2
    assert text.endswith("'x'")


def test_of_a_long_text_of_a_cause_the_end_is_told_and_the_error_itself_too() -> None:
    lines = "\n".join(f'  File "deep.py", line {n}, in recurse' for n in range(1_000))
    cause = RuntimeError(f"{lines}\nValueError: at the bottom; nats://me:s3cret@h")
    with pytest.raises(KeyError) as caught:
        raise KeyError("outer") from cause
    text = traceback_of(caught.value)
    assert "ValueError: at the bottom; nats://h" in text
    assert text.endswith("KeyError: 'outer'")
    assert len(text) <= 4_000


def test_an_error_that_only_steers_has_a_traceback_when_another_one_led_to_it() -> None:
    assert traceback_of(raised(Reject("no"))) == ""
    with pytest.raises(Reject) as caught:
        raise Reject("no") from failing("x")
    assert "in parse\n" in traceback_of(caught.value)
    assert traceback_of(ValueError("never raised")) == ""
