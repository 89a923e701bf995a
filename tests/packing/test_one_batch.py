"""One batch in packs and its results in order again; packed BERT gives every sequence what it gives it alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.bert import BertForPreTraining
from tensor3d import Cube, gather, select
from tensor3d.data import Pack
from tensor3d.packing import PackAssignment, lpfhp, pack_batch, restore_order
from tests.models.toy import CAPACITY, MAX_SEQUENCES, Shape, lay, toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import error, make_twins, name_of, ranks_of

VOCAB = 67


def contents(packs: PackAssignment) -> list[list[int]]:
    return [packs[i].tolist() for i in range(len(packs))]


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_small_batch_by_hand() -> None:
    packs = pack_batch([3, 6, 1, 6, 4], 10)
    # The longest pack first; of equal lengths the first sequence first.
    assert contents(packs) == [[1, 4], [3, 0, 2]]
    assert restore_order(packs, ["six", "four", "six too", "three", "one"]) == [
        "three",
        "six",
        "one",
        "six too",
        "four",
    ]


def test_limits_are_kept() -> None:
    assert contents(pack_batch([2, 2, 2, 2], 10, 3)) == [[0, 1, 2], [3]]
    assert contents(pack_batch([4, 3, 2, 1], 10, budget=2, costs=[1] * 11)) == [[0, 1], [2, 3]]


def test_empty_packs_fill_up_to_a_multiple() -> None:
    packs = pack_batch([6, 6, 3], 10, multiple_of=4)
    assert contents(packs) == [[0, 2], [1], [], []]
    assert packs.totals(np.array([6, 6, 3])).tolist() == [9, 6, 0, 0]
    assert contents(pack_batch([6, 6], 10, multiple_of=2)) == [[0], [1]]


def test_totals_of_packs_that_are_empty_anywhere() -> None:
    packs = PackAssignment(offsets=np.array([0, 0, 2, 2, 3, 3]), sequences=np.array([2, 0, 1]))
    assert packs.totals(np.array([5, 7, 11])).tolist() == [0, 16, 0, 7, 0]
    assert PackAssignment(offsets=np.array([0, 0]), sequences=np.array([], dtype=np.int64)).totals(
        np.array([])
    ).tolist() == [0]


# --- properties ----------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    capacity = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    options: dict[str, Any] = {"max_sequences": draw(st.none() | st.integers(1, 6)), "capacity": capacity}
    if draw(st.booleans()):
        costs = draw(st.lists(st.integers(0, 9), min_size=capacity + 1, max_size=capacity + 1))
        options |= {"costs": costs, "budget": draw(st.integers(max(costs), 3 * max(costs) + 1))}
    return lengths, options


@given(batches(), st.integers(1, 9))
def test_every_sequence_once_within_every_limit(batch: tuple[list[int], dict[str, Any]], multiple: int) -> None:
    lengths, options = batch
    packs = pack_batch(lengths, **options, multiple_of=multiple)
    filled = [pack for pack in contents(packs) if pack]
    assert sorted(packs.sequences.tolist()) == list(range(len(lengths)))
    assert all(pack == [] for pack in contents(packs)[len(filled) :])
    assert len(packs) == -(-len(filled) // multiple) * multiple
    assert len(filled) <= lpfhp(np.bincount(lengths), **options).packs
    for pack in filled:
        assert len(pack) <= (options["max_sequences"] or options["capacity"])
        assert sum(lengths[number] for number in pack) <= options["capacity"]
        if "budget" in options:
            assert sum(options["costs"][lengths[number]] for number in pack) <= options["budget"]
    np.testing.assert_array_equal(
        packs.totals(np.array(lengths)), [sum(lengths[i] for i in p) for p in contents(packs)]
    )


@given(batches())
def test_order_is_restored(batch: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = batch
    packs = pack_batch(np.array(lengths, dtype=np.int32), **options, multiple_of=3)
    wanted = np.arange(len(lengths)) * 1.5
    in_packs = wanted[packs.sequences]
    assert restore_order(packs, in_packs.tolist()) == wanted.tolist()
    np.testing.assert_array_equal(restore_order(packs, in_packs), wanted)
    np.testing.assert_array_equal(restore_order(packs, np.stack([in_packs, -in_packs], 1))[:, 1], -wanted)
    assert torch.equal(restore_order(packs, torch.from_numpy(in_packs)), torch.from_numpy(wanted))


def test_gradients_find_their_sequences() -> None:
    packs = pack_batch([3, 6, 1, 6, 4], 10)
    values = torch.zeros(5, 2, requires_grad=True)
    weights = torch.arange(10.0).view(5, 2)
    (restore_order(packs, values) * weights).sum().backward()
    assert torch.equal(values.grad, weights[packs.sequences])  # type: ignore[arg-type]


def test_a_second_attempt_finds_what_best_fit_misses() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 1.1, size=3000), 5, 512).astype(np.int64)
    packs = pack_batch(lengths, 512, 3)
    # Three sequences a pack leave best fit without short ones for the long ones.
    assert len(packs) < 0.95 * lpfhp(np.bincount(lengths), 512, 3).packs
    assert np.diff(packs.offsets).max() <= 3
    assert packs.totals(lengths).max() <= 512


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "there is no sequence to pack"),
        ([3, 0], {}, r"capacity of 10.*\b0 for sequence 1"),
        ([3, 11], {}, r"capacity of 10.*\b11 for sequence 1.*Truncate"),
        ([3, -1], {}, "Got -1 for sequence 1"),
        ([3.0], {}, "whole numbers. Got float64"),
        ([[3]], {}, r"whole numbers. Got int64, shape \(1, 1\)"),
        ([3], {"multiple_of": 0}, r"multiple_of.*\b1.*\b0"),
        ([3], {"multiple_of": 1.5}, r"multiple_of.*\b1.*\b1.5"),
        ([3], {"max_sequences": 0}, "max_sequences must be at least 1"),
        ([3], {"budget": 1, "costs": [2] * 11}, "a sequence of 3 tokens costs 2, more than the budget of 1"),
    ],
)
def test_what_cannot_be_packed_is_named(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_batch(lengths, 10, **options)


def test_values_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b3\b sequences need \b3\b values, one each.*4"):
        restore_order(pack_batch([5, 5, 5], 10), torch.zeros(4))


# --- with BERT -----------------------------------------------------------------------------------------------------


def random_sequences(count: int, seed: int = 5) -> list[Pack]:
    """Each alone in a pack of its own."""
    random = np.random.default_rng(seed)
    none = np.empty(0, dtype=np.int64)
    return [
        Pack(
            ids=random.integers(5, VOCAB, length),
            types=np.arange(length) * 2 // length,
            lengths=np.array([length]),
            masked=none,
            masked_labels=none,
            next_labels=np.array([0]),
        )
        for length in random.integers(1, CAPACITY + 1, count).tolist()
    ]


def joined(sequences: list[Pack]) -> Pack:
    if not sequences:
        return Pack.empty()
    names = ("ids", "types", "lengths", "masked", "masked_labels", "next_labels")
    return Pack(**{name: np.concatenate([getattr(each, name) for each in sequences]) for name in names})


def cls_outputs(model: Any, packs: list[Pack], cube: Cube, capacity: int = CAPACITY) -> Tensor:
    """(sequences, hidden): the encoder's output at each [CLS], in the order of the packs, on every rank."""
    batch = lay(packs, cube, capacity)
    rows = gather(select(model.bert(batch), batch.first, cube), cube, "z")
    # Each plane's slots begin with its own sequences, one after another.
    planes = np.array_split(np.array([len(pack.lengths) for pack in packs]), cube.shape.planes)
    slots = rows.shape[0] // cube.shape.planes
    return torch.cat([rows[i * slots : i * slots + int(plane.sum())] for i, plane in enumerate(planes)])


def packed_against_alone(shape: Shape) -> float:
    """Errors of the packed outputs, order restored, against those of the sequences one by one on one device."""
    torch.set_default_dtype(torch.float64)
    cube, model, single, twin = make_twins(lambda c: BertForPreTraining(toy_config(VOCAB), c), shape)
    sequences = random_sequences(21)
    lengths = [len(each.ids) for each in sequences]
    packs = pack_batch(lengths, CAPACITY, MAX_SEQUENCES, multiple_of=4 * cube.shape.planes * cube.shape.z)
    assert any(len(pack) > 1 for pack in contents(packs))
    assert [] in contents(packs)
    with torch.no_grad():
        outputs = cls_outputs(model, [joined([sequences[i] for i in pack]) for pack in contents(packs)], cube)
        alone = [cls_outputs(twin, [each], single, length) for each, length in zip(sequences, lengths, strict=True)]
    assert error(outputs, torch.cat(alone)) > 0.1  # in the order of the packs they are those of other sequences
    return error(restore_order(packs, outputs), torch.cat(alone))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2, 2, 1)], ids=name_of)
def test_packed_outputs_in_order_are_those_of_the_sequences_alone(shape: Shape) -> None:
    assert max(run_ranks(ranks_of(shape), packed_against_alone, shape)) <= 1e-9


def test_the_example_of_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "packing.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    for code in examples:
        exec(compile(code, page.name, "exec"), {})
