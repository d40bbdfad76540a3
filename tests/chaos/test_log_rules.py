"""What workers may log while the server is killed, and what fails a run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from chaos.log_rules import AFTERMATH_S, ALLOWED, Circumstances, judge_logs, parse_line, unexcused

S = 1_000_000_000
KILLED_NS = 1_795_000_000 * S
ABOUT = Circumstances([(KILLED_NS, KILLED_NS + S)], {17})
AWAY = "not connected to nats://127.0.0.1:4222"
SOURCES = Path(__file__).parents[2] / "src" / "parti"


def line(event: str, *, after_s: float = 0.5, level: str = "error", **fields: object) -> str:
    at = datetime.fromtimestamp(KILLED_NS / S + after_s, UTC).isoformat()
    return json.dumps({"timestamp": at, "level": level, "event": event, "logger": "parti", **fields})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(line("connection suspended", level="warning"), id="a warning"),
        pytest.param(line("worker started", level="info"), id="an info"),
        pytest.param(line("positions not stored", error=AWAY), id="nothing can be stored while the server is away"),
        pytest.param(line("positions not stored", error=AWAY, after_s=3), id="nor a moment later"),
        pytest.param(line("message dead-lettered", reason="ValueError", seq=17, after_s=90), id="a refused message"),
    ],
)
def test_what_is_about_the_outage_or_wanted_is_allowed(text: str) -> None:
    assert not [*unexcused([text], ABOUT)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(line("positions not stored", error=AWAY, after_s=2 + AFTERMATH_S), id="long after the outage"),
        pytest.param(line("positions not stored", error=AWAY, after_s=-1), id="before it"),
        pytest.param(line("positions not stored", error="wrong last sequence"), id="for another reason"),
        pytest.param(line("positions not stored"), id="for no reason"),
        pytest.param(line("message dead-lettered", reason="ValueError", seq=18), id="a message nobody refused"),
        pytest.param(line("a connection callback failed", error="RuntimeError('closed')"), id="a callback"),
        pytest.param(line("Task exception was never retrieved\nfuture: <Task>", error=AWAY), id="a lost task"),
        pytest.param(line("Task exception was never retrieved", level="warning"), id="a lost task as a warning"),
        pytest.param(line("out of memory", level="critical"), id="a critical one"),
        pytest.param("Traceback (most recent call last):", id="a traceback that nobody logged"),
        pytest.param("[1, 2]", id="JSON that is no log line"),
    ],
)
def test_everything_else_is_found_also_during_an_outage(text: str) -> None:
    assert len([*unexcused([text], ABOUT)]) == 1


def test_console_lines_are_read_like_those_in_json() -> None:
    text = (
        "\x1b[2m2026-11-18T11:06:40.500000Z\x1b[0m [\x1b[31m\x1b[1merror    \x1b[0m] \x1b[1mpositions not stored"
        "\x1b[0m           [\x1b[34mparti.reader\x1b[0m] error='not connected to nats://x' seq=9"
    )
    found = parse_line(text)
    assert (found.level, found.event, found.seq) == ("error", "positions not stored", 9)
    assert found.at_ns == KILLED_NS + S // 2
    assert not [*unexcused([text], Circumstances([(found.at_ns - S, found.at_ns)]))]
    assert [*unexcused([text], Circumstances())] == [found]
    assert parse_line("2026-11-18T15:06:40Z [info     ] worker left").event == "worker left"
    long = parse_line("2026-11-18T15:06:40Z [error    ] dead letter not stored, will try again [parti.lanes] seq=3")
    assert (long.event, long.seq) == ("dead letter not stored, will try again", 3)


def test_the_cause_of_a_logged_exception_is_told() -> None:
    found = parse_line(line("a hook failed", exception="Traceback (most recent call last):\n  x\nValueError: no"))
    assert found.detail == "ValueError: no"


def test_findings_are_told_by_log(tmp_path: Path) -> None:
    (tmp_path / "w0-1.log").write_text(line("worker started", level="info") + "\n")
    (tmp_path / "w1-1.log").write_text(line("a hook failed") + "\n" + line("positions not stored", error=AWAY) + "\n")
    found = judge_logs(tmp_path.glob("w*.log"), ABOUT)
    assert {name: [each.event for each in lines] for name, lines in found.items()} == {"w1-1": ["a hook failed"]}


def test_a_line_that_was_cut_by_a_kill_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "w0-1.log").write_text(
        line("worker started", level="info") + "\n" + line("message dead-lettered")[:40]
    )
    assert not judge_logs(tmp_path.glob("w*.log"), ABOUT)


def test_every_error_that_is_allowed_exists_and_has_a_reason() -> None:
    logged = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    for rule in ALLOWED:
        assert f'"{rule.event}"' in logged, f"nothing logs {rule.event!r} any more; remove the rule"
        assert rule.why
        assert rule.refused or rule.detail, f"{rule.event!r} would be allowed for any cause during an outage"
