"""Settings of the example: environment variables `TRANSCODE_<NAME>`. What concerns jobs and NATS are parti's own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from examples.transcode.ladder import RUNGS
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from parti.errors import ConfigError
from parti.setting_types import Waits

PREFIX = "TRANSCODE_"
_NAMES = tuple(rung.name for rung in RUNGS)


class TranscodeSettings(BaseSettings):
    """All settings of the example; immutable and valid once it exists."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    stream: str = "MEDIA"
    """Stream of the events; made if it does not exist."""
    subject: str = "media.events"
    """Subject that the object store publishes its events to."""
    results_bucket: str = Field(default="transcoded", pattern=r"^[A-Za-z0-9_-]+$")
    """Bucket that results go to; events about it are skipped."""
    resolutions: Annotated[tuple[str, ...], NoDecode] = _NAMES
    """Resolutions to make, with commas between."""
    preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow"] = "veryfast"
    """libx264's trade of time for size."""
    crf: int = Field(default=23, ge=0, le=51)
    """libx264's quality: smaller is better and larger."""
    max_bytes: int = Field(default=2 << 30, ge=1)
    """Largest file that is accepted."""
    max_pixels: int = Field(default=7680 * 4320, ge=1)
    """Largest picture that is decoded, as width x height."""
    max_duration_s: float = Field(default=6 * 3600.0, gt=0)
    """Longest video that is accepted."""
    stall_s: float = Field(default=300.0, gt=0)
    """An ffmpeg that has got no further for this long is ended, and the job tried again."""
    clamd: str | None = Field(default=None, pattern=r"^(tcp://[^/:]+:\d+|unix:///.+)$")
    """Where clamd listens, `tcp://HOST:PORT` or `unix:///PATH`; without it nothing is scanned."""
    s3_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/]+/?$")
    """Where objects lie, such as `https://minio.example:9000`; without it in NATS object stores."""
    s3_region: str = "us-east-1"
    """Region that requests to `s3_endpoint` are signed for."""
    files_at_once: int = Field(default=14, ge=1)
    """Uploads that one worker has on its disk at the same time."""
    work_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Where the directory for temporary files is made."""
    attempts: int = Field(default=20, ge=1)
    """Attempts of a job; only what is not the file's fault, such as an unreachable store, uses up more than one."""
    backoff_s: Waits = (2.0, 5.0, 15.0, 60.0, 300.0)
    """Waits between attempts; the last one repeats."""

    @field_validator("resolutions", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("resolutions")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not set(value) <= set(_NAMES):
            raise ValueError(f"expected some of {', '.join(_NAMES)}, with commas between")
        return value

    @field_validator("work_dir")
    @classmethod
    def _exists(cls, value: Path) -> Path:
        if not value.is_dir():
            raise ValueError("expected a directory that exists")
        return value


def load_transcode() -> TranscodeSettings:
    """Read the environment; raises `ConfigError` that names each bad variable in one line."""
    try:
        return TranscodeSettings()
    except ValidationError as error:
        found = (f"{PREFIX}{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        text = "; ".join(" ".join(one.split()) for one in found)
    raise ConfigError(text)
