"""Subjects: templates, patterns, mappings and keys, with any text where a subject is expected."""

from __future__ import annotations

from fuzz.feed import Feed
from fuzz.target import Target, WrongError
from parti.errors import ConfigError, SubjectMismatch
from parti.model.fleet import is_key, key_of, name_of
from parti.model.mapping import SubjectMapping, stored_subjects
from parti.model.partition import Template
from parti.model.state import chunk_subject, parse_chunk_subject, state_key, token_of
from parti.model.subjects import covers, first_overlap, has_wildcard, overlap, tokens_of, within

_TEMPLATES = tuple(Template(text) for text in ("dc.{tool}.{chamber}.done", "orders.{id}", "only"))
_MAPPING = SubjectMapping("orders.*", "orders.{{wildcard(1)}}.{{partition(16,1)}}")


def one(data: bytes) -> None:
    """Subjects as they come over the wire, and patterns as people write them."""
    feed = Feed(data)
    kind = feed.byte() % 4
    if kind == 0:
        _route(feed.rest().decode("utf-8", "replace"))
    elif kind == 1:
        left, _, right = feed.rest().partition(b"\n")
        _compare(left.decode("utf-8", "replace"), right.decode("utf-8", "replace"))
    elif kind == 2:
        source, _, destination = feed.rest().partition(b"\n")
        _map(source.decode("utf-8", "replace"), destination.decode("utf-8", "replace"))
    else:
        _name(feed.rest().decode("utf-8", "replace"))


def _route(subject: str) -> None:
    for template in _TEMPLATES:
        try:
            partition = template.parse(subject)
        except SubjectMismatch:
            continue
        if template.partition(partition.id).subject != subject:
            raise WrongError("a subject and its partition do not belong together")
    stored = _MAPPING.apply(subject)
    if stored is not None and _MAPPING.partition_of(subject) >= _MAPPING.partition_count:
        raise WrongError("a subject has a slot that does not exist")
    try:
        _MAPPING.partition_of(subject)
    except SubjectMismatch:
        if stored is not None:
            raise WrongError("a subject is mapped and has no slot") from None
    try:
        template = Template(subject)
        template.partition(["x"] * len(template.keys))
    except SubjectMismatch:
        pass


def _compare(left: str, right: str) -> None:
    for text in (left, right):
        try:
            tokens_of(text)
        except SubjectMismatch:
            return
    if overlap(left, right) != overlap(right, left):
        raise WrongError("whether two patterns overlap depends on their order")
    if covers(left, right) and not overlap(left, right):
        raise WrongError("a pattern covers what it does not overlap")
    has_wildcard(left)
    within(left, [right])
    if (first_overlap([left, right]) is not None) != (left != right and overlap(left, right)):
        raise WrongError("the first overlap of two patterns is not theirs")
    stored_subjects([left], right, "a.{{wildcard(1)}}")


def _map(source: str, destination: str) -> None:
    try:
        mapping = SubjectMapping(source, destination)
    except (ConfigError, SubjectMismatch):
        return
    subject = ".".join("x" if token == "*" else token for token in source.split("."))
    if mapping.apply(subject) is None:
        raise WrongError("a mapping does not map what its source matches")
    mapping.partition_of(subject)
    stored_subjects([source], source, destination)


def _name(name: str) -> None:
    key = key_of("claims", name)
    if not key.isascii() or any(c.isspace() for c in key):
        raise WrongError("a key has characters that keys must not have")
    if name_of(key) != name or not is_key(key):
        raise WrongError("a name is not found again in its key")
    is_key(f"claims.{name}")  # of anything
    state_key(name)
    if "." in token_of(name):
        raise WrongError("the token of a partition is more than one")
    parse_chunk_subject(name, "root")
    found = parse_chunk_subject(chunk_subject(f"root.{token_of(name)}.1-2-abc", 0), "root")
    if name and (found is None or found.partition != name):
        raise WrongError("the partition of a chunk is not found again in its subject")


def seeds() -> list[bytes]:
    """Subjects, patterns and mappings that are right."""
    subjects = [b"dc.etch1.c3.done", b"orders.ada", b"only", b"orders.\xff", b"dc.a.b.done.more", b"{a}.b.{c}"]
    pairs = [b"a.*\na.b", b"a.>\na.b.c", b"*.b\na.*", b">\na"]
    maps = [b"orders.*\norders.{{wildcard(1)}}.{{partition(16,1)}}", b"a.*.*\na.$1.{{partition(8,1,2)}}.$2"]
    names = [b"etch1.c3", b"*.7", b"\xe2\x82\xac=41", b"root.a.1-2-abc.0"]
    return [
        *(b"\0" + each for each in subjects),
        *(b"\1" + each for each in pairs),
        *(b"\2" + each for each in maps),
        *(b"\3" + each for each in names),
    ]


TARGET = Target("subjects", one, seeds)
