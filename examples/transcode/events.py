"""What an object store says has happened: the event notifications of S3 and MinIO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

import parti

_CREATED = "ObjectCreated:"


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that has been written."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that names no object."""

    reason: str


def read_event(event: Any, *, but: str) -> list[Upload | BadRecord]:
    """What is to be done about an event, each object once; nothing about other things than uploads.

    Skipped are records of other events than `ObjectCreated`, of bucket `but` (results would be results' causes), and
    of the empty objects that stand for folders. Raises `parti.Reject` for what is no such event at all.
    """
    if isinstance(event, dict) and event.get("Event") == "s3:TestEvent":
        return []
    records = event.get("Records") if isinstance(event, dict) else None
    if not isinstance(records, list):
        raise parti.Reject("this is no event of an object store: expected JSON with a list named Records")
    return list(dict.fromkeys(_wanted(records, but)))


def _wanted(records: list[Any], but: str) -> Iterator[Upload | BadRecord]:
    for number, record in enumerate(records, 1):
        try:
            # AWS sends `ObjectCreated:Put`, MinIO `s3:ObjectCreated:Put`.
            if not record["eventName"].removeprefix("s3:").startswith(_CREATED):
                continue
            bucket, key = record["s3"]["bucket"]["name"], unquote_plus(record["s3"]["object"]["key"])
        except (TypeError, KeyError, AttributeError):
            yield BadRecord(f"record {number} has no eventName, s3.bucket.name and s3.object.key")
            continue
        if not isinstance(bucket, str) or not bucket or not key:
            yield BadRecord(f"record {number} has an empty bucket or key")
        elif bucket != but and not key.endswith("/"):
            yield Upload(bucket, key)
