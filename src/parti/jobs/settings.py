"""The settings of job workers: table `[jobs]` of `parti.toml`, checked before anything is touched.

Sources, strongest first: arguments, environment `PARTI_JOBS_<NAME>`, the table, the profile, the defaults. How to
reach the server, attempts, dead letters, draining and telemetry are parti's general settings.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from parti.config.loading import load_table
from parti.core.admission import LookAhead
from parti.core.job_profiles import HEARTBEATS_IN_ACK_WAIT, tuned
from parti.core.priority import HIGHEST, LOWEST, Policy, PriorityGroup, PullOptions, check_name
from parti.errors import ConfigError
from parti.setting_types import Name

ENV_PREFIX = "PARTI_JOBS_"


class JobSettings(BaseModel):
    """All settings of job workers; immutable, valid and consistent once it exists."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    durable: Name | None = None
    """Name of the consumer that all workers of these jobs share; unset: `<prefix>-jobs`."""
    max_capacity: int = Field(default=14, ge=1, le=100_000)
    """Slots of one worker, which the costs of work inside jobs are taken from; also the most jobs that it holds."""
    workers: int = Field(default=1, ge=1, le=10_000)
    """Workers that share the consumer: its max_ack_pending is `max_capacity` x `workers`."""
    profile: Literal["auto", "small", "medium", "large"] = "auto"
    """Size of the machine, which chooses `fetch_batch_size`: 2, 5 or 10; `auto` goes by its cores."""
    length: Literal["short", "long", "very-long"] = "short"
    """How long jobs take, which chooses `heartbeat_interval_s` and `ack_wait_minutes`: 30 s and 5, 60 s and 15, 60 s
    and 30."""
    traffic: Literal["low", "normal", "high"] = "normal"
    """How often jobs come, which chooses `fetch_timeout_s`: 5, 2 or 1."""
    ack_wait_minutes: float = Field(default=5.0, gt=0, le=100_000)
    """The server gives a job to somebody else when it has heard nothing of it for this long."""
    heartbeat_interval_s: float = Field(default=30.0, ge=0.05)
    """How often the server is told that a job is still worked on, from its receipt to its end."""
    fetch_batch_size: int = Field(default=5, ge=1)
    """Most jobs that one pull asks for."""
    fetch_timeout_s: float = Field(default=2.0, ge=0.1, le=600)
    """How long a pull waits for jobs."""
    look_ahead: int = Field(default=64, ge=0)
    """Pieces of work that may be looked at behind a large one that waits for slots; 0: strict order of arrival."""
    overtakings: int = Field(default=30, ge=0)
    """How often one piece of work may be overtaken by smaller ones."""
    patience_s: float = Field(default=600.0, ge=0)
    """Nothing overtakes a piece of work that has waited this long, whatever its size or priority."""
    job_crash_limit: int = Field(default=5, ge=1)
    """Processes that may die while they run a job before it is dead-lettered."""
    report_interval_s: float = Field(default=1.0, ge=0.05)
    """Shortest time between two writes of one job's progress."""
    keep_s: float = Field(default=86_400.0, ge=1)
    """How long the record of a job is kept after its end; by it a job that is delivered again is known to be done."""
    retention: Literal["workqueue", "limits", "interest"] = "workqueue"
    """Retention of the stream, if it does not exist and is made."""
    priority_policy: Literal["none", "overflow", "prioritized"] = "none"
    """How the server chooses among workers of several regions, the same for all of them: `overflow` by how much is
    pending, `prioritized` by `priority`; fixed when the consumer is made."""
    priority_group: str = "jobs"
    """Name of the consumer's priority group, if there is a policy."""
    min_pending: int = Field(default=0, ge=0)
    """With `overflow`: this worker gets jobs only while at least so many are waiting; 0: no such condition."""
    min_ack_pending: int = Field(default=0, ge=0)
    """With `overflow`: or while workers hold at least so many; either of the two conditions is enough."""
    priority: int = Field(default=0, ge=HIGHEST, le=LOWEST)
    """With `prioritized`: this worker gets jobs only while no worker with a smaller number asks for some."""

    @property
    def ack_wait_s(self) -> float:
        """`ack_wait_minutes` in seconds."""
        return self.ack_wait_minutes * 60

    @property
    def max_ack_pending(self) -> int:
        """Most jobs that all workers together hold."""
        return self.max_capacity * self.workers

    @property
    def group(self) -> PriorityGroup | None:
        """The priority group of the consumer."""
        if self.priority_policy == "none":
            return None
        return PriorityGroup(self.priority_group, Policy(self.priority_policy))

    @property
    def pull_options(self) -> PullOptions:
        """What the pulls of this worker say of its place in the group."""
        name = self.priority_group if self.group else ""
        return PullOptions(name, self.min_pending, self.min_ack_pending, self.priority or None)

    @property
    def fairness(self) -> LookAhead:
        """How far the order of arrival may be left."""
        return LookAhead(self.look_ahead, self.overtakings, self.patience_s)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: object) -> object:
        return tuned(values, os.cpu_count()) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_relations(self) -> JobSettings:
        least_s = HEARTBEATS_IN_ACK_WAIT * self.heartbeat_interval_s
        if self.ack_wait_s < least_s - 1e-9:
            raise ValueError(
                f"ack_wait_minutes={self.ack_wait_minutes:g} ({self.ack_wait_s:g} s) must be at least "
                f"{HEARTBEATS_IN_ACK_WAIT} x heartbeat_interval_s={self.heartbeat_interval_s:g} = {least_s:g} s, or "
                f"a few lost heartbeats have a running job started elsewhere; raise the one or lower the other"
            )
        if self.fetch_batch_size > self.max_capacity:
            raise ValueError(
                f"fetch_batch_size={self.fetch_batch_size} must be at most max_capacity={self.max_capacity}, since a "
                f"worker holds no more jobs than it has slots"
            )
        if self.fetch_timeout_s >= self.ack_wait_s:
            raise ValueError(
                f"fetch_timeout_s={self.fetch_timeout_s:g} must be below ack_wait_minutes={self.ack_wait_minutes:g} "
                f"({self.ack_wait_s:g} s)"
            )
        self._check_priority()
        if self.keep_s <= self.ack_wait_s:
            raise ValueError(
                f"keep_s={self.keep_s:g} must exceed ack_wait_minutes={self.ack_wait_minutes:g} ({self.ack_wait_s:g} "
                f"s), or a job that is delivered again is not known to be done"
            )
        return self

    def _check_priority(self) -> None:
        meant_for = {"min_pending": "overflow", "min_ack_pending": "overflow", "priority": "prioritized"}
        for name, policy in meant_for.items():
            if getattr(self, name) and self.priority_policy != policy:
                raise ValueError(
                    f"{name}={getattr(self, name)} says something only with priority_policy={policy}, but it is "
                    f"priority_policy={self.priority_policy}"
                )
        try:
            check_name(self.priority_group)
        except ConfigError as error:
            raise ValueError(f"priority_group={self.priority_group}: {error}") from None
        if self.min_ack_pending >= self.max_ack_pending:
            raise ValueError(
                f"min_ack_pending={self.min_ack_pending} must be below max_capacity={self.max_capacity} x "
                f"workers={self.workers} = {self.max_ack_pending}, at which the server gives out nothing more"
            )


def load_jobs(overrides: Mapping[str, object] | None = None, *, config_file: Path | None = None) -> JobSettings:
    """Read the settings from all sources; overrides win, and those that are None are ignored.

    Raises ConfigError with one line that names each bad setting, where it came from and what is expected.
    """
    found, origin = load_table("jobs", config_file=config_file)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    named = {name: os.environ.get(f"{ENV_PREFIX}{name.upper()}") for name in JobSettings.model_fields}
    environment = {name: value for name, value in named.items() if value}
    origins = {
        **dict.fromkeys(found, f"[jobs], {origin}"),
        **{name: f"environment {ENV_PREFIX}{name.upper()}" for name in environment},
        **dict.fromkeys(given, "argument"),
    }
    try:
        return JobSettings.model_validate({**found, **environment, **given})
    except ValidationError as error:
        text = "; ".join(_explain(detail, origins) for detail in error.errors(include_url=False))
    raise ConfigError(text)


def _explain(detail: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    origin = origins.get(place.partition(".")[0], "default")
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(place, JobSettings.model_fields, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(JobSettings.model_fields)}"
        return f"unknown setting {place!r} ({origin}); {hint}"
    cause = detail.get("ctx", {}).get("error")
    text = str(cause) if cause is not None else re.sub(r"^(Input|String|Value|Tuple) should", "must", detail["msg"])
    if place:
        return f"{place} {text} ({origin})"
    known = ", ".join(f"{name}: {where}" for name, where in origins.items() if f"{name}=" in text)
    return f"{text} ({known})" if known else text


def jobs_reference() -> str:
    """Return the reference page of these settings as Markdown, derived from the schema."""
    lines = [
        "# Settings of job workers",
        "",
        "Generated by `docs/generate.py` from `parti.jobs.settings`; do not edit.",
        "",
        "Keys of the table `[jobs]` of `parti.toml`, environment variables `PARTI_JOBS_<NAME>`, or arguments of",
        "`parti.jobs.JobApp`. Connection, attempts, dead letters, draining and telemetry are general",
        "[settings](settings.md). What they mean together: [jobs](../jobs.md).",
        "",
        "| setting | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in JobSettings.model_fields.items():
        default = "" if field.default is None else f"`{_plain(field.default)}`"
        lines.append(f"| `{name}` | {default} | {' '.join((field.description or '').split())} |")
    return "\n".join([*lines, ""])


def _plain(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, int | float) else str(value)
