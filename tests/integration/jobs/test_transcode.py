"""The transcode example on a real server with a real ffmpeg: results, repeats, bad files, what is refused."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

import pytest
from examples.transcode.demo.videos import make_video
from examples.transcode.ffmpeg import Ffmpeg, FfmpegFailed
from examples.transcode.ladder import pieces_for
from examples.transcode.media import AVI, MP4, kind_of
from examples.transcode.settings import TranscodeSettings
from examples.transcode.stores import Gone, StoreFailed
from tests.integration.conftest import eventually
from tests.integration.jobs.media import Media, write_slow_ffmpeg
from tests.integration.processes import command, environment

import parti
from parti.errors import ConfigError
from parti.jobs.desk import JobDesk
from parti.model.headers import parse_headers
from parti.model.job import JobState


async def test_every_object_of_an_event_becomes_its_resolutions_and_a_manifest(media: Media, tmp_path: Path) -> None:
    await media.upload("clip.mkv", as_key="my trip/day 1 + 2.mkv")
    await media.upload("tiny.mp4", "silent.avi")
    async with media.app().running() as worker:
        seq = await media.send("my trip/day 1 + 2.mkv", "tiny.mp4", "silent.avi")
        record = await media.ended(seq)
        assert (record.state, record.percent, record.attempt) == (JobState.DONE, 100, 1)
        assert "done" in record.phrase
        await eventually(media.jobs.all_settled)
        assert worker.scheduler.current_usage == 0
    found = await media.manifests()
    assert {key: [result.name for result in one.results] for key, one in found.items()} == {
        "my trip/day 1 + 2.mkv": ["144p", "240p"],
        "tiny.mp4": ["144p"],
        "silent.avi": ["144p"],
    }
    one = found["my trip/day 1 + 2.mkv"]
    assert (one.source.type, one.source.width, one.source.height) == ("video/x-matroska", 320, 240)
    assert one.source.bytes == (media.files / "clip.mkv").stat().st_size
    assert found["silent.avi"].source.type == "video/x-matroska"  # whatever it is called
    sizes = [(result.width, result.height, result.slots, result.threads) for result in one.results]
    cores = os.cpu_count() or 1
    assert sizes == [(192, 144, 1, 1), (320, 240, 2, min(2, cores))]
    assert all(result.asked_s <= result.started_s < result.finished_s for result in one.results)
    for result in one.results:
        path = tmp_path / "result.mp4"
        path.write_bytes(await media.read(result.key))
        assert path.stat().st_size == result.bytes
        video = await Ffmpeg(TranscodeSettings()).probe(path, MP4)
        assert (video.codec, video.width, video.height) == ("h264", result.width, result.height)
    assert media.left_behind() == []


async def test_other_events_are_acknowledged_and_nothing_is_made(media: Media) -> None:
    async with media.app().running():
        removed = await media.send("gone.mp4", event="s3:ObjectRemoved:Delete")
        (test,) = await media.jobs.publish({"Service": "Amazon S3", "Event": "s3:TestEvent"})
        (other,) = await media.jobs.publish({"hello": "world"})
        assert (await media.ended(removed)).state is JobState.DONE
        assert (await media.ended(test)).state is JobState.DONE
        assert "no event of an object store" in (await media.ended(other)).error


async def test_bad_objects_make_a_dead_letter_with_their_reasons_and_the_others_are_done(media: Media) -> None:
    await media.upload("tiny.mp4", "text.mp4", "broken.mp4")
    async with media.app().running():
        seq = await media.send("text.mp4", "tiny.mp4", "broken.mp4", "missing.mp4")
        record = await media.ended(seq)
        await eventually(media.jobs.all_settled)
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert record.error.startswith("3 of 4 objects failed: text.mp4: its content is no video: text; broken.mp4: ")
    assert "moov atom not found" in record.error
    assert f"missing.mp4: there is no object 'missing.mp4' in bucket '{media.uploads}'" in record.error
    assert (await media.manifests()).keys() == {"tiny.mp4"}
    answer = await media.jobs.kit.api.call(f"STREAM.MSG.GET.d{media.jobs.prefix}", {"seq": record.dead_letter})
    assert parse_headers(base64.b64decode(answer["message"]["hdrs"]))["Parti-Error"] == record.error
    letter = json.loads(base64.b64decode(answer["message"]["data"]))
    assert len(letter["Records"]) == 4
    assert media.left_behind() == []


async def test_doing_it_again_makes_only_what_is_missing(media: Media) -> None:
    await media.upload("clip.mkv", "text.mp4")
    async with media.app().running():
        first = await media.ended(await media.send("clip.mkv", "text.mp4"))
        assert first.state is JobState.FAILED
        made = await media.objects()
        await media.upload("tiny.mp4", as_key="text.mp4")  # somebody has mended it
        desk = JobDesk(media.jobs.kit.connection, media.jobs.prefix)
        entry = await media.jobs.entry(first.seq)
        again = await desk.retry(media.jobs.durable, first.seq, entry, f"d{media.jobs.prefix}")
        assert (await media.ended(again)).state is JobState.DONE
        after = await media.objects()
        assert after.items() >= made.items()  # the same objects, not written again
        assert len(after) == len(made) + 2
        lost = [key for key in made if key.endswith(("240p.mp4", "manifest.json"))]
        bucket = await media.jobs.kit.connection.client.jetstream().object_store(media.results)
        for key in lost:
            await bucket.delete(key)
        assert (await media.ended(await media.send("clip.mkv"))).state is JobState.DONE
        mended = await media.objects()
        assert mended.keys() == after.keys()
        assert {key for key in made if mended[key] != made[key]} == set(lost)
    (small, large) = (await media.manifests())["clip.mkv"].results
    assert (small.slots, large.slots) == (0, 2)  # of the one that was there nothing is told but that it is


async def test_other_content_of_the_same_name_never_overwrites_results(media: Media) -> None:
    async with media.app().running():
        for name in ("tiny.mp4", "silent.avi"):
            await media.upload(name, as_key="one.mp4")
            assert (await media.ended(await media.send("one.mp4"))).state is JobState.DONE
    places = {key.rpartition("/")[0] for key in await media.objects()}
    assert len(places) == 2


@pytest.mark.parametrize(
    ("name", "own", "reason"),
    [
        ("torn.mp4", {}, "it was cut off: 1."),
        ("tiny.mp4", {"max_bytes": 1000}, "are more than the 1,000 that are accepted"),
        ("whole.mp4", {"max_duration_s": 3.0}, "its 4 s are more than the 3 that are accepted"),
        ("tiny.mp4", {"max_pixels": 64 * 47}, "ffmpeg cannot"),
    ],
)
async def test_what_is_too_large_too_long_or_cut_off_is_refused(
    media: Media, name: str, own: dict[str, float], reason: str
) -> None:
    await media.upload(name)
    async with media.app(**own).running() as worker:
        record = await media.ended(await media.send(name))
        assert worker.scheduler.current_usage == 0
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert reason in record.error
    assert media.left_behind() == []


async def test_pieces_of_many_jobs_share_the_slots_and_never_take_more(media: Media) -> None:
    await media.upload("clip.mkv", "tiny.mp4")
    for number in range(4):
        await media.upload("clip.mkv" if number % 2 else "tiny.mp4", as_key=f"{number}.mkv")
    async with media.app(max_capacity=2, fetch_batch_size=2).running() as worker:
        seqs = [await media.send(f"{number}.mkv") for number in range(4)]
        for seq in seqs:
            assert (await media.ended(seq)).state is JobState.DONE
        assert worker.scheduler.max_capacity == 2
    results = [result for one in (await media.manifests()).values() for result in one.results]
    assert len(results) == 6
    for moment in (result.started_s for result in results):
        running = [result for result in results if result.started_s <= moment < result.finished_s]
        assert sum(result.slots for result in running) <= 2


async def test_no_more_files_are_on_the_disk_than_are_allowed(
    media: Media, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(write_slow_ffmpeg(tmp_path / "slow")))
    await media.upload("tiny.mp4")
    await media.upload("tiny.mp4", as_key="other.mp4")
    async with media.app(files_at_once=1, drain_timeout_s=0.05).running() as worker:
        await media.send("tiny.mp4", "other.mp4")
        await eventually(lambda: worker.scheduler.current_usage == 1)
        sources = [name for name in media.left_behind() if name.endswith("/source")]
        assert len(sources) == 1
    assert media.left_behind() == []


# ── looking into files ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ffmpeg() -> Ffmpeg:
    return Ffmpeg(TranscodeSettings(stall_s=0.3))


@pytest.mark.parametrize("muxer", ["mp4", "mov", "matroska", "webm", "avi", "mpegts", "mpeg"])
async def test_kinds_that_are_recognised_are_readable(ffmpeg: Ffmpeg, tmp_path: Path, muxer: str) -> None:
    path = tmp_path / "video"
    if muxer in {"webm", "mpeg"}:
        codec = ["-c:v", "libvpx", "-deadline", "realtime"] if muxer == "webm" else ["-c:v", "mpeg2video"]
        picture = ["-f", "lavfi", "-i", "testsrc2=size=96x64:rate=25:duration=0.4"]
        subprocess.run(  # noqa: ASYNC221 - it takes no time
            [ffmpeg.path, "-loglevel", "error", *picture, "-pix_fmt", "yuv420p", *codec, "-f", muxer, str(path)],
            check=True,
        )
    else:
        make_video(path, 96, 64, 0.4, muxer=muxer)
    kind = kind_of(path.read_bytes()[:4096])
    assert kind is not None
    video = await ffmpeg.probe(path, kind)
    assert (video.width, video.height) == (96, 64)


async def test_a_sound_without_pictures_is_refused(ffmpeg: Ffmpeg, tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    tone = [ffmpeg.path, "-loglevel", "error", "-f", "lavfi", "-i", "sine=duration=0.2", str(path)]
    subprocess.run(tone, check=True)  # noqa: ASYNC221 - it takes no time
    with pytest.raises(parti.Reject, match="it has no video in it"):
        await ffmpeg.probe(path, MP4)


async def test_a_file_is_opened_by_the_reader_of_its_kind_alone(ffmpeg: Ffmpeg, media_files: Path) -> None:
    """A playlist, say, would make ffmpeg open what it names."""
    with pytest.raises(parti.Reject, match="cannot read it as video/x-msvideo"):
        await ffmpeg.probe(media_files / "tiny.mp4", AVI)
    with pytest.raises(parti.Reject):
        await ffmpeg.probe(media_files / "text.mp4", MP4)


async def test_what_this_machine_lacks_is_not_the_fault_of_the_file(ffmpeg: Ffmpeg, media_files: Path) -> None:
    with pytest.raises(FfmpegFailed, match="No such file"):
        await ffmpeg.probe(media_files / "missing.mp4", MP4)
    (piece,) = pieces_for(64, 48, ["144p"])
    with pytest.raises(FfmpegFailed, match=r"exit code 228: .*No space left on device"):
        await ffmpeg.transcode(
            media_files / "tiny.mp4", MP4, piece, threads=1, into=Path("/dev/full"), on_time=lambda at_s: None
        )


async def test_an_ffmpeg_that_gets_no_further_is_ended(
    monkeypatch: pytest.MonkeyPatch, media_files: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(write_slow_ffmpeg(tmp_path / "slow")))
    (piece,) = pieces_for(64, 48, ["144p"])
    with pytest.raises(FfmpegFailed, match=r"ffmpeg got no further than .* s for 0.3 s"):
        await Ffmpeg(TranscodeSettings(stall_s=0.3)).transcode(
            media_files / "whole.mp4", MP4, piece, threads=1, into=tmp_path / "out", on_time=lambda at_s: None
        )


async def test_an_ffmpeg_that_does_not_run_or_lacks_an_encoder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho ' V....D libvpx  VP8'\n")
    other.chmod(0o700)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(other))
    with pytest.raises(ConfigError, match="has no encoders libx264 and aac"):
        await Ffmpeg(TranscodeSettings()).check()
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="does not exist, or cannot be run"):
        await Ffmpeg(TranscodeSettings()).check()


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Refusing:
    """A sink that breaks a download off."""

    def write(self, data: bytes) -> int:
        raise parti.Reject("enough")


async def test_a_download_that_breaks_off_leaves_no_subscription(media: Media) -> None:
    await media.upload("tiny.mp4")
    await media.store.size(media.uploads, "tiny.mp4")
    before = set(media.store._connection.client._subs)
    with pytest.raises(parti.Reject, match="enough"):
        await media.store.download(media.uploads, "tiny.mp4", Refusing())
    assert set(media.store._connection.client._subs) == before


async def test_what_is_not_there_is_gone_and_what_cannot_be_reached_has_failed(media: Media) -> None:
    sink = Refusing()
    with pytest.raises(Gone):
        await media.store.download("nowhere", "a.mp4", sink)
    await media.upload("tiny.mp4")
    with pytest.raises(Gone):
        await media.store.download(media.uploads, "a.mp4", sink)
    with pytest.raises(parti.Reject, match="cannot be one of NATS"):
        await media.store.size("with.dots", "a.mp4")
    await media.store._connection.close()
    with pytest.raises(StoreFailed, match="cannot look at object"):
        await media.store.size(media.uploads, "tiny.mp4")


# ── as a command ──────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TRANSCODE_MAX_BYTES": "much"}, "TRANSCODE_MAX_BYTES"),
        ({"TRANSCODE_S3_ENDPOINT": "http://127.0.0.1:1"}, "AWS_ACCESS_KEY_ID"),
        ({"IMAGEIO_FFMPEG_EXE": "/nowhere/ffmpeg"}, "ffmpeg at '/nowhere/ffmpeg' does not exist"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_line(
    media: Media, variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    own = {"PYTHONPATH": str(ROOT), "PARTI_PREFIX": media.jobs.prefix, "TRANSCODE_STREAM": media.jobs.stream}
    own |= {"TRANSCODE_SUBJECT": media.jobs.subject, "PARTI_DEAD_LETTER_STREAM": f"d{media.jobs.prefix}"}
    own |= {"PARTI_DEAD_LETTER_SUBJECT": f"d{media.jobs.prefix}"}
    started = subprocess.run(
        command("jobs", "run", "examples.transcode.app:jobs", "--nats", media.jobs.kit.url),
        cwd=tmp_path,
        env={k: v for k, v in environment().items() if not k.startswith("AWS_")} | own | variables,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert started.returncode == 2, started.stderr
    assert started.stderr.count("\n") == 1
    assert words in started.stderr


def test_the_demo_shows_what_it_claims_and_leaves_only_its_picture(tmp_path: Path) -> None:
    shown = subprocess.run(
        [*command()[:1], "-m", "examples.transcode.demo", "--small", "--picture", "slots.svg"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path), PARTI_NATS="nats://127.0.0.1:1", COLUMNS="100"),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stderr == ""
    assert "Everything is as expected." in shown.stdout
    assert "notes.mp4: its content is no video: text" in shown.stdout
    assert "capacity: 14 slots" in (tmp_path / "slots.svg").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["slots.svg"]
