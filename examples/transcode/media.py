"""What a file really is, by its first bytes; its name and declared type are only claims."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

HEAD = 4096
"""First bytes that are looked at."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of container, and the only reader of ffmpeg that may open it.

    ffmpeg itself would try all its readers, among them some that follow names of other files and of hosts.
    """

    type: str
    reader: str


MP4 = Kind("video/mp4", "mov")
QUICKTIME = Kind("video/quicktime", "mov")
WEBM = Kind("video/webm", "matroska")
MATROSKA = Kind("video/x-matroska", "matroska")
AVI = Kind("video/x-msvideo", "avi")
MPEG_TS = Kind("video/mp2t", "mpegts")
MPEG_PS = Kind("video/mpeg", "mpeg")

_TS_PACKET = 188
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide")
_PICTURE_BRANDS = (b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis")
_OTHERS = (
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"OggS", "an Ogg file"),
    (b"ID3", "an MP3 file"),
)


def kind_of(head: bytes) -> Kind | None:
    """The kind of video that begins like this, or None."""
    if head[4:8] in _BOXES:
        return _kind_of_boxes(head)
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return WEBM if b"webm" in head[:64] else MATROSKA
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return AVI
    if head.startswith(b"\x00\x00\x01\xba"):
        return MPEG_PS
    if len(head) > 2 * _TS_PACKET and all(head[at] == 0x47 for at in range(0, 3 * _TS_PACKET, _TS_PACKET)):
        return MPEG_TS
    return None


def _kind_of_boxes(head: bytes) -> Kind | None:
    brand = head[8:12] if head[4:8] == b"ftyp" else b"qt  "  # QuickTime is older than brands
    return None if brand in _PICTURE_BRANDS else QUICKTIME if brand == b"qt  " else MP4


def describe(head: bytes) -> str:
    """In a few words what begins like this, for the reason of a refusal."""
    if not head:
        return "empty"
    for magic, name in _OTHERS:
        if head.startswith(magic):
            return name
    if head[4:8] == b"ftyp":
        return "a picture"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last letter may be cut in two
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        return "text"
    return f"unknown (begins with {head[:8].hex(' ')})"
