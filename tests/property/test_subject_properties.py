"""Subject arithmetic against brute force over a small alphabet."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.model.subjects import covers, first_overlap, has_wildcard, overlap

WORDS = ("a", "b", "c")
DEPTH = 4
LITERALS = [".".join(tokens) for depth in range(1, DEPTH + 1) for tokens in product(WORDS, repeat=depth)]


def matches(pattern: str, subject: str) -> bool:
    """Match token by token, as the server's documentation describes it."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


@st.composite
def patterns(draw: st.DrawFn) -> str:
    # One word fewer and one level less than LITERALS: then these tell any two patterns apart.
    tokens = draw(st.lists(st.sampled_from(["a", "b", "*"]), min_size=0, max_size=DEPTH - 1))
    if not tokens or draw(st.booleans()):
        tokens = [*tokens[: DEPTH - 2], ">"]
    return ".".join(tokens)


@settings(deadline=None, max_examples=examples_of(400))
@given(patterns(), patterns())
def test_covers_and_overlap_agree_with_brute_force(left: str, right: str) -> None:
    of_left = {s for s in LITERALS if matches(left, s)}
    of_right = {s for s in LITERALS if matches(right, s)}
    assert overlap(left, right) == bool(of_left & of_right)
    assert covers(left, right) == (of_right <= of_left)


@settings(deadline=None, max_examples=examples_of(200))
@given(patterns(), st.sampled_from(LITERALS))
def test_a_literal_is_covered_exactly_when_it_matches(pattern: str, subject: str) -> None:
    assert covers(pattern, subject) == matches(pattern, subject) == overlap(pattern, subject)


@settings(deadline=None, max_examples=examples_of(200))
@given(st.lists(patterns() | st.sampled_from(LITERALS), max_size=6))
def test_first_overlap_finds_a_pair_exactly_when_there_is_one(subjects: list[str]) -> None:
    pairs = [(a, b) for a, b in combinations(dict.fromkeys(subjects), 2) if overlap(a, b)]
    found = first_overlap(subjects)
    assert (found is not None) == bool(pairs)
    if found is not None:
        assert found in pairs
        assert any(has_wildcard(s) for s in found)
