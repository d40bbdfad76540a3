"""Loading the settings from all sources, and one line that explains every bad one without showing a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from parti.config.relations import ContradictionError
from parti.config.schema import Settings
from parti.config.sources import (
    DEFAULT_CONFIG_FILE,
    config_path,
    describe_unknown,
    origins_of,
    read_config_file,
    reading_from,
)
from parti.errors import ConfigError
from parti.model.safe_text import looks_like_key, strip_userinfo


def load_settings(
    overrides: Mapping[str, object] = MappingProxyType({}), *, config_file: Path | None = None
) -> Settings:
    """Read the settings from all sources; `overrides` win, and those that are None are ignored.

    Raises `ConfigError` with one line that names every bad setting, its value (never a secret), where it came
    from and what is expected.
    """
    path = config_path(config_file)
    in_file = read_config_file(path, Settings.model_fields)
    arguments: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    try:
        with reading_from(in_file):
            return Settings(**arguments)
    except ValidationError as error:
        origins = origins_of(arguments, in_file, path)
        # A default that follows another setting is not worked out where a setting is wrong, which is said already.
        wrong = (d for d in error.errors(include_url=False) if d["type"] != "default_factory_not_called")
        text = "; ".join(_explain(detail, origins) for detail in wrong)
    # Raised out here so that the ValidationError, which holds the values, is not chained to it.
    raise ConfigError(text)


def load_table(name: str, *, config_file: Path | None = None) -> tuple[Mapping[str, object], str]:
    """Return a table of the config file, such as `[pipeline]`, and where it came from; empty if there is none.

    Whoever uses the table checks what is in it. Raises `ConfigError` for an unreadable file and for what is no table.
    """
    path = config_path(config_file)
    found = read_config_file(path, Settings.model_fields).get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} (file {path}) must be a table: write its settings below a line [{name}]")
    return found, f"file {path}" if path else f"no {DEFAULT_CONFIG_FILE} here"


def _explain(detail: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ContradictionError):
        return "; ".join(_explain_contradiction(text, names, origins) for text, names in cause.problems)
    name, *rest = (str(part) for part in detail["loc"])
    origin = origins.get(name, "default")
    if detail["type"] == "extra_forbidden":
        return describe_unknown(name, origin, Settings.model_fields)
    place = name + "".join(f"[{part}]" for part in rest)
    text = str(cause) if cause is not None else detail["msg"]
    text = re.sub(r"^(Input|String|Value|Tuple) should", "must", text)
    return f"{place}={_shown(name, detail['input'])} ({origin}): {text}"


def _explain_contradiction(text: str, names: Sequence[str], origins: Mapping[str, str]) -> str:
    known = ", ".join(f"{name}: {origins[name]}" for name in names if name in origins)
    return f"{text} ({known})" if known else text


def _shown(name: str, value: object) -> str:
    if name in {"password", "token"} or looks_like_key(str(value)):
        return "(hidden)"
    text = strip_userinfo(str(value) if isinstance(value, Path) else repr(value))
    if name == "nats" and not re.fullmatch(r"'(([a-z]+://)?[\w.-]+(:\d+)?/?)?'|\d+|\[\]|\(\)", text):
        return "(hidden)"  # a password that holds a comma is torn into items without "@"
    return text if len(text) <= 80 else f"{text[:80]}..."
