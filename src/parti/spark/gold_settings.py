"""Settings of the gold step: table `[pipeline.gold]` of `parti.toml`, and what it takes over from `[pipeline]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from parti.errors import ConfigError
from parti.model.partition import Template

if TYPE_CHECKING:
    from parti.spark.pipelines.settings import PipelineSettings

_DAY_S = 86_400
_LIMITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "period_s": (lambda value: value > 0, "seconds, more than 0"),
    "recent_s": (lambda value: value > 0, "seconds, more than 0"),
    "handler_p95_s": (lambda value: value is None or value > 0, "seconds, more than 0"),
    "sample": (lambda value: value >= 1 and value == int(value), "a whole number from 1 on"),
}


@dataclass(frozen=True, slots=True)
class GoldSettings:
    """What the gold step needs to know; made by `GoldSettings.of`, which checks it."""

    lake: str
    template: str
    window_us: int
    period_s: float = _DAY_S
    """Length of a period for which objectives are judged; a multiple of the window."""
    recent_s: float = 3600
    """The newest part of a period, for which a burn rate of its own is told."""
    handler_p95_s: float | None = None
    """The p95 of handler latency that is normal; unset: that of the period itself."""
    sample: int = 1
    """The `ledger_sample` of the workers, if their ledger is sampled."""

    @classmethod
    def of(cls, settings: PipelineSettings) -> GoldSettings:
        """Take the settings of the pipeline; raises `ConfigError` that names what is wrong."""
        given = dict(settings.gold)
        known = [field.name for field in fields(cls) if field.name in _LIMITS]
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r} ([pipeline.gold]); known are {', '.join(known)}")
            fits, expected = _LIMITS[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
                raise ConfigError(f"{name} is {value!r} ([pipeline.gold]): expected {expected}")
        if settings.template is None or not Template(settings.template).keys:
            raise ConfigError(
                "gold needs to know the partitions of the messages; set template in [pipeline], such as "
                '"dc.{tool}.{chamber}.completion"'
            )
        for name in {"key", "value", "worker", "partition"}.intersection(settings.keys):
            raise ConfigError(f"template has a key {name!r}, which the gold tables use themselves; rename it")
        made = cls(settings.lake, settings.template, round(settings.window_s * 1e6), **given)
        if round(made.period_s * 1e6) % made.window_us:
            raise ConfigError(
                f"period_s = {made.period_s:g} ([pipeline.gold]) is no multiple of window_s = {settings.window_s:g} "
                f"([pipeline]); change one of them"
            )
        return made

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the template."""
        return Template(self.template).keys

    @property
    def windows_per_period(self) -> int:
        """How many windows a period has."""
        return round(self.period_s * 1e6) // self.window_us

    @property
    def meaning(self) -> dict[str, object]:
        """What must not change between two runs, or old and new rows do not fit each other."""
        windows = {"window_us": self.window_us, "period_s": float(self.period_s)}
        return {**windows, "template": self.template, "sample": self.sample}
