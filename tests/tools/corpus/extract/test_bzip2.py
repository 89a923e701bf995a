"""Blocks of .bz2 files found from anywhere, against the library that reads from the beginning."""

from __future__ import annotations

import bz2
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.corpus.extract.bzip2 import BLOCK, END, Mark, bzip2_chunks, find_marks
from tools.corpus.extract.record_splitter import Chunk, Place


def noise(size: int, seed: int = 0) -> bytes:
    """Text that packs badly, so that its blocks are long and begin at any bit."""
    return bytes(random.Random(seed).choices(b"abcdefghijklmnop<>/ \n", k=size))


def read(path: Path, begin: int, end: int, *, window: int = 1 << 20) -> tuple[list[Chunk], list[tuple[int, str]]]:
    """The owned chunks of a piece, and what was reported."""
    reports: list[tuple[int, str]] = []

    def report(place: Place, reason: str, remedy: str) -> None:
        reports.append((place.byte, reason))

    chunks = bzip2_chunks(path, begin, end, report, lambda size: None, window)
    return [chunk for chunk in chunks if chunk.owned], reports


def pieces(path: Path, step: int, *, window: int = 1 << 20) -> tuple[list[Chunk], list[tuple[int, str]]]:
    size = path.stat().st_size
    chunks: list[Chunk] = []
    reports: list[tuple[int, str]] = []
    for begin in range(0, size, step):
        more, said = read(path, begin, min(begin + step, size), window=window)
        chunks += more
        reports += said
    return chunks, reports


def text(chunks: list[Chunk]) -> bytes:
    return b"".join(chunk.data or b"" for chunk in chunks)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of four blocks, of which all but the first begin inside a byte or another way than the one before."""
    path = tmp_path_factory.mktemp("bzip2") / "several.bz2"
    path.write_bytes(bz2.compress(noise(330_000), 1))
    return path


def blocks(path: Path) -> list[Mark]:
    return [mark for mark in find_marks(path.read_bytes()) if mark.begins]


@pytest.mark.parametrize("step", [1 << 30, 50_001, 4_000])
def test_the_pieces_of_one_stream_make_its_text(several: Path, step: int) -> None:
    marks = blocks(several)
    assert len(marks) == 4
    assert len({mark.bit % 8 for mark in marks}) > 1
    chunks, reports = pieces(several, step, window=30_000)
    assert text(chunks) == noise(330_000)
    assert not reports
    assert [chunk.place for chunk in chunks] == [Place(mark.bit // 8, 0) for mark in marks]


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.integers(1, 200), st.integers(1, 64))
def test_streams_behind_one_another(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], step: int, window: int
) -> None:
    path = tmp_path_factory.mktemp("streams") / "streams.bz2"
    path.write_bytes(b"".join(map(bz2.compress, texts)))
    chunks, reports = pieces(path, step, window=window)
    assert text(chunks) == b"".join(texts) == bz2.decompress(path.read_bytes())
    assert not reports


@given(st.binary(max_size=40), st.integers(0, 7), st.sampled_from([BLOCK, END]), st.binary(min_size=1, max_size=40))
def test_a_mark_is_found_at_any_bit(before: bytes, shift: int, magic: int, after: bytes) -> None:
    bits = (((1 << shift) - 1) << 48 | magic) << (8 - shift)
    data = before + bits.to_bytes(7, "big") + after
    assert Mark(8 * (len(before) + 3) + shift, magic == BLOCK) in find_marks(data, 3)


def with_chance_mark(magic: int) -> bytes:
    """Text whose packed block holds the magic: the list of bytes that occur is part of it, a bit each."""
    used = set(range(0, 0x100, 16))
    for row in range(3):
        bits = magic >> (32 - 16 * row) & 0xFFFF
        used -= set(range(0x30 + 16 * row, 0x40 + 16 * row))
        used |= {0x30 + 16 * row + column for column in range(16) if bits >> (15 - column) & 1}
    return bytes(random.Random(0).choices(sorted(used), k=20_000)) + bytes(sorted(used))


@pytest.mark.parametrize("magic", [BLOCK, END])
@pytest.mark.parametrize("step", [1 << 30, 1_000, 16])
def test_a_mark_by_chance_inside_a_block_is_none(tmp_path: Path, magic: int, step: int) -> None:
    content = with_chance_mark(magic)
    path = tmp_path / "chance.bz2"
    path.write_bytes(bz2.compress(content) + bz2.compress(b"next"))
    assert len(find_marks(path.read_bytes())) == 5
    chunks, reports = pieces(path, step)
    assert text(chunks) == content + b"next"
    assert not reports


@pytest.mark.parametrize("step", [1 << 30, 50_001, 9_000])
def test_damage_is_reported_at_its_block_and_the_others_are_read(several: Path, tmp_path: Path, step: int) -> None:
    packed = bytearray(several.read_bytes())
    begin = blocks(several)[1].bit // 8
    packed[begin + 20_000] ^= 16
    path = tmp_path / "damaged.bz2"
    path.write_bytes(packed)
    with pytest.raises(OSError, match="Invalid data stream"):
        bz2.decompress(packed)
    chunks, reports = pieces(path, step)
    assert reports == [(begin, "the bzip2 block that begins here is damaged or cut off")]
    sound, _ = pieces(several, step)
    assert [chunk.data for chunk in chunks] == [sound[0].data, None, sound[2].data, sound[3].data]


def test_a_stretch_of_zeros_takes_the_blocks_it_touches(several: Path, tmp_path: Path) -> None:
    packed = bytearray(several.read_bytes())
    first, second, third, fourth = (mark.bit // 8 for mark in blocks(several))
    packed[second + 100 : third + 100] = bytes(third - second)
    path = tmp_path / "zeros.bz2"
    path.write_bytes(packed)
    chunks, reports = pieces(path, 10_000)
    assert [byte for byte, _ in reports] == [second]
    assert [chunk.data is None for chunk in chunks] == [False, True, False]
    assert (chunks[0].place.byte, chunks[2].place.byte) == (first, fourth)


@pytest.mark.parametrize("cut", [1, 6, 11, 30_000])
def test_a_cut_file_is_not_taken_for_a_whole_one(several: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.bz2"
    path.write_bytes(several.read_bytes()[:-cut])
    for step in (1 << 30, 7_000):
        chunks, reports = pieces(path, step)
        assert len(reports) == 1
        assert (chunks[-1].data, chunks[-1].place.byte) == (None, reports[0][0])
        assert noise(330_000).startswith(text(chunks))


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"BZ", b"BZh0" + bytes(20)])
def test_what_is_no_bzip2_file_is_said_at_byte_0(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.bz2"
    path.write_bytes(content)
    _, reports = read(path, 0, len(content))
    assert reports == [(0, "no bzip2 stream begins here")]


def test_garbage_after_a_stream_and_a_damaged_head_are_said(tmp_path: Path) -> None:
    one, two = bz2.compress(b"one"), bz2.compress(b"two")
    path = tmp_path / "garbage.bz2"
    path.write_bytes(one + b"garbage")
    assert read(path, 0, 100)[1] == [(len(one), "the bzip2 stream ends here, and no other begins")]
    path.write_bytes(one + b"BZh9" + bytes(6) + two[10:] + one)
    chunks, reports = pieces(path, 5)
    assert [byte for byte, _ in reports] == [len(one)]
    assert [chunk.data for chunk in chunks] == [b"one", None, b"one"]
