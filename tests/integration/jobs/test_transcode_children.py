"""No ffmpeg outlives the job or the worker that started it, and no temporary file either."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from examples.transcode.ffmpeg import find_ffmpeg
from tests.integration.conftest import eventually
from tests.integration.jobs.media import Media, ffmpegs, is_gone, write_slow_ffmpeg
from tests.integration.processes import EXIT_S, command, environment

from parti.jobs.desk import JobDesk
from parti.model.job import JobState

ROOT = Path(__file__).parents[3]
REAL = find_ffmpeg()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An ffmpeg that would take minutes."""
    path = str(write_slow_ffmpeg(tmp_path / "slow-ffmpeg"))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", path)
    return path


@contextmanager
def worker_process(media: Media, ffmpeg: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`parti jobs run`, which hears nothing of the settings of this machine."""
    jobs = media.jobs
    own = {
        "PYTHONPATH": str(ROOT),
        "IMAGEIO_FFMPEG_EXE": ffmpeg,
        "TRANSCODE_STREAM": jobs.stream,
        "TRANSCODE_SUBJECT": f"{jobs.prefix}.>",
        "TRANSCODE_RESULTS_BUCKET": media.results,
        "TRANSCODE_WORK_DIR": str(media.work),
        "PARTI_PREFIX": jobs.prefix,
        "PARTI_DEAD_LETTER_STREAM": f"d{jobs.prefix}",
        "PARTI_DEAD_LETTER_SUBJECT": f"d{jobs.prefix}",
        "PARTI_LOG_LEVEL": "error",
        "PARTI_JOBS_ACK_WAIT_MINUTES": str(2 / 60),
        "PARTI_JOBS_HEARTBEAT_INTERVAL_S": "0.1",
        "PARTI_JOBS_FETCH_TIMEOUT_S": "0.5",
        **variables,
    }
    process = subprocess.Popen(
        command("jobs", "run", "examples.transcode.app:jobs", "--nats", jobs.kit.url),
        cwd=media.work.parent,
        env=environment(**own),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        print(process.communicate(timeout=EXIT_S)[1])


async def test_a_cancelled_job_ends_its_ffmpegs_and_gives_its_slots_back(media: Media, slow: str) -> None:
    await media.upload("clip.mkv")
    async with media.app().running() as worker:
        seq = await media.send("clip.mkv")
        await eventually(lambda: len(ffmpegs()) == 2)
        children = ffmpegs()
        assert media.left_behind()
        desk = JobDesk(media.jobs.kit.connection, media.jobs.prefix)
        await desk.cancel(media.jobs.durable, seq, await media.jobs.entry(seq))
        assert (await media.ended(seq)).state is JobState.CANCELLED
        assert all(is_gone(child) for child in children)
        assert worker.scheduler.current_usage == 0
        assert [name for name in media.left_behind() if "source" in name] == []
    assert media.left_behind() == []


async def test_a_job_that_runs_too_long_for_a_drain_is_given_back_without_its_ffmpegs(
    media: Media, slow: str
) -> None:
    await media.upload("tiny.mp4")
    worker = media.app(drain_timeout_s=0.1).worker()
    await worker.start()
    seq = await media.send("tiny.mp4")
    await eventually(lambda: len(ffmpegs()) == 1)
    (child,) = ffmpegs()
    assert not await worker.stop()
    assert is_gone(child)
    assert media.left_behind() == []
    record = await media.jobs.record(seq)
    assert record is not None
    assert (record.state, record.worker, record.failures) == (JobState.WAITING, "", 0)


async def test_a_job_that_waits_for_slots_is_given_back_when_the_worker_leaves(media: Media, slow: str) -> None:
    await media.upload("tiny.mp4", "clip.mkv")
    app = media.app(max_capacity=1, fetch_batch_size=1, drain_timeout_s=0.1, workers=2)
    worker = app.worker()
    await worker.start()
    running = await media.send("tiny.mp4")
    await eventually(lambda: len(ffmpegs()) == 1)
    (child,) = ffmpegs()
    other = app.worker(scheduler=worker.scheduler)  # the same slots
    await other.start()
    waiting = await media.send("clip.mkv")
    await eventually(lambda: worker.scheduler.waiting == 2)
    assert await other.stop()  # nothing was interrupted
    assert not is_gone(child)
    assert not await worker.stop()
    assert is_gone(child)
    for seq in (running, waiting):
        record = await media.jobs.record(seq)
        assert record is not None
        assert (record.state, record.worker, record.failures) == (JobState.WAITING, "", 0)
    assert media.left_behind() == []


@pytest.mark.parametrize(
    ("signals", "codes"),
    [
        ((signal.SIGKILL,), {-signal.SIGKILL}),
        pytest.param(
            (signal.SIGTERM, signal.SIGINT),
            {128 + signal.SIGTERM, 128 + signal.SIGINT},  # in any order
            marks=pytest.mark.slow,  # between the other two: it leaves at once, and what it had counts as a crash
        ),
        ((signal.SIGTERM,), {1}),
    ],
    ids=["killed", "told twice", "told once"],
)
async def test_a_worker_that_dies_or_leaves_takes_its_ffmpegs_along_and_the_next_one_completes_the_job(
    media: Media, slow: str, signals: tuple[signal.Signals, ...], codes: set[int]
) -> None:
    await media.upload("clip.mkv")
    await media.jobs.create_stream()
    seq = await media.send("clip.mkv")
    drain_s = "30" if len(signals) > 1 else "0.2"
    with worker_process(media, slow, PARTI_DRAIN_TIMEOUT_S=drain_s) as first:
        await eventually(lambda: len(ffmpegs(first.pid)) == 2, 20)
        children = ffmpegs(first.pid)
        children[0].suspend()  # also one that cannot hear anything
        for number in signals:
            first.send_signal(number)
        assert await asyncio.to_thread(first.wait, EXIT_S) in codes
        await eventually(lambda: all(is_gone(child) for child in children))
    was_killed = codes != {1}
    assert bool(media.left_behind()) == was_killed
    with worker_process(media, REAL) as second:
        record = await media.ended(seq)
        await eventually(media.jobs.all_settled)
        second.terminate()
        assert await asyncio.to_thread(second.wait, EXIT_S) == 0
    assert (record.state, record.failures, record.crashes) == (JobState.DONE, 0, int(was_killed))
    assert [result.name for result in (await media.manifests())["clip.mkv"].results] == ["144p", "240p"]
    assert media.left_behind() == []  # also what the first one could not remove
