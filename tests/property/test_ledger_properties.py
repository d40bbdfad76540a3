"""Ledger batches: any rows come back, and nothing else is taken for a batch."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.errors import LedgerCorrupt
from parti.model.ledger import LedgerBatch, decode_batch, encode_batch

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20)
numbers = st.integers(0, 2**63 - 1)
times = st.integers(-(2**63), 2**63 - 1)


@st.composite
def batches(draw: st.DrawFn) -> LedgerBatch:
    rows = draw(st.integers(0, 40))
    partitions = tuple(draw(st.lists(names, min_size=1, max_size=5)))

    def column(code: str, values: st.SearchStrategy[int]) -> array[int]:
        return array(code, draw(st.lists(values, min_size=rows, max_size=rows)))

    return LedgerBatch(
        draw(names),
        draw(names),
        draw(names),
        draw(names),
        draw(numbers),
        draw(st.booleans()),
        partitions,
        tuple(draw(st.lists(numbers, min_size=len(partitions), max_size=len(partitions)))),
        column("I", st.integers(0, len(partitions) - 1)),
        column("q", numbers),
        column("I", st.integers(0, 2**32 - 1)),
        column("B", st.integers(0, 1)),
        column("q", times),
        column("q", times),
        column("q", times),
    )


@settings(deadline=None, max_examples=examples_of(200))
@given(batch=batches())
def test_any_batch_comes_back(batch: LedgerBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@settings(deadline=None, max_examples=examples_of(100))
@given(batch=batches(), data=st.data())
def test_a_part_of_a_batch_is_refused(batch: LedgerBatch, data: st.DataObject) -> None:
    encoded = encode_batch(batch)
    size = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(LedgerCorrupt):
        decode_batch(encoded[:size])


@settings(deadline=None, max_examples=examples_of(100))
@given(batch=batches(), data=st.data())
def test_a_changed_byte_is_noticed(batch: LedgerBatch, data: st.DataObject) -> None:
    encoded = bytearray(encode_batch(batch))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LedgerCorrupt):
        decode_batch(bytes(encoded))


@settings(deadline=None, max_examples=examples_of(300))
@given(garbage=st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: b"PLG1" + tail)))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(LedgerCorrupt):
        decode_batch(garbage)
