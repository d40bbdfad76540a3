"""Every setting of parti: its type, its bounds, its default and what it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, SecretStr, field_serializer, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from parti.config.relations import ContradictionError, auth_methods, find_contradictions
from parti.config.sources import ENV_PREFIX, TABLES, file_values
from parti.core.shards import MOST_SHARDS
from parti.model.safe_text import strip_userinfo
from parti.setting_types import (
    ExistingFile,
    LogLevel,
    Name,
    Networks,
    ServerUrls,
    StreamName,
    Subject,
    Waits,
)

DEFAULT_BUCKET = "parti"


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
    inbox_prefix: Subject = "_INBOX"
    """First part of the subjects that answers come back on; one of its own for each user keeps others from reading
    them (`parti perms`)."""
    read_by: Literal["consumers", "requests"] = "consumers"
    """How commands, the console and Spark read: by consumers of their own, or by requests alone, which is all that a
    user in an account of its own may do (`parti perms`). Workers need consumers."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for the first connection."""
    ping_interval_s: float = Field(default=3.0, gt=0)
    """Time between pings that detect a silent server."""
    reconnect_wait_s: float = Field(default=0.2, gt=0)
    """Pause between attempts to reconnect."""
    protocol_reader: Literal["lean", "plain"] = "lean"
    """Who reads the bytes of the connection: parti itself, or (`plain`) the client library, which is slower."""
    event_loop: Literal["auto", "asyncio"] = "auto"
    """Whose event loop a worker process runs on: uvloop's if it is installed (`parti[fast]`), or Python's own."""
    lost_after_s: float = Field(default=60.0, gt=0)
    """A connection suspended for longer than this counts as lost."""

    bucket: Name = DEFAULT_BUCKET
    """Key-value bucket that holds positions and claims; one per fleet."""
    prefix: Name = Field(default_factory=lambda given: given.get("bucket", DEFAULT_BUCKET))
    """First part of consumer names: `<prefix>-<worker_id>`; one per fleet. Unset: the name of `bucket`."""
    replicas: int = Field(default=1, ge=1, le=5)
    """Replicas of the buckets and streams that parti creates."""

    fleet: bool = True
    """Share the partitions with all workers of this bucket; false: read everything alone."""
    worker_id: Name | None = None
    """The one id that this worker insists on; unset: the lowest free of `worker-0`, `worker-1`, ..."""
    standby: bool = False
    """Share the worker id with other processes: one holds it and works, the others stand by to take it over."""
    standby_rank: int = Field(default=0, ge=0, le=9)
    """Of several that stand by, those with smaller numbers go first: 0 in the primary region, 1 in the second, ..."""
    identity: Name | None = None
    """Name of host, pod or slot that gets its worker id back after a restart."""
    owner_token: SecretStr | None = Field(default=None, min_length=1)
    """Handed down by a supervisor so that a restarted process takes over its predecessor's lease at once."""
    may_lead: bool = True
    """Stand for election as rebalancer, monitor and cleanup; false: own partitions, and leave that to others."""
    max_workers: int = Field(default=1000, ge=1, le=100_000)
    """How many worker ids there are."""
    capacity: int | None = Field(default=None, ge=0)
    """Most partitions that this worker takes; unset: `max_subjects` x `consumer_shards`."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of the partitions that this worker gets, against the others."""
    strategy: Literal["sticky", "hash", "weighted", "load", "range", "round-robin"] = "sticky"
    """How partitions are shared out."""
    lease_ttl_s: float = Field(default=5.0, ge=1)
    """A worker that is silent for this long is gone, and its partitions go to others."""
    stall_after_s: float = Field(default=10.0, ge=0.5)
    """A worker that should make progress and makes none for this long says so, and leaves if a restart of its reading
    side does not help."""
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
    """Most memory that the copy takes on a server; full, it is read to its end and made anew from there."""
    hot_mirror_max_age_s: float = Field(default=120.0, ge=1)
    """Workers that lag by more than this and hold up most others read the stream itself until they have caught up."""
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
    history: bool = True
    """Record each change of a partition's owner for a week, in the stream `<bucket>-history`: for `parti explain`."""
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
    tracing: bool = False
    """Handle each message in an OpenTelemetry span that goes on with the publisher's trace (extra `parti[otel]`)."""
    log_level: LogLevel = "info"
    """Least important level that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """`console` or `json` lines; `auto` is console on a terminal, else JSON."""

    console_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that `parti console` listens on; any but this machine's own needs one of the two files below."""
    console_port: int = Field(default=8787, ge=0, le=65_535)
    """Port of `parti console`; 0 = any free one."""
    console_token_file: ExistingFile | None = None
    """File with a token that whoever opens the console has to name."""
    console_basic_auth_file: ExistingFile | None = None
    """File with lines `user:password`, one of which whoever opens the console has to name."""
    console_allow_readable_files: bool = False
    """Accept these two files although other users may read them; else the console refuses to start."""
    console_trusted_proxies: Networks = ("127.0.0.0/8", "::1/128")
    """Addresses or networks of proxies that speak TLS for the console: with `X-Forwarded-Proto: https` from one of
    them, its cookie is sent over TLS only."""

    migrate_at_once: int = Field(default=50, ge=1, le=900)
    """Partitions that rest at the same time while `parti migrate` switches them or gives them back."""
    migrate_window_s: float = Field(default=10.0, ge=0.1)
    """Length of a parity window."""
    migrate_max_lag_msgs: int = Field(default=10_000, ge=0)
    """Messages that may wait in a parity window, over all partitions."""
    migrate_max_redelivery_ratio: float = Field(default=0.05, ge=0, le=1)
    """Share of the deliveries in a parity window that may be repeats."""
    migrate_breaches: int = Field(default=3, ge=1)
    """Parity windows in a row that exceed one of the two before everything is taken back."""

    @model_validator(mode="after")
    def _check_relations(self) -> Settings:
        if problems := list(find_contradictions(self)):
            raise ContradictionError(problems)
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
        auth = " and ".join(auth_methods(self)) or "none"
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
        values = file_values(cls.model_fields)
        own = {name: value for name, value in values.items() if name not in TABLES}
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=own)
