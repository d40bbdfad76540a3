"""Options of `format("jetstream")`: read from Spark's strings, checked, and refused with one clear line.

Secrets are never options, because Spark shows options in plans, event logs and its UI. Options name files and
environment variables, which are read where they are used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from parti.errors import ConfigError
from parti.jetstream.target import Target
from parti.model.partition import Template
from parti.model.safe_text import looks_like_key
from parti.model.subjects import tokens_of

CONNECTION_OPTIONS = (
    "servers",
    "user",
    "passwordEnv",
    "tokenEnv",
    "credentialsFile",
    "credentialsEnv",
    "nkeySeedFile",
    "nkeySeedEnv",
    "tlsCa",
    "tlsCert",
    "tlsKey",
    "tlsHostname",
    "tlsHandshakeFirst",
    "inboxPrefix",
    "readBy",
    "connectTimeout",
)
SOURCE_OPTIONS = (
    *CONNECTION_OPTIONS,
    "stream",
    "subject",
    "startingOffsets",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "includePayload",
    "subjectTemplate",
    "filterPushdown",
)
DEFAULT_SERVERS = "nats://127.0.0.1:4222"
DEFAULT_INBOX_PREFIX = "_INBOX"
COLUMNS = ("stream", "seq", "subject", "timestamp", "headers", "payload")

_SECRETS = {
    "password": "user and passwordEnv",
    "token": "tokenEnv",
    "creds": "credentialsFile or credentialsEnv",
    "credentials": "credentialsFile or credentialsEnv",
    "nkey": "nkeySeedFile or nkeySeedEnv",
    "nkeyseed": "nkeySeedFile or nkeySeedEnv",
    "userjwt": "credentialsFile or credentialsEnv",
}

HeaderForm: TypeAlias = Literal["none", "raw", "parsed"]
Offset: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""Where to begin or end: an end of the stream, a sequence, or a moment."""

_HEADER_FORMS: Mapping[str, HeaderForm] = {
    "none": "none",
    "false": "none",
    "raw": "raw",
    "parsed": "parsed",
    "true": "parsed",
}
_MAX_RECORDS = 500_000
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEED = re.compile(r"S[A-Z][A-Z2-7]{50,}")
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What `spark.read.format("jetstream")` was asked for."""

    target: Target
    stream: str
    subjects: tuple[str, ...] = ()
    starting: Offset = "earliest"
    ending: Offset = "latest"
    max_offsets: int | None = None
    min_partitions: int | None = None
    max_records: int = _MAX_RECORDS
    fail_on_data_loss: bool = True
    headers: HeaderForm = "none"
    payload: bool = True
    template: str | None = None
    pushdown: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the columns that the template adds."""
        return Template(self.template).keys if self.template else ()


def read_source_options(given: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
    """Check the options of a source; `streaming` None: either."""
    refuse_secrets(given)
    options = _Options(given, SOURCE_OPTIONS)
    default_start = "latest" if streaming else "earliest"
    found = SourceOptions(
        target=read_target(given),
        stream=options.required("stream", "the name of a stream"),
        subjects=_subjects(options.text("subject")),
        starting=read_offset("startingOffsets", options.text("startingOffsets") or default_start),
        ending=read_offset("endingOffsets", options.text("endingOffsets") or "latest"),
        max_offsets=options.count("maxOffsetsPerTrigger"),
        min_partitions=options.count("minPartitions"),
        max_records=options.count("maxRecordsPerPartition") or _MAX_RECORDS,
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        headers=_header_form(options.text("includeHeaders")),
        payload=options.flag("includePayload", default=True),
        template=_template(options.text("subjectTemplate")),
        pushdown=options.flag("filterPushdown", default=False),
    )
    if any(c in ".*>/\\" or c.isspace() or not c.isprintable() for c in found.stream):
        raise ConfigError(f"stream: {found.stream!r} is no stream name; expected no dots, spaces or wildcards")
    if streaming and options.text("endingOffsets"):
        raise ConfigError("endingOffsets: a streaming query has no end; leave it out, or use spark.read")
    if streaming is False:
        if options.text("maxOffsetsPerTrigger"):
            raise ConfigError("maxOffsetsPerTrigger: only streaming queries have triggers; leave it out")
        if found.starting == "latest":
            raise ConfigError(
                "startingOffsets: a batch cannot begin at latest; expected earliest, a number or a time"
            )
        if found.ending == "earliest":
            raise ConfigError("endingOffsets: a batch cannot end at earliest; expected latest, a number or a time")
    return found


def read_target(given: Mapping[str, str]) -> Target:
    """The server and the credentials of source and sink."""
    refuse_secrets(given)
    options = _Options(given, None)
    servers = tuple(part.strip() for part in (options.text("servers") or DEFAULT_SERVERS).split(",") if part.strip())
    target = Target(
        servers=servers,
        user=options.text("user"),
        password_env=options.variable("passwordEnv"),
        token_env=options.variable("tokenEnv"),
        credentials_file=options.file("credentialsFile"),
        credentials_env=options.variable("credentialsEnv"),
        nkey_seed_file=options.file("nkeySeedFile"),
        nkey_seed_env=options.variable("nkeySeedEnv"),
        tls_ca=options.file("tlsCa"),
        tls_cert=options.file("tlsCert"),
        tls_key=options.file("tlsKey"),
        tls_hostname=options.text("tlsHostname"),
        tls_handshake_first=options.flag("tlsHandshakeFirst", default=False),
        inbox_prefix=_inbox_prefix(options.text("inboxPrefix")),
        read_by=_read_by(options.text("readBy")),
        connect_timeout_s=options.count("connectTimeout") or 10,
    )
    if target.password_env and not target.user:
        raise ConfigError("passwordEnv: a password needs a user; set the option user")
    target.addresses()
    return target


def target_options(target: Target) -> dict[str, str]:
    """The options that `read_target` turns back into this target."""
    values = {
        "servers": ",".join(target.servers),
        "user": target.user,
        "passwordEnv": target.password_env,
        "tokenEnv": target.token_env,
        "credentialsFile": target.credentials_file,
        "credentialsEnv": target.credentials_env,
        "nkeySeedFile": target.nkey_seed_file,
        "nkeySeedEnv": target.nkey_seed_env,
        "tlsCa": target.tls_ca,
        "tlsCert": target.tls_cert,
        "tlsKey": target.tls_key,
        "tlsHostname": target.tls_hostname,
        "tlsHandshakeFirst": "true" if target.tls_handshake_first else None,
        "inboxPrefix": target.inbox_prefix,
        "readBy": target.read_by,
        "connectTimeout": str(max(1, round(target.connect_timeout_s))),
    }
    return {name: value for name, value in values.items() if value}


def refuse_secrets(given: Iterable[str]) -> None:
    """Refuse options that would hold a secret, and say which one to use; the value is never shown."""
    for name in given:
        if use := _SECRETS.get(name.lower()):
            raise ConfigError(f"{name}: Spark shows options in its plans, so secrets cannot be options; use {use}")


def check_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an option that does not exist, with the one that was perhaps meant."""
    names = {name.lower(): name for name in known}
    for name in given:
        if name.lower() in names:
            continue
        if name.lower() == "path":
            raise ConfigError("path: a stream has no path; use the option stream, and load() without one")
        close = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {names[close[0]]}?" if close else f"expected one of {', '.join(names.values())}"
        raise ConfigError(f"{' '.join(name.split())}: format jetstream has no such option; {hint}")


class _Options:
    """Spark's options, whose names have no case."""

    def __init__(self, given: Mapping[str, str], known: Iterable[str] | None) -> None:
        if known is not None:
            check_known(given, known)
        self._given = {name.lower(): value for name, value in given.items()}

    def text(self, name: str) -> str | None:
        value = self._given.get(name.lower())
        return value.strip() or None if value is not None else None

    def variable(self, name: str) -> str | None:
        """The name of an environment variable; what looks like the secret itself is refused and not shown."""
        value = self.text(name)
        if value is not None and (not _VARIABLE.fullmatch(value) or _SEED.fullmatch(value)):
            raise ConfigError(
                f"{name}: this is no name of an environment variable (the value is not shown, it may be a secret); "
                f"expected letters, digits and underscores; put the secret into a variable and give its name here"
            )
        return value

    def file(self, name: str) -> str | None:
        """The name of a file; what looks like its contents is refused and not shown."""
        value = self.text(name)
        if value is not None and (not value.isprintable() or looks_like_key(value)):
            raise ConfigError(
                f"{name}: this is no name of a file (the value is not shown, it may be a secret); "
                f"put the secret into a file and give its path here"
            )
        return value

    def required(self, name: str, expected: str) -> str:
        value = self.text(name)
        if value is None:
            raise ConfigError(f"{name}: not given; expected {expected}; set .option({name!r}, ...)")
        return value

    def count(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not _is_number(value):
            raise ConfigError(f"{name}: {value[:40]!r} is no number above 0")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in {"true", "false"}:
            raise ConfigError(f"{name}: {value!r}; expected true or false")
        return value.lower() == "true"


def _is_number(text: str) -> bool:
    """Whether this is a number above 0; Python refuses to read thousands of digits."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) >= 1


def _subjects(text: str | None) -> tuple[str, ...]:
    subjects = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    for subject in subjects:
        tokens_of(subject)
    return () if ">" in subjects else tuple(dict.fromkeys(subjects))


def read_offset(name: str, text: str) -> Offset:
    """Read where to begin or end; `name` is the option that an error names."""
    if text.lower() in ("earliest", "latest"):
        return text.lower()  # type: ignore[return-value]
    if _is_number(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{name}: {text[:80]!r}; expected earliest, latest, a sequence of at least 1, or a time such as "
            f"2026-11-16T08:00:00Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _inbox_prefix(text: str | None) -> str:
    prefix = text or DEFAULT_INBOX_PREFIX
    if not re.fullmatch(r"[^\s.*>]+(\.[^\s.*>]+)*", prefix):
        raise ConfigError(f"inboxPrefix: {prefix!r}; expected a subject without wildcards, such as _INBOX_ingest")
    return prefix


def _read_by(text: str | None) -> Literal["consumers", "requests"]:
    match (text or "consumers").lower():
        case "consumers":
            return "consumers"
        case "requests":
            return "requests"
    raise ConfigError(f"readBy: {text!r}; expected consumers or requests")


def _header_form(text: str | None) -> HeaderForm:
    form = _HEADER_FORMS.get((text or "none").lower())
    if form is None:
        raise ConfigError(f"includeHeaders: {text!r}; expected none, raw or parsed")
    return form


def _template(text: str | None) -> str | None:
    if text is None:
        return None
    template = Template(text)
    if not template.keys:
        raise ConfigError(f"subjectTemplate: {text!r} names no key; expected some, as in dc.{{tool}}.done")
    names = list(COLUMNS)
    for key in template.keys:
        if key.lower() in names:
            raise ConfigError(f"subjectTemplate: the key {key!r} is the name of a column already; choose another")
        names.append(key.lower())
    return text
