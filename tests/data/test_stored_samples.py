"""Sequences that lie on disk, read here or by exchange."""

from __future__ import annotations

import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensor3d import Cube
from tensor3d.data import (
    IndexedWriter,
    Loader,
    PretrainingData,
    RemoteSamples,
    Segments,
    ShardExchange,
    StoredSamples,
    StoredShard,
)
from tensor3d.data.masking import masked_count
from tensor3d.data.sources import in_order
from tensor3d.distributed.host_all_to_all import HostAllToAll
from tests.data.samples import VOCABULARY, files_to_open, same_step
from tests.descriptors import open_files
from tests.ranks import run_ranks

Sequence = tuple[list[int], list[int], int]
PAIRS: list[Sequence] = [([11], [12], 1), ([21, 22], [23, 24, 25], 0), ([31, 32, 33], [34], 0)]
TEXTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
LIMITS: dict[str, Any] = {"capacity": 16, "max_length": 12, "max_sequences": 4, "seed": 5}


def write_pairs(prefix: Path, pairs: list[Sequence], masks: list[tuple[list[int], list[int]]] | None = None) -> Path:
    with IndexedWriter(prefix, vocab_size=100) as writer:
        for a, b, _ in pairs:
            writer.add_document([a, b])
    np.save(f"{prefix}.labels.npy", np.array([label for _, _, label in pairs], dtype=np.uint8))
    if masks is not None:
        with IndexedWriter(f"{prefix}.masks", vocab_size=100) as writer:
            for places, seen in masks:
                writer.add_document([places, seen])
    return prefix


def write_texts(prefix: Path, texts: list[list[int]]) -> Path:
    with IndexedWriter(prefix, vocab_size=100) as writer:
        for text in texts:
            writer.add_document([text])
    return prefix


def stored(prefix: Path, *, single: bool = False, static: bool = False) -> StoredShard:
    return StoredShard(prefix, single=single, static=static)


def test_pairs_by_hand(tmp_path: Path) -> None:
    shard = stored(write_pairs(tmp_path / "shard", PAIRS))
    assert shard.lengths.tolist() == [5, 8, 7]
    found = shard.segments(np.array([2, 0]))
    assert found.tokens(VOCABULARY).ids.tolist() == [2, 31, 32, 33, 3, 34, 3, *(2, 11, 3, 12, 3)]
    assert found.label.tolist() == [0, 1]
    assert found.masks is None


def test_single_texts_by_hand(tmp_path: Path) -> None:
    shard = stored(write_texts(tmp_path / "shard", TEXTS), single=True)
    assert shard.lengths.tolist() == [5, 3, 12]
    found = shard.segments(np.array([1, 0]))
    tokens = found.tokens(VOCABULARY)
    assert tokens.ids.tolist() == [2, 21, 3, *(2, 11, 12, 13, 3)]
    assert tokens.types.tolist() == [0] * 8
    assert tokens.guessable.astype(int).tolist() == [0, 1, 0, *(0, 1, 1, 1, 0)]
    assert found.label.tolist() == [-100, -100]


def test_on_the_wire_a_single_text_is_a_nought_and_its_ids(tmp_path: Path) -> None:
    texts = stored(write_texts(tmp_path / "texts", TEXTS), single=True).segments(np.array([1, 0]))
    assert texts.encode(np.dtype(np.uint16)).tolist() == [0, 21, *(0, 11, 12, 13)]
    pairs = stored(write_pairs(tmp_path / "pairs", PAIRS)).segments(np.array([1, 2]))
    mixed = in_order([texts, pairs], np.array([0, 1, 0, 1]))
    again = Segments.decode(mixed.encode(np.dtype(np.uint16)), mixed.lengths)
    for name in ("a_length", "b_length", "label", "ids"):
        np.testing.assert_array_equal(getattr(again, name), getattr(mixed, name))


def test_an_epoch_has_every_sequence_once_and_other_masks(tmp_path: Path) -> None:
    shards = [stored(write_pairs(tmp_path / f"{n}", PAIRS)) for n in range(2)]
    data = PretrainingData(StoredSamples(shards, max_length=12), VOCABULARY, **LIMITS)
    drawn = [data.epochs[number].drawing for number in (0, 1)]
    for drawing in drawn:
        assert drawing.lengths.tolist() == [5, 8, 7, 5, 8, 7]
        assert drawing.offsets.tolist() == [0, 3, 6]
        assert drawing.segments(np.array([4, 0])).ids.tolist() == [21, 22, 23, 24, 25, 11, 12]
    places = {
        tuple(sorted((int(pack.lengths[0]), int(row)) for pack in data.packs(epoch, range(2)) for row in pack.masked))
        for epoch in range(6)
    }
    assert len(places) > 1


def test_single_texts_in_packs_have_no_label(tmp_path: Path) -> None:
    shard = stored(write_texts(tmp_path / "shard", TEXTS), single=True)
    data = PretrainingData(StoredSamples([shard], max_length=12), VOCABULARY, **LIMITS)
    packs = data.packs(0, range(len(data.epochs[0].packs)))
    assert sorted(length for pack in packs for length in pack.lengths.tolist()) == [3, 5, 12]
    for pack in packs:
        assert set(pack.next_labels.tolist()) == {-100}
        assert len(pack.masked) == sum(masked_count(length) for length in pack.lengths.tolist())
        assert pack.types.tolist() == [0] * len(pack.ids)


def test_stored_masks_are_those_of_every_epoch(tmp_path: Path) -> None:
    # One token of each is guessed: it becomes [MASK], another token, stays.
    masks = [([3], [4]), ([2], [77]), ([3], [33])]
    shard = stored(write_pairs(tmp_path / "shard", PAIRS, masks), static=True)
    data = PretrainingData(StoredSamples([shard], max_length=12), VOCABULARY, **LIMITS)
    wanted = {
        (2, 11, 3, 4, 3): (3, 12),
        (2, 21, 77, 3, 23, 24, 25, 3): (2, 22),
        (2, 31, 32, 33, 3, 34, 3): (3, 33),
    }
    for epoch in range(3):
        seen = {}
        for pack in data.packs(epoch, range(len(data.epochs[epoch].packs))):
            begins = np.cumsum(pack.lengths) - pack.lengths
            for begin, length, row, label in zip(begins, pack.lengths, pack.masked, pack.masked_labels, strict=True):
                seen[tuple(pack.ids[begin : begin + length].tolist())] = (int(row - begin), int(label))
        assert seen == wanted


def test_words_are_masked_whole_at_load(tmp_path: Path) -> None:
    """A text of five words of two ids, of which two ids are guessed."""
    shard = stored(write_texts(tmp_path / "shard", TEXTS), single=True)
    goes_on = np.arange(100) % 2 == 0
    data = PretrainingData(StoredSamples([shard], max_length=12), VOCABULARY, **LIMITS, continuations=goes_on)
    for epoch in range(8):
        for pack in data.packs(epoch, range(len(data.epochs[epoch].packs))):
            if pack.lengths[0] == 12:
                one, two = sorted(pack.masked_labels.tolist())[-2:]
                assert (one % 2, two) == (1, one + 1)
    with pytest.raises(ValueError, match=r"for each of the 100 pieces of the vocabulary. Got \(99,\)"):
        PretrainingData(StoredSamples([shard], max_length=12), VOCABULARY, **LIMITS, continuations=goes_on[:99])


def test_a_plan_that_fits_is_taken(tmp_path: Path) -> None:
    shard = stored(write_pairs(tmp_path / "shard", PAIRS * 2))
    source = StoredSamples([shard], max_length=12)
    plan = PretrainingData(source, VOCABULARY, **LIMITS, method="padded").epochs.plan(0, 0, shard.lengths)
    assert plan.packs == 6
    # The plan says so many packs, though this method would need fewer; and it does not fit other limits or lengths.
    data = PretrainingData(source, VOCABULARY, **{**LIMITS, "max_sequences": 1}, method="lpfhp", plan=plan)
    assert data.epochs.plan(0, 0, shard.lengths) is plan
    assert data.epochs.plan(0, 0, shard.lengths[:4]).packs == 4
    other = PretrainingData(source, VOCABULARY, **LIMITS, plan=plan)
    assert other.epochs.plan(0, 0, shard.lengths).packs < 6


def folder_of_shards(folder: Path, kind: str) -> list[Path]:
    """Four shards, each with sequences of its own."""
    rng = np.random.default_rng(0)
    prefixes = []
    for number in range(4):
        texts = [rng.integers(5, 100, size=rng.integers(2, 11)).tolist() for _ in range(20 + number)]
        if kind == "texts":
            prefixes.append(write_texts(folder / f"texts-{number}", texts))
        else:
            pairs = [(text[:1], text[1:][:8], int(rng.integers(2))) for text in texts]
            prefixes.append(write_pairs(folder / f"pairs-{number}", pairs))
    return prefixes


def _compare(folder: Path, kind: str) -> tuple[int, int]:
    """Steps that differ with and without exchange, and the bytes that came from another rank."""
    cube = Cube(data=2)
    prefixes, single = folder_of_shards(folder / str(cube.coordinate["data"]), kind), kind == "texts"
    shards = [stored(prefix, single=single) for prefix in prefixes]
    settings: dict[str, Any] = {"global_batch": 8, "shape": cube.shape, "rank": cube.rank}
    settings |= {"packs_per_rank": 2, "end_step": 6}
    everyone = HostAllToAll.along(cube, "data", timeout=timedelta(seconds=60))
    own = [shard if n // 2 == everyone.index else None for n, shard in enumerate(shards)]
    source = RemoteSamples(own, everyone, max_length=12)
    exchange = ShardExchange(everyone, vocab_size=100)
    local = PretrainingData(StoredSamples(shards, max_length=12), VOCABULARY, **LIMITS)
    with Loader(local, **settings) as loader:
        wanted = list(loader)
    with Loader(PretrainingData(source, VOCABULARY, **LIMITS), **settings, exchange=exchange, every=2) as loader:
        steps = list(loader)
    exchange.close()
    assert len(steps) == len(wanted) == 6
    differing = sum(not same_step(step, other) for step, other in zip(steps, wanted, strict=True))
    return differing, exchange.received_bytes


@pytest.mark.parametrize("kind", ["pairs", "texts"])
def test_exchanged_samples_make_the_same_steps(tmp_path: Path, kind: str) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
    for differing, received in run_ranks(2, _compare, tmp_path, kind):
        assert differing == 0
        assert received > 0


def test_stored_masks_do_not_travel(tmp_path: Path) -> None:
    shard = stored(write_pairs(tmp_path / "shard", PAIRS[:1], [([3], [4])]), static=True)
    with pytest.raises(ValueError, match=r"stored masks.*exchanged"):
        RemoteSamples([shard], HostAllToAll.along(Cube(), "data"), max_length=12)


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def test_files_that_are_damaged_or_missing_are_named(tmp_path: Path) -> None:
    masks = [([3], [4]), ([2], [77]), ([3], [33])]

    def fresh(name: str) -> Path:
        return write_pairs(tmp_path / name, PAIRS, masks)

    def refused(prefix: Path, message: str, **kind: bool) -> None:
        with pytest.raises(ValueError, match=message):
            stored(prefix, **kind).segments(np.arange(3))

    prefix = fresh("short")
    cut(tmp_path / "short.bin", -2)
    refused(prefix, r"short.bin has \d+ bytes where its index speaks of")
    prefix = fresh("unlabelled")
    (tmp_path / "unlabelled.labels.npy").unlink()
    refused(prefix, r"unlabelled.labels.npy is missing")
    prefix = fresh("labels")
    cut(tmp_path / "labels.labels.npy", -1)
    refused(prefix, r"labels.labels.npy is damaged")
    np.save(tmp_path / "labels.labels.npy", np.array([0, 1, 2], dtype=np.uint8))
    refused(prefix, r"labels.labels.npy is damaged: a 0 or 1 is needed for each of 3 pairs")
    with open(tmp_path / "labels.labels.npy", "wb") as file:  # a name without suffix would get another one
        np.savez(file, np.zeros(3, dtype=np.uint8))
    refused(prefix, r"labels.labels.npy is damaged: .* is no .npy file")
    huge = "{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776,)}"
    (tmp_path / "labels.labels.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(huge)) + huge.encode())
    refused(prefix, r"labels.labels.npy is damaged: .* is no .npy file of numbers")
    refused(fresh("single"), r"single.idx holds no samples, which have 1 items in each document", single=True)
    prefix = write_texts(tmp_path / "texts", TEXTS)
    refused(prefix, r"texts.idx holds no samples, which have 2 items in each document")
    prefix = write_pairs(tmp_path / "outside", PAIRS, [([3], [4]), ([9], [77]), ([3], [33])])
    refused(prefix, r"outside.masks.bin is damaged: a masked place lies outside its text", static=True)
    prefix = write_pairs(tmp_path / "other", PAIRS, masks[:2])
    refused(prefix, r"other.masks.idx does not belong to .*other.idx", static=True)
    refused(write_pairs(tmp_path / "maskless", PAIRS), r"maskless.masks.idx is missing", static=True)
    with pytest.raises(ValueError, match=r"fresh.*8 tokens, and max_length is \b7\b"):
        StoredSamples([stored(fresh("fresh"))], max_length=7)
    with pytest.raises(ValueError, match=r"of \b2\b shards, shard \b1\b"):
        StoredSamples([stored(fresh("alone")), None], max_length=12)


@pytest.mark.parametrize("static", [False, True])
def test_a_shard_keeps_few_files_open(tmp_path: Path, static: bool) -> None:
    masks = [([3], [4]), ([2], [77]), ([3], [33])]
    prefix = write_pairs(tmp_path / "shard", PAIRS, masks)
    shard = stored(prefix, static=static)
    assert len(open_files(tmp_path)) == (4 if static else 2)
    assert shard.segments(np.array([0, 1])).label.tolist() == [1, 0]


@pytest.mark.parametrize("more", [8, 9])  # the limit is met at the labels, or at the index
def test_too_many_open_files_are_no_damage(tmp_path: Path, more: int) -> None:
    prefix = write_pairs(tmp_path / "shard", PAIRS)
    shards: list[StoredShard] = []
    words = r"shard cannot be opened: this process has too many files open, and every shard keeps 2. .*\(ulimit -n\)"
    with files_to_open(more), pytest.raises(ValueError, match=words):
        shards.extend(stored(prefix) for _ in range(9))
    assert 3 <= len(shards) <= 4


def test_ids_of_another_vocabulary_are_noticed(tmp_path: Path) -> None:
    shard = stored(write_pairs(tmp_path / "shard", PAIRS, [([3], [4]), ([2], [99]), ([3], [33])]), static=True)
    found = shard.segments(np.arange(3))
    found.check(100)
    with pytest.raises(ValueError, match="holds the id 99, which a vocabulary of 98"):
        found.check(98)
