"""The transcode example: what it decides without a server, an ffmpeg or a store."""

from __future__ import annotations

import hashlib
import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from examples.transcode.demo.check import Outcome, find_faults
from examples.transcode.demo.picture import Used, draw, measure
from examples.transcode.demo.uploads import Happening, Sample
from examples.transcode.events import BadRecord, Upload, read_event
from examples.transcode.ffmpeg import Video, read_report
from examples.transcode.ladder import RUNGS, pieces_for
from examples.transcode.manifest import Manifest, Result, Source, decode, encode
from examples.transcode.media import AVI, MATROSKA, MP4, MPEG_PS, MPEG_TS, QUICKTIME, WEBM, Kind, describe, kind_of
from examples.transcode.settings import TranscodeSettings, load_transcode
from examples.transcode.sigv4 import EMPTY_SHA256, Credentials, sign
from examples.transcode.transcoder import settle
from examples.transcode.workplace import Workplace

import parti
from parti.errors import ConfigError
from parti.jobs import JobInterrupted
from parti.model.job import JobRecord, JobState

ALL = [rung.name for rung in RUNGS]


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────


def record(key: Any = "a.mp4", *, name: str = "s3:ObjectCreated:Put", bucket: Any = "uploads") -> dict[str, Any]:
    return {"eventName": name, "s3": {"bucket": {"name": bucket}, "object": {"key": key}}}


def test_each_created_object_of_an_event_is_found_once_with_its_name_as_it_was_written() -> None:
    event = {
        "EventName": "s3:ObjectCreated:Put",
        "Records": [
            record("trip+to+the%20sea%2Fd%C3%A4y%2B1.mp4"),
            record("b.mp4", name="ObjectCreated:CompleteMultipartUpload"),
            record("b.mp4"),
        ],
    }
    assert read_event(event, but="transcoded") == [
        Upload("uploads", "trip to the sea/däy+1.mp4"),
        Upload("uploads", "b.mp4"),
    ]


@pytest.mark.parametrize(
    "skipped",
    [
        record(name="s3:ObjectRemoved:Delete"),
        record(name="s3:ObjectAccessed:Get"),
        record(bucket="transcoded"),
        record("folder/"),
    ],
)
def test_other_events_results_and_folders_are_skipped(skipped: dict[str, Any]) -> None:
    assert read_event({"Records": [skipped, record()]}, but="transcoded") == [Upload("uploads", "a.mp4")]


@pytest.mark.parametrize("bad", [None, 7, {}, record(key=7), record(key=None), record(key=""), record(bucket="")])
def test_a_bad_record_is_told_and_does_not_hide_the_others(bad: Any) -> None:
    found = read_event({"Records": [bad, record()]}, but="transcoded")
    assert isinstance(found[0], BadRecord)
    assert "record 1" in found[0].reason
    assert found[1:] == [Upload("uploads", "a.mp4")]


def test_what_is_no_event_is_rejected_and_a_test_event_is_not() -> None:
    assert read_event({"Service": "Amazon S3", "Event": "s3:TestEvent"}, but="transcoded") == []
    events: tuple[Any, ...] = ({}, [], None, {"Records": {}})
    for event in events:
        with pytest.raises(parti.Reject, match="no event of an object store"):
            read_event(event, but="transcoded")


# ── resolutions ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_costs_are_those_of_the_source_document() -> None:
    costs = {"144p": 1, "240p": 2, "360p": 4, "480p": 8, "720p": 16, "1080p": 32, "4K": 64}
    assert {rung.name: rung.cost for rung in RUNGS} == costs


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((3840, 2160), ALL),
        ((1920, 1080), ALL[:6]),
        ((1919, 1079), ALL[:5]),
        ((360, 640), ["144p", "240p", "360p"]),
        ((64, 48), ["144p"]),
    ],
)
def test_a_video_gets_the_resolutions_up_to_its_own(size: tuple[int, int], expected: list[str]) -> None:
    assert [piece.rung.name for piece in pieces_for(*size, ALL)] == expected


@pytest.mark.parametrize(
    "size", [(1920, 1080), (1079, 1921), (427, 241), (65, 49), (3, 3), (4096, 144), (7680, 4320)]
)
def test_sizes_are_even_keep_their_shape_and_never_grow(size: tuple[int, int]) -> None:
    width, height = size
    for piece in pieces_for(width, height, ALL):
        assert piece.width % 2 == piece.height % 2 == 0
        assert 2 <= piece.width <= width
        assert 2 <= piece.height <= height
        assert min(piece.width, piece.height) <= piece.rung.lines
        assert abs(piece.width / width - piece.height / height) <= 2 / min(width, height)


def test_only_the_wanted_resolutions_are_made() -> None:
    assert [piece.rung.name for piece in pieces_for(1280, 720, ["720p", "240p"])] == ["240p", "720p"]
    (only,) = pieces_for(640, 360, ["720p"])
    assert (only.rung.name, only.width, only.height) == ("720p", 640, 360)


# ── what a file is ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x20ftypisom\0\0\2\0", MP4),
        (b"\0\0\0\x14ftypqt  \0\0\2\0", QUICKTIME),
        (b"\0\0\0\x08wide\0\0\0\0mdat", QUICKTIME),
        (b"\x1a\x45\xdf\xa3\x93\x42\x82\x84webm", WEBM),
        (b"\x1a\x45\xdf\xa3\xa3\x42\x82\x88matroska", MATROSKA),
        (b"RIFF\x10\0\0\0AVI LIST", AVI),
        (b"\0\0\1\xba\x44\0\4\0", MPEG_PS),
        ((b"\x47" + b"\xff" * 187) * 3, MPEG_TS),
        (b"\0\0\0\x18ftypheic\0\0\0\0", None),
        (b"RIFF\x10\0\0\0WAVEfmt ", None),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///secret\n", None),
        (b"", None),
    ],
)
def test_the_kind_of_a_file_is_known_by_its_first_bytes(head: bytes, kind: Kind | None) -> None:
    assert kind_of(head) == kind


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "empty"),
        (b"minutes of a meeting", "text"),
        ("ä".encode() * 2000 + b"\xc3", "text"),
        (b"\x89PNG\r\n", "a PNG picture"),
        (b"\0\0\0\x18ftypheic", "a picture"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"\xfe\xed\0\1", "unknown (begins with fe ed 00 01)"),
    ],
)
def test_what_is_no_video_is_described(head: bytes, words: str) -> None:
    assert describe(head) == words


REPORT = """\
[info] Input #0, mov,mp4,m4a,3gp,3g2,mj2, from 'file:/tmp/x':
[info]   Metadata:
[info]     title           : Stream #0:9: Video: fake, 9x9, Duration: 00:00:01.00
[info]   Duration: 01:02:03.50, start: 0.000000, bitrate: 778 kb/s
[info]   Stream #0:0[0x1]: Audio: aac (LC) (mp4a / 0x6134706D), 44100 Hz, mono, fltp, 69 kb/s (default)
[info]   Stream #0:1[0x0]: Video: mjpeg, yuvj420p(pc), 600x600 [SAR 1:1 DAR 1:1], 90k tbr, 90k tbn (attached pic)
[info]   Stream #0:2[0x2](und): Video: h264 (High) (avc1 / 0x31637661), yuv420p(tv), 1920x1080 [SAR 1:1], 25 fps
[info]       displaymatrix: rotation of -90.00 degrees
[info] Stream mapping:
[info]   Stream #0:3: Video: vp9, yuv420p, 10x10
"""


def test_ffmpegs_report_is_read_and_not_fooled_by_text_of_the_file() -> None:
    assert read_report(REPORT.splitlines()) == Video("h264", 1080, 1920, 3723.5)
    assert read_report(REPORT.replace("-90.00", "180.00").splitlines()) == Video("h264", 1920, 1080, 3723.5)
    assert read_report(REPORT.splitlines()[:6]) is None
    unknown = read_report(REPORT.replace("01:02:03.50", "N/A").splitlines())
    assert unknown is not None
    assert unknown.duration_s == 0


# ── what a job comes to ───────────────────────────────────────────────────────────────────────────────────────────

A, B, C = Upload("u", "a.mp4"), Upload("u", "b.mp4"), BadRecord("record 3 is empty")


def test_a_job_without_faults_is_done() -> None:
    settle([A, B], [None, None])


def test_bad_objects_are_all_named_in_the_reason() -> None:
    with pytest.raises(parti.Reject) as caught:
        settle([A, B, C], [parti.Reject("infected"), None, parti.Reject(C.reason)])
    assert str(caught.value) == "2 of 3 objects failed: a.mp4: infected; record 3 is empty"
    with pytest.raises(parti.Reject, match=r"^a.mp4: infected$"):
        settle([A], [parti.Reject("infected")])


def test_what_may_work_later_is_tried_again_also_beside_bad_objects() -> None:
    with pytest.raises(parti.Retry, match=r"2 of 2 objects failed: a.mp4: infected; b.mp4: no disk"):
        settle([A, B], [parti.Reject("infected"), OSError("no disk")])


def test_an_interrupted_job_is_interrupted_whatever_else_went_wrong() -> None:
    with pytest.raises(JobInterrupted):
        settle([A, B], [parti.Reject("infected"), JobInterrupted("the worker leaves")])


# ── signatures ────────────────────────────────────────────────────────────────────────────────────────────────────

# Key pair, time, requests and signatures as Amazon's reference of S3 publishes them for tests of such code.
PUBLISHED = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1")
AT = datetime(2013, 5, 24, tzinfo=UTC)
HOST = {"Host": "examplebucket.s3.amazonaws.com"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "payload", "signature"),
    [
        (
            "GET",
            "/test.txt",
            {"Range": "bytes=0-9"},
            b"",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test$file.text",
            {"Date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
            b"Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
    ],
)
def test_signatures_are_the_published_ones(
    method: str, path: str, headers: dict[str, str], payload: bytes, signature: str
) -> None:
    digest = hashlib.sha256(payload).hexdigest()
    signed = sign(PUBLISHED, method, path, {**HOST, **headers}, payload_sha256=digest, at=AT)
    assert signed["Authorization"].endswith(f",Signature={signature}")


def test_a_session_token_is_signed_too_and_secrets_do_not_show() -> None:
    credentials = replace(PUBLISHED, session_token="a-token")
    signed = sign(credentials, "GET", "/a", HOST, payload_sha256=EMPTY_SHA256, at=AT)
    assert signed["x-amz-security-token"] == "a-token"
    assert "x-amz-date;x-amz-security-token" in signed["Authorization"]
    assert credentials.secret_key not in repr(credentials)
    assert "a-token" not in repr(credentials)


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("TRANSCODE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_settings_come_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TRANSCODE_RESOLUTIONS", "720p, 144p")
    environment.setenv("TRANSCODE_BACKOFF_S", "1,2")
    environment.setenv("TRANSCODE_CLAMD", "unix:///run/clamav/clamd.ctl")
    found = load_transcode()
    assert list(found.resolutions) == ["720p", "144p"]
    assert list(found.backoff_s) == [1, 2]
    assert found.clamd == "unix:///run/clamav/clamd.ctl"
    assert (found.stream, found.max_bytes, found.s3_endpoint) == ("MEDIA", 2 << 30, None)


def test_every_setting_is_in_the_guide() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transcode.md").read_text()
    assert [name for name in TranscodeSettings.model_fields if f"`TRANSCODE_{name.upper()}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RESOLUTIONS", "720p,81p", "expected some of 144p, 240p"),
        ("MAX_BYTES", "much", "valid integer"),
        ("CLAMD", "localhost:3310", "match pattern"),
        ("S3_ENDPOINT", "minio:9000", "match pattern"),
        ("WORK_DIR", "/nowhere/at/all", "expected a directory that exists"),
        ("PRESET", "placebo", "veryfast"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(
    environment: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    environment.setenv(f"TRANSCODE_{name}", value)
    with pytest.raises(ConfigError) as caught:
        load_transcode()
    text = str(caught.value)
    assert text.startswith(f"TRANSCODE_{name}: ")
    assert words in text
    assert "\n" not in text


# ── temporary files ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_workplace_removes_itself_and_those_that_were_left_but_none_that_is_in_use(tmp_path: Path) -> None:
    with Workplace(tmp_path) as mine:
        (mine.path / "file").touch()
        left = tmp_path / "transcode-left"
        left.mkdir()
        (left / ".lock").touch()
        unlocked = tmp_path / "transcode-being-made"
        unlocked.mkdir()
        with Workplace(tmp_path) as other:
            assert (mine.path / "file").exists()
            assert not left.exists()
            assert unlocked.exists()
        assert not other.path.exists()
    assert not mine.path.exists()


# ── the picture and the demo's judgement ──────────────────────────────────────────────────────────────────────────

PIECES = [
    Used("144p", "a<&>.mp4", 1, 10.0, 10.0, 12.0),
    Used("1080p", "a<&>.mp4", 14, 10.0, 12.0, 14.0),
    Used("480p", "b.mp4", 8, 10.5, 10.5, 11.5),
]


def test_the_use_of_slots_is_measured() -> None:
    usage = measure(PIECES)
    assert (usage.seconds, usage.most, usage.side_by_side, usage.longest_wait_s) == (4.0, 14, 2, 2.0)
    assert usage.mean == pytest.approx((2 * 1 + 2 * 14 + 1 * 8) / 4)
    assert measure([]).seconds == 0


def test_the_picture_is_a_file_that_stands_alone_with_a_block_for_each_piece() -> None:
    text = draw(PIECES, 14, "14 slots & <jobs>")
    root = ET.fromstring(text)
    kinds = [element.get("class") or "" for element in root.iter() if element.tag.endswith("path")]
    assert sorted(kind for kind in kinds if kind.startswith("piece")) == ["piece r0", "piece r3", "piece r5"]
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"capacity: 14 slots", "slots in use", "waiting", "14 slots & <jobs>", "1080p (cost 32)"} <= set(words)
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the name of SVG itself: nothing is loaded
    ET.fromstring(draw([], 14, "nothing"))


def manifest(key: str = "a.mp4", **changes: Any) -> Manifest:
    result = Result("144p", f"u/{key}/1/144p.mp4", 5, 64, 48, 1, 1, 1.0, 1.0, 2.0)
    made = Manifest(Source("u", key, 9, "", "video/mp4", 64, 48, 1.0), "r", "j.1", "w", 1, [result])
    return Manifest(**{**{name: getattr(made, name) for name in made.__struct_fields__}, **changes})


def job(state: JobState = JobState.DONE, error: str = "", attempt: int = 1) -> JobRecord:
    return JobRecord(stream="S", seq=1, subject="s", published_ns=1, state=state, error=error, attempt=attempt)


HAPPENINGS = [
    Happening([Sample("a.mp4", Path("a"), ("144p",)), Sample("b.mp4", Path("b"), ("144p",))]),
    Happening([Sample("bad.mp4", Path("c"), refused_for="no video")]),
]


def outcome(**changes: Any) -> Outcome:
    manifests = {key: manifest(key) for key in ("a.mp4", "b.mp4")}
    made = Outcome(
        [job(), job(JobState.FAILED, "bad.mp4: no video: text")],
        manifests,
        {one.results[0].key: (5, Video("h264", 64, 48, 1.0)) for one in manifests.values()},
        1,
        14,
    )
    return replace(made, **changes)


def test_an_outcome_as_expected_has_no_faults() -> None:
    assert find_faults(HAPPENINGS, outcome()) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"records": [job(JobState.FAILED, "why"), outcome().records[1]]}, "event 1 is failed, expected done: why"),
        ({"records": [job(), job()]}, "event 2 is done, expected failed"),
        ({"records": [job(), job(JobState.FAILED, "bad.mp4: infected")]}, "expected 'no video'"),
        ({"records": [job(attempt=2), outcome().records[1]]}, "event 1 took 2 attempts"),
        ({"dead_letters": 2}, "there are 2 dead letters, expected 1"),
        ({"manifests": {"a.mp4": manifest()}}, "b.mp4: no results"),
        ({"manifests": {**outcome().manifests, "bad.mp4": manifest("bad.mp4")}}, "bad.mp4: results of a bad file"),
        ({"results": {}}, "a.mp4/1/144p.mp4 has 0 bytes"),
        ({"results": {**outcome().results, "stray": (1, Video("h264", 2, 2, 1))}}, "stray"),
        ({"manifests": {**outcome().manifests, "a.mp4": manifest(results=[])}}, "a.mp4 became ()"),
        ({"capacity": 1}, "2 slots were in use at once, of 1"),
    ],
)
def test_each_fault_is_found(changes: dict[str, Any], fault: str) -> None:
    assert any(fault in found for found in find_faults(HAPPENINGS, outcome(**changes)))


def test_a_result_of_another_size_is_a_fault() -> None:
    key = "u/a.mp4/1/144p.mp4"
    wrong = {**outcome().results, key: (5, Video("h264", 32, 24, 1.0))}
    assert find_faults(HAPPENINGS, outcome(results=wrong)) == [f"{key} is 32x24, but its manifest says 64x48"]


def test_manifests_survive_their_json() -> None:
    assert decode(encode(manifest())) == manifest()
