"""No secret of an outside text is shown, in whatever form it is written; everything else stays readable."""

from __future__ import annotations

import pytest
from tests.pace import unhindered_s

from parti.model.safe_text import many_lines, one_line, without_secrets

SECRET = "s3cret-never-shown"
WITH_BLANK = "never shown"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # parameters of a URL
        (f"/x?pass={SECRET}&a=b", "/x?pass=***&a=b"),
        (f"https://h/x?access_key={SECRET}", "https://h/x?access_key=***"),
        (f"https://h/cb#access_token={SECRET}&state=7", "https://h/cb#access_token=***&state=7"),
        (f"https://b.example/c?sv=2024&sig={SECRET}&se=1", "https://b.example/c?sv=2024&sig=***&se=1"),
        (f"s3://b?X-Amz-Date=1&X-Amz-Signature={SECRET}", "s3://b?X-Amz-Date=1&X-Amz-Signature=***"),
        (f"/x?db[password]={SECRET}&db[host]=h", "/x?db[password]=***&db[host]=h"),
        (f"/x?db%5Bpassword%5D={SECRET}", "/x?db%5Bpassword%5D=***"),
        # settings
        (f"host=h password={SECRET} user=me", "host=h password=*** user=me"),
        (f"db_pass={SECRET}, DB_PASS={SECRET}", "db_pass=*** DB_PASS=***"),
        (f"AWSSecretKey={SECRET}", "AWSSecretKey=***"),
        (f"aws_secret_access_key = {SECRET}", "aws_secret_access_key = ***"),
        (f"spark.hadoop.fs.s3a.secret.key={SECRET}", "spark.hadoop.fs.s3a.secret.key=***"),
        (f"AccountName=a;AccountKey={SECRET}==;Suffix=s", "AccountName=a;AccountKey=***;Suffix=s"),
        # quoted values
        (f'password="{WITH_BLANK}" user="me"', 'password="***" user="me"'),
        (f"connect(password='{WITH_BLANK}', user='me')", "connect(password='***', user='me')"),
        (f"password = b'{SECRET}'", "password = b'***'"),
        (f"password: '{WITH_BLANK}'", "password: '***'"),
        (f'password="never \\"shown {SECRET}" x', 'password="***" x'),
        (f'password="{WITH_BLANK} and no end', 'password="***'),
        # dicts and JSON
        (f"{{'user': 'me', 'password': '{WITH_BLANK}', 'port': 1}}", "{'user': 'me', 'password': '***', 'port': 1}"),
        (f'{{"user":"me","token":"{SECRET}","port":1}}', '{"user":"me","token":"***","port":1}'),
        (f'{{\\"token\\": \\"{WITH_BLANK}\\", \\"port\\": 1}}', '{\\"token\\": \\"***\\", \\"port\\": 1}'),
        (f"{{'password': ['{WITH_BLANK}'], 'a': ['b']}}", "{'password': ['***'], 'a': ['b']}"),
        (f"{{'password': Secret('{WITH_BLANK}')}}", "{'password': Secret('***')}"),
        (f"{{'password' => '{WITH_BLANK}'}}", "{'password' => '***'}"),
        (f'{{\\\\"token\\\\":\\\\"{WITH_BLANK}\\\\"}}', '{\\\\"token\\\\":\\\\"***\\\\"}'),
        (f"{{'password': Secret(b'{WITH_BLANK}')}}", "{'password': Secret(b'***')}"),
        (f"{{'password': {{'v': '{WITH_BLANK}'}}, 'a': 1}}", "{'password': *** 'a': 1}"),
        (f"jdbc:sqlserver://h;password={{{WITH_BLANK};}};user=me", "jdbc:sqlserver://h;password=***;user=me"),
        (f"to=%2Fx%3Fclient_secret%3D{SECRET}&a=b", "to=%2Fx%3Fclient_secret%3D***&a=b"),
        # headers
        (f"[(b'authorization', b'Bearer {SECRET}'), (b'a', b'b')]", "[(b'authorization', b'***'), (b'a', b'b')]"),
        (f"Authorization: Bearer {SECRET} x", "Authorization: Bearer *** x"),
        (f"curl -H 'Authorization: Basic {SECRET}' h", "curl -H 'Authorization: Basic ***' h"),
        (f"authorization: {SECRET}", "authorization: ***"),
        (f"Proxy-Authorization=ApiKey {SECRET}", "Proxy-Authorization=ApiKey ***"),
        (f"{{'Authorization': 'Bearer {SECRET}', 'Accept': 'x'}}", "{'Authorization': '***', 'Accept': 'x'}"),
        # user info
        (f"//me:{SECRET}@h/db", "//h/db"),
        (f"url='//me:{SECRET}@h'", "url='//h'"),
        (f"jdbc:oracle:thin:me/{SECRET}@//h:1521/s", "jdbc:oracle:thin://h:1521/s"),
        (f"jdbc:oracle:thin:me/{SECRET}@h:1521:sid", "jdbc:oracle:thin:h:1521:sid"),
        (f"jdbc:oracle:oci:me/{SECRET}/@{SECRET}@h", "jdbc:oracle:oci:h"),
    ],
)
def test_a_secret_is_hidden_and_what_is_around_it_stays(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown
    for made in (one_line(text), many_lines(f"first\n{text}\nlast", 1_000)):
        assert SECRET not in made
        assert WITH_BLANK not in made


@pytest.mark.parametrize(
    "text",
    [
        "mail me@example.org, or a@b",
        "user:8080 refused, db:5432 too",
        "/etc/a:/opt/b:/c, C:\\x, 12:30:45, [::1]:4222",
        "image registry/name:tag@sha256:abc",
        "monkey=banana key=partition-7 hockey_key=3 primary key: id",
        "compass=north bypass=1 passed=3 passes=2 passenger='x'",
        "design=x sign=+ signal=9 secretary='y' tokens=5 max_tokens: 100 tokenizer='z'",
        "fence_token=7 fenceToken=8 {'fence_token': 9}",
        "password_file=/run/x passwordEnv=DB_PASSWORD AWSAccessKeyId=AKIA",
        "password: the environment variable P is not set; a token: what is that?",
        "{'user': 'me', 'retries': 3, 'path': '/a:b', 'keys': ['x y'], 'kind': 'password'}",
        "if token == other: return password != given",
        "Authorization Violation of user ann; authorization, 'too'",
        "see // the comment of me@home, and a//b",
        "http://host:80/x?page=2&sort=name#part",
        "password='' token=",
    ],
)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert without_secrets(text) == text


def test_a_source_line_of_a_traceback_tells_no_secret_and_keeps_its_next_line() -> None:
    text = f"  File 'x.py', line 3\n    connect(password=\"{WITH_BLANK})\n    connect(user)\nValueError: bad"
    shown = many_lines(text, 1_000)
    assert WITH_BLANK not in shown
    assert shown.endswith('password="***\n    connect(user)\nValueError: bad')


def test_user_info_without_a_scheme_does_not_survive_where_a_text_is_cut() -> None:
    for text in (f"//me:{'p' * 100_000}@host", f"jdbc:oracle:thin:me/{'p' * 100_000}@host"):
        assert "pppp" not in one_line(text)


HOSTILE = [
    *("p", "a", ":", "/", "//", "@", "'", '"', "\\", "[", "=", " ", "?", "eyJ", "S", "x:", "a@", "://", "a://"),
    *("//a", "//u:", "u:p@", "a:b", "eyJa.", "eyJa.b.c", "jdbc:oracle:", "jdbc:oracle:thin:", "jdbc:oracle:thin:a@"),
    *("password", "password=", "password='", 'password="\\', "'password':", "password: ", "password=x'y", "x'y"),
    *("password={", "token={a}", "password=%3D", "'authorization',", "\\\\\\'"),
    *("password=[", "password=a(", "password=\\'", "password\\\\\\", "pass=", "token=a'", "secret_", "secret_key"),
    *(
        "?token=",
        "&sig=",
        "fence_",
        "authorization",
        "authorization: ",
        "authorization: a ",
        "Authorization: Bearer ",
    ),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_of_64_kilobytes_takes_no_longer_than_its_length(piece: str) -> None:
    """A pattern that looks at the rest of the text from each of its characters would take minutes."""
    for text in (piece * (65_536 // len(piece)), f"{'x' * 32_768}{piece * (32_768 // len(piece))}\n"):
        began_s = unhindered_s()
        without_secrets(text)
        assert unhindered_s() - began_s < 1.0
