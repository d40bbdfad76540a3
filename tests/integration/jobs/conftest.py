"""The kit of the tests of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from examples.transcode.demo.videos import cut_off, make_video
from examples.transcode.stores import NatsStore
from tests.integration.conftest import Kit
from tests.integration.jobs.kit import Gates, JobKit
from tests.integration.jobs.media import Media

from parti.config import Settings
from parti.errors import PartiError


@pytest.fixture
async def jobs(kit: Kit, no_settings_of_this_machine: None) -> AsyncIterator[JobKit]:
    """Names for jobs on the shared server; what was made is removed."""
    made = JobKit(kit)
    yield made
    try:
        await made.clean_up()
    except PartiError:
        pass


@pytest.fixture
async def gates() -> Gates:
    return Gates()


@pytest.fixture(scope="session")
def media_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny videos, and files that are none."""
    directory = tmp_path_factory.mktemp("media")
    make_video(directory / "tiny.mp4", 64, 48, 1.5)
    make_video(directory / "clip.mkv", 320, 240, 2.0)
    make_video(directory / "silent.avi", 96, 64, 0.5, muxer="matroska", sound=False)
    make_video(directory / "whole.mp4", 96, 64, 4.0, faststart=True)
    cut_off(directory / "whole.mp4", directory / "torn.mp4", 0.4)
    cut_off(directory / "tiny.mp4", directory / "broken.mp4", 0.5)
    (directory / "text.mp4").write_text("no video at all\n" * 100)
    return directory


@pytest.fixture
async def media(jobs: JobKit, media_files: Path, tmp_path: Path) -> AsyncIterator[Media]:
    """A transcode app on the shared server; what was made is removed."""
    work = tmp_path / "work"
    work.mkdir()
    async with NatsStore.connected(Settings.model_construct(nats=(jobs.kit.url,))) as store:
        made = Media(jobs, store, work, media_files)
        yield made
        await made.clean_up()
