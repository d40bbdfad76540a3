"""What is good and what is not about a deployment: facts in, findings out, each with what it means and its fix.

Only what was measured or is documented is judged; thresholds stand at the top. What cannot be seen from a client is
said to be unseen, never guessed.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parti.core.cliff import search_us

MANY_SUBJECTS = 100
"""With fewer subjects in a stream its filters are cheap."""
USED_WARNING, USED_ERROR = 0.8, 0.95
"""Shares of a limit."""
CLOCK_NOTE_S, CLOCK_WARNING_S = 0.5, 2.0
FEW_CONSUMERS = 5
_SECOND_NS = 1_000_000_000
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    area: str
    text: str
    meaning: str = ""
    """What follows from it; empty where all is well."""
    fix: str = ""


def ok(area: str, text: str) -> Finding:
    """All is well here."""
    return Finding(Level.OK, area, text)


def note(area: str, text: str, meaning: str = "", fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, area, text, meaning, fix)


def warning(area: str, text: str, meaning: str, fix: str) -> Finding:
    """It works, until something happens."""
    return Finding(Level.WARNING, area, text, meaning, fix)


def error(area: str, text: str, meaning: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(Level.ERROR, area, text, meaning, fix)


# ── the server and the account ────────────────────────────────────────────────────────────────────────────────────


def judge_server(
    info: Mapping[str, Any], version: tuple[int, int, int], least: tuple[int, int, int], servers: Sequence[str]
) -> Iterator[Finding]:
    """The server by what it says of itself when somebody connects."""
    shown, needed = ".".join(map(str, version)), ".".join(map(str, least[:2]))
    if version == (0, 0, 0):
        yield warning("server", "it does not say which version it is", "parti needs a certain one", "look at its log")
    elif version < least:
        yield error(
            "server",
            f"nats-server {shown} is older than {needed}",
            "workers refuse to start: positions rest on the consumer reset of that version",
            f"upgrade nats-server to {needed} or newer",
        )
    else:
        cluster = f", cluster {info['cluster']}" if info.get("cluster") else ", on its own"
        yield ok("server", f"nats-server {shown}{cluster}, messages up to {info.get('max_payload', 0):,} bytes")
    if not info.get("headers", True):
        yield error("server", "headers are off", "parti's records need them", "remove no_header_support")
    remote = [url for url in servers if not url.partition("://")[2].rpartition("@")[2].startswith(_LOOPBACK)]
    if remote and not info.get("auth_required"):
        yield warning(
            "server",
            "nobody has to authenticate",
            "whoever reaches the server can read, write and delete everything",
            "set up accounts and users; 'docs/operating.md#credentials' lists what a worker needs",
        )
    if remote and not info.get("tls_required") and not info.get("tls_verify"):
        yield note("server", "the connection is not encrypted", "others on the network can read along", "set up TLS")


def judge_limits(account: Mapping[str, Any]) -> Iterator[Finding]:
    """What the account may use of JetStream, and what it does; for each tier where it has tiers."""
    tiers = account.get("tiers") or {"": account}
    for name, tier in tiers.items():
        limits, where = tier.get("limits") or {}, f" of tier {name}" if name else ""
        judged = [
            _usage(f"memory{where}", tier.get("memory", 0), limits.get("max_memory", -1), "bytes"),
            _usage(f"storage{where}", tier.get("storage", 0), limits.get("max_storage", -1), "bytes"),
            _usage(f"streams{where}", tier.get("streams", 0), limits.get("max_streams", -1), ""),
            _usage(f"consumers{where}", tier.get("consumers", 0), limits.get("max_consumers", -1), ""),
        ]
        found = [finding for finding in judged if finding]
        yield from found
        if not found:
            streams, consumers = tier.get("streams", 0), tier.get("consumers", 0)
            yield ok("account", f"limits{where} leave room; streams in use: {streams:,}, consumers: {consumers:,}")


def _usage(what: str, used: int, limit: int, unit: str) -> Finding | None:
    if limit < 0 or (limit == 0 and not used):
        return None
    share = used / limit if limit else 1.0
    if share < USED_WARNING:
        return None
    text = f"{used:,} of {limit:,} {unit} {what} are used".replace("  ", " ")
    meaning, fix = "what is refused for want of room is not stored", "raise the limits of the account, or remove data"
    return (error if share >= USED_ERROR else warning)("account", text, meaning, fix)


# ── a stream ──────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_stream(name: str, info: Mapping[str, Any], *, replicas: int, clustered: bool) -> Iterator[Finding]:
    """The stream that messages are read from; `replicas`: what the settings want of parti's own streams."""
    config, area = info["config"], f"stream {name}"
    retention, storage = config.get("retention", "limits"), config.get("storage", "file")
    yield ok(area, f"{retention} retention, {storage} storage, {info['state'].get('messages', 0):,} messages")
    if config.get("sealed"):
        yield error(area, "it is sealed", "nothing can be published", "make a new stream")
    if storage == "memory" and config.get("num_replicas", 1) == 1:
        yield warning(
            area,
            "it is in memory, on one server",
            "a restart of the server takes all messages with it",
            "use file storage, or replicas",
        )
    if retention == "limits" and not config.get("allow_direct"):
        yield warning(
            area,
            "allow_direct is off",
            "what a partition has gathered is read one message at a time when it moves or is parked",
            f"nats stream edit {name} --allow-direct",
        )
    yield from _judge_room(area, config, retention)
    yield from judge_replicas(area, info, replicas=replicas, clustered=clustered)
    most, consumers = config.get("max_consumers", -1), info["state"].get("consumer_count", 0)
    if 0 < most < consumers + FEW_CONSUMERS:
        yield warning(
            area,
            f"{consumers} of at most {most} consumers exist",
            "each worker needs one for every max_subjects partitions; the next may be refused",
            "raise max_consumers of the stream",
        )


def _judge_room(area: str, config: Mapping[str, Any], retention: str) -> Iterator[Finding]:
    """Limits by which messages leave the stream, or are not let in."""
    old = config.get("discard", "old") == "old"
    per_subject = config.get("max_msgs_per_subject", -1)
    if per_subject > 0 and old:
        yield warning(
            area,
            f"it keeps {per_subject} messages of each subject (max_msgs_per_subject)",
            "a partition that lags by more loses messages, and nobody is told",
            "remove that limit, or set discard new for each subject",
        )
    sizes = [f"{key}={config[key]:,}" for key in ("max_msgs", "max_bytes") if config.get(key, -1) > 0]
    if config.get("max_age", 0) > 0:
        sizes.append(f"max_age={config['max_age'] / _SECOND_NS:,.0f} s")
    if not sizes:
        return
    if not old and len(sizes) > 0 and not config.get("max_age"):
        yield note(area, f"limited by {', '.join(sizes)}", "full, it refuses new messages", "watch its size")
    else:
        level = note if retention == "limits" else warning
        yield level(
            area,
            f"limited by {', '.join(sizes)}",
            "messages beyond that are dropped, handled or not",
            "make sure that no worker can lag by so much; 'parti partitions --behind' tells",
        )


def judge_replicas(area: str, info: Mapping[str, Any], *, replicas: int, clustered: bool) -> Iterator[Finding]:
    """Copies of a stream against what the settings want and the cluster can give."""
    config, cluster = info["config"], info.get("cluster") or {}
    has = config.get("num_replicas", 1)
    if has < replicas:
        yield warning(
            area,
            f"it has {has} replica{'s' * (has != 1)}, the settings want {replicas}",
            "it was made before the setting, or by somebody else; a server that is lost takes it away",
            f"nats stream edit {config.get('name', '')} --replicas {replicas}",
        )
    elif clustered and has == 1:
        yield warning(
            area,
            "one replica in a cluster",
            "when its server is away nothing can be read or written; when its disk is gone, so is the data",
            "use 3 replicas (setting replicas for parti's own streams)",
        )
    if clustered and not cluster.get("leader"):
        yield error(area, "it has no leader", "nothing can be read or written", "look at the servers' logs")
    away = [peer.get("name", "?") for peer in cluster.get("replicas") or () if peer.get("offline")]
    if away:
        yield warning(area, f"offline: {', '.join(away)}", "one more and it stops", "bring these servers back")


def judge_cliff(
    name: str, *, storage: str, retention: str, subjects: int, hot_mirror: str, mirror_bytes: int, memory_left: int
) -> Finding:
    """Filters on a file stream with many subjects; `memory_left`: what the account may still use, -1 for no limit."""
    area = f"stream {name}"
    if storage != "file" or subjects < MANY_SUBJECTS:
        return ok(area, f"{subjects:,} subjects: filters are cheap")
    rate = 1e6 / search_us(subjects)
    what = f"{subjects:,} subjects on file storage"
    meaning = (
        f"consumers with several filters that lag are served about {rate:,.0f} messages a second, all together, "
        f"because the server searches for each one"
    )
    if retention != "limits":
        return note(
            area,
            f"{what}, {retention} retention",
            f"{meaning}; the hot mirror is for limits retention only",
            "let workers keep up; a SubjectMapping with few slots makes the subjects fewer",
        )
    if hot_mirror == "off":
        return warning(area, f"{what}, and hot_mirror=off", meaning, "set hot_mirror=auto")
    if 0 <= memory_left < mirror_bytes:
        return warning(
            area,
            f"{what}, but the hot mirror does not fit: {memory_left:,} of {mirror_bytes:,} bytes of memory are left",
            meaning,
            "raise the account's memory limit, or lower hot_mirror_max_bytes",
        )
    return ok(area, f"{what}: workers that lag read from the hot mirror (hot_mirror={hot_mirror})")


# ── the control plane ─────────────────────────────────────────────────────────────────────────────────────────────


def judge_bucket(name: str, info: Mapping[str, Any], *, replicas: int, clustered: bool) -> Iterator[Finding]:
    """The bucket that holds leases, claims and positions."""
    config, area = info["config"], f"bucket {name}"
    problems = list(judge_replicas(area, info, replicas=replicas, clustered=clustered))
    if config.get("max_msgs_per_subject") != 1:
        problems.append(
            error(
                area,
                f"it keeps a history of {config.get('max_msgs_per_subject')}",
                "an old value comes back when the newest one expires; workers refuse to start",
                "name another bucket, or delete this one",
            )
        )
    if config.get("storage") == "memory":
        problems.append(
            error(
                area,
                "it is in memory",
                "a restart of the server takes all positions with it",
                "delete it while no worker runs; the next one makes it on file storage",
            )
        )
    if not config.get("allow_atomic") or not config.get("allow_msg_ttl"):
        problems.append(note(area, "it lacks atomic batches or expiry of keys", "the next worker adds them"))
    yield from problems
    if not problems:
        yield ok(area, f"file storage, history 1, replicas: {config.get('num_replicas', 1)}")


def judge_sync(interval_ns: int | None, always: bool, *, replicas: int) -> Finding:
    """How soon the server writes to disk; None: it cannot be seen from here."""
    fix = "set sync_interval: always in the servers' jetstream section, at least where the bucket lives"
    lost = "a power failure can take back acknowledged leases, claims and positions"
    if interval_ns is None:
        return note(
            "sync",
            "sync_interval cannot be seen without the system account",
            f"by default it is two minutes: {lost}",
            f"{fix}; with system_user and system_password this is checked here",
        )
    if always:
        return ok("sync", "every write is synced to disk")
    text = f"writes are synced to disk every {interval_ns / _SECOND_NS:g} s"
    if replicas >= 3:
        return note("sync", text, f"{lost}, if it strikes most servers at once", fix)
    return warning("sync", text, lost, fix)


def judge_clock(difference_s: float) -> Finding:
    """The server's clock against the one here."""
    text = f"the server's clock and the one here differ by {abs(difference_s):.2f} s"
    if abs(difference_s) < CLOCK_NOTE_S:
        return ok("clock", text)
    meaning, fix = "ages and times are shown wrong by that; leases do not depend on it", "run NTP on both machines"
    return (warning if abs(difference_s) >= CLOCK_WARNING_S else note)("clock", text, meaning, fix)


# ── what is left behind ───────────────────────────────────────────────────────────────────────────────────────────


def judge_fleets(
    stream: str, prefix: str, bucket: str, marks: Mapping[str, Collection[str]], buckets: Collection[str]
) -> Iterator[Finding]:
    """Other fleets that have the same prefix on the stream.

    `marks`: by the bucket of another fleet, consumers with names of ours that belong to it. `buckets`: those of
    fleets that say the same stream and prefix of themselves.
    """
    for other in sorted({*marks, *buckets}):
        seen = f", such as {_named(marks[other], 2)}" if other in marks else ""
        yield error(
            f"stream {stream}",
            f"the fleets of bucket {bucket} and of bucket {other} have the same prefix {prefix}{seen}",
            "their consumers have the same names, so they would take each other's messages; the one that starts "
            "later is refused",
            "set PARTI_PREFIX for one of them (unset, it is the name of the bucket); if the other fleet is no more, "
            "delete its bucket and its consumers",
        )


def judge_leftovers(
    *, consumers: Collection[str], mirrors: Collection[str], streams: Collection[str], running: bool, stream: str
) -> Iterator[Finding]:
    """Things with this deployment's names that nobody needs; `running`: workers are there."""
    if consumers:
        names = _named(consumers)
        if running:
            yield note(
                "leftovers",
                f"consumers of workers that are gone: {names}",
                "whoever has the role cleanup removes them within a minute or so",
            )
        else:
            yield note(
                "leftovers",
                f"consumers while no worker runs: {names}",
                "they are expected back; the server removes them after inactive_threshold_s",
                f"if they are not: nats consumer rm {stream} NAME",
            )
    if mirrors and not running:
        yield warning(
            "leftovers",
            f"hot mirrors while no worker runs: {_named(mirrors)}",
            "they hold the server's memory",
            "nats stream rm NAME; the next worker makes its own",
        )
    if streams:
        yield note(
            "leftovers",
            f"streams of a bucket that is gone: {_named(streams)}",
            "states and history of a fleet that is no more",
            "nats stream rm NAME, if that fleet does not come back",
        )
    if not consumers and not streams and not (mirrors and not running):
        yield ok("leftovers", "nothing is left behind")


def _named(names: Collection[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
