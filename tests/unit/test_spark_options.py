"""Options of `format("jetstream")`: what each one means, and the one line for each wrong value."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from parti.errors import ConfigError
from parti.jetstream.target import Target
from parti.spark.options import (
    CONNECTION_OPTIONS,
    SOURCE_OPTIONS,
    SourceOptions,
    check_known,
    read_source_options,
    read_target,
    target_options,
)

SECRET = "s3cret-never-shown"


def read(streaming: bool | None = None, /, **options: str) -> SourceOptions:
    return read_source_options({"stream": "DC", **options}, streaming=streaming)


def refused(streaming: bool | None = None, /, **options: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(streaming, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_defaults() -> None:
    found = read()
    assert found == SourceOptions(
        target=Target(servers=("nats://127.0.0.1:4222",), connect_timeout_s=10), stream="DC"
    )
    assert (found.starting, found.ending, found.fail_on_data_loss) == ("earliest", "latest", True)
    assert (found.headers, found.payload, found.template, found.keys) == ("none", True, None, ())
    assert (found.max_offsets, found.min_partitions, found.max_records) == (None, None, 500_000)
    assert read(True).starting == "latest"
    assert read(False).starting == "earliest"


@pytest.mark.parametrize(
    ("option", "value", "name", "expected"),
    [
        ("stream", " DC-2_x ", "stream", "DC-2_x"),
        ("subject", "dc.*.x, dc.y.> ,dc.*.x,", "subjects", ("dc.*.x", "dc.y.>")),
        ("subject", "dc.*, >", "subjects", ()),
        ("subject", " ", "subjects", ()),
        ("startingOffsets", "earliest", "starting", "earliest"),
        ("startingOffsets", "Latest", "starting", "latest"),
        ("startingOffsets", "17", "starting", 17),
        ("startingOffsets", "2026-11-16T08:00:00Z", "starting", datetime(2026, 11, 16, 8, tzinfo=UTC)),
        (
            "startingOffsets",
            "2026-11-16 08:00:00.5",
            "starting",
            datetime(2026, 11, 16, 8, 0, 0, 500_000, tzinfo=UTC),
        ),
        ("endingOffsets", "99999999999999", "ending", 99999999999999),
        (
            "endingOffsets",
            "2026-11-16T08:00:00+02:00",
            "ending",
            datetime(2026, 11, 16, 8, tzinfo=timezone(timedelta(hours=2))),
        ),
        ("maxOffsetsPerTrigger", "1000", "max_offsets", 1000),
        ("minPartitions", "3", "min_partitions", 3),
        ("maxRecordsPerPartition", "10", "max_records", 10),
        ("failOnDataLoss", "FALSE", "fail_on_data_loss", False),
        ("includeHeaders", "raw", "headers", "raw"),
        ("includeHeaders", "Parsed", "headers", "parsed"),
        ("includeHeaders", "true", "headers", "parsed"),
        ("includeHeaders", "false", "headers", "none"),
        ("includePayload", "false", "payload", False),
        ("filterPushdown", "true", "pushdown", True),
        ("subjectTemplate", "dc.{tool}.{chamber}.x", "keys", ("tool", "chamber")),
    ],
)
def test_what_options_mean(option: str, value: str, name: str, expected: Any) -> None:
    assert getattr(read(**{option: value}), name) == expected
    assert getattr(read(**{option.upper() if option != "stream" else option: value}), name) == expected


@pytest.mark.parametrize(
    ("option", "value", "name", "expected"),
    [
        ("servers", "nats://a:1, tls://b", "servers", ("nats://a:1", "tls://b")),
        ("servers", "localhost", "servers", ("localhost",)),
        ("user", "ann", "user", "ann"),
        ("tokenEnv", "SOME_VARIABLE", "token_env", "SOME_VARIABLE"),
        ("credentialsFile", "/etc/a b.creds", "credentials_file", "/etc/a b.creds"),
        ("credentialsEnv", "CREDS", "credentials_env", "CREDS"),
        ("nkeySeedFile", "seed.nk", "nkey_seed_file", "seed.nk"),
        ("nkeySeedEnv", "SEED", "nkey_seed_env", "SEED"),
        ("tlsCa", "ca.pem", "tls_ca", "ca.pem"),
        ("tlsCert", "c.pem", "tls_cert", "c.pem"),
        ("tlsKey", "c.key", "tls_key", "c.key"),
        ("tlsHostname", "nats.example", "tls_hostname", "nats.example"),
        ("tlsHandshakeFirst", "true", "tls_handshake_first", True),
        ("connectTimeout", "3", "connect_timeout_s", 3),
    ],
)
def test_how_to_connect(option: str, value: str, name: str, expected: Any) -> None:
    target = read(**{option: value}).target
    assert getattr(target, name) == expected
    assert read_target(target_options(target)) == target
    assert pickle.loads(pickle.dumps(target)) == target


def test_password_needs_a_user() -> None:
    target = read(user="ann", passwordEnv="P").target
    assert (target.user, target.password_env) == ("ann", "P")
    assert refused(passwordEnv="P") == "passwordEnv: a password needs a user; set the option user"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stream": ""}, "stream: not given; expected the name of a stream"),
        ({"stream": "a.b"}, "stream: 'a.b' is no stream name; expected no dots, spaces or wildcards"),
        ({"stream": "a b"}, "stream: 'a b' is no stream name"),
        ({"stream": "a>"}, "stream: 'a>' is no stream name"),
        ({"stream": "a\r\nPUB x 0"}, "stream: 'a\\r\\nPUB x 0' is no stream name"),
        ({"subject": "a..b"}, "subject 'a..b' has an empty token"),
        ({"subject": "a b"}, "subject 'a b' contains white space"),
        ({"subject": "a.>.b"}, "subject 'a.>.b' has '>' before its end"),
        ({"startingOffsets": "0"}, "startingOffsets: '0'; expected earliest, latest, a sequence of at least 1, or"),
        ({"startingOffsets": "-1"}, "startingOffsets: '-1'; expected"),
        ({"startingOffsets": "first"}, "startingOffsets: 'first'; expected"),
        ({"startingOffsets": '{"DC": 5}'}, "startingOffsets: '{\"DC\": 5}'; expected"),
        ({"endingOffsets": "1.5"}, "endingOffsets: '1.5'; expected"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger: '0' is no number above 0"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger: 'many' is no number above 0"),
        ({"minPartitions": "-2"}, "minPartitions: '-2' is no number above 0"),
        ({"maxRecordsPerPartition": "1e3"}, "maxRecordsPerPartition: '1e3' is no number above 0"),
        ({"connectTimeout": "0"}, "connectTimeout: '0' is no number above 0"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss: 'no'; expected true or false"),
        ({"includePayload": "1"}, "includePayload: '1'; expected true or false"),
        ({"tlsHandshakeFirst": "yes"}, "tlsHandshakeFirst: 'yes'; expected true or false"),
        ({"includeHeaders": "all"}, "includeHeaders: 'all'; expected none, raw or parsed"),
        ({"subjectTemplate": "dc.x"}, "subjectTemplate: 'dc.x' names no key; expected some, as in dc.{tool}.done"),
        ({"subjectTemplate": "dc.{Seq}"}, "subjectTemplate: the key 'Seq' is the name of a column already"),
        ({"subjectTemplate": "{headers}.x"}, "subjectTemplate: the key 'headers' is the name of a column already"),
        ({"subjectTemplate": "{tool}.{Tool}"}, "subjectTemplate: the key 'Tool' is the name of a column already"),
        ({"subjectTemplate": "{tool}.{tool}"}, "names a key twice"),
        ({"subjectTemplate": "dc.{a}x"}, "a key must be a whole token"),
        ({"subjectTemplate": "dc.*"}, "contains the wildcard '*'"),
        ({"servers": "http://x"}, "servers: 'http://x' is no server address; expected nats://host:port"),
        ({"servers": ","}, "servers: no address given"),
    ],
)
def test_wrong_values(options: dict[str, str], text: str) -> None:
    assert text in refused(**options)


def test_what_only_one_kind_of_query_has() -> None:
    assert "a streaming query has no end" in refused(True, endingOffsets="5")
    assert "only streaming queries have triggers" in refused(False, maxOffsetsPerTrigger="5")
    assert "a batch cannot begin at latest" in refused(False, startingOffsets="latest")
    assert "a batch cannot end at earliest" in refused(False, endingOffsets="earliest")


@pytest.mark.parametrize(
    "name", ["password", "PASSWORD", "token", "creds", "credentials", "nkey", "nkeySeed", "userJwt"]
)
def test_secrets_are_refused_by_name_and_never_shown(name: str) -> None:
    text = refused(**{name: SECRET})
    assert text.startswith(f"{name}: Spark shows options in its plans, so secrets cannot be options; use ")
    assert SECRET not in text
    with pytest.raises(ConfigError, match="secrets cannot be options"):
        read_target({name: SECRET})


@pytest.mark.parametrize("name", ["passwordEnv", "tokenEnv", "credentialsEnv", "nkeySeedEnv"])
@pytest.mark.parametrize(
    "value", [SECRET, "two words", "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY", "$HOME", "1A"]
)
def test_the_secret_itself_in_place_of_a_variable_is_not_shown(name: str, value: str) -> None:
    text = refused(user="ann", **{name: value}) if name == "passwordEnv" else refused(**{name: value})
    assert text.startswith(f"{name}: this is no name of an environment variable")
    assert value not in text


PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize("name", ["credentialsFile", "nkeySeedFile", "tlsKey", "tlsCert", "tlsCa"])
@pytest.mark.parametrize(
    "value",
    [
        "-----BEGIN NATS USER JWT-----\nabc",
        "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY",
        PEM,
        PEM.replace("\n", "\\n"),
        PEM.replace("\n", " "),
        "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7" + "VJTUt9Us8cKj" * 20,
        "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.eyJqdGkiOiJ4In0.c2ln",
    ],
    ids=["creds", "seed", "pem", "escaped pem", "pem in a line", "base64", "jwt"],
)
def test_the_contents_in_place_of_a_file_are_not_shown(name: str, value: str) -> None:
    text = refused(**{name: value})
    assert text.startswith(f"{name}: this is no name of a file")
    assert value not in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("startingOffset", "did you mean startingOffsets?"),
        ("subjects", "did you mean subject?"),
        ("server", "did you mean servers?"),
        ("failondataLos", "did you mean failOnDataLoss?"),
        ("zzz", "expected one of servers, user, "),
        ("path", "a stream has no path; use the option stream, and load() without one"),
    ],
)
def test_unknown_options_are_refused_with_the_one_that_was_meant(name: str, hint: str) -> None:
    text = refused(**{name: SECRET})
    assert text.startswith(f"{name}: ")
    assert hint in text
    assert SECRET not in text


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "minPartitions", "startingOffsets", "connectTimeout"])
def test_a_number_with_thousands_of_digits_is_refused_in_a_line(name: str) -> None:
    assert refused(**{name: "9" * 5000}).startswith(f"{name}: ")


def test_every_option_is_known_whatever_its_case() -> None:
    check_known([name.swapcase() for name in SOURCE_OPTIONS], SOURCE_OPTIONS)
    assert set(CONNECTION_OPTIONS) < set(SOURCE_OPTIONS)
    assert len({name.lower() for name in SOURCE_OPTIONS}) == len(SOURCE_OPTIONS)


def test_who_may_make_no_consumers_reads_by_requests() -> None:
    assert read_target({}).read_by == "consumers"
    assert read_target({"readBy": "Requests"}).read_by == "requests"
    with pytest.raises(ConfigError, match="readBy: 'pulls'; expected consumers or requests"):
        read_target({"readBy": "pulls"})
