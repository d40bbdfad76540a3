"""The lists that `parti perms` prints: least, complete, private, and refused where the question is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parti.cli.main import main
from parti.config import Settings, load_settings
from parti.core.accounts import layout_commands, layout_config, layout_of
from parti.core.permissions import claims_of, config_style, inbox_of, jwt_style, permissions_of
from parti.core.role_calls import MEMBERS, ROLES, Names, Role, calls_of
from parti.core.role_matrix import EXAMPLE, actions, may, permissions_reference
from parti.errors import ConfigError
from parti.model.subjects import covers

ROOT = Path(__file__).parents[2]
FULL = Names(
    "ORDERS",
    "b",
    "p",
    "d",
    "d.x",
    subjects=("orders.>",),
    mirror="p-hot-ORDERS",
    ledger_stream="ORDERS-ledger",
    stateful=True,
    jobs_stream="WORK",
    jobs_durable="p-jobs",
    jobs_subjects=("work.>",),
)


def user_of(role: Role, names: Names = FULL) -> Any:
    return permissions_of([role], names, user=role, inbox_prefix=inbox_of(role))


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("role", ROLES)
def test_no_line_says_what_another_one_says_already(role: Role) -> None:
    for subjects in (user_of(role).publish_subjects, user_of(role).subscribe_subjects):
        assert len(set(subjects)) == len(subjects)
        covered = [(a, b) for a in subjects for b in subjects if a != b and covers(a, b)]
        assert not covered


@pytest.mark.parametrize("role", ROLES)
def test_all_that_a_role_calls_is_granted(role: Role) -> None:
    user = user_of(role)
    for call in calls_of(role, FULL):
        granted = user.subscribe_subjects if call.kind == "listen" else user.publish_subjects
        assert any(covers(each, call.subject) for each in granted), call


@pytest.mark.parametrize("role", ROLES)
def test_no_role_is_granted_more_than_names_of_its_deployment(role: Role) -> None:
    """Every grant names one of the deployment's own things, but for those that name nothing."""
    own = {"ORDERS", "KV_b", "b", "d", "d-replays", "p-hot-ORDERS", "ORDERS-ledger", "b-history", "b-state", "WORK"}
    own |= {"KV_p-jobs", "p-jobs", "p", "orders", "work", inbox_of(role)}
    general = {"$JS.API.INFO", "$JS.API.STREAM.NAMES", "$SYS.REQ.USER.INFO"}
    user = user_of(role)
    for subject in (*user.publish_subjects, *user.subscribe_subjects):
        assert subject in general or subject.startswith("$SRV.") or own.intersection(subject.split(".")), subject
        assert not subject.startswith((">", "*", "$JS.>", "$JS.API.>", "$KV.>", "$KV.*")), subject


def test_nobody_but_a_leader_makes_streams_but_for_a_fleet_to_come() -> None:
    makers = {
        role: [s for s in user_of(role).publish_subjects if ".STREAM.CREATE." in s or ".STREAM.UPDATE." in s]
        for role in ROLES
    }
    assert makers.pop("migrator") == ["$JS.API.STREAM.CREATE.KV_b"], "the bucket of a fleet to come"
    assert len(makers.pop("leader")) == 9
    assert all(not subjects for subjects in makers.values())


def test_each_user_hears_its_own_inbox_only() -> None:
    inboxes = {role: [s for s in user_of(role).subscribe_subjects if s.startswith("_INBOX")] for role in ROLES}
    assert inboxes == {role: [f"_INBOX_{role}.>"] for role in ROLES}


def test_a_fixed_worker_id_narrows_keys_consumers_and_acknowledgements() -> None:
    names = Names("S", "b", "p", "d", "d", worker_id="one", shards=2)
    subjects = user_of("worker", names).publish_subjects
    assert "$KV.b.progress.one" in subjects
    assert "$JS.ACK.S.p-one.>" in subjects
    assert "$JS.API.CONSUMER.DELETE.S.p-one-2" in subjects
    assert not [s for s in subjects if s.startswith(("$JS.API.CONSUMER.DELETE.S.*", "$KV.b.progress.*"))]
    held = Names("S", "b", "p", "d", "d", worker_id="one", holds=True)
    assert "$JS.API.CONSUMER.CREATE.S.*" in user_of("worker", held).publish_subjects


def test_roles_together_are_one_user_and_a_replay_may_write_to_its_own_inbox() -> None:
    both = permissions_of(["worker", "operator"], FULL, user="replay", inbox_prefix="_INBOX_replay")
    assert "_INBOX_replay.>" in both.publish_subjects
    assert "_INBOX_worker.>" not in user_of("worker").publish_subjects
    assert {"$KV.b.orders", "$KV.b.ids.*"} <= set(both.publish_subjects)


def test_styles_say_the_same() -> None:
    users = [user_of(role) for role in ROLES]
    config, commands = config_style(users, "A"), jwt_style(users, "A")
    for user in users:
        for subject in (*user.publish_subjects, *user.subscribe_subjects):
            assert json.dumps(subject) in config
            assert subject in commands
        assert claims_of(user)["pub"]["allow"] == user.publish_subjects
        assert ("resp" in claims_of(user)) == (user.user in {"worker", "leader"})
    assert "password: $SPARK_READER_PASSWORD" in config


def test_no_role_may_do_what_is_nobodys_business() -> None:
    forbidden = {
        "change the stream",
        "purge the stream",
        "delete the stream",
        "change the bucket",
        "purge the bucket",
        "delete the bucket",
        "copy the bucket",
        "make any other stream",
        "write to other buckets",
        "listen to everything",
        "listen to messages of the app",
        "listen to the inbox of another user",
    }
    found = [each for each in actions(EXAMPLE) if each.what in forbidden]
    assert len(found) == len(forbidden)
    assert not [(role, each.what) for role in ROLES for each in found if may(user_of(role, EXAMPLE), each)]


def test_the_page_of_the_roles_is_current() -> None:
    page = ROOT / "docs" / "reference" / "permissions.md"
    assert page.read_text() == permissions_reference(), "run .venv/bin/python docs/generate.py"


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing option '--stream'"),
        (["--stream", "A.B"], "--stream 'A.B': expected a stream name"),
        (["--stream", "S", "--role", "king"], "--role 'king': expected one of worker, leader, operator"),
        (["--stream", "S", "--style", "xml"], "--style 'xml': expected one of config, jwt, json"),
        (["--stream", "S", "--retention", "ever"], "--retention 'ever': expected one of limits, interest, workqueue"),
        (["--stream", "S", "--subject", "a..b"], "a..b"),
        (["--stream", "S", "--jobs", "*"], "--jobs '*': expected a stream name"),
        (["--stream", "S", "--layout", "flat"], "--layout 'flat': expected one of accounts, single"),
        (
            ["--stream", "S", "--subject", ">"],
            "--subject '>': whoever publishes to it could call the server's own API",
        ),
        (["--stream", "S", "--subject", "*.x"], "--subject '*.x': whoever publishes to it"),
        (["--stream", "S", "--jobs-subject", "$KV.b.>"], "--subject '$KV.b.>': whoever publishes to it"),
        (["--stream", "S", "--subject", "$SRV.>"], "--subject '$SRV.>': whoever publishes to it"),
        (
            ["--stream", "S", "--subject", "_INBOX_observer.>"],
            "could call the server's own API or answer in its place",
        ),
        (["--stream", "S", "--role", "publisher"], "--role publisher: expected what it publishes to; add --subject"),
        (["--stream", "S", "--user", "ann\n}}}\nroot"], r"--user 'ann\n}}}\nroot': expected letters, digits and"),
        (["--stream", "S", "--user", "admin", "--admin"], "--user 'admin': --admin makes the user 'admin', whose"),
        (["--stream", "S", "--user", "Admin", "--admin"], "whose password is also $ADMIN_PASSWORD; choose another"),
        (["--stream", "S", "--account", "A\nnsc delete operator"], r"--account 'A\nnsc delete operator': expected"),
        (["--stream", "S", "--account", "$SYS"], "--account '$SYS': expected letters, digits and"),
        (["--stream", "S", "--subject", "a.\x1b.>"], r"subject 'a.\x1b.>' has characters that cannot be seen"),
        (
            ["--stream", "S", "--subject", "a,$KV.>", "--style", "jwt"],
            "nsc reads a comma or a quote as the end of one",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perms", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert text in printed.err


def test_an_inbox_prefix_of_the_settings_is_one_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARTI_INBOX_PREFIX", "_INBOX_mine")
    assert main(["perms", "--stream", "S"]) == 2
    assert "inbox_prefix=_INBOX_mine is one user's" in capsys.readouterr().err
    assert main(["perms", "--stream", "S", "--role", "observer", "--style", "json"]) == 0
    (user,) = json.loads(capsys.readouterr().out)["users"]
    assert user["claims"]["sub"]["allow"][0] == "_INBOX_mine.>"


def test_it_says_what_an_operator_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perms", "--stream", "S", "--role", "operator"]) == 0
    assert "without --subject" in capsys.readouterr().err
    assert main(["perms", "--stream", "S", "--role", "operator", "--subject", "s.>"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("layout", ["single", "accounts"])
def test_a_role_that_is_named_twice_is_one_user(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["perms", "--stream", "S", "--layout", layout, "--role", "observer"]
    assert main(arguments) == 0
    once = capsys.readouterr().out
    assert main([*arguments, "--role", "observer"]) == 0
    assert capsys.readouterr().out == once


def test_somebody_has_to_make_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perms", "--stream", "S", "--role", "observer", "--admin"]) == 0
    assert "{ user: admin, password: $ADMIN_PASSWORD }" in capsys.readouterr().out
    assert main(["perms", "--stream", "S", "--role", "observer"]) == 0
    assert "admin" not in capsys.readouterr().out


# ── accounts ──────────────────────────────────────────────────────────────────────────────────────────────────────

OUTSIDERS = tuple(role for role in ROLES if role not in MEMBERS)


@pytest.mark.parametrize("role", OUTSIDERS)
def test_who_is_apart_makes_nothing_that_names_a_subject_to_write_to(role: Role) -> None:
    subjects = user_of(role, replace(FULL, apart=True)).publish_subjects
    wide = (".CONSUMER.CREATE.", ".CONSUMER.MSG.NEXT.", ".STREAM.CREATE.", ".STREAM.UPDATE.", ".STREAM.DELETE.")
    assert subjects
    assert not [subject for subject in subjects if any(each in subject for each in wide)]


def test_each_who_is_apart_has_an_account_that_imports_its_calls_and_no_others() -> None:
    users = [user_of(role, replace(FULL, apart=role in OUTSIDERS)) for role in ROLES]
    layout = layout_of(users, "A")
    assert [user.user for user in layout.members] == list(MEMBERS)
    for user in layout.outsiders:
        imported = {each.subject for each in layout.imports_of(f"A-{user.user}")}
        needed = {*user.publish_subjects, *user.subscribe_subjects} - {f"{user.inbox_prefix}.>", "$SYS.REQ.USER.INFO"}
        assert imported - {"$JS.API.INFO"} == needed - {"$JS.API.INFO"}
        # Without it the server would give the account an empty API of its own.
        assert ("$JS.API.INFO" in imported) == (user.user != "publisher")
    for style in (layout_config(layout), layout_commands(layout)):
        for each in layout.shared:
            assert each.subject in style


def test_the_name_of_an_export_is_its_own() -> None:
    layout = layout_of([user_of(role, replace(FULL, apart=True)) for role in OUTSIDERS], "A")
    assert len({each.name for each in layout.shared}) == len(layout.shared)


@pytest.mark.parametrize("style", ["config", "jwt", "json"])
def test_each_layout_says_what_it_does_not_protect(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["perms", "--stream", "S", "--subject", "s.>", "--style", style]
    assert main([*arguments, "--layout", "single"]) == 0
    assert "ONE ACCOUNT, for people and processes that trust each other" in capsys.readouterr().out
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "users of the first account trust each other" in printed.out
    assert printed.err == ""


def test_a_user_who_may_publish_nothing_is_not_given_everything() -> None:
    """The server takes an empty list for no limit."""
    nobody = user_of("publisher", Names("S", "b", "p", "d", "d"))
    assert nobody.publish == ()
    assert 'publish { deny: ">" }' in config_style([nobody], "A")
    assert "--deny-pub '>'" in jwt_style([nobody], "A")
    assert claims_of(nobody)["pub"] == {"deny": [">"]}


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_may_lead_and_where_answers_come_back_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Settings().may_lead, Settings().inbox_prefix) == (True, "_INBOX")
    monkeypatch.setenv("PARTI_MAY_LEAD", "false")
    assert not load_settings().may_lead
    with pytest.raises(
        ConfigError, match=r"inbox_prefix='_INBOX.>' \(argument\): must be a subject without wildcards"
    ):
        load_settings({"inbox_prefix": "_INBOX.>"})
