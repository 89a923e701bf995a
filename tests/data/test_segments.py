"""The content of pairs: on the wire and back, rearranged, and as tokens."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor3d.data import Segments
from tensor3d.data.segments import encoded_sizes
from tensor3d.data.sources import in_order
from tests.data.samples import VOCABULARY


def made(*pairs: tuple[list[int], list[int], int]) -> Segments:
    return Segments(
        a_length=np.array([len(a) for a, _, _ in pairs], dtype=np.int64),
        b_length=np.array([len(b) for _, b, _ in pairs], dtype=np.int64),
        label=np.array([label for _, _, label in pairs], dtype=np.int64),
        ids=np.array([token for a, b, _ in pairs for token in (*a, *b)], dtype=np.int64),
    )


def same(left: Segments, right: Segments) -> bool:
    return all(np.array_equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(Segments))


SHORT, LONG = ([11], [12], 1), ([21, 22], [23, 24, 25], 0)


def test_on_the_wire_a_pair_is_the_length_of_a_the_label_and_its_ids() -> None:
    flat = made(SHORT, LONG).encode(np.dtype(np.uint16))
    assert flat.dtype == np.uint16
    assert flat.tolist() == [*(1, 1, 11, 12), *(2, 0, 21, 22, 23, 24, 25)]
    assert encoded_sizes(made(SHORT, LONG).lengths).tolist() == [4, 7]


def test_tokens_by_hand() -> None:
    ids, types, guessable = made(LONG, SHORT).tokens(VOCABULARY)
    assert ids.tolist() == [2, 21, 22, 3, 23, 24, 25, 3, *(2, 11, 3, 12, 3)]
    assert types.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, *(0, 0, 0, 1, 1)]
    assert guessable.astype(int).tolist() == [0, 1, 1, 0, 1, 1, 1, 0, *(0, 1, 0, 1, 0)]


def test_taken_and_put_together_in_another_order() -> None:
    assert same(made(SHORT, LONG).take(np.array([1, 0, 1])), made(LONG, SHORT, LONG))
    assert same(in_order([made(LONG, SHORT), made(SHORT)], np.array([1, 0, 0])), made(SHORT, LONG, SHORT))
    assert same(in_order([made(), made(SHORT)], np.array([1])), made(SHORT))


ids = st.integers(0, VOCABULARY.vocab_size - 1)
pairs = st.tuples(st.lists(ids, min_size=1, max_size=5), st.lists(ids, min_size=1, max_size=5), st.integers(0, 1))


@given(st.lists(pairs, max_size=8), st.sampled_from([np.uint16, np.int32]))
def test_what_comes_out_of_the_wire_is_what_went_in(content: list, kind: type) -> None:
    segments = made(*content)
    assert same(Segments.decode(segments.encode(np.dtype(kind)), segments.lengths), segments)


@pytest.mark.parametrize("wrong", [100, -1])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"the data holds the id {wrong}, which a vocabulary of 100 does not have"):
        made(([5], [wrong], 0)).tokens(VOCABULARY)
