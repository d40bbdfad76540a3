"""The relations between settings: what excludes, needs or bounds what, each with the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from parti.config.schema import Settings

Problem: TypeAlias = tuple[str, tuple[str, ...]]
"""What is wrong and what to do, and the names of the settings that it is about."""


class ContradictionError(ValueError):
    """Settings that exclude each other; carries their names so that an error can say where each came from."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(text for text, _ in problems))
        self.problems = problems


def find_contradictions(s: Settings) -> Iterator[Problem]:
    """Everything that is wrong with settings that are fine one by one."""
    yield from _connection_problems(s)
    yield from _system_problems(s)
    yield from _timing_problems(s)
    yield from _standby_problems(s)
    yield from _ledger_problems(s)


def auth_methods(s: Settings) -> list[str]:
    """The ways to authenticate that are set, by name."""
    methods = {
        "password": s.user is not None or s.password is not None,
        "token": s.token is not None,
        "nkey": s.nkey_seed_file is not None,
        "credentials": s.credentials_file is not None,
        "URL": any("@" in url for url in s.nats),
    }
    return [name for name, used in methods.items() if used]


def _connection_problems(s: Settings) -> Iterator[Problem]:
    if len(methods := auth_methods(s)) > 1:
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


def _system_problems(s: Settings) -> Iterator[Problem]:
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


def _standby_problems(s: Settings) -> Iterator[Problem]:
    if s.standby and (s.worker_id is None or not s.fleet):
        yield (
            "standby is for a member of a fleet whose worker id others share; set worker_id, and leave fleet on",
            ("standby", "worker_id", "fleet"),
        )
    if s.standby and s.hot_mirror == "on":
        yield (
            "standby=true needs a consumer with acknowledgements, which those of the hot mirror are not; set "
            "hot_mirror=auto, and the stream itself is read",
            ("standby", "hot_mirror"),
        )


def _ledger_problems(s: Settings) -> Iterator[Problem]:
    if s.ledger_stream is not None and s.ledger_stream in {s.dead_letter_stream, f"KV_{s.bucket}"}:
        yield (
            f"ledger_stream={s.ledger_stream} holds dead letters or the bucket already; name another one",
            ("ledger_stream", "dead_letter_stream", "bucket"),
        )


def _text(value: object) -> str:
    return "(unset)" if value is None else str(value)


def _timing_problems(s: Settings) -> Iterator[Problem]:
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
