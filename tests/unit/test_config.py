"""Settings: where they come from, which contradictions are refused, and that secrets stay hidden."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.trials import examples_of

from parti.config import Settings, load_settings
from parti.config.reference import settings_reference
from parti.errors import ConfigError
from parti.model.safe_text import strip_userinfo

SECRET = "hunter2-very-secret"
SEED = "SUAOPDFGV5LTWAZRNYJWJ5CNV2P7SOK2LRSKBMLE7TCBA2ERKBFCWVHLJQ"


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", *(name.upper() for name in Settings.model_fields)):
        monkeypatch.delenv(f"PARTI_{name}", raising=False)


def refused(**overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return text


def test_defaults_are_valid_and_documented() -> None:
    loaded = load_settings()
    assert loaded.nats == ("nats://127.0.0.1:4222",)
    assert (loaded.attempts, loaded.backoff_s, loaded.max_ack_pending) == (3, (2.0, 5.0, 15.0), 500)
    assert loaded.pull_max_bytes == 4 * 1024 * 1024
    assert loaded.handler_timeout_s is None
    assert all(field.description for field in Settings.model_fields.values())


def test_arguments_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("parti.toml").write_text('prefix = "file"\nbucket = "file"\nworker_id = "file"\n', encoding="utf-8")
    monkeypatch.setenv("PARTI_PREFIX", "env")
    monkeypatch.setenv("PARTI_BUCKET", "env")
    loaded = load_settings({"prefix": "argument"})
    assert (loaded.prefix, loaded.bucket, loaded.worker_id) == ("argument", "env", "file")
    assert loaded.dead_letter_stream == "parti-dlq"
    direct = Settings(prefix="argument")
    assert direct == loaded


def test_none_overrides_and_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTI_PREFIX", "env")
    monkeypatch.setenv("PARTI_TOKEN", "")
    loaded = load_settings({"prefix": None})
    assert (loaded.prefix, loaded.token) == ("env", None)


def test_the_file_named_by_argument_wins_over_the_one_named_by_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("parti", "env", "argument"):
        (tmp_path / f"{name}.toml").write_text(f'prefix = "{name}"\n', encoding="utf-8")
    monkeypatch.setenv("PARTI_CONFIG", "env.toml")
    assert load_settings().prefix == "env"
    assert load_settings(config_file=Path("argument.toml")).prefix == "argument"


def test_lists_may_be_comma_separated_in_the_environment_and_lists_in_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("parti.toml").write_text('nats = ["nats://a", "tls://b:1"]\nbackoff_s = [1, 2.5]\n', encoding="utf-8")
    loaded = load_settings()
    assert (loaded.nats, loaded.backoff_s) == (("nats://a", "tls://b:1"), (1.0, 2.5))
    monkeypatch.setenv("PARTI_NATS", "nats://c:4222, d:4223")
    monkeypatch.setenv("PARTI_BACKOFF_S", "3,4")
    loaded = load_settings()
    assert (loaded.nats, loaded.backoff_s) == (("nats://c:4222", "nats://d:4223"), (3.0, 4.0))


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        load_settings().prefix = "other"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b'pull_bach = "hunter2-very-secret"\n',
            "unknown setting 'pull_bach' (file parti.toml); did you mean pull_batch?",
        ),
        (b"[parti]\nprefix = 'x'\n", "unknown setting 'parti'"),
        (b"password = hunter2-very-secret\n", "not valid TOML"),
        (b"password = 'hunter2-very-secret\n", "not valid TOML"),
        (b"prefix = '\xff'\n", "not UTF-8"),
        (b"prefix = 5\n", "prefix=5 (file parti.toml): must be a valid string"),
    ],
)
def test_a_bad_file_is_explained_in_one_line(content: bytes, expected: str) -> None:
    Path("parti.toml").write_bytes(content)
    text = refused()
    assert expected in text
    assert SECRET not in text


def test_a_named_file_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file nowhere\.toml does not exist"):
        load_settings(config_file=Path("nowhere.toml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(config_file=tmp_path)
    monkeypatch.setenv("PARTI_CONFIG", "absent.toml")
    assert "absent.toml" in refused()
    with pytest.raises(ConfigError):
        Settings()


def test_an_error_names_setting_value_origin_and_expectation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTI_ACK_WAIT_S", "soon")
    assert refused().startswith("ack_wait_s='soon' (environment PARTI_ACK_WAIT_S): must be a valid number")
    text = refused(attempts=0)
    assert "ack_wait_s='soon'" in text
    assert "attempts=0 (argument): must be greater than or equal to 1" in text
    monkeypatch.delenv("PARTI_ACK_WAIT_S")
    assert refused(atempts=2) == "unknown setting 'atempts' (argument); did you mean attempts?"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"user": "u", "password": SECRET, "token": SECRET}, ["password", "token"]),
        ({"token": SECRET, "nats": f"nats://u:{SECRET}@h"}, ["token", "URL"]),
        ({"token": SECRET, "nkey_seed_file": "key"}, ["token", "nkey"]),
        ({"credentials_file": "key", "nkey_seed_file": "key"}, ["credentials_file", "nkey_seed_file"]),
        ({"password": SECRET}, ["password", "user"]),
        ({"tls_cert": "key"}, ["tls_cert=key", "tls_key=(unset)"]),
        ({"tls_key": "key"}, ["tls_cert=(unset)", "tls_key=key"]),
        ({"pull_heartbeat_s": 16}, ["pull_heartbeat_s=16", "pull_expires_s=30"]),
        ({"pull_batch": 401}, ["pull_batch=401", "backpressure=0.8", "max_ack_pending=500"]),
        ({"inactive_threshold_s": 60}, ["inactive_threshold_s=60", "lost_after_s=60"]),
        ({"ack_wait_s": 86_400}, ["inactive_threshold_s=86400", "ack_wait_s=86400"]),
        ({"capacity": 1_001, "consumer_shards": 2}, ["capacity=1001", "max_subjects=500", "consumer_shards=2"]),
        ({"worker_id": "worker", "consumer_shards": 2}, ["worker_id=worker", "consumer_shards=2"]),
    ],
)
def test_contradictions_name_both_settings_and_their_values(overrides: dict[str, Any], names: list[str]) -> None:
    Path("key").write_text("k", encoding="utf-8")
    text = refused(**overrides)
    assert all(name in text for name in names), text
    assert "argument" in text
    assert SECRET not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("attempts", 0), ("backoff_s", ""), ("backoff_s", "1,0"), ("backoff_s", [-1]), ("ack_wait_s", 0.5)),
        *(("backpressure", 0), ("backpressure", 1.1), ("backpressure", "nan"), ("lost_after_s", "inf")),
        *(("replicas", 0), ("replicas", 6), ("update_min_interval_s", -0.1), ("handler_timeout_s", 0)),
        *(("consumer_shards", 0), ("consumer_shards", 65)),
        *(("pull_expires_s", 0.5), ("metrics_port", 65_536), ("metrics_port", -1), ("log_level", "loud")),
        *(("log_format", "xml"), ("start", "old"), ("prefix", "a.b"), ("worker_id", "a b"), ("worker_id", "")),
        *(("prefix", "x\n"), ("bucket", "a/b"), ("dead_letter_subject", "a.*"), ("dead_letter_subject", "a.>")),
        *(("dead_letter_subject", "a..b"), ("dead_letter_stream", "a.b"), ("tls_ca", "absent.pem")),
        *(("nats", ""), ("nats", []), ("nats", 5), ("nats", "http://h"), ("nats", "nats://"), ("nats", "h:99999")),
        *(("nats", "nats://[::1"), ("nats", "nats://h/path"), ("tls_ca", "x" * 5000), ("user", "")),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    assert refused(**{name: value}).startswith(name)


def test_boundaries_are_accepted() -> None:
    load_settings({"pull_batch": 400, "pull_heartbeat_s": 15, "metrics_port": 0, "drain_timeout_s": 0})
    load_settings({"backpressure": 0.7, "max_ack_pending": 10, "pull_batch": 7})
    load_settings({"attempts": 9, "backoff_s": "1", "log_level": "WARNING", "backpressure": 1})


@given(
    batch=st.integers(1, 2000),
    share=st.floats(0.01, 1.0),
    pending=st.integers(1, 2000),
    heartbeat=st.floats(0.1, 60),
    expires=st.floats(1, 60),
)
@settings(max_examples=examples_of(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_relations_hold_for_whatever_is_accepted(
    batch: int, share: float, pending: int, heartbeat: float, expires: float
) -> None:
    values: dict[str, object] = {
        "pull_batch": batch,
        "backpressure": share,
        "max_ack_pending": pending,
        "pull_heartbeat_s": heartbeat,
        "pull_expires_s": expires,
    }
    fits = batch <= share * pending + 1e-9 and heartbeat * 2 <= expires
    if fits:
        assert load_settings(values).pull_batch == batch
    else:
        refused(**values)


@pytest.mark.parametrize(
    "url",
    [
        *(f"nats://me:{SECRET}@h:99999", f"nats://{SECRET}@h:0", f"nats://a:1,nats://me:{SECRET}@h/x"),
        *(f"http://me:{SECRET}@h", f"nats://me:{SECRET}/x@h", f"nats://me:{SECRET}?x@h", f"nats://me:{SECRET}#@h"),
        *(f"nats://me:{SECRET},x@h", f"me:{SECRET}@h", f"nats://me:{SECRET}@[::1"),
        f"nats://me:{SECRET}@\u2100",
    ],
)
def test_user_info_of_bad_urls_is_not_shown(url: str) -> None:
    assert SECRET not in refused(nats=url)
    with pytest.raises(ValidationError) as caught:
        Settings(nats=url)  # type: ignore[arg-type]
    assert SECRET not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    "url",
    [
        f"nats://me:{SECRET}@h:4222",
        f"nats://{SECRET}@h",
        f"nats://a:1,nats://me:{SECRET}@h,tls://you:{SECRET}@g",
    ],
)
def test_user_info_of_good_urls_is_kept_and_not_shown(url: str) -> None:
    loaded = load_settings({"nats": url})
    shown = f"{loaded!r} {loaded} {loaded.connection_summary} {loaded.model_dump_json()}"
    assert SECRET not in shown
    assert "@" not in shown
    assert SECRET in "".join(loaded.nats)


def test_secrets_are_never_shown() -> None:
    Path("key").write_text(SECRET, encoding="utf-8")
    for values in (
        {"user": "me", "password": SECRET},
        {"token": SECRET},
        {"nkey_seed_file": "key"},
        {"credentials_file": "key"},
    ):
        loaded = load_settings(values)
        shown = f"{loaded!r} {loaded} {loaded.connection_summary} {loaded.model_dump()} {loaded.model_dump_json()}"
        assert SECRET not in shown
    for bad in ({"password": [SECRET]}, {"token": {SECRET: 1}}, {"user": "me", "password": SECRET, "attempts": 0}):
        assert SECRET not in refused(**bad)


@pytest.mark.parametrize("text", [SEED, f"-----BEGIN KEY-----\n{SECRET}", f"eyJ{SECRET}.a.b", f"x\n{SECRET}"])
@pytest.mark.parametrize("name", ["nkey_seed_file", "credentials_file", "tls_key"])
def test_a_key_given_where_its_file_was_expected_is_not_shown(name: str, text: str) -> None:
    shown = refused(**{name: text})
    assert shown.startswith(f"{name}=(hidden) (argument): must be the path of an existing file")
    assert SECRET not in shown
    assert SEED not in shown


def test_connection_summary_tells_servers_authentication_and_tls() -> None:
    Path("key").write_text("k", encoding="utf-8")
    summary: Callable[..., str] = lambda **values: load_settings(values).connection_summary  # noqa: E731
    assert summary() == "nats://127.0.0.1:4222 auth=none tls=off"
    assert summary(nats="nats://u:p@a:1,tls://b:2") == "nats://a:1,tls://b:2 auth=URL tls=on"
    assert summary(token="t", tls_cert="key", tls_key="key").endswith("auth=token tls=mutual")
    assert summary(user="alice", password="p", tls_ca="key").endswith("auth=password tls=on")


@given(
    user=st.from_regex(r"[a-z0-9:@/#?!%]{1,12}", fullmatch=True),
    host=st.from_regex(r"[a-z]{1,8}(:[0-9]{1,4})?", fullmatch=True),
    before=st.sampled_from(["", "cannot reach ", "('", "url="]),
)
def test_strip_userinfo_keeps_only_the_host(user: str, host: str, before: str) -> None:
    assert strip_userinfo(f"{before}nats://{user}@{host} (refused)") == f"{before}nats://{host} (refused)"


def test_strip_userinfo_keeps_each_server_of_a_list_and_plain_text() -> None:
    assert strip_userinfo("nats://a:b@h1,tls://c:d@h2,nats://h3") == "nats://h1,tls://h2,nats://h3"
    assert strip_userinfo("mail me@home, see nats://host") == "mail me@home, see nats://host"


def test_the_settings_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_reference(), "run: python docs/generate.py"
    assert set(re.findall(r"^\| `(\w+)`", settings_reference(), re.M)) == set(Settings.model_fields)


def test_the_prefix_follows_the_bucket_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({}).prefix == "parti"
    assert load_settings({"bucket": "orders"}).prefix == "orders"
    assert load_settings({"bucket": "orders", "prefix": "own"}).prefix == "own"
    monkeypatch.setenv("PARTI_BUCKET", "env")
    assert load_settings({}).prefix == "env"
    monkeypatch.setenv("PARTI_PREFIX", "other")
    assert load_settings({}).prefix == "other"


def test_a_bad_bucket_is_refused_without_a_word_on_the_prefix() -> None:
    with pytest.raises(ConfigError, match="bucket") as refused:
        load_settings({"bucket": "a b"})
    assert "prefix" not in str(refused.value)
