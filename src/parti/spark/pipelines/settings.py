"""The settings of the pipeline: table `[pipeline]` of `parti.toml`, checked before Spark is started."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from parti.config.loading import load_table
from parti.errors import ConfigError
from parti.model.partition import Template
from parti.model.subjects import tokens_of
from parti.spark.lake import is_local
from parti.spark.pipelines.columns import Column, parse_columns

RESERVED = frozenset(
    {"stream", "seq", "subject", "timestamp", "headers", "payload", "batch_id", "event_time", "reason", "detail"}
)
"""Columns that silver and quarantine have anyway."""
CORRUPT = "_corrupt_record"
"""Where Spark puts a document that does not fit the schema."""


class PipelineSettings(BaseModel):
    """All settings of the pipeline; immutable, valid and consistent once it exists."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        populate_by_name=True,
    )

    stream: str
    """Stream that is read."""
    subjects: tuple[str, ...] = ()
    """Only messages on these subjects, wildcards allowed; none given: all of the stream."""
    lake: str = "lake"
    """Directory of the tables: a local path or any that Hadoop knows (hdfs://, abfs://)."""
    template: str | None = None
    """Subject template whose keys become columns of silver, such as `dc.{tool}.{chamber}.completion`."""
    columns: tuple[Column, ...] = Field(default=(), alias="schema")
    """Columns of the JSON payload: a table `[pipeline.schema]` of `name = "type"`, or one line of DDL."""
    event_time: str | None = None
    """Declared timestamp column that says when an event happened; unset: the time it reached the stream."""
    lateness_s: float = Field(default=600.0, ge=0, le=10**9)
    """An event older than the newest one of earlier batches by more than this is late."""
    ahead_s: float = Field(default=3600.0, ge=0, le=10**9)
    """An event that claims to be later than its arrival in the stream by more than this is not believed."""
    dedup: tuple[str, ...] = ()
    """Columns that make two events the same one; required columns or keys of the template."""
    window_s: float = Field(default=60.0, gt=0)
    """Length of a window of the gold tables."""
    start: str = "earliest"
    """Where the first run begins: `earliest`, `latest`, a sequence or a time such as `2026-11-01T00:00:00Z`."""
    headers: Literal["none", "raw", "parsed"] = "none"
    """Whether bronze has the headers, as bytes or as a map; a map halves the rate."""
    fail_on_data_loss: bool = True
    """Stop when messages were deleted before they were read; false: note it and go on."""
    max_offsets_per_trigger: int = Field(default=500_000, ge=1)
    """Most sequences that one batch of bronze takes in."""
    min_partitions: int | None = Field(default=None, ge=1)
    """Tasks that read one batch; unset: the source decides."""
    silver_rows: int = Field(default=2_000_000, ge=1)
    """Most rows of bronze that one commit of silver takes in, unless a single commit has more."""
    ledger: bool | None = None
    """Whether the ledger stream is taken in too; unset: if the workers' setting `ledger` is not off."""
    ledger_stream: str | None = None
    """Stream of the workers' ledger; unset: that of parti's own settings."""
    target_mb: int = Field(default=128, ge=1, le=10_000)
    """Size of a commit that compaction aims at."""
    compact_after: int = Field(default=0, ge=0)
    """With `--every`: compact a table when it has so many commits below `target_mb`; 0: only by hand."""
    gold: dict[str, Any] = Field(default_factory=dict)
    """Table `[pipeline.gold]`, checked by the gold step."""

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that a payload must have."""
        return tuple(column.name for column in self.columns if column.required)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the template."""
        return Template(self.template).keys if self.template else ()

    @property
    def target_bytes(self) -> int:
        """Size of a commit that compaction aims at."""
        return self.target_mb * 1024 * 1024

    @property
    def lateness_us(self) -> int:
        """Allowed lateness in microseconds."""
        return round(self.lateness_s * 1e6)

    @property
    def ahead_us(self) -> int:
        """How far ahead of its arrival an event may be, in microseconds."""
        return round(self.ahead_s * 1e6)

    @field_validator("stream", "ledger_stream")
    @classmethod
    def _check_stream(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[^\s.*>/\\]+", name):
            raise ValueError("must be a stream name: no spaces and none of . * > / \\")
        return name

    @field_validator("subjects", mode="before")
    @classmethod
    def _check_subjects(cls, subjects: object) -> object:
        if isinstance(subjects, str):
            subjects = [part.strip() for part in subjects.split(",") if part.strip()]
        if isinstance(subjects, list | tuple):
            for subject in subjects:
                tokens_of(str(subject))
        return subjects

    @field_validator("dedup", mode="before")
    @classmethod
    def _check_dedup(cls, names: object) -> object:
        return [part.strip() for part in names.split(",") if part.strip()] if isinstance(names, str) else names

    @field_validator("columns", mode="before")
    @classmethod
    def _check_columns(cls, declared: object) -> object:
        if isinstance(declared, str | Mapping):
            return parse_columns(declared)
        if isinstance(declared, tuple) and all(isinstance(column, Column) for column in declared):
            return declared
        raise ValueError('must be a table of name = "type", or one line such as "lot string not null, wafer int"')

    @field_validator("lake")
    @classmethod
    def _check_lake(cls, lake: str) -> str:
        if not lake.strip():
            raise ValueError("must be a directory")
        # Spark's JVM and this process need not have the same working directory.
        return str(Path(lake).expanduser().absolute()) if is_local(lake) and ":" not in lake else lake.rstrip("/")

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str | None) -> str | None:
        if template is not None:
            Template(template)
        return template

    @field_validator("start", mode="before")
    @classmethod
    def _check_start(cls, start: object) -> object:
        text = str(start)
        if text in {"earliest", "latest"} or text.isdecimal():
            return text
        try:
            datetime.fromisoformat(text)
        except ValueError:
            raise ValueError("must be earliest, latest, a sequence or a time like 2026-11-01T00:00:00Z") from None
        return text

    @model_validator(mode="after")
    def _check_relations(self) -> PipelineSettings:
        declared = {column.name: column for column in self.columns}
        for name in (*declared, *self.keys):
            if name.lower() in RESERVED or name.startswith("_"):
                raise ValueError(f"column {name!r} has a name that silver uses itself, or begins with '_'; rename it")
        if clash := {n.lower() for n in declared}.intersection(k.lower() for k in self.keys):
            raise ValueError(
                f"{', '.join(sorted(clash))}: both a key of the template and a declared column; rename one"
            )
        if self.event_time is not None:
            column = declared.get(self.event_time)
            if column is None or column.type != "timestamp":
                raise ValueError(f"event_time is {self.event_time!r}, which is no declared column of type timestamp")
            if not column.required:
                raise ValueError(f"event_time: column {self.event_time!r} must be declared 'timestamp not null'")
        for name in self.dedup:
            if name not in self.required and name not in self.keys:
                raise ValueError(f"dedup: {name!r} must be a column declared 'not null' or a key of the template")
        return self


def load_pipeline(
    overrides: Mapping[str, object] | None = None, *, config_file: Path | None = None
) -> PipelineSettings:
    """Read `[pipeline]` of the config file; overrides win, and those that are None are ignored.

    Raises ConfigError with one line that names each bad setting, where it came from and what is expected.
    """
    found, origin = load_table("pipeline", config_file=config_file)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    if not found and "stream" not in given:
        raise ConfigError(
            f'there is no table [pipeline] ({origin}); write one into parti.toml with at least: stream = "NAME"'
        )
    try:
        return PipelineSettings.model_validate({**found, **given})
    except ValidationError as error:
        text = "; ".join(_explain(detail, origin) for detail in error.errors(include_url=False))
    except ConfigError as error:
        text = f"{error} ([pipeline], {origin})"
    raise ConfigError(text)


def _explain(detail: Mapping[str, Any], origin: str) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in PipelineSettings.model_fields.items()]
        close = difflib.get_close_matches(place, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        return f"unknown setting {place!r} ([pipeline], {origin}); {hint}"
    if detail["type"] == "missing":
        return f"{place} is missing ([pipeline], {origin}); add it"
    cause = detail.get("ctx", {}).get("error")
    text = str(cause) if cause is not None else re.sub(r"^(Input|String|Value|Tuple) should", "must", detail["msg"])
    return f"{place} {text} ([pipeline], {origin})" if place else f"{text} ([pipeline], {origin})"


def pipeline_reference() -> str:
    """Return the reference page of these settings as Markdown, derived from the schema."""
    lines = [
        "# Settings of the pipeline",
        "",
        "Generated by `docs/generate.py` from `parti.spark.pipelines.settings`; do not edit.",
        "",
        "Keys of the table `[pipeline]` of `parti.toml`; how to reach the server stands in the top-level keys, see",
        "[settings](settings.md). What they mean together: [pipelines](../pipelines.md).",
        "",
        "| setting | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in PipelineSettings.model_fields.items():
        default = "" if field.is_required() or field.default in (None, ()) else _plain(field.default)
        lines.append(f"| `{field.alias or name}` | {default} | {field.description} |")
    return "\n".join([*lines, ""])


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"`{value:.10g}`"
    return f"`{value}`" if isinstance(value, str) else ""
