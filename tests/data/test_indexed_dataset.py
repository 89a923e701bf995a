"""The indexed format: byte for byte, there and back, and damaged in every way."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data import IndexedDataset, IndexedWriter, indexed_dataset
from tests.data.samples import write

# Two documents, [[1, 2], [3]] and [[4, 5, 6]], in ids of two bytes, as the format's definition has them.
INDEX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 3, 3)
    + struct.pack("<3i", 2, 1, 3)
    + struct.pack("<3q", 0, 4, 6)
    + struct.pack("<3q", 0, 2, 3)
)
DATA = struct.pack("<6H", 1, 2, 3, 4, 5, 6)


def put(folder: Path, index: bytes = INDEX, data: bytes = DATA) -> Path:
    (folder / "set.idx").write_bytes(index)
    (folder / "set.bin").write_bytes(data)
    return folder / "set"


def test_writes_the_format_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "set", [[[1, 2], [3]], [[4, 5, 6]]])
    assert (tmp_path / "set.idx").read_bytes() == INDEX
    assert (tmp_path / "set.bin").read_bytes() == DATA


def test_writes_many_documents_at_once_byte_for_byte(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", vocab_size=100) as writer:
        writer.add_documents(np.array([1, 2, 3, 4, 5, 6], dtype=np.uint16), [2, 1, 3], np.array([2, 1]))
        writer.add_documents(np.array([], dtype=np.uint16), [], [])
    assert (tmp_path / "set.idx").read_bytes() == INDEX
    assert (tmp_path / "set.bin").read_bytes() == DATA


def test_an_index_of_many_blocks_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[[number] * (1 + number % 3) for number in range(first, 20)] for first in range(8)]
    write(tmp_path / "one", documents)
    monkeypatch.setattr(indexed_dataset, "_BLOCK", 7)
    dataset = write(tmp_path / "many", documents)
    for kind in ("idx", "bin"):
        assert (tmp_path / f"many.{kind}").read_bytes() == (tmp_path / f"one.{kind}").read_bytes()
    assert [dataset[item].tolist() for item in range(len(dataset))] == [item for items in documents for item in items]
    index = bytearray((tmp_path / "many.idx").read_bytes())
    index[34 + 4 * 9] += 1
    (tmp_path / "many.idx").write_bytes(index)
    with pytest.raises(ValueError, match=r"many.idx.*one after another"):
        IndexedDataset(tmp_path / "many")


@pytest.mark.parametrize(
    ("ids", "lengths", "items", "message"),
    [
        ([1, 2, 3], [2, 2], [2], "the lengths of 2 items add up to 4, and 3 ids are given"),
        ([1, 2, 3], [2, 1], [1], "the documents' items add up to 1"),
        ([1, 2], [1, 1, 0], [1, 2], "item 1 of document 1 is empty"),
        ([1, 100], [1, 1], [2], "between 0 and 99. Got 100"),
        ([1, -1], [1, 1], [2], "between 0 and 99. Got -1"),
    ],
)
def test_refuses_many_documents_that_do_not_fit(
    tmp_path: Path, ids: list[int], lengths: list[int], items: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message), IndexedWriter(tmp_path / "set", vocab_size=100) as writer:
        writer.add_documents(np.array(ids), lengths, items)
    assert list(tmp_path.iterdir()) == []


def test_reads_the_format(tmp_path: Path) -> None:
    dataset = IndexedDataset(put(tmp_path))
    assert len(dataset) == 3
    assert [dataset[i].tolist() for i in range(3)] == [[1, 2], [3], [4, 5, 6]]
    assert dataset.lengths.tolist() == [2, 1, 3]
    assert dataset.documents.tolist() == [0, 2, 3]
    assert dataset.starts.tolist() == [0, 2, 3, 6]
    assert dataset.ids.dtype == np.uint16
    with pytest.raises(IndexError, match="item 3 of 3"):
        dataset[3]


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")], ids=lambda value: str(value)
)
def test_reads_every_type_of_whole_numbers(tmp_path: Path, code: int, letter: str) -> None:
    size = struct.calcsize(letter)
    index = INDEX[:17] + bytes([code]) + INDEX[18:46] + struct.pack("<3q", 0, 2 * size, 3 * size) + INDEX[70:]
    dataset = IndexedDataset(put(tmp_path, index, struct.pack(f"<6{letter}", 1, 2, 3, 4, 5, 127)))
    assert [dataset[i].tolist() for i in range(3)] == [[1, 2], [3], [4, 5, 127]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.int32)])
def test_ids_take_two_bytes_where_that_is_enough(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    dataset = write(tmp_path / "set", [[[0, vocab_size - 1]]], vocab_size=vocab_size)
    assert dataset.ids.dtype == dtype
    assert dataset[0].tolist() == [0, vocab_size - 1]


def test_random_documents_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(0, 70_000, size=rng.integers(1, 30)).tolist() for _ in range(rng.integers(0, 6))]
        for _ in range(100)
    ]
    dataset = write(tmp_path / "a.set", documents, vocab_size=70_000)
    for number, document in enumerate(documents):
        items = range(dataset.documents[number], dataset.documents[number + 1])
        assert [dataset[item].tolist() for item in items] == document
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.set.bin", "a.set.idx"]


def test_no_document_at_all_is_a_dataset(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [])
    assert (len(dataset), dataset.documents.tolist(), dataset.ids.tolist()) == (0, [0], [])


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    put(tmp_path)
    with pytest.raises(ValueError, match="Got 10"):
        write(tmp_path / "set", [[[7, 8, 9]], [[10]]], vocab_size=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]
    assert (tmp_path / "set.idx").read_bytes() == INDEX
    assert (tmp_path / "set.bin").read_bytes() == DATA


def test_refuses_what_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size.*1.*0"):
        IndexedWriter(tmp_path / "set", vocab_size=0)
    for document, message in (
        ([[1], []], "item 1 of document 0 is empty"),
        ([[1, 10]], "between 0 and 9. Got 10"),
        ([[1, -1]], "between 0 and 9. Got -1"),
    ):
        with pytest.raises(ValueError, match=message), IndexedWriter(tmp_path / "set", vocab_size=10) as writer:
            writer.add_document(document)
    assert list(tmp_path.iterdir()) == []


def patch(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:at] + value + index[at + len(value) :]


def test_kind_10_modes_of_items_are_ignored_with_a_word(tmp_path: Path) -> None:
    """As Megatron writes them for data of several kinds: a byte an item, behind everything else."""
    with pytest.warns(UserWarning, match=r"set\.idx has a mode of one byte for each of its 3 items"):
        dataset = IndexedDataset(put(tmp_path, index=INDEX + bytes([0, 1, 0])))
    assert [dataset[i].tolist() for i in range(3)] == [[1, 2], [3], [4, 5, 6]]
    assert dataset.documents.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: b"", "set.idx is no index"),
        (lambda index: index[:20], "set.idx is no index"),
        (patch(0, b"TNTIDX"), "set.idx is an index of the older format TNTIDX.*--dataset-impl mmap"),
        (patch(0, b"MMAPIDX"), "set.idx is no index"),
        (patch(9, struct.pack("<Q", 2)), "set.idx has version 2"),
        (patch(17, b"\x07"), r"set.idx.*\b7"),
        (lambda index: index[:-1], "set.idx.*93 bytes.*94.*cut short"),
        (lambda index: index + b"\x00", "set.idx has 95 bytes.*longer than that"),
        (patch(18, struct.pack("<Q", 2**60)), "set.idx has 94 bytes; 1152921504606846976 items"),
        (patch(34, struct.pack("<3i", -2, 1, 3)), "set.idx.*item 0.*negative"),
        (patch(34, struct.pack("<3i", 1, 2, 3)), "set.idx is damaged: its items do not lie one after another"),
        (patch(46, struct.pack("<3q", 2, 4, 6)), "set.idx is damaged: its items do not lie one after another"),
        (patch(70, struct.pack("<3q", 1, 2, 3)), "set.idx is damaged: its documents"),
        (patch(70, struct.pack("<3q", 0, 2, 4)), "set.idx is damaged: its documents"),
        (patch(70, struct.pack("<3q", 0, 4, 3)), "set.idx is damaged: its documents"),
        (lambda index: patch(26, struct.pack("<Q", 0))(index)[:70], "set.idx is damaged: its documents"),
    ],
)
def test_kind_10_a_damaged_index_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IndexedDataset(put(tmp_path, index=damage(INDEX)))


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"\x00\x00", b""])
def test_damaged_data_is_named(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match=f"set.bin has {len(data)} bytes where its index speaks of 12"):
        IndexedDataset(put(tmp_path, data=data))


@pytest.mark.parametrize("missing", ["set.idx", "set.bin"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    prefix = put(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        IndexedDataset(prefix)
