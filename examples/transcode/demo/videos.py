"""Makes small videos to try things with, by ffmpeg's own test pictures."""

from __future__ import annotations

import subprocess
from pathlib import Path

from examples.transcode.ffmpeg import find_ffmpeg

_MUXERS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska", ".avi": "avi", ".ts": "mpegts"}


def make_video(
    path: Path,
    width: int,
    height: int,
    seconds: float,
    *,
    muxer: str = "",
    sound: bool = True,
    faststart: bool = False,
) -> Path:
    """Write a moving test picture with a tone; the container follows the name, unless `muxer` says otherwise."""
    picture = f"testsrc2=size={width}x{height}:rate=25:duration={seconds}"
    tone = ["-f", "lavfi", "-i", f"sine=frequency=440:duration={seconds}", "-c:a", "aac"] if sound else []
    command = [
        *(find_ffmpeg(), "-hide_banner", "-loglevel", "error", "-nostdin", "-y"),
        *("-f", "lavfi", "-i", picture, *tone),
        *("-pix_fmt", "yuv420p", "-c:v", "libx264", "-preset", "ultrafast"),
        *(("-movflags", "+faststart") if faststart else ()),
        *("-f", muxer or _MUXERS[path.suffix], str(path)),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


def cut_off(source: Path, path: Path, share: float) -> Path:
    """Write the first part of a file, as an upload that broke off leaves it."""
    data = source.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path
