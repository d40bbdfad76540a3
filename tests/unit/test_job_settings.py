"""`[jobs]`: profiles by machine, length and traffic; relations that are refused in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from parti.cli.main import main
from parti.core.job_profiles import machine_size, tuned
from parti.core.priority import Policy, PriorityGroup, PullOptions
from parti.errors import ConfigError, HandlerMissing, SubjectMismatch
from parti.jobs import Job, JobApp, JobSettings, load_jobs
from parti.jobs.settings import jobs_reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PARTI_")]:
        monkeypatch.delenv(name)


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_jobs(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_those_of_the_source_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    jobs = load_jobs()
    assert (jobs.max_capacity, jobs.max_ack_pending, jobs.ack_wait_s) == (14, 14, 300)
    assert (jobs.heartbeat_interval_s, jobs.fetch_batch_size, jobs.fetch_timeout_s) == (30, 5, 2)


@pytest.mark.parametrize(
    ("cores", "size", "batch"),
    [(1, "small", 2), (2, "small", 2), (4, "small", 2), (8, "medium", 5), (12, "medium", 5), (16, "large", 10)],
)
def test_the_batch_follows_the_cores(cores: int, size: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert machine_size(cores) == size
    assert load_jobs().fetch_batch_size == batch
    assert load_jobs({"profile": "large"}).fetch_batch_size == 10
    assert load_jobs({"fetch_batch_size": 3}).fetch_batch_size == 3
    assert load_jobs({"max_capacity": 1}).fetch_batch_size == 1


def test_without_a_policy_pulls_say_nothing_of_priorities() -> None:
    jobs = load_jobs()
    assert (jobs.group, jobs.pull_options) == (None, PullOptions())


def test_a_region_has_its_place_in_the_group() -> None:
    remote = load_jobs({"priority_policy": "overflow", "min_pending": 1000, "min_ack_pending": 5})
    assert remote.group == PriorityGroup("jobs", Policy.OVERFLOW)
    assert remote.pull_options == PullOptions("jobs", 1000, 5)
    second = load_jobs({"priority_policy": "prioritized", "priority_group": "eu", "priority": 1})
    assert second.group == PriorityGroup("eu", Policy.PRIORITIZED)
    assert second.pull_options == PullOptions("eu", priority=1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_pending": 5}, "min_pending=5 says something only with priority_policy=overflow"),
        ({"priority": 1, "priority_policy": "overflow"}, "only with priority_policy=prioritized"),
        ({"min_ack_pending": 1, "priority_policy": "prioritized"}, "but it is priority_policy=prioritized"),
        ({"priority_policy": "pinned_client"}, "priority_policy must be 'none', 'overflow' or 'prioritized'"),
        ({"priority_policy": "overflow", "priority_group": "a b"}, "priority_group=a b: priority group 'a b' has no"),
        ({"priority_policy": "prioritized", "priority": 10}, "priority must be less than or equal to 9"),
        ({"priority_policy": "overflow", "min_pending": -1}, "min_pending must be greater than or equal to 0"),
        (
            {"priority_policy": "overflow", "min_ack_pending": 14},
            "min_ack_pending=14 must be below max_capacity=14 x workers=1 = 14",
        ),
    ],
)
def test_what_contradicts_the_policy_is_refused(values: dict[str, Any], said: str) -> None:
    assert said in refused(**values)


def test_length_and_traffic_choose_the_times() -> None:
    jobs = load_jobs({"length": "long", "traffic": "high"})
    assert (jobs.heartbeat_interval_s, jobs.ack_wait_minutes, jobs.fetch_timeout_s) == (60, 15, 1)
    assert load_jobs({"length": "very-long"}).ack_wait_minutes == 30
    assert load_jobs({"length": "long", "ack_wait_minutes": 20}).ack_wait_minutes == 20
    assert tuned({}, None)["fetch_batch_size"] == 5


@pytest.mark.parametrize("length", ["short", "long", "very-long"])
@pytest.mark.parametrize("traffic", ["low", "normal", "high"])
@pytest.mark.parametrize("profile", ["small", "medium", "large"])
def test_every_profile_keeps_the_relations(length: str, traffic: str, profile: str) -> None:
    load_jobs({"length": length, "traffic": traffic, "profile": profile})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"ack_wait_minutes": 4.9},
            "ack_wait_minutes=4.9 (294 s) must be at least 10 x heartbeat_interval_s=30 = 300 s",
        ),
        ({"heartbeat_interval_s": 31}, "must be at least 10 x heartbeat_interval_s=31 = 310 s"),
        ({"fetch_batch_size": 15}, "fetch_batch_size=15 must be at most max_capacity=14"),
        ({"fetch_timeout_s": 301}, "fetch_timeout_s=301 must be below ack_wait_minutes=5"),
        ({"keep_s": 10}, "keep_s=10 must exceed ack_wait_minutes=5"),
        ({"max_capacity": 0}, "max_capacity must be greater than or equal to 1 (argument)"),
        ({"profile": "huge"}, "profile must be 'auto', 'small', 'medium' or 'large' (argument)"),
        ({"max_capasity": 3}, "unknown setting 'max_capasity' (argument); did you mean max_capacity?"),
        ({"durable": "a.b"}, "durable must be letters, digits"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    assert said in refused(**values)


def test_the_table_the_environment_and_arguments_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("parti.toml").write_text("prefix = 'media'\n[jobs]\nmax_capacity = 4\nlength = 'long'\n", encoding="utf-8")
    assert (load_jobs().max_capacity, load_jobs().ack_wait_minutes) == (4, 15)
    monkeypatch.setenv("PARTI_JOBS_MAX_CAPACITY", "6")
    assert load_jobs().max_capacity == 6
    assert load_jobs({"max_capacity": 8}).max_capacity == 8
    assert "fetch_batch_size=7 must be at most max_capacity=6" in refused(fetch_batch_size=7)
    assert "max_capacity: environment PARTI_JOBS_MAX_CAPACITY" in refused(fetch_batch_size=7)


def test_an_app_sorts_its_arguments_into_settings_of_jobs_and_general_ones() -> None:
    jobs = JobApp(stream="MEDIA", subject="media.>", max_capacity=3, attempts=5, prefix="media")

    @jobs.handler
    async def handle(job: Job) -> None: ...

    worker = jobs.worker(fetch_batch_size=2)
    assert (worker.jobs.max_capacity, worker.jobs.fetch_batch_size, worker.settings.attempts) == (3, 2, 5)
    assert worker.durable == "media-jobs"
    assert worker.scheduler.max_capacity == 3
    with pytest.raises(ConfigError, match="has a handler already"):
        jobs.handler(handle)
    with pytest.raises(ConfigError, match="unknown setting 'max_capasity'"):
        jobs.worker(max_capasity=3)


def test_an_app_that_cannot_work_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"stream name 'a\.b' is not valid"):
        JobApp(stream="a.b", subject="x")
    with pytest.raises(SubjectMismatch, match="empty token"):
        JobApp(stream="A", subject="x..y")
    with pytest.raises(HandlerMissing, match="the app has no handler"):
        JobApp(stream="A", subject="x").worker()
    with pytest.raises(ConfigError, match="must be a function"):
        JobApp(stream="A", subject="x").handler(3)  # type: ignore[type-var]


APP = """
import parti
jobs = parti.jobs.JobApp(stream="A", subject="x", heartbeat_interval_s=60)

@jobs.handler
async def handle(job): ...

other = 3
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "media_app:jobs"],
            "ack_wait_minutes=5 (300 s) must be at least 10 x heartbeat_interval_s=60",
        ),
        (["run", "media_app:other"], "has an int, not a parti.jobs.JobApp, named 'other'"),
        (["run", "media_app:none"], "has nothing named 'none'; expected none = parti.jobs.JobApp(...)"),
        (["ls", "--state", "asleep"], "--state 'asleep': expected one of waiting, running, done, failed, cancelled"),
        (["top"], "draws on a terminal, and this is none"),
        (["cancel", "7", "--nats", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_refuses_with_exit_code_2_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTI_CONNECT_TIMEOUT_S", "0.3")
    Path("media_app.py").write_text(APP, encoding="utf-8")
    assert main(["jobs", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "reference" / "jobs.md").read_text(encoding="utf-8")
    assert page == jobs_reference(), "run .venv/bin/python docs/generate.py"
    assert all(f"`{name}`" in page for name in JobSettings.model_fields)
