"""One uploaded object, from its download to its results."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog
from examples.transcode import manifest
from examples.transcode.clamd import Clamd
from examples.transcode.events import BadRecord, Upload, read_event
from examples.transcode.ffmpeg import Ffmpeg, Video
from examples.transcode.ladder import Piece, pieces_for
from examples.transcode.media import HEAD, Kind, describe, kind_of
from examples.transcode.s3 import S3Store, credentials_of_environment
from examples.transcode.settings import TranscodeSettings
from examples.transcode.stores import Gone, NatsStore, Store
from examples.transcode.workplace import Workplace

import parti
from parti.jobs import Job, JobInterrupted, JobWorker

_log = structlog.get_logger("transcode")

_VERSION_DIGITS = 16
_MISSING_S, _MISSING_SHARE = 1.0, 0.1
"""A result may be so much shorter than its source says to be: containers round, and tracks differ in length."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """A file on the disk that has been found to be a video."""

    upload: Upload
    path: Path
    bytes: int
    sha256: str
    kind: Kind
    video: Video


class Transcoder:
    """Does the jobs of one worker.

    A job's records are handled side by side, and so are the resolutions of each: every one waits for its own slots.
    All that can be done of a job is done before its bad records make it a dead letter. Doing it again, after a crash
    or by hand, makes only what is missing, because results have keys that follow from the content of their source.
    """

    def __init__(self, settings: TranscodeSettings, ffmpeg: Ffmpeg, store: Store, place: Path) -> None:
        self._settings = settings
        self._ffmpeg = ffmpeg
        self._store = store
        self._place = place
        self._clamd = Clamd(settings.clamd) if settings.clamd else None
        self._room = asyncio.Semaphore(settings.files_at_once)
        self._recipe = f"h264-{settings.preset}-crf{settings.crf}-aac"

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: TranscodeSettings, worker: JobWorker) -> AsyncIterator[Transcoder]:
        """One for a worker, with a store and a place for temporary files; raises `PartiError` without an ffmpeg."""
        ffmpeg = Ffmpeg(settings)
        await ffmpeg.check()
        async with AsyncExitStack() as stack:
            store: Store
            if settings.s3_endpoint:
                store = S3Store(settings.s3_endpoint, credentials_of_environment(settings.s3_region))
            else:
                store = await stack.enter_async_context(NatsStore.connected(worker.settings))
            yield cls(settings, ffmpeg, store, stack.enter_context(Workplace(settings.work_dir)).path)

    async def handle(self, job: Job) -> None:
        """Do all records of an event; `parti.Reject` names those that were bad, when all others are done."""
        found = read_event(job.json, but=self._settings.results_bucket)
        if not found:
            _log.info("nothing to do: no object was created", job=job.id)
            return
        progress = _Progress(job, len(found))
        outcomes = await asyncio.gather(
            *(self._record(job, one, progress.part(number)) for number, one in enumerate(found)),
            return_exceptions=True,
        )
        settle(found, outcomes)

    async def _record(self, job: Job, found: Upload | BadRecord, part: _Part) -> None:
        if isinstance(found, BadRecord):
            raise parti.Reject(found.reason)
        async with self._room:
            with tempfile.TemporaryDirectory(dir=self._place) as directory:
                part.tell("downloading", found.key)
                checked = await self._check(found, Path(directory), part)
                await self._make_all(job, checked, Path(directory), part)
        part.finish()

    # ── may it be touched ─────────────────────────────────────────────────────────────────────────────────────

    async def _check(self, upload: Upload, directory: Path, part: _Part) -> _Checked:
        """Download it and find out what it really is."""
        limit = self._settings.max_bytes
        size = await self._store.size(upload.bucket, upload.key)
        if size is None:
            raise Gone(upload.bucket, upload.key)
        if size > limit:
            raise parti.Reject(f"its {size:,} bytes are more than the {limit:,} that are accepted")
        path = directory / "source"
        with path.open("wb") as file:
            intake = _Intake(file, limit)
            await self._store.download(upload.bucket, upload.key, intake)
        kind = kind_of(intake.head)
        if kind is None:
            raise parti.Reject(f"its content is no video: {describe(intake.head)}")
        if self._clamd is not None:
            part.tell("scanning", upload.key)
            await self._clamd.check(path)
        video = await self._ffmpeg.probe(path, kind)
        if video.duration_s > self._settings.max_duration_s:
            most = self._settings.max_duration_s
            raise parti.Reject(f"its {video.duration_s:,.0f} s are more than the {most:,.0f} that are accepted")
        return _Checked(upload, path, intake.bytes, intake.digest.hexdigest(), kind, video)

    # ── the work ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _make_all(self, job: Job, checked: _Checked, directory: Path, part: _Part) -> None:
        """Every resolution, then the manifest."""
        where = self._where(checked)
        name = f"{where}/manifest.json"
        if await self._store.size(self._settings.results_bucket, name) is not None:
            _log.info("made before", job=job.id, object=str(checked.upload))
            return
        video = checked.video
        pieces = pieces_for(video.width, video.height, self._settings.resolutions)
        part.begin(checked.upload.key, {piece.rung.name: piece.rung.cost for piece in pieces})
        try:
            async with asyncio.TaskGroup() as group:
                # The largest first: it takes longest, and smaller ones fit beside it.
                making = [
                    group.create_task(self._make(job, checked, piece, directory, part)) for piece in reversed(pieces)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        made = manifest.Manifest(
            source=manifest.Source(
                checked.upload.bucket,
                checked.upload.key,
                checked.bytes,
                checked.sha256,
                checked.kind.type,
                video.width,
                video.height,
                video.duration_s,
            ),
            recipe=self._recipe,
            job=job.id,
            worker=job.worker_id,
            attempt=job.attempt,
            results=[task.result() for task in reversed(making)],
        )
        path = directory / "manifest.json"
        path.write_bytes(manifest.encode(made))
        await self._store.upload(self._settings.results_bucket, name, path, "application/json")

    def _where(self, checked: _Checked) -> str:
        """Where results go: the same for the same content, and never the place of other content."""
        version = hashlib.sha256(f"{checked.sha256} {self._recipe}".encode()).hexdigest()[:_VERSION_DIGITS]
        return f"{checked.upload}/{version}"

    async def _make(self, job: Job, checked: _Checked, piece: Piece, directory: Path, part: _Part) -> manifest.Result:
        """One resolution: slots only while ffmpeg runs."""
        name, bucket = piece.rung.name, self._settings.results_bucket
        key = f"{self._where(checked)}/{name}.mp4"
        if (size := await self._store.size(bucket, key)) is not None:
            return manifest.Result(name, key, size, piece.width, piece.height)
        into = directory / f"{name}.mp4"
        asked_s = time.time()
        async with job.slots(piece.rung.cost) as slots:
            started_s, threads = time.time(), min(slots, os.cpu_count() or 1)
            reached_s = await self._ffmpeg.transcode(
                checked.path,
                checked.kind,
                piece,
                threads=threads,
                into=into,
                on_time=lambda at_s: part.reach(name, at_s, checked.video.duration_s),
            )
            finished_s = time.time()
        _check_length(reached_s, checked.video.duration_s)
        await self._store.upload(bucket, key, into, "video/mp4")
        size = into.stat().st_size
        into.unlink()
        part.reach(name, 1.0, 1.0)
        times = {"asked_s": asked_s, "started_s": started_s, "finished_s": finished_s}
        return manifest.Result(
            name, key, size, piece.width, piece.height, slots, threads, **{k: round(v, 3) for k, v in times.items()}
        )


def _check_length(reached_s: float, duration_s: float) -> None:
    """ffmpeg makes what it can of a file that was cut off, and calls it a success."""
    if duration_s - reached_s > max(_MISSING_S, _MISSING_SHARE * duration_s):
        raise parti.Reject(f"it was cut off: {reached_s:.1f} of {duration_s:.1f} s can be decoded")


def settle(found: list[Upload | BadRecord], outcomes: list[BaseException | None]) -> None:
    """Raise what the job as a whole has come to."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    for error in errors:
        if isinstance(error, asyncio.CancelledError | JobInterrupted):
            raise error
    told = [
        f"{one.key}: {outcome}" if isinstance(one, Upload) else str(outcome)
        for one, outcome in zip(found, outcomes, strict=True)
        if outcome is not None
    ]
    if not told:
        return
    text = f"{len(told)} of {len(found)} objects failed: {'; '.join(told)}" if len(found) > 1 else told[0]
    if all(isinstance(error, parti.Reject) for error in errors):
        raise parti.Reject(text)
    # At least one may work later; what is done and what was refused is found to be so again, quickly.
    raise parti.Retry(reason=text) from next(error for error in errors if not isinstance(error, parti.Reject))


class _Intake:
    """Takes a download: onto the disk, into a digest, and no more than the limit."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self._limit = limit
        self.bytes = 0
        self.head = b""
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        if self.bytes > self._limit:
            raise parti.Reject(f"it has more than the {self._limit:,} bytes that are accepted")
        if len(self.head) < HEAD:
            self.head += data[: HEAD - len(self.head)]
        self.digest.update(data)
        return self._file.write(data)


class _Progress:
    """How far a job is: the mean of its objects, each by the costs of its resolutions."""

    def __init__(self, job: Job, parts: int) -> None:
        self._job = job
        self._shares = [0.0] * parts

    def part(self, number: int) -> _Part:
        """The share of one object."""
        return _Part(self, number)

    def set(self, number: int, share: float, phrase: str) -> None:
        """Say how far one object is."""
        self._shares[number] = share
        done = sum(each >= 1 for each in self._shares)
        which = f" ({done} of {len(self._shares)} objects done)" if len(self._shares) > 1 else ""
        self._job.progress(100 * sum(self._shares) / len(self._shares), f"{phrase}{which}")


class _Part:
    """One object's part of the progress."""

    def __init__(self, whole: _Progress, number: int) -> None:
        self._whole = whole
        self._number = number
        self._key = ""
        self._costs: dict[str, int] = {}
        self._done: dict[str, float] = {}

    def tell(self, doing: str, key: str) -> None:
        """It has not got any slots yet."""
        self._key = key
        self._whole.set(self._number, 0.0, f"{doing} {key}")

    def begin(self, key: str, costs: dict[str, int]) -> None:
        """These are the resolutions to come."""
        self._costs, self._done = costs, dict.fromkeys(costs, 0.0)
        self.tell("waiting for slots:", key)

    def reach(self, name: str, at_s: float, of_s: float) -> None:
        """One resolution is so far."""
        self._done[name] = min(1.0, at_s / of_s) if of_s > 0 else 0.0
        share = sum(self._costs[n] * done for n, done in self._done.items()) / sum(self._costs.values())
        running = ", ".join(f"{n} {int(100 * done)} %" for n, done in self._done.items() if 0 < done < 1)
        # Not quite: results and manifest are still to be stored.
        self._whole.set(self._number, min(share, 0.99), f"{self._key} {running}".strip())

    def finish(self) -> None:
        """All of it is stored."""
        self._whole.set(self._number, 1.0, f"{self._key} done")
