"""Outside text made safe: valid UTF-8, no control characters, bounded, without passwords. Standard library only.

Subjects, headers, payloads and texts of exceptions come from others. Whatever of it goes into a log, a record, a
header, a dead letter, a terminal or a page passes through here first. What is replaced is shown as an escape
(`\\x1b`, `\\u202e`), what is cut leaves a mark with its length.
"""

from __future__ import annotations

import hashlib
import re

HIDDEN = "***"
LINE = 500
"""Most characters of a text on one line: an error in a log, a record or a header."""

# C0 but tab and newline, C1, surrogates, bidirectional controls, separators of lines, and what nobody can see.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
_BLANK = re.compile(r"[\t\n]")
# Where user info may begin: after a scheme, after "//" that begins a word, in jdbc:oracle:thin:user/password@host.
_SCHEME = re.compile(r"[A-Za-z][\w+.-]{0,30}://|(?<![\w/:])//|\bjdbc:oracle:\w{1,20}:")
# A comma-separated list of servers begins its next URL there.
_WORD_END = re.compile(r"\s|,(?=(?:nats|tls|wss?)://)")
_PASSWORD = re.compile(r"(?<![\w.%+/-])[\w.%+-]{1,64}+:[^\s@/'\"]{1,128}+@(?=[\w\[])")
_QUOTE = r"\\{0,3}[\"']"
_PLAIN = r"(?:[^\s&;'\"\#]|['\"](?=\w))"
"""A character of a value without quotes; a quote that no word follows ends the text that the value is in."""
_NAMED = re.compile(
    rf"""(
        (?: passw(?:or)?d | passphrase | pwd | secret | (?<!fence)(?<!fence[_-])token
          | (?:access|account|api|private|secret)[_.-]?key | (?<![a-z])(?:pass|sig|signature) | authorization )
        (?: # a header, as text or as a pair
            (?<=authorization)[ ]{{0,2}}[:=][ ]{{0,2}}(?:(?:Basic|Bearer|Digest|Negotiate|NTLM|Token|Api-?Key)[ ]++)?
          | (?<=authorization){_QUOTE},[ ]{{0,2}}(?=b?{_QUOTE})
            # x=, x =, 'x' =>, a[x]=, a['x'] =, and the same escaped for a URL
          | (?:[\[\]\\"']{{0,4}}|%5D)[ ]{{0,2}}(?:=(?!=)>?|%3D)[ ]{{0,2}}
            # 'x': y and x: 'y'
          | {_QUOTE}[ ]{{0,2}}:[ ]{{0,2}}
          | [ ]{{0,2}}:[ ]{{0,2}}(?=b?{_QUOTE}) )
        # A value in quotes may be one of bytes, in a list or in a call: b'x', ['x'], Secret('x').
        (?: (?:[\w.]{{0,40}}[(\[])?[bru]? ({_QUOTE}) )?
    )
    # To the same quote, or to the end of the line if there is none; without quotes, what is in braces as a whole.
    (?(2) (?:(?!\2)\\?[^\n])++ | (?={_PLAIN}) (?:\{{[^}}\n]*+\}}?)?+ {_PLAIN}*+ )""",
    re.IGNORECASE | re.VERBOSE,
)
"""A value whose name says that it is secret: in a URL, a setting, a call, a dict, JSON or a header.

Behind a bare name and a colon only what is in quotes: "password: the variable P is not set" is a sentence.
"""
_NAMES = ("pass", "pwd", "secret", "token", "key", "sig", "authorization")
"""One of these is in every such name. Looking for them costs a tenth of looking for the pattern."""
_SECRET = re.compile(r"\bS[A-Z2-7]{57}\b|(?<![\w-])eyJ[\w-]++\.[\w-]++\.[\w-]++")  # NKey seeds and JWTs
# What begins a PEM file, also in base64; an NKey seed; a JWT; the base64 of a key in DER or of OpenSSH's.
_KEY = re.compile(
    r"[\r\n]|-----(?:BEGIN|END)\b|\b(?:BEGIN|END) [A-Z0-9 ]{1,40}-----|LS0tLS1CRUdJTi"
    r"|^\s*[\"']?(?:S[A-Z2-7]{40}|eyJ|M[A-I][A-Za-z0-9+/]{58}|b3BlbnNzaC1rZXkt)"
)
_BYTES = re.compile(r"\\x[89a-f][0-9a-f]")
_DIGITS = 16
_LONGEST_WORD = 256


def text_of(data: bytes) -> str:
    """Bytes as text, whatever they are: those that are no UTF-8 stand in it as `\\xNN`.

    >>> text_of(b"a.\\xffb")
    'a.\\\\xffb'
    """
    return data.decode("utf-8", "backslashreplace")


def may_be_bytes(text: str) -> bool:
    """Whether `text_of` may have made this of bytes that are no UTF-8, so that it is not what was sent.

    Also true of a text that had such escapes in it from the beginning.
    """
    return _BYTES.search(text) is not None


# ── secrets ───────────────────────────────────────────────────────────────────────────────────────────────────────


def strip_userinfo(text: str) -> str:
    """Return `text` with the user info of every URL in it removed: `nats://me:pw@host` becomes `nats://host`.

    Errs on the side of removing too much: everything up to the last `@` of the word goes, since an unescaped password
    may itself hold "@", "/" or "#".
    """
    if "@" not in text:
        return text
    kept: list[str] = []
    done = checked = 0
    for found in _SCHEME.finditer(text):
        if found.end() <= max(done, checked):
            continue
        after = _WORD_END.search(text, found.end())
        checked = after.start() if after else len(text)
        last = text.rfind("@", found.end(), checked)
        if last >= 0:
            kept.append(text[done : found.end()])
            done = last + 1
    kept.append(text[done:])
    return "".join(kept)


def looks_like_key(text: str) -> bool:
    """Whether this seems to be a seed, a JWT or a private key, pasted where the path of its file was expected.

    >>> looks_like_key("/etc/nats/worker.key"), looks_like_key("MC4CAQAwBQYDK2VwBCIEI" + "x" * 43)
    (False, True)
    """
    return _KEY.search(text) is not None


def without_secrets(text: str) -> str:
    """Return `text` without user info of URLs, `user:password@`, values with secret names, NKey seeds and JWTs.

    >>> without_secrets("cannot reach me:pw@db:5432, nats://token@host:4222, jdbc:x://db?user=me&password=pw")
    'cannot reach ***@db:5432, nats://host:4222, jdbc:x://db?user=me&password=***'
    >>> without_secrets("connect(user='me', password='p w') with Authorization: Bearer x")
    "connect(user='me', password='***') with Authorization: Bearer ***"
    """
    if "@" in text:
        text = _PASSWORD.sub(f"{HIDDEN}@", strip_userinfo(text))
    lower = text.lower()
    if any(name in lower for name in _NAMES):
        text = _NAMED.sub(rf"\1{HIDDEN}", text)
    return _SECRET.sub(HIDDEN, text)


# ── characters ────────────────────────────────────────────────────────────────────────────────────────────────────


def is_plain(text: str) -> bool:
    """Whether a text on one line can be shown and stored as it is."""
    return _UNSAFE.search(text) is None and _BLANK.search(text) is None


def escape(text: str) -> str:
    """Show what is no plain text as escapes; newlines and tabs stay.

    >>> escape("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return _UNSAFE.sub(_escaped, text)


def escape_line(text: str) -> str:
    """The same on one line: newlines and tabs are shown as escapes as well."""
    return _BLANK.sub(_escaped, escape(text))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code in {9, 10}:
        return "\\t" if code == 9 else "\\n"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# ── length ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cut(text: str, most: int, length: int = 0) -> str:
    """The beginning of a text, with a mark that says how long it was; never longer than `most`.

    `length`: of the whole text, if something of it is missing already.

    >>> cut("x" * 1000, 40)
    'xxxxxxxxxxxxxxx… (cut: 1,000 characters)'
    """
    length = max(length, len(text))
    if length <= most:
        return text
    mark = f"… (cut: {length:,} characters)"
    return text[: most - len(mark)] + mark if len(mark) < most else text[:most]


def abbreviate(text: str, most_bytes: int) -> str:
    """The text if it is plain and short enough, else as much of it as fits, and a hash that tells it from others."""
    plain = escape_line(text)
    if plain == text and len(text.encode()) <= most_bytes:
        return text
    mark = f"…{digest(text)}"
    room = max(0, most_bytes - len(mark.encode()))
    return plain.encode()[:room].decode("utf-8", "ignore") + mark


def digest(text: str) -> str:
    """A short name for a text of any length, as one token of a subject."""
    return f"sha256-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:_DIGITS]}"


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────


def one_line(text: str, most: int = LINE) -> str:
    """Outside text for a log, a record or a header: one line, plain, without secrets, bounded."""
    begin = _begin(text, most)
    return _bounded(" ".join(begin.split()), most, len(text) if begin is not text else 0).strip()


def many_lines(text: str, most: int) -> str:
    """Outside text that may have lines, such as a traceback: plain but for newlines, without secrets, bounded."""
    begin = _begin(text, most)
    return _bounded(begin.replace("\r\n", "\n").expandtabs(4), most, len(text) if begin is not text else 0)


def log_value(text: str, most: int) -> str:
    """Outside text as the value of a field in a log line: as `one_line`, but with its blanks as they are."""
    return cut(escape_line(many_lines(text, most)), most)


def _bounded(text: str, most: int, length: int) -> str:
    # Escaped first: a password may have anything in it, and ends no sooner for that.
    return cut(without_secrets(escape(text)), most, length)


def _begin(text: str, most: int) -> str:
    """As much of a text as has to be looked at. What is left out does not begin within a password."""
    limit = 4 * most + 4096
    if len(text) <= limit:
        return text
    begin = text[:limit]
    word = next((at for at in range(limit - 1, limit - _LONGEST_WORD, -1) if begin[at].isspace()), limit)
    begin = begin[:word]
    # A URL that has not ended yet may have a password in it.
    last = max(begin.rfind(blank) for blank in " \n\t")
    scheme = _SCHEME.search(begin, last + 1)
    return begin if scheme is None else begin[: scheme.end()]
