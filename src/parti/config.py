"""Every setting of parti, in one schema, with the relations between them checked at construction.

Sources, strongest first: constructor arguments, environment `PARTI_<NAME>`, the keys of `parti.toml` (in the
current directory, or the file named by `PARTI_CONFIG` or `config_file`), the defaults below. An empty
environment variable counts as unset. Relative paths start at the current directory.

Invariant guarded here: no secret (password, token, key, user info inside a URL) appears in an error, a
repr or a JSON dump of the settings.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_serializer, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from parti.core.shards import MOST_SHARDS
from parti.errors import ConfigError
from parti.setting_types import (
    ExistingFile,
    LogLevel,
    Name,
    ServerUrls,
    StreamName,
    Subject,
    Waits,
    looks_like_key,
    strip_userinfo,
)

__all__ = ["Settings", "load_settings", "load_table", "settings_reference", "strip_userinfo"]

DEFAULT_CONFIG_FILE = "parti.toml"
ENV_PREFIX = "PARTI_"
ENV_CONFIG_FILE = "PARTI_CONFIG"
TABLES = ("pipeline", "jobs")
"""Tables of the config file that have a schema of their own, where they are used."""

_file_values: ContextVar[Mapping[str, object] | None] = ContextVar("parti_file_values", default=None)

# The first setting of each section, for the reference page.
_SECTIONS = {
    "nats": "Connection",
    "prefix": "Names and storage",
    "fleet": "Fleet",
    "ordered": "Consumer and handlers",
    "pull_batch": "Pulling",
    "progress_interval_s": "Progress, dead letters and ledger",
    "metrics_port": "Telemetry",
}


class _ContradictionError(ValueError):
    """Settings that exclude each other; carries their names so that an error can say where each came from."""

    def __init__(self, problems: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        super().__init__("; ".join(text for text, _ in problems))
        self.problems = problems


class Settings(BaseSettings):
    """All settings of one parti process; immutable, valid and consistent once it exists.

    Constructing it directly raises pydantic's `ValidationError` for bad values (without echoing them) and
    `ConfigError` for an unreadable file; `load_settings` turns both into a one-line `ConfigError`.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    nats: ServerUrls = ("nats://127.0.0.1:4222",)
    """NATS servers, as a list or separated by commas; tried until one answers."""
    user: str | None = Field(default=None, min_length=1)
    """User name, together with `password`."""
    password: SecretStr | None = None
    """Password of `user`."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Authentication token."""
    nkey_seed_file: ExistingFile | None = None
    """File that holds an NKey seed."""
    credentials_file: ExistingFile | None = None
    """`.creds` file with a user JWT and its seed."""
    tls_ca: ExistingFile | None = None
    """PEM file of the authorities trusted to sign server certificates."""
    tls_cert: ExistingFile | None = None
    """PEM client certificate, with `tls_key`."""
    tls_key: ExistingFile | None = None
    """PEM private key of `tls_cert`."""
    tls_hostname: str | None = Field(default=None, min_length=1)
    """Host name expected in the server certificate, if not the URL's."""
    tls_handshake_first: bool = False
    """Start TLS before the server's first line; the server must be set up alike."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for the first connection."""
    ping_interval_s: float = Field(default=3.0, gt=0)
    """Time between pings that detect a silent server."""
    reconnect_wait_s: float = Field(default=0.2, gt=0)
    """Pause between attempts to reconnect."""
    protocol_reader: Literal["lean", "plain"] = "lean"
    """Who reads the bytes of the connection: parti itself, or (`plain`) the client library, which is slower."""
    lost_after_s: float = Field(default=60.0, gt=0)
    """A connection suspended for longer than this counts as lost."""

    prefix: Name = "parti"
    """First part of consumer names: `<prefix>-<worker_id>`; one per deployment."""
    bucket: Name = "parti"
    """Key-value bucket that holds positions and claims."""
    replicas: int = Field(default=1, ge=1, le=5)
    """Replicas of the buckets and streams that parti creates."""

    fleet: bool = True
    """Share the partitions with all workers of this bucket; false: read everything alone."""
    worker_id: Name | None = None
    """The one id that this worker insists on; unset: the lowest free of `worker-0`, `worker-1`, ..."""
    identity: Name | None = None
    """Name of host, pod or slot that gets its worker id back after a restart."""
    owner_token: SecretStr | None = Field(default=None, min_length=1)
    """Handed down by a supervisor so that a restarted process takes over its predecessor's lease at once."""
    max_workers: int = Field(default=1000, ge=1, le=100_000)
    """How many worker ids there are."""
    capacity: int | None = Field(default=None, ge=0)
    """Most partitions that this worker takes; unset: `max_subjects` x `consumer_shards`."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """Share of the partitions that this worker gets, against the others."""
    strategy: Literal["sticky", "hash", "weighted", "load", "range", "round-robin"] = "sticky"
    """How partitions are shared out."""
    lease_ttl_s: float = Field(default=5.0, ge=1)
    """A worker that is silent for this long is gone, and its partitions go to others."""
    leader_ttl_s: float = Field(default=5.0, ge=1)
    """A leader that is silent for this long is replaced."""
    rejoin_s: float = Field(default=30.0, ge=0)
    """How long the partitions of a worker with an identity wait for it after it left."""
    cold_start_window_s: float = Field(default=1.0, ge=0)
    """Wait so long for other workers before partitions are given out for the first time."""
    scale_window_s: float = Field(default=3.0, ge=0)
    """Wait so long after the last join or leave before partitions move between workers."""
    min_rebalance_interval_s: float = Field(default=5.0, ge=0)
    """Shortest time between two rebalances; a lost worker's partitions do not wait for it."""
    hysteresis: float = Field(default=0.1, ge=0, le=1)
    """Imbalance that no partition moves for, as a share of the mean."""
    load_window_s: float = Field(default=30.0, ge=0.5)
    """With strategy `load`: an imbalance has to last so long; also the half-life that loads are smoothed with."""
    moves_at_once: int = Field(default=200, ge=1)
    """Most partitions that are on their way from one worker to another at the same time."""
    ready_within_s: float = Field(default=5.0, gt=0)
    """A worker that is not ready for a partition by then does not get it; the owner keeps it."""
    crash_limit: int = Field(default=2, ge=1)
    """Processes that may be known to have died in the handler of a message before it is dead-lettered."""
    system_user: str | None = Field(default=None, min_length=1)
    """User of the server's system account, whose events tell at once that a process is gone."""
    system_password: SecretStr | None = None
    """Password of `system_user`."""
    system_credentials_file: ExistingFile | None = None
    """`.creds` file of a user of the system account, instead of `system_user`."""
    takeover_on_disconnect: bool = False
    """Give away the partitions of a worker half a second after its connection was closed; needs system events."""

    ordered: bool = True
    """Handle each partition's messages one at a time, in stream order."""
    start: Literal["all", "new"] = "all"
    """Where a partition without a position begins: its oldest message or the next new one."""
    ack_wait_s: float = Field(default=30.0, ge=1)
    """The server redelivers what is unacknowledged for this long; 3 x p95 handler."""
    max_ack_pending: int = Field(default=500, ge=1, le=1_000_000)
    """Most messages delivered and not yet acknowledged."""
    max_waiting: int = Field(default=256, ge=1, le=100_000)
    """Most pull requests waiting on the server."""
    inactive_threshold_s: float = Field(default=86_400.0, gt=0)
    """The server deletes a consumer unused for this long."""
    attempts: int = Field(default=3, ge=1)
    """Tries of a handler before its message is dead-lettered."""
    backoff_s: Waits = (2.0, 5.0, 15.0)
    """Waits between tries, separated by commas; the last one repeats."""
    handler_timeout_s: float | None = Field(default=None, gt=0)
    """Longest run of one handler call; unset means no limit."""
    handler_threads: int = Field(default=16, ge=1, le=1024)
    """Threads for handlers that are not async."""
    max_subjects: int = Field(default=500, ge=1)
    """Most subjects that one consumer of this worker may carry."""
    consumer_shards: int = Field(default=1, ge=1, le=MOST_SHARDS)
    """Most consumers that this worker may have; each carries up to `max_subjects`."""
    hot_mirror: Literal["off", "on", "auto"] = "auto"
    """Read live messages from a copy of the stream in the server's memory: never, always, or when the stream's own
    storage is too slow for the filters (`auto`); limits retention and file storage only."""
    hot_mirror_max_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Most memory that the copy takes on a server; full, it stops and is made anew."""
    hot_mirror_max_age_s: float = Field(default=120.0, ge=1)
    """Workers that lag by more than this make room: they read the stream itself until they have caught up."""
    update_min_interval_s: float = Field(default=0.5, ge=0)
    """Shortest time between consumer updates; changes in between are merged."""
    update_attempts: int = Field(default=5, ge=1)
    """Tries of one consumer update before it has failed."""
    update_failure_threshold: int = Field(default=3, ge=1)
    """Failed updates in a row that make the worker unhealthy."""

    pull_batch: int = Field(default=50, ge=1)
    """Messages asked for by one pull request at first."""
    pull_max_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Most bytes that one pull request may return."""
    pull_expires_s: float = Field(default=30.0, ge=1)
    """Lifetime of a pull request on the server."""
    pull_heartbeat_s: float = Field(default=2.0, ge=0.1)
    """Idle heartbeat asked for; missing ones make the worker pull anew."""
    backpressure: float = Field(default=0.8, gt=0, le=1)
    """Share of `max_ack_pending` in flight at which pulling pauses."""

    progress_interval_s: float = Field(default=0.5, gt=0)
    """Time between writes of changed positions."""
    checkpoint_interval_s: float = Field(default=60.0, gt=0)
    """How often the state of a stateful handler's partitions is saved while they are handled."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Longest wait for running handlers when stopping."""
    dead_letter_stream: StreamName = "parti-dlq"
    """Stream that keeps messages whose handler gave up."""
    dead_letter_subject: Subject = "parti.dlq"
    """Subject that dead letters are published under."""
    ledger: Literal["off", "sampled", "full"] = "off"
    """Record finished messages in a ledger stream: none, one in `ledger_sample`, or all."""
    ledger_sample: int = Field(default=100, ge=1, le=1_000_000)
    """One in so many messages is recorded with `ledger=sampled`; all workers choose the same."""
    ledger_stream: StreamName | None = None
    """Stream that keeps the ledger; unset: `<stream>-ledger`."""

    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of `/metrics` and `/healthz`; 0 = any free one, unset = off."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the metrics port listens on."""
    metrics_per_partition: bool = False
    """Also count messages per partition: one time series for each."""
    log_level: LogLevel = "info"
    """Least important level that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """`console` or `json` lines; `auto` is console on a terminal, else JSON."""

    @model_validator(mode="after")
    def _check_relations(self) -> Settings:
        problems = [
            *_connection_problems(self),
            *_system_problems(self),
            *_timing_problems(self),
            *_ledger_problems(self),
        ]
        if problems:
            raise _ContradictionError(problems)
        return self

    @field_serializer("nats", when_used="json")
    def _dump_nats(self, urls: tuple[str, ...]) -> list[str]:
        return [strip_userinfo(url) for url in urls]

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield what repr, str and rich show: every field, without user info in URLs."""
        for name, value in super().__repr_args__():
            yield name, tuple(strip_userinfo(url) for url in value) if name == "nats" else value

    @property
    def room(self) -> int:
        """Most partitions that this worker takes."""
        return self.max_subjects * self.consumer_shards if self.capacity is None else self.capacity

    @property
    def has_system_account(self) -> bool:
        """Whether there are credentials for the server's system events."""
        return self.system_user is not None or self.system_credentials_file is not None

    def for_system_account(self) -> Settings:
        """The same settings with the credentials for the server's system events."""
        return self.model_copy(
            update={
                "user": self.system_user,
                "password": self.system_password,
                "credentials_file": self.system_credentials_file,
                "token": None,
                "nkey_seed_file": None,
                "nats": tuple(strip_userinfo(url) for url in self.nats),
            }
        )

    @property
    def connection_summary(self) -> str:
        """One line for logs: servers, kind of authentication, TLS; never a user name or a secret."""
        auth = " and ".join(_auth_methods(self)) or "none"
        tls = bool(self.tls_ca or self.tls_cert or self.tls_hostname or self.tls_handshake_first)
        tls = tls or any(url.startswith("tls://") for url in self.nats)
        mode = "mutual" if self.tls_cert else "on" if tls else "off"
        return f"{','.join(strip_userinfo(url) for url in self.nats)} auth={auth} tls={mode}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, file."""
        values = _file_values.get()
        if values is None:
            values = _read_config_file(_config_path(None))
        own = {name: value for name, value in values.items() if name not in TABLES}
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=own)


def load_settings(
    overrides: Mapping[str, object] = MappingProxyType({}), *, config_file: Path | None = None
) -> Settings:
    """Read the settings from all sources; `overrides` win, and those that are None are ignored.

    Raises `ConfigError` with one line that names every bad setting, its value (never a secret), where it came
    from and what is expected.
    """
    path = _config_path(config_file)
    file_values = _read_config_file(path)
    arguments: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    token = _file_values.set(file_values)
    try:
        return Settings(**arguments)
    except ValidationError as error:
        origins = _origins(arguments, file_values, path)
        text = "; ".join(_explain(detail, origins) for detail in error.errors(include_url=False))
    finally:
        _file_values.reset(token)
    # Raised out here so that the ValidationError, which holds the values, is not chained to it.
    raise ConfigError(text)


def load_table(name: str, *, config_file: Path | None = None) -> tuple[Mapping[str, object], str]:
    """Return a table of the config file, such as `[pipeline]`, and where it came from; empty if there is none.

    Whoever uses the table checks what is in it. Raises `ConfigError` for an unreadable file and for what is no table.
    """
    path = _config_path(config_file)
    found = _read_config_file(path).get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} (file {path}) must be a table: write its settings below a line [{name}]")
    return found, f"file {path}" if path else f"no {DEFAULT_CONFIG_FILE} here"


def _auth_methods(s: Settings) -> list[str]:
    methods = {
        "password": s.user is not None or s.password is not None,
        "token": s.token is not None,
        "nkey": s.nkey_seed_file is not None,
        "credentials": s.credentials_file is not None,
        "URL": any("@" in url for url in s.nats),
    }
    return [name for name, used in methods.items() if used]


def _connection_problems(s: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    if len(methods := _auth_methods(s)) > 1:
        yield (
            f"more than one way to authenticate is set ({', '.join(methods)}); keep one of: "
            "user and password, token, nkey_seed_file, credentials_file, or credentials inside the nats URL",
            ("user", "password", "token", "nkey_seed_file", "credentials_file", "nats"),
        )
    if s.password is not None and s.user is None:
        yield "password is set but user is not; set both or neither", ("password",)
    if (s.tls_cert is None) != (s.tls_key is None):
        values = f"tls_cert={_text(s.tls_cert)} and tls_key={_text(s.tls_key)}"
        yield f"{values} belong together; set both or neither", ("tls_cert", "tls_key")


def _system_problems(s: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    if (s.system_user is None) != (s.system_password is None):
        yield "system_user and system_password belong together; set both or neither", ("system_user",)
    if s.system_user is not None and s.system_credentials_file is not None:
        yield (
            "system_user and system_credentials_file are both set; keep one of them",
            ("system_user", "system_credentials_file"),
        )
    if s.takeover_on_disconnect and not s.has_system_account:
        yield (
            "takeover_on_disconnect needs the server's system events; set system_user and system_password, or "
            "system_credentials_file",
            ("takeover_on_disconnect",),
        )


def _ledger_problems(s: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    if s.ledger_stream is not None and s.ledger_stream in {s.dead_letter_stream, f"KV_{s.bucket}"}:
        yield (
            f"ledger_stream={s.ledger_stream} holds dead letters or the bucket already; name another one",
            ("ledger_stream", "dead_letter_stream", "bucket"),
        )


def _text(value: object) -> str:
    return "(unset)" if value is None else str(value)


def _timing_problems(s: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    if s.pull_heartbeat_s * 2 > s.pull_expires_s:
        yield (
            f"pull_heartbeat_s={s.pull_heartbeat_s:g} must be at most half of "
            f"pull_expires_s={s.pull_expires_s:g}, or the server refuses the pull",
            ("pull_heartbeat_s", "pull_expires_s"),
        )
    limit = s.backpressure * s.max_ack_pending
    if s.pull_batch > limit + 1e-9:
        yield (
            f"pull_batch={s.pull_batch} must be at most backpressure={s.backpressure:g} x "
            f"max_ack_pending={s.max_ack_pending} = {limit:g}; lower pull_batch or raise max_ack_pending",
            ("pull_batch", "backpressure", "max_ack_pending"),
        )
    most = s.max_subjects * s.consumer_shards
    if s.capacity is not None and s.capacity > most:
        yield (
            f"capacity={s.capacity} must be at most max_subjects={s.max_subjects} x consumer_shards="
            f"{s.consumer_shards} = {most}, since each partition is a subject of one of the worker's consumers; "
            f"raise consumer_shards or max_subjects too",
            ("capacity", "max_subjects", "consumer_shards"),
        )
    if s.consumer_shards > 1 and s.worker_id == "worker":
        yield (
            f"worker_id=worker with consumer_shards={s.consumer_shards} would name its second consumer like that of "
            f"worker-2, an id that workers get by default; choose another worker_id",
            ("worker_id", "consumer_shards"),
        )
    if s.fleet and s.inactive_threshold_s <= s.rejoin_s:
        yield (
            f"inactive_threshold_s={s.inactive_threshold_s:g} must exceed rejoin_s={s.rejoin_s:g}, or the server "
            f"deletes the consumer of a worker that is expected back",
            ("inactive_threshold_s", "rejoin_s"),
        )
    for name, why in (
        ("lost_after_s", "or the server deletes the consumer during an outage that parti would survive"),
        ("lease_ttl_s", "or the server deletes the consumer of a worker that is still alive"),
        ("ack_wait_s", "or the server deletes the consumer while its messages are being handled"),
    ):
        if s.inactive_threshold_s <= getattr(s, name):
            values = f"inactive_threshold_s={s.inactive_threshold_s:g} must exceed {name}={getattr(s, name):g}"
            yield f"{values}, {why}", ("inactive_threshold_s", name)


def _config_path(config_file: Path | None) -> Path | None:
    if config_file is not None:
        return config_file
    if named := os.environ.get(ENV_CONFIG_FILE):
        return Path(named)
    default = Path(DEFAULT_CONFIG_FILE)
    return default if default.is_file() else None


def _read_config_file(path: Path | None) -> Mapping[str, object]:
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
    if unknown := [name for name in values if name not in Settings.model_fields and name not in TABLES]:
        raise ConfigError("; ".join(_unknown(name, f"file {path}") for name in unknown))
    return values


def _unknown(name: str, origin: str) -> str:
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"did you mean {close[0]}?" if close else "settings are top-level keys, listed in the settings reference"
    return f"unknown setting {name!r} ({origin}); {hint}"


def _origins(arguments: Mapping[str, object], file_values: Mapping[str, object], path: Path | None) -> dict[str, str]:
    origins = dict.fromkeys(file_values, f"file {path}")
    for variable, value in os.environ.items():
        if value and variable.upper().startswith(ENV_PREFIX):
            origins[variable[len(ENV_PREFIX) :].lower()] = f"environment {variable}"
    return origins | dict.fromkeys(arguments, "argument")


def _explain(detail: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, _ContradictionError):
        return "; ".join(_explain_contradiction(text, names, origins) for text, names in cause.problems)
    name, *rest = (str(part) for part in detail["loc"])
    origin = origins.get(name, "default")
    if detail["type"] == "extra_forbidden":
        return _unknown(name, origin)
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


def settings_reference() -> str:
    """Return the reference page of all settings as Markdown, derived from the schema."""
    lines = [
        "# Settings",
        "",
        "Generated by `docs/generate.py` from `parti.config.Settings`; do not edit.",
        "",
        "Sources, strongest first: arguments, environment `PARTI_<NAME>` in capitals (empty counts as",
        "unset), top-level keys of `parti.toml` in the current directory or of the file that `PARTI_CONFIG`",
        "names, defaults. Relative paths start at the current directory.",
    ]
    schema = Settings.model_json_schema()["properties"]
    for name, field in Settings.model_fields.items():
        if name in _SECTIONS:
            header = ["| setting | expected | default | meaning |", "|---|---|---|---|"]
            lines += ["", f"## {_SECTIONS[name]}", "", *header]
        default = "" if field.default is None else f"`{_plain(field.default)}`"
        lines.append(f"| `{name}` | {_expected(schema[name])} | {default} | {field.description} |")
    return "\n".join([*lines, ""])


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_plain(item) for item in value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _expected(schema: Mapping[str, Any]) -> str:
    schema = next((option for option in schema.get("anyOf", ()) if option["type"] != "null"), schema)
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_expected(schema['items'])}"
    kind = {"password": "secret", "path": "file"}.get(schema.get("format", ""), schema["type"])
    limits = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="))
    return " ".join([kind, *(f"{sign} {_plain(schema[key])}" for key, sign in limits if key in schema)])
