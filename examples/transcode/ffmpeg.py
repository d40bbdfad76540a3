"""ffmpeg as a child process: looks into a file, makes one resolution of it, and never outlives its worker."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.transcode.ladder import Piece
from examples.transcode.media import Kind
from examples.transcode.settings import TranscodeSettings

import parti
from parti.errors import ConfigError

# ffmpeg's exit code is the last byte of its error; these two say that the data are bad.
_INVALID_DATA, _TOO_MANY_ERRORS = 183, 69
_REPORT_S = 0.25
_KEPT_LINES, _LINE_BYTES = 1000, 4096
_NEEDED = ("libx264", "aac")
# Matched at the beginning of a line: anything may stand further on, such as in the title of a video.
_DURATION = re.compile(r"Duration: (\d+):(\d\d):(\d\d(?:\.\d+)?)")
_VIDEO = re.compile(r"Stream #0:\d+.*?: Video: (\w+).*?, (\d+)x(\d+)")
_ROTATION = re.compile(r"displaymatrix: rotation of (-?[\d.]+) degrees")
_TAGS = re.compile(r"^(?:\[[^\]]*\] *)+")
# The child asks the kernel to be killed with this process, then becomes ffmpeg. Not in a `preexec_fn`: code between
# fork and exec can deadlock when there are threads. The kernel means the thread that starts the child: the loop's.
_TIE = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class FfmpegFailed(Exception):  # noqa: N818 - named for what happened
    """ffmpeg ended with an error that need not be the file's fault."""


@dataclass(frozen=True, slots=True)
class Video:
    """What ffmpeg found in a file."""

    codec: str
    width: int
    height: int
    """As it is shown: a rotated one is turned."""
    duration_s: float
    """0 when the file does not say."""


@dataclass(frozen=True, slots=True)
class _Ended:
    code: int
    lines: Sequence[str]

    @property
    def complaint(self) -> str:
        """The first error, without ffmpeg's addresses."""
        errors = [_plain(line) for line in self.lines if "[error]" in line or "[fatal]" in line]
        return errors[0] if errors else f"exit code {self.code}"


def find_ffmpeg() -> str:
    """The ffmpeg of `IMAGEIO_FFMPEG_EXE`, of the package imageio-ffmpeg, or of the machine; raises `ConfigError`."""
    try:
        import imageio_ffmpeg  # noqa: PLC0415 - optional

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        if found := shutil.which("ffmpeg"):
            return found
    raise ConfigError("there is no ffmpeg here: install parti[transcode], or ffmpeg, or set IMAGEIO_FFMPEG_EXE")


class Ffmpeg:
    """Runs ffmpeg. Files are opened by the reader of their kind alone, and nothing but files is opened."""

    def __init__(self, settings: TranscodeSettings) -> None:
        self._settings = settings
        self.path = find_ffmpeg()

    async def check(self) -> None:
        """Raise `ConfigError` when this ffmpeg does not run, or lacks an encoder."""
        if shutil.which(self.path) is None:
            raise ConfigError(f"ffmpeg at {self.path!r} does not exist, or cannot be run; correct IMAGEIO_FFMPEG_EXE")
        lines: list[str] = []
        found = await self._run(["-encoders"], quiet=False, out=lines.append)
        names = {words[1] for line in lines if len(words := line.split()) > 1}
        if found.code or not names.issuperset(_NEEDED):
            raise ConfigError(f"ffmpeg at {self.path!r} has no encoders {' and '.join(_NEEDED)}; use another one")

    async def probe(self, path: Path, kind: Kind) -> Video:
        """Look into a file and decode its first picture; `parti.Reject` when it is no usable video."""
        ended = await self._run(
            [*self._open(path, kind, threads=1), "-map", "0:V:0", "-frames:v", "1", "-f", "null", "-"], quiet=False
        )
        if ended.code < 0 or ended.code in _THIS_MACHINE:
            raise FfmpegFailed(_describe(ended))
        video = read_report(ended.lines)
        if video is None:
            no_video = (
                "it has no video in it"
                if any(_plain(line).startswith("Input #0") for line in ended.lines)
                else ended.complaint
            )
            raise parti.Reject(f"ffmpeg cannot read it as {kind.type}: {no_video}")
        if ended.code:
            raise parti.Reject(f"ffmpeg cannot decode its {video.codec}: {ended.complaint}")
        return video

    async def transcode(
        self, path: Path, kind: Kind, piece: Piece, *, threads: int, into: Path, on_time: Callable[[float], None]
    ) -> float:
        """Make one resolution; tells how many seconds of it are made meanwhile, and returns how many there are.

        `parti.Reject` when the data are bad. The child is gone when this returns or raises, however that happens.
        """
        reached_s, moved = 0.0, asyncio.Event()

        def take(line: str) -> None:
            nonlocal reached_s
            name, _, value = line.partition("=")
            if name == "out_time_us" and value.isdecimal() and int(value) / 1e6 > reached_s:
                reached_s = int(value) / 1e6
                moved.set()
                on_time(reached_s)

        arguments = [
            *("-progress", "pipe:1", "-nostats", "-stats_period", str(_REPORT_S)),
            *self._open(path, kind, threads=threads),
            *("-map", "0:V:0", "-map", "0:a:0?", "-map_metadata", "-1", "-map_chapters", "-1"),
            *("-vf", f"scale={piece.width}:{piece.height}", "-pix_fmt", "yuv420p"),
            *("-c:v", "libx264", "-preset", self._settings.preset, "-crf", str(self._settings.crf)),
            *("-c:a", "aac", "-b:a", "128k", "-threads", str(threads), "-filter_threads", str(threads)),
            *("-movflags", "+faststart", "-f", "mp4", "-y", str(into)),
        ]
        watching = asyncio.create_task(_until_still(moved, self._settings.stall_s))
        running = asyncio.create_task(self._run(arguments, out=take))
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise FfmpegFailed(f"ffmpeg got no further than {reached_s:.1f} s for {self._settings.stall_s:g} s")
        finally:
            watching.cancel()
            running.cancel()
            await asyncio.wait({running, watching})
        ended = running.result()
        if ended.code in {_INVALID_DATA, _TOO_MANY_ERRORS}:
            raise parti.Reject(f"ffmpeg cannot decode it: {ended.complaint}")
        if ended.code:
            raise FfmpegFailed(_describe(ended))
        return reached_s

    def _open(self, path: Path, kind: Kind, *, threads: int) -> list[str]:
        """An input that can name no other files and no hosts, with bounded pictures."""
        most = str(self._settings.max_pixels)
        return [
            *("-threads", str(threads), "-max_pixels", most),
            *("-protocol_whitelist", "file", "-f", kind.reader, "-i", f"file:{path}"),
        ]

    async def _run(
        self, arguments: Sequence[str], *, quiet: bool = True, out: Callable[[str], None] = lambda line: None
    ) -> _Ended:
        command = [self.path, "-hide_banner", "-nostdin", "-loglevel", f"level+{'error' if quiet else 'info'}"]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the worker, which may let it finish
        )
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        assert process.stdout
        assert process.stderr
        try:
            await asyncio.gather(_read(process.stdout, out), _read(process.stderr, lines.append))
            return _Ended(await process.wait(), tuple(lines))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


_THIS_MACHINE = frozenset(256 - number for number in (2, 5, 11, 12, 13, 23, 24, 28))
"""Exit codes for files, memory, disk or permissions that this machine lacks."""


def read_report(lines: Sequence[str]) -> Video | None:
    """What ffmpeg says of its input, or None if there is no video in it."""
    codec, width, height, duration_s, turned = "", 0, 0, 0.0, False
    for line in map(_plain, lines):
        if line.startswith(("Output #0", "Stream mapping:")):
            break
        if found := _DURATION.match(line):
            duration_s = int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3])
        elif not codec and "(attached pic)" not in line and (found := _VIDEO.match(line)):
            codec, width, height = found[1], int(found[2]), int(found[3])
        elif codec and (found := _ROTATION.match(line)):
            turned = round(float(found[1])) % 180 != 0
    if not codec:
        return None
    return Video(codec, height, width, duration_s) if turned else Video(codec, width, height, duration_s)


def _plain(line: str) -> str:
    """The line without what ffmpeg puts before it: who says it, and how bad it is."""
    return _TAGS.sub("", line).strip()


async def _read(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Lines of any length, of which the beginning is kept: their text may come from the file."""
    rest = b""
    while data := await stream.read(_LINE_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        rest = rest[:_LINE_BYTES]
        for line in whole:
            take(line[:_LINE_BYTES].decode(errors="replace").rstrip())
    if rest:
        take(rest.decode(errors="replace").rstrip())


async def _until_still(moved: asyncio.Event, stall_s: float) -> None:
    while True:
        moved.clear()
        try:
            async with asyncio.timeout(stall_s):
                await moved.wait()
        except TimeoutError:
            return


def _describe(ended: _Ended) -> str:
    if ended.code < 0:
        return f"ffmpeg was ended by {signal.Signals(-ended.code).name}"
    return f"ffmpeg failed with exit code {ended.code}: {ended.complaint}"
