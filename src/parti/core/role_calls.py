"""What each role needs to be allowed by the server, and a harmless way to find out whether it is.

A role is what a user of NATS is for: a worker, a worker that may also be elected to the offices of the fleet
(leader), an operator, an observer, a reader from Spark, a publisher, somebody who migrates. A leader is a worker too,
an operator an observer too.

Workers, leaders and migrators are members: they make consumers, so they are in the account that holds the streams.
The others can be apart, each in an account of its own (`parti.core.accounts`).

A probe is a message that, allowed, changes nothing: a question, a request whose body is no JSON, a publish that
expects a sequence which no stream has reached, or a subscription that ends at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parti.core.consumer_config import consumer_name
from parti.model.fleet import key_of
from parti.model.history import history_stream
from parti.model.job import BUCKET_SUFFIX
from parti.model.ledger import ledger_subject
from parti.model.letter_mark import mark_subject, marks_stream
from parti.model.migration import OLD_CONSUMERS

Role = Literal["worker", "leader", "operator", "observer", "spark-reader", "publisher", "migrator"]
ROLES: tuple[Role, ...] = ("worker", "leader", "operator", "observer", "spark-reader", "publisher", "migrator")
MEMBERS: tuple[Role, ...] = ("worker", "leader", "migrator")
"""Roles that need consumers, and with them the account of the streams."""
Kind = Literal["ask", "broken", "expecting", "listen", "none"]
"""How to probe: a plain request; one whose body is no JSON; a publish with an expectation that fails; a subscription
(all others are publishes); not at all, because no harmless form is known."""

_PROBE = "parti-doctor"
_OWN_KEYS = ("ids", "health", "progress", "load", "stalls")
"""What a worker writes about itself."""
_SERVICE = "parti"


@dataclass(frozen=True, slots=True)
class Call:
    """Something that a role publishes or, with the kind `listen`, subscribes to."""

    subject: str
    """As a permission names it."""
    purpose: str
    probe: str
    """A subject that the permission covers."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class Names:
    """What this deployment calls its things, and which of them it has."""

    stream: str
    bucket: str
    prefix: str
    dead_letter_stream: str
    dead_letter_subject: str
    history: bool = True
    subjects: tuple[str, ...] = ()
    """What the stream takes: operators publish to it when they send dead letters back."""
    mirror: str = ""
    """The hot mirror; empty: there is none."""
    ledger_stream: str = ""
    """Empty: no ledger is kept."""
    stateful: bool = False
    """Handlers have a state that moves with their partition."""
    worker_id: str = ""
    """The one id that the worker has; empty: any."""
    shards: int = 1
    holds: bool = False
    """The stream has interest retention, where workers also make consumers with names that are not known before."""
    keeps: bool = True
    """The stream has limits retention; Spark reads others without consumers, which would take part in it."""
    jobs_stream: str = ""
    """Where jobs come from; empty: there are none."""
    jobs_durable: str = ""
    jobs_subjects: tuple[str, ...] = ()
    creates: bool = True
    """Leaders make what is missing."""
    apart: bool = False
    """The user has an account of its own: it reads by requests, and makes neither consumers nor streams. Both name
    subjects in their configuration that the server then writes to."""

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the worker's consumers; a wildcard where they are not known."""
        if not self.worker_id or self.holds:
            return ("*",)
        return tuple(consumer_name(self.prefix, self.worker_id, n) for n in range(1, self.shards + 1))

    @property
    def jobs_bucket(self) -> str:
        """The bucket of the records of jobs."""
        return f"{self.prefix}{BUCKET_SUFFIX}"


def calls_of(role: Role, names: Names) -> tuple[Call, ...]:
    """Everything that a role publishes and subscribes to, but for its inbox."""
    makers = {
        "worker": _worker,
        "leader": _leader,
        "operator": _operator,
        "observer": _observer,
        "spark-reader": _spark_reader,
        "publisher": _publisher,
        "migrator": _migrator,
    }
    found: dict[str, Call] = {}
    for call in makers[role](names):
        found.setdefault(f"{call.kind == 'listen'} {call.subject}", call)
    return tuple(found.values())


# ── what calls are made of ────────────────────────────────────────────────────────────────────────────────────────


def _api(verb: str, purpose: str, kind: Kind = "ask", *, below: bool = False) -> Call:
    """A call of `$JS.API`; `below`: with one more name after it."""
    subject = f"$JS.API.{verb}"
    return Call(f"{subject}.*" if below else subject, purpose, f"{subject}.{_PROBE}" if below else subject, kind)


def _reading(stream: str, purpose: str, *, apart: bool = False) -> Iterator[Call]:
    """Through a consumer that the server pushes from, and that is deleted afterwards; apart: by requests."""
    if apart:
        yield _api(f"STREAM.INFO.{stream}", purpose)
        yield _api(f"STREAM.MSG.GET.{stream}", purpose, "broken")
        return
    yield _api(f"CONSUMER.CREATE.{stream}", purpose, "broken", below=True)
    yield _api(f"CONSUMER.DELETE.{stream}", purpose, below=True)
    for root in _both_forms("$JS.FC", stream):
        yield Call(f"{root}.>", purpose, f"{_one_of(root)}.{_PROBE}", "ask")


def _both_forms(root: str, place: str) -> tuple[str, str]:
    """Where the server wants an answer to a delivery, without and with domain and account (`js_ack_fc_v2`)."""
    return f"{root}.{place}", f"{root}.*.*.{place}"


def _acks(stream: str, consumer: str, purpose: str, kind: Kind) -> Iterator[Call]:
    for root in _both_forms("$JS.ACK", f"{stream}.{consumer}"):
        yield Call(f"{root}.>", purpose, f"{_one_of(root)}.1.1.1.1.0", kind)


def _key(bucket: str, key: str, purpose: str) -> Call:
    """Writing a key; `key` may end with a wildcard."""
    subject = f"$KV.{bucket}.{key}"
    return Call(subject, purpose, subject.replace("*", _PROBE).replace(">", _PROBE), "expecting")


def _listen(subject: str, purpose: str) -> Call:
    return Call(subject, purpose, subject, "listen")


# ── people ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _observer(names: Names) -> Iterator[Call]:
    bucket, stream = f"KV_{names.bucket}", names.stream
    letters, marks = names.dead_letter_stream, marks_stream(names.dead_letter_stream)
    yield _api(f"STREAM.INFO.{bucket}", "finding the fleet")
    yield from _reading(bucket, "reading the fleet", apart=names.apart)
    yield _api(f"STREAM.MSG.GET.{bucket}", "reading positions", "broken")
    yield _api(f"STREAM.INFO.{stream}", "counting what waits")
    yield _api(f"DIRECT.GET.{stream}", "counting what waits", "broken")
    for each in filter(None, (stream, names.mirror)):
        yield _api(f"CONSUMER.LIST.{each}", "lags of workers")
    if names.history:
        yield _api(f"STREAM.INFO.{history_stream(names.bucket)}", "the history of a partition")
        yield _api(f"STREAM.MSG.GET.{history_stream(names.bucket)}", "the history of a partition", "broken")
        yield from _reading(history_stream(names.bucket), "the history, in the console", apart=names.apart)
    yield _api(f"STREAM.INFO.{letters}", "dead letters")
    yield _api(f"STREAM.MSG.GET.{letters}", "dead letters", "broken")
    yield from _reading(letters, "dead letters", apart=names.apart)
    yield from _reading(marks, "which dead letters were sent back", apart=names.apart)
    yield _api("INFO", "limits of the account, for 'parti doctor'")
    yield _api("STREAM.NAMES", "leftovers, for 'parti doctor'")
    yield _api(f"CONSUMER.NAMES.{stream}", "leftovers, for 'parti doctor'")
    yield Call("$SYS.REQ.USER.INFO", "who we are, for 'parti doctor'", "$SYS.REQ.USER.INFO", "ask")
    for verb in ("PINNED", "UNPINNED"):
        yield _listen(f"$JS.EVENT.ADVISORY.CONSUMER.{verb}.{stream}.*", "'parti priority watch'")
    yield from _watching_jobs(names)


def _watching_jobs(names: Names) -> Iterator[Call]:
    bucket, durable = f"KV_{names.jobs_bucket}", names.jobs_durable
    yield _api(f"STREAM.INFO.{bucket}", "whether there are jobs")
    if names.jobs_stream:
        yield _api(f"STREAM.MSG.GET.{bucket}", "records of jobs", "broken")
        yield from _reading(bucket, "records of jobs", apart=names.apart)
        yield _api(f"CONSUMER.INFO.{names.jobs_stream}.{durable}", "how many jobs wait")
        yield _api(f"CONSUMER.LIST.{names.jobs_stream}", "'parti priority status'")


def _operator(names: Names) -> Iterator[Call]:
    letters = names.dead_letter_stream
    yield from _observer(names)
    yield _key(names.bucket, "orders", "giving orders")
    yield _api(f"STREAM.MSG.DELETE.{letters}", "removing dead letters", "broken")
    yield _api(f"STREAM.INFO.{marks_stream(letters)}", "sending dead letters back")
    marks = mark_subject(letters, "*")
    yield Call(marks, "sending dead letters back", mark_subject(letters, 0), "expecting")
    yield _api(f"STREAM.MSG.GET.{names.stream}", "payloads that dead letters have left there", "broken")
    for subject in names.subjects:
        yield Call(subject, "sending dead letters back", _one_of(subject), "expecting")
    yield _api(f"CONSUMER.UNPIN.{names.stream}", "'parti priority unpin'", "broken", below=True)
    if names.jobs_stream:
        yield _api(f"STREAM.INFO.{names.jobs_stream}", "cancelling jobs")
        yield _api(f"STREAM.MSG.GET.{names.jobs_stream}", "cancelling jobs", "broken")
        yield _api(f"CONSUMER.NAMES.{names.jobs_stream}", "cancelling jobs")
        yield _key(names.jobs_bucket, f"cancel.{names.jobs_durable}.*", "cancelling jobs")
        yield _key(names.jobs_bucket, f"jobs.{names.jobs_durable}.*", "noting that a job was sent again")
        for subject in names.jobs_subjects:
            yield Call(subject, "sending failed jobs again", _one_of(subject), "expecting")


def _migrator(names: Names) -> Iterator[Call]:
    """What `parti migrate` sends. Old consumers have names of their own, so it may change any of the stream."""
    bucket, stream = f"KV_{names.bucket}", names.stream
    yield _api("STREAM.NAMES", "whether there is a fleet already")
    yield _api(f"STREAM.INFO.{bucket}", "finding the fleet")
    yield from _reading(bucket, "reading the fleet and the migration")
    yield _api(f"STREAM.MSG.GET.{bucket}", "reading the fleet and the migration", "broken")
    yield _api(f"STREAM.INFO.{stream}", "what is migrated")
    for verb in ("LIST", "NAMES"):
        yield _api(f"CONSUMER.{verb}.{stream}", "finding old consumers")
    yield _api(f"CONSUMER.CREATE.{stream}", "shadow consumers, and old ones made anew", "broken", below=True)
    yield _api(f"CONSUMER.INFO.{stream}", "what old consumers have finished", below=True)
    yield _api(f"CONSUMER.DELETE.{stream}", "old consumers that are not needed any more", below=True)
    yield _api(f"CONSUMER.PAUSE.{stream}", "stopping old consumers", "broken", below=True)
    yield _api(f"DIRECT.GET.{stream}", "counting what waits", "broken")
    if names.keeps or names.holds:
        yield _api(f"CONSUMER.RESET.{stream}", "old consumers go on at a position", "none", below=True)
    if names.keeps:
        yield _api(f"CONSUMER.MSG.NEXT.{stream}", "what shadow consumers are given", below=True)
        yield from _reading(stream, "comparing deliveries with the stream")
    elif not names.holds:
        yield _api(f"STREAM.MSG.GET.{stream}", "what is finished and still in the work-queue", "broken")
        yield _api(f"STREAM.PURGE.{stream}", "what is finished and still in the work-queue", "none")
    if names.mirror:
        yield _api(f"CONSUMER.LIST.{names.mirror}", "repeats of workers")
    for key in ("migration", "migration.>", "migrator", key_of("progress", OLD_CONSUMERS)):
        yield _key(names.bucket, key, "records of the migration")
    yield _key(names.bucket, "orders", "which partitions the fleet leaves alone")
    yield _key(names.bucket, "claims.>", "that nobody has a partition when its old consumer goes on")
    if names.creates:
        yield _api(f"STREAM.CREATE.{bucket}", "making the bucket of a fleet to come", "broken")


def _one_of(pattern: str) -> str:
    """A subject that a pattern matches."""
    return ".".join(_PROBE if token in {"*", ">"} else token for token in pattern.split("."))


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _worker(names: Names) -> Iterator[Call]:
    bucket, stream = f"KV_{names.bucket}", names.stream
    yield _api("INFO", "checks at the start")
    yield _api("STREAM.NAMES", "error messages of the start")
    for each in (stream, bucket, names.dead_letter_stream, marks_stream(names.dead_letter_stream)):
        yield _api(f"STREAM.INFO.{each}", "checks at the start")
    yield _api(f"STREAM.MSG.GET.{stream}", "older messages of a partition", "broken")
    yield _api(f"STREAM.MSG.GET.{bucket}", "reading the fleet", "broken")
    yield _api(f"DIRECT.GET.{stream}", "older messages of a partition, in batches", "broken")
    yield from _reading(bucket, "watching the fleet")
    yield from _consuming(names, stream)
    yield _api(f"CONSUMER.NAMES.{stream}", "finding what an earlier process has left")
    if names.mirror:
        yield _api(f"STREAM.INFO.{names.mirror}", "the hot mirror")
        yield from _consuming(names, names.mirror)
    yield from _own_keys(names)
    letters = f"{names.dead_letter_subject}.{stream}"
    yield Call(f"{letters}.>", "dead letters", f"{letters}.{_PROBE}", "expecting")
    if names.ledger_stream:
        yield _api(f"STREAM.INFO.{names.ledger_stream}", "the ledger")
        rows = ledger_subject(names.prefix, stream, names.worker_id or "*")
        yield Call(rows, "the ledger", rows.replace("*", _PROBE), "expecting")
    if names.stateful:
        yield from _states(names)
    yield from _jobs(names)
    for verb in ("PING", "INFO", "STATS"):
        yield _listen(f"$SRV.{verb}", "'nats micro' shows workers")
        yield _listen(f"$SRV.{verb}.{_SERVICE}", "'nats micro' shows workers")
        yield _listen(f"$SRV.{verb}.{_SERVICE}.*", "'nats micro' shows workers")


def _consuming(names: Names, stream: str) -> Iterator[Call]:
    """The worker's own consumers. Of one whose name is known, nothing is tried that would change it."""
    known = names.consumers != ("*",)
    for consumer in names.consumers:
        for verb, kind in (("CREATE", "broken"), ("INFO", "ask"), ("DELETE", "ask"), ("MSG.NEXT", "ask")):
            subject = f"$JS.API.CONSUMER.{verb}.{stream}.{consumer}"
            harmless: Kind = "broken" if kind == "broken" else "none" if known and verb != "INFO" else "ask"
            yield Call(subject, "its consumer", subject.replace("*", _PROBE), harmless)
        for verb in ("RESET", "UNPIN"):
            subject = f"$JS.API.CONSUMER.{verb}.{stream}.{consumer}"
            yield Call(subject, "its consumer", subject.replace("*", _PROBE), "none")
        yield from _acks(stream, consumer, "acknowledgements", "none" if known else "ask")


def _own_keys(names: Names) -> Iterator[Call]:
    """What a worker writes into the bucket."""
    who = names.worker_id
    for kind in _OWN_KEYS:
        yield _key(names.bucket, key_of(kind, who) if who else f"{kind}.*", "its lease, positions and reports")
    yield _key(names.bucket, f"{key_of('standby', who)}.*" if who else "standby.*.*", "standing by")


def _states(names: Names) -> Iterator[Call]:
    stream, root = f"{names.bucket}-state", f"{names.bucket}.state"
    kinds: tuple[tuple[str, Kind], ...] = (("INFO", "ask"), ("MSG.GET", "broken"), ("PURGE", "none"))
    for verb, kind in kinds:
        yield _api(f"STREAM.{verb}.{stream}", "states of handlers", kind)
    yield Call(f"$JS.API.DIRECT.GET.{stream}.>", "states of handlers", f"$JS.API.DIRECT.GET.{stream}.{_PROBE}", "ask")
    yield Call(f"{root}.>", "states of handlers", f"{root}.{_PROBE}", "expecting")
    yield _key(names.bucket, "state.>", "where the state of a partition lies")


def _jobs(names: Names) -> Iterator[Call]:
    if not names.jobs_stream:
        return
    stream, bucket, durable = names.jobs_stream, f"KV_{names.jobs_bucket}", names.jobs_durable
    for each in (stream, bucket):
        yield _api(f"STREAM.INFO.{each}", "jobs")
    yield _api(f"STREAM.MSG.GET.{bucket}", "records of jobs", "broken")
    yield from _reading(bucket, "jobs that are cancelled")
    yield _api(f"CONSUMER.CREATE.{stream}.{durable}", "jobs", "broken")
    yield _api(f"CONSUMER.INFO.{stream}.{durable}", "jobs")
    yield _api(f"CONSUMER.MSG.NEXT.{stream}.{durable}", "jobs", "none")
    yield from _acks(stream, durable, "jobs", "none")
    yield _key(names.jobs_bucket, f"jobs.{durable}.*", "records of jobs")
    letters = f"{names.dead_letter_subject}.{stream}"
    yield Call(f"{letters}.>", "dead letters", f"{letters}.{_PROBE}", "expecting")


def _leader(names: Names) -> Iterator[Call]:
    bucket, stream, mirror = f"KV_{names.bucket}", names.stream, names.mirror
    yield from _worker(names)
    for key in ("fleet", "mirror", "leader.*", "claims.>", "assignment.*"):
        yield _key(names.bucket, key, "the offices of the fleet")
    for kind in _OWN_KEYS:
        yield _key(names.bucket, f"{kind}.*", "records of workers that are gone")
    for verb in ("INFO", "DELETE"):
        yield _api(f"CONSUMER.{verb}.{stream}", "consumers of workers that are gone", below=True)
    if names.history:
        history = history_stream(names.bucket)
        yield _api(f"STREAM.INFO.{history}", "the history")
        yield Call(f"{history}.>", "the history", f"{history}.{_PROBE}", "expecting")
    yield _api(f"STREAM.INFO.{names.bucket}-state", "states that nothing points at")
    if mirror:
        yield _api(f"CONSUMER.LIST.{mirror}", "the hot mirror")
        yield _api(f"STREAM.PURGE.{mirror}", "the hot mirror", "none")
        yield _api(f"STREAM.DELETE.{mirror}", "the hot mirror", "none")
    if names.creates:
        letters = names.dead_letter_stream
        made = [bucket, letters, marks_stream(letters), names.ledger_stream, mirror]
        made += [history_stream(names.bucket)] if names.history else []
        made += [f"{names.bucket}-state"] if names.stateful else []
        made += [names.jobs_stream, f"KV_{names.jobs_bucket}"] if names.jobs_stream else []
        for each in filter(None, made):
            yield _api(f"STREAM.CREATE.{each}", "making what is missing", "broken")


def _spark_reader(names: Names) -> Iterator[Call]:
    for stream in filter(None, (names.stream, names.ledger_stream)):
        yield _api(f"STREAM.INFO.{stream}", "where the stream begins and ends")
        yield _api(f"STREAM.MSG.GET.{stream}", "whether the end was reached", "broken")
        if names.apart or (not names.keeps and stream == names.stream):
            yield _api(f"DIRECT.GET.{stream}", "reading", "broken")
            continue
        yield _api(f"CONSUMER.CREATE.{stream}", "reading", "broken", below=True)
        for verb in ("DELETE", "MSG.NEXT"):
            yield _api(f"CONSUMER.{verb}.{stream}", "reading", below=True)


def _publisher(names: Names) -> Iterator[Call]:
    for subject in (*names.subjects, *names.jobs_subjects):
        yield Call(subject, "messages of the app", _one_of(subject), "expecting")
