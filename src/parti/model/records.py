"""Records as bytes: how they are written, and what is refused when they are read.

Every record is a JSON object that names its kind in the field `kind`. Whatever else lies under a key (bytes that are
no UTF-8, a thousand nested lists, a number without end, a time without a zone, the record of another kind, a publish
ack) is a `DecodeError` and nothing else, so that its reader can leave it out and go on. Fields that a record does not
know are ignored: a newer version may have added them, and a fleet is upgraded worker by worker.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast

import msgspec

from parti.errors import DecodeError
from parti.model.safe_text import escape

TAG = "kind"
"""The field that says what a record is."""
MOST = 2**53 - 1
"""The largest number in a record: JSON readers keep no larger one exactly."""
_EARLIEST, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_SAID = 160
"""Characters of a reason: part of it may be what somebody else has written."""
_DIGITS = 19

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Whole = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
Real = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=7_258_118_400.0)]
"""A time in seconds since 1970, before 2200: one that readers can convert."""
Weight = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")


def _plain(value: Any) -> str:
    """A kind of text that msgspec does not know (`EscapedText`) as the text that it is."""
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError(f"a record holds a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)


class _Foreign(msgspec.Struct, frozen=True, tag_field=TAG, tag=""):
    """Never written. A choice between two kinds makes msgspec insist on the tag; alone it would be optional."""


def encode(record: msgspec.Struct) -> bytes:
    """Serialise a record. Texts in it are made safe where they come in; one that was missed fails no write."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        return _encoder.encode(_escaped(msgspec.to_builtins(record, enc_hook=_plain)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {_escaped(k): _escaped(v) for k, v in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list | tuple) else value


def decode(data: bytes, kind: type[T]) -> T:
    """Read a record; raises `DecodeError` on anything else."""
    return _read(data, _decoder(kind), kind, str(kind.__struct_config__.tag or kind.__name__))


def decode_plain(data: bytes, kind: type[V]) -> V:
    """Read a value that names no kind, such as what a request says; raises `DecodeError` on anything else."""
    return _read(data, _plain_decoder(cast("Hashable", kind)), kind, kind.__name__)


def _read(data: bytes, decoder: msgspec.json.Decoder[Any], kind: type[V], name: str) -> V:
    try:
        found = decoder.decode(data)
    except (ValueError, RecursionError, OverflowError) as error:
        raise DecodeError(f"not a record of kind {name!r}: {_in_short(error)}") from None
    if not isinstance(found, kind):
        raise DecodeError(f"not a record of kind {name!r}: it names no kind")
    return found


def check_time(moment: datetime | None) -> None:
    """Raise ValueError for a time that no clock of ours has shown; readers could not convert it."""
    if moment is not None and not _EARLIEST <= moment < _LATEST:
        raise ValueError("expected a time between 1970 and 2200")


def number_in(text: str) -> int:
    """The number that a text from outside holds; 0 when it is none, or too long to be one of ours.

    >>> number_in("42"), number_in("9" * 5000), number_in("-1"), number_in("")
    (42, 0, 0, 0)
    """
    return int(text) if len(text) <= _DIGITS and text.isdecimal() else 0


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    if kind.__struct_config__.tag is None:
        return _plain_decoder(kind)
    return msgspec.json.Decoder(Union[kind, _Foreign])  # noqa: UP007 - `kind` is a value here


@cache
def _plain_decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _in_short(error: Exception) -> str:
    return str(error)[:_SAID].encode("unicode_escape").decode()
