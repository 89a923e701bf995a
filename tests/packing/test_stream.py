"""Packs of a stream: full, within their limits, with nobody waiting for ever, and the same after a restart."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor3d.packing import StreamPacker, lpfhp, pack_stream


def packed(lengths: list[int], *limits: Any, **options: Any) -> list[list[int]]:
    """The packs as lengths."""
    return [[lengths[number] for number in pack] for pack in pack_stream(lengths, *limits, **options)]


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_pack_is_begun_with_the_oldest_and_filled_to_the_last_slot() -> None:
    # The fourth sequence fills the window. With the 5 go 3 and 2, not the 4 that would leave a slot empty.
    packer = StreamPacker(10, window=4)
    assert [packer.add(length) for length in (5, 4, 3)] == [None, None, None]
    assert packer.add(2) == [0, 2, 3]
    assert packer.waiting == 1
    assert packer.flush() == [[1]]


def test_of_ways_to_fill_a_pack_the_one_with_the_longest_wait_is_taken() -> None:
    # 6 + 4 and 6 + 1 + 3 are both full. What came first goes first.
    assert packed([6, 4, 9, 9, 1], 10, window=5)[0] == [6, 4]
    assert packed([6, 1, 3, 9, 4], 10, window=5)[0] == [6, 3, 1]
    # Two sequences are taken for one only where they have waited longer together: 4 + 2 + 1 against 4 + 3.
    assert packed([4, 3, 6, 6, 2, 1], 7, window=6)[0] == [4, 3]


def test_a_sequence_is_not_taken_twice_for_two() -> None:
    assert packed([4, 3, 7], 10, window=2) == [[4, 3], [7]]
    assert packed([4, 3, 3], 10, window=3) == [[4, 3, 3]]
    # Not exactly either: of 4 + 4 there is one 4, so the next best pair is 4 + 3.
    assert packed([1, 4, 3, 9, 9], 10, window=5)[0] == [1, 9]
    assert packed([2, 4, 3], 11, window=3) == [[2, 4, 3]]


def test_a_sequence_of_a_whole_pack_does_not_wait() -> None:
    packer = StreamPacker(10, window=4)
    assert packer.add(3) is None
    assert packer.add(10) == [1]
    assert packer.waiting == 1
    alone = StreamPacker(10, 1)
    assert [alone.add(3), alone.add(3)] == [[0], [1]]


def test_where_nothing_fits_exactly_the_fullest_is_taken() -> None:
    # With the 7 of 20 slots 6 + 6 would leave 1, 8 leaves 5.
    assert packed([7, 6, 8, 6], 20, window=4)[0] == [7, 6, 6]


def test_the_end_of_a_stream_is_packed_longest_first() -> None:
    assert packed([2, 3, 8, 7], 10, window=99) == [[8, 2], [7, 3]]


def test_the_budget_is_a_second_limit() -> None:
    costs = [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert packed([4, 3, 2, 1], 10, window=99) == [[4, 3, 2, 1]]
    assert sorted(map(len, packed([4, 3, 2, 1], 10, window=99, budget=2, costs=costs))) == [2, 2]
    # 5 costs the whole budget, so nothing joins it.
    assert packed([5, 4, 1], 10, window=2, budget=2, costs=costs) == [[5], [4, 1]]


def test_a_stream_may_be_endless_and_is_read_no_further_than_needed() -> None:
    read = itertools.count()

    def lengths() -> Iterator[int]:
        for number in read:
            yield 1 + number * 7 % 10

    packs = pack_stream(lengths(), 12, window=50)
    first = [next(packs) for _ in range(1000)]
    assert next(read) <= sum(map(len, first)) + 50


# --- properties ----------------------------------------------------------------------------------------------------

capacities = st.integers(1, 60)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths, and the arguments of a packer that can take them."""
    capacity = draw(capacities)
    longest = draw(st.integers(1, capacity))
    lengths = draw(st.lists(st.integers(1, longest), max_size=120))
    options: dict[str, Any] = {
        "capacity": capacity,
        "max_sequences": draw(st.none() | st.integers(1, 6)),
        "window": draw(st.integers(1, 40)),
    }
    if draw(st.booleans()):
        costs = draw(st.lists(st.integers(0, 9), min_size=capacity + 1, max_size=capacity + 1))
        costs = sorted(costs) if draw(st.booleans()) else costs
        options |= {"costs": costs, "budget": draw(st.integers(max(costs), 3 * max(costs) + 1))}
    return lengths, options


@given(streams())
def test_every_sequence_once_within_every_limit(stream: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = stream
    packs = list(pack_stream(lengths, **options))
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    for pack in packs:
        assert 1 <= len(pack) <= (options["max_sequences"] or options["capacity"])
        assert sum(lengths[number] for number in pack) <= options["capacity"]
        if "budget" in options:
            assert sum(options["costs"][lengths[number]] for number in pack) <= options["budget"]


@given(streams())
def test_no_sequence_waits_longer_than_the_window(stream: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = stream
    packer = StreamPacker(**options)
    passed: dict[int, int] = {}
    for number, length in enumerate(lengths):
        passed[number] = 0
        pack = packer.add(length)
        assert packer.waiting < options["window"]
        if pack is None:
            continue
        for each in pack:
            del passed[each]
        if pack != [number]:  # a pack of the newcomer alone has made nobody wait
            assert not passed or min(pack) < min(passed)
            for each in passed:
                passed[each] += 1
        assert max(passed.values(), default=0) < options["window"]


@given(streams(), st.integers(0, 120), st.booleans())
def test_a_restart_changes_nothing(stream: tuple[list[int], dict[str, Any]], cut: int, as_json: bool) -> None:
    lengths, options = stream
    whole = list(pack_stream(lengths, **options))
    first, second = StreamPacker(**options), StreamPacker(**options)
    packs = first.feed(lengths[:cut])
    state = first.state_dict()
    second.load_state_dict(json.loads(json.dumps(state)) if as_json else pickle.loads(pickle.dumps(state)))
    assert second.state_dict() == state
    assert packs + second.feed(np.array(lengths[cut:], dtype=np.int64)) + second.flush() == whole


def test_packing_goes_on_after_a_flush() -> None:
    packer = StreamPacker(10, window=4)
    assert packer.feed([5, 5]) == []
    assert packer.flush() == [[0, 1]]
    assert packer.feed([1, 2, 3, 4]) == [[2, 3, 5, 4]]
    assert packer.waiting == 0


# --- how full ------------------------------------------------------------------------------------------------------


def articles(count: int, seed: int = 0) -> np.ndarray:
    """Lengths like those of pairs from an encyclopaedia: mostly short, and a quarter cut off at 512."""
    lengths = np.random.default_rng(seed).lognormal(5.3, 1.1, size=count)
    return np.clip(np.rint(lengths), 5, 512).astype(np.int64)


def steady_fill(lengths: np.ndarray, capacity: int, *limits: int) -> float:
    """Share of the slots that hold a token, without the sequences that the end of the stream leaves over."""
    packs = StreamPacker(capacity, *limits, window=4096).feed(lengths)
    assert len(packs) > 100
    return sum(int(lengths[pack].sum()) for pack in packs) / (len(packs) * capacity)


def test_packs_of_articles_are_full() -> None:
    lengths = articles(40_000)
    assert steady_fill(lengths, 512) > 0.9995
    assert steady_fill(lengths, 8192) > 0.9999


def test_few_sequences_a_pack_do_not_hurt() -> None:
    lengths = articles(40_000)
    packs = list(pack_stream(lengths.tolist(), 512, 4))
    assert max(map(len, packs)) <= 4
    # Best fit takes the short ones too early, and has none left for the long ones.
    assert len(packs) < 0.97 * lpfhp(np.bincount(lengths), 512, 4).packs


def test_scarce_places_go_to_long_sequences() -> None:
    # Of 36 sequences of 249 tokens, the mean, 33 fill a pack: with any mixture, places run out before slots do.
    assert steady_fill(articles(40_000), 8192, 36) > 0.9999


def test_the_window_bounds_what_is_kept() -> None:
    packer = StreamPacker(8192, window=64)
    sizes = []
    for chunk in np.split(articles(20_000), 20):
        packer.feed(chunk)
        sizes.append(len(pickle.dumps(packer)))
    assert packer.waiting < 64
    assert max(sizes) < 1.2 * sizes[0]


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "between 1 and the capacity of 10. Got 0"),
        (11, r"capacity of 10.*\b11.*Truncate"),
        (2.5, "must be a whole number. Got 2.5"),
        (7, "a sequence of 7 tokens costs 3, more than the budget of 2"),
    ],
)
def test_a_bad_length_is_refused_and_not_counted(length: Any, message: str) -> None:
    packer = StreamPacker(10, budget=2, costs=[0, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3], window=3)
    packer.add(4)
    before = packer.state_dict()
    with pytest.raises(ValueError, match=message):
        packer.add(length)
    with pytest.raises(ValueError, match=message):
        packer.feed([1, 2, length, 3])
    assert packer.state_dict() == before


def test_bad_limits_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"at least 1. Got 0"):
        pack_stream([1], 10, window=0)
    with pytest.raises(ValueError, match=r"window.*number.*1.5"):
        pack_stream([1], 10, window=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"capacity.*1"):
        pack_stream([1], 0)
    with pytest.raises(ValueError, match=r"budget is given without costs"):
        pack_stream([1], 10, budget=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 12}, "another capacity: 12 where this one has 10"),
        ({"window": 5}, "another window: 5 where this one has 4"),
        ({"waiting": [[1, 3], [0, 3]]}, "sequence 0 is out of order"),
        ({"waiting": [[2, 3]]}, "sequence 2 is out of order or out of range"),
        ({"waiting": [[0, 11]]}, "between 1 and the capacity of 10"),
        ({"waiting": [[0, 3, 5]]}, "no state of a packer"),
        ({"waiting": [[0, 1], [1, 1], [2, 1], [3, 1]], "next": 4}, "4 sequences wait in a state of a window of 4"),
        ({"next": "two"}, "no state of a packer"),
    ],
)
def test_a_foreign_state_is_refused(changes: dict[str, Any], message: str) -> None:
    packer = StreamPacker(10, window=4)
    packer.feed([3, 3])
    state = packer.state_dict()
    with pytest.raises(ValueError, match=message):
        packer.load_state_dict({**state, **changes})
    with pytest.raises(ValueError, match="no state of a packer"):
        packer.load_state_dict({name: value for name, value in state.items() if name != "waiting"})
    assert packer.state_dict() == state
