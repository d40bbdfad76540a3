"""Who may look at the console, and what it says to those who may not."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from parti.console.access import COOKIE, Access, Proxies, is_loopback, names_this_machine, read_access
from parti.errors import ConfigError

TOKEN = "a-token-that-is-long-enough"
PASSWORD = "correct horse"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_without_secrets_everybody_is_let_in() -> None:
    assert not Access().required
    assert Access().admits("", "")


@pytest.mark.parametrize(
    ("authorization", "admitted"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (f"Bearer {TOKEN}x", False),
        ("Bearer ", False),
        (f"Bearer {TOKEN[:-1]}ü", False),
        (f"Basic {TOKEN}", False),
        (basic("", TOKEN), False),
        (TOKEN, False),
        ("", False),
    ],
)
def test_a_token_is_named_whole_or_not_at_all(authorization: str, admitted: bool) -> None:
    assert Access(TOKEN).admits(authorization, "") is admitted


@pytest.mark.parametrize(
    ("authorization", "admitted"),
    [
        (basic("ada", PASSWORD), True),
        (basic("eve", PASSWORD), False),
        (basic("ada", "wrong"), False),
        (basic("bob", PASSWORD), False),
        (basic("", ""), False),
        ("Basic not!base64", False),
        (f"Bearer {PASSWORD}", False),
        ("", False),
    ],
)
def test_a_password_counts_for_its_user(authorization: str, admitted: bool) -> None:
    assert Access(passwords={"ada": PASSWORD, "bob": "another password"}).admits(authorization, "") is admitted


def test_a_cookie_counts_for_the_process_that_gave_it_and_is_not_the_token() -> None:
    access, other = Access(TOKEN), Access(TOKEN)
    assert access.admits("", f"theme=dark; {COOKIE}={access.session}")
    assert not other.admits("", f"{COOKIE}={access.session}")
    assert not access.admits("", f"{COOKIE}=")
    assert not access.admits("", f'{COOKIE}="; bad cookie')
    assert TOKEN not in access.session
    # Without a token there is no form, and nobody has a cookie.
    users = Access(passwords={"ada": PASSWORD})
    assert not users.admits("", f"{COOKIE}={users.session}")


def test_secrets_are_in_no_repr() -> None:
    text = repr(Access(TOKEN, {"ada": PASSWORD}))
    assert TOKEN not in text
    assert PASSWORD not in text


@pytest.fixture(autouse=True)
def private_files() -> Iterator[None]:
    """Files of these tests are for their owner only."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_secrets_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "users").write_text(f"# who may look\n\nada:{PASSWORD}\nbob:pass:word:with:colons\n")
    access = read_access(tmp_path / "token", tmp_path / "users")
    assert access.admits(f"Bearer {TOKEN}", "")
    assert access.admits(basic("bob", "pass:word:with:colons"), "")


@pytest.mark.parametrize(
    ("token", "users", "said"),
    [
        ("short", None, "must hold one token of 16 characters"),
        ("", None, "must hold one token of 16 characters"),
        ("two words that are long enough", None, "must hold one token of 16 characters"),
        (None, "ada:short", "line 1 of console_basic_auth_file is no 'user:password'"),
        (None, f"ada:{PASSWORD}\nada:{PASSWORD}2", "line 2 of console_basic_auth_file"),
        (None, "just-a-long-password", "line 1 of console_basic_auth_file"),
        (None, "# nobody\n", "holds no 'user:password'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_what_is_in_it(
    tmp_path: Path, token: str | None, users: str | None, said: str
) -> None:
    files: list[Path | None] = []
    for name, text in (("token", token), ("users", users)):
        files.append(tmp_path / name if text is not None else None)
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_access(files[0], files[1])
    text = token or users or "?"
    assert text not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="console_token_file cannot be read: it is no text"):
        read_access(tmp_path / "token", None)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602], ids=oct)
@pytest.mark.parametrize("which", ["console_token_file", "console_basic_auth_file"])
def test_a_file_that_others_may_read_or_write_is_refused_in_a_line(tmp_path: Path, which: str, mode: int) -> None:
    file = tmp_path / "a secret"
    file.write_text(TOKEN if which == "console_token_file" else f"ada:{PASSWORD}")
    file.chmod(mode)
    link = tmp_path / "..data"
    link.symlink_to(file)
    given = (link, None) if which == "console_token_file" else (None, link)
    with pytest.raises(ConfigError) as caught:
        read_access(*given)
    text = str(caught.value)
    assert text == (
        f"{which}: other users may read or write {link} (mode {mode:04o}), expected 0600; run 'chmod 600 {link}' "
        f"(Kubernetes: defaultMode 0400 of the volume), or accept it with console_allow_readable_files=true"
    )
    assert read_access(*given, readable=True).required
    file.chmod(0o600)
    assert read_access(*given).required
    file.chmod(0o400)
    assert read_access(*given).required


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost:8787", True),
        ("127.0.0.1:8787", True),
        ("127.0.0.1", True),
        ("[::1]:8787", True),
        ("evil.example:8787", False),
        ("127.0.0.1.evil.example:8787", False),
        ("", False),
        ("LOCALHOST", True),
        ("127.8.8.8:1", True),
        ("localhost%", False),
        ("localhost%evil.example", False),
        ("127.0.0.1%evil.example:8787", False),
        ("127.0.0.1%25evil.example", False),
        ("[::1%evil.example]:8787", False),
        ("::1", False),
        ("[::1", False),
        ("::1]", False),
        ("[[::1]]", False),
        ("[127.0.0.1]", False),
        ("[::ffff:127.0.0.1]", False),
        ("localhost.", False),
        ("localhost:", False),
        ("localhost:80:80", False),
        ("localhost:\u0661", False),
        ("localhost:8787\n", False),
        (" localhost", False),
        ("user@localhost", False),
        ("localhost/x", False),
        ("127.1", False),
        ("0x7f000001", False),
        ("2130706433", False),
        ("0.0.0.0", False),
        ("[::]", False),
    ],
)
def test_a_name_of_somebody_else_does_not_name_this_machine(host: str, ours: bool) -> None:
    assert names_this_machine(host) is ours


@pytest.mark.parametrize(
    ("address", "trusted"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.1.2.3", True),
        ("10.2.0.1", False),
        ("::ffff:10.2.0.1", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("proxy.example", False),
    ],
)
def test_a_proxy_is_trusted_by_its_address(address: str, trusted: bool) -> None:
    assert Proxies(["127.0.0.0/8", "::1/128", "10.1.0.0/16"]).trusts(address) is trusted
    assert not Proxies().trusts(address)
