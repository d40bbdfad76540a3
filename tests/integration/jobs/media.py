"""What the tests of the transcode example share: tiny videos, a store, events, and a slow ffmpeg."""

from __future__ import annotations

import asyncio
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import psutil
from examples.transcode.app import make_app
from examples.transcode.ffmpeg import find_ffmpeg
from examples.transcode.manifest import Manifest, decode
from examples.transcode.settings import TranscodeSettings
from examples.transcode.stores import NatsStore
from tests.integration.jobs.kit import JobKit

from parti.jobs import JobApp
from parti.jobs.desk import JobDesk
from parti.model.job import JobRecord


@dataclass
class Media:
    """An object store and a transcode app on the test's own names."""

    jobs: JobKit
    store: NatsStore
    work: Path
    files: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def uploads(self) -> str:
        return f"u{self.jobs.prefix}"

    @property
    def results(self) -> str:
        return f"r{self.jobs.prefix}"

    def app(self, **own: Any) -> JobApp:
        settings = {
            "stream": self.jobs.stream,
            "subject": f"{self.jobs.prefix}.>",
            "results_bucket": self.results,
            "work_dir": self.work,
            "preset": "ultrafast",
        }
        of_parti = {name: own.pop(name) for name in tuple(own) if name not in TranscodeSettings.model_fields}
        return make_app(TranscodeSettings(**{**settings, **own}), **{**self.jobs.settings, **of_parti})

    async def upload(self, *names: str, as_key: str = "") -> None:
        for name in names:
            await self.store.upload(self.uploads, as_key or name, self.files / name, "")

    async def send(self, *keys: str, event: str = "s3:ObjectCreated:Put") -> int:
        """Publish one event about some objects."""
        records = [
            {"eventName": event, "s3": {"bucket": {"name": self.uploads}, "object": {"key": quote_plus(key)}}}
            for key in keys
        ]
        (seq,) = await self.jobs.publish({"EventName": event, "Records": records})
        return seq

    async def ended(self, seq: int) -> JobRecord:
        """The record of a job when it has ended."""
        record = await JobDesk(self.jobs.kit.connection, self.jobs.prefix).wait_final(self.jobs.durable, seq, 20)
        assert record is not None, "the job has not ended"
        return record

    async def objects(self) -> dict[str, str]:
        """Every result by its key, with what tells one writing of it from the next."""
        bucket = await self.jobs.kit.connection.client.jetstream().object_store(self.results)
        return {info.name: str(info.nuid) for info in await bucket.list(ignore_deletes=True)}

    async def read(self, key: str) -> bytes:
        into = io.BytesIO()
        await self.store.download(self.results, key, into)
        return into.getvalue()

    async def manifests(self) -> dict[str, Manifest]:
        """By the key of their source."""
        keys = [key for key in await self.objects() if key.endswith("/manifest.json")]
        found = [decode(await self.read(key)) for key in keys]
        return {manifest.source.key: manifest for manifest in found}

    def left_behind(self) -> list[str]:
        """Files in the place for temporary ones."""
        return sorted(str(path.relative_to(self.work)) for path in self.work.rglob("*"))

    async def clean_up(self) -> None:
        for name in (self.uploads, self.results):
            await asyncio.gather(self.jobs.kit.api.call(f"STREAM.DELETE.OBJ_{name}"), return_exceptions=True)


def write_slow_ffmpeg(path: Path) -> Path:
    """The real one, which takes minutes for each second of video that it is to make."""
    slowly = "-readrate 0.005 -readrate_initial_burst 0.01 -readrate_catchup 0.005"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *-progress*) slowly="{slowly}";; esac\nexec "{find_ffmpeg()}" $slowly "$@"\n'
    )
    path.chmod(0o700)
    return path


def ffmpegs(pid: int | None = None) -> list[psutil.Process]:
    """The ffmpeg processes that a process, by default this one, has started, and that are making something."""
    found = []
    for child in psutil.Process(pid or os.getpid()).children(recursive=True):
        try:
            if "-progress" in child.cmdline() and child.name().startswith("ffmpeg"):
                found.append(child)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
