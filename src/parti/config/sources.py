"""Where settings come from: the environment and the config file, found, read and named in errors."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from parti.errors import ConfigError

DEFAULT_CONFIG_FILE = "parti.toml"
ENV_PREFIX = "PARTI_"
ENV_CONFIG_FILE = "PARTI_CONFIG"
TABLES = ("pipeline", "jobs")
"""Tables of the config file that have a schema of their own, where they are used."""

_read: ContextVar[Mapping[str, object] | None] = ContextVar("parti_file_values", default=None)


@contextmanager
def reading_from(values: Mapping[str, object]) -> Iterator[None]:
    """Within the block these are the values of the config file, which has been read already."""
    token = _read.set(values)
    try:
        yield
    finally:
        _read.reset(token)


def file_values(known: Collection[str]) -> Mapping[str, object]:
    """The values of the config file; see `read_config_file`."""
    values = _read.get()
    return read_config_file(config_path(), known) if values is None else values


def config_path(config_file: Path | None = None) -> Path | None:
    """The config file: this one, else the one that the environment names, else the one here, if there is one."""
    if config_file is not None:
        return config_file
    if named := os.environ.get(ENV_CONFIG_FILE):
        return Path(named)
    default = Path(DEFAULT_CONFIG_FILE)
    return default if default.is_file() else None


def read_config_file(path: Path | None, known: Collection[str]) -> Mapping[str, object]:
    """What a config file says, nothing if there is none; `known` are the names of the settings.

    Raises `ConfigError` for a file that cannot be read, is no TOML, or names a setting that there is not.
    """
    if path is None:
        return {}
    try:
        with path.expanduser().open("rb") as file:
            values = tomllib.load(file)
    except (FileNotFoundError, RuntimeError):
        raise ConfigError(f"config file {path} does not exist; create it or name another one") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not UTF-8 text; save it as TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {str(error).splitlines()[0]}") from None
    if unknown := [name for name in values if name not in known and name not in TABLES]:
        raise ConfigError("; ".join(describe_unknown(name, f"file {path}", known) for name in unknown))
    return values


def describe_unknown(name: str, origin: str, known: Collection[str]) -> str:
    """Say that there is no such setting, with the one that was perhaps meant."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "settings are top-level keys, listed in the settings reference"
    return f"unknown setting {name!r} ({origin}); {hint}"


def origins_of(arguments: Mapping[str, object], in_file: Mapping[str, object], path: Path | None) -> dict[str, str]:
    """Where the value of each setting comes from that is not left at its default."""
    origins = dict.fromkeys(in_file, f"file {path}")
    for variable, value in os.environ.items():
        if value and variable.upper().startswith(ENV_PREFIX):
            origins[variable[len(ENV_PREFIX) :].lower()] = f"environment {variable}"
    return origins | dict.fromkeys(arguments, "argument")
