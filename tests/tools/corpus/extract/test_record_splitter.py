"""Records that straddle chunks and pieces: each is read once, by the piece that owns its beginning."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.corpus.extract.record_splitter import Chunk, Place, ReadBuffer, cut_elements, cut_lines

CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=20)
Reports = list[tuple[str, str]]


def chunked(data: bytes, begin: int, end: int, sizes: list[int], holes: tuple[int, ...] = ()) -> Iterator[Chunk]:
    """The bytes from `begin` on in chunks of these sizes, over and over; the chunk with a byte of `holes` is one."""
    at, number = begin, 0
    while at < len(data):
        limit = end if at < end else len(data)
        stop = min(at + sizes[number % len(sizes)], limit)
        hole = any(at <= byte < stop for byte in holes)
        yield Chunk(None if hole else data[at:stop], Place(at), at < end)
        at, number = stop, number + 1


def elements(data: bytes, begin: int, end: int, sizes: list[int], largest: int = 1000, holes: tuple[int, ...] = ()
             ) -> tuple[list[tuple[bytes, int]], Reports]:  # fmt: skip
    reports: Reports = []
    records = cut_elements(
        ReadBuffer(chunked(data, begin, end, sizes, holes)), b"<p>", b"</p>", largest,
        lambda place, reason, remedy: reports.append((str(place), reason)), name="page",
    )  # fmt: skip
    return [(record.data, record.place.byte) for record in records], reports


@given(st.lists(st.tuples(st.text("ab<p\n", max_size=8), st.text("/>pc<\n", max_size=4)), max_size=8), CUTS, CUTS)
def test_elements_belong_to_the_piece_of_their_first_byte(
    parts: list[tuple[str, str]], sizes: list[int], cuts: list[int]
) -> None:
    data, expected = b"", []
    for inside, between in parts:
        # Tags occur nowhere else, as in XML.
        inside, between = (part.replace("<p>", "").replace("</p>", "") for part in (inside, between))
        record = f"<p>{inside}</p>".encode()
        if b"<p>" in record[3:] or record.count(b"</p>") > 1 or "<p>" in between or between.endswith(("<", "<p")):
            continue
        expected.append((record, len(data)))
        data += record + between.encode()
    begin, found = 0, []
    for cut in [*cuts, len(data) + 1]:
        records, reports = elements(data, begin, min(begin + cut, len(data)), sizes)
        assert all(begin <= at < begin + cut for _, at in records)
        assert not reports
        found += records
        begin = min(begin + cut, len(data))
    assert found == expected


@given(st.binary(max_size=60).map(lambda data: data.replace(b"\xff", b"\n").replace(b"\xfe", b"\n\n")), CUTS, CUTS)
def test_lines_belong_to_the_piece_of_the_newline_before_them(data: bytes, sizes: list[int], cuts: list[int]) -> None:
    begin, found = 0, []
    for cut in [*cuts, len(data) + 1]:
        end = min(begin + cut, len(data))
        if begin < end:
            window = ReadBuffer(chunked(data, begin, end, sizes))
            for line in cut_lines(window, first=not begin, largest=1000):
                if not line.owned:
                    break
                assert line.data is not None
                found.append((line.data, window.place(line.start).byte if line.data else None))
        begin = end
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line for line, _ in found] == expected
    starts = [sum(len(line) + 1 for line in expected[:number]) for number in range(len(expected))]
    assert all(at in (None, start) for (_, at), start in zip(found, starts, strict=True))


@pytest.mark.parametrize("size", [1, 5, 100])
def test_elements_without_their_end_or_too_long_are_reported(size: int) -> None:
    data = b"<p>a</p><p>no end<p>b</p><p>" + b"x" * 40 + b"</p><p>c</p><p>cut"
    found, reports = elements(data, 0, len(data), [size], largest=30)
    assert found == [(b"<p>a</p>", 0), (b"<p>b</p>", 17), (b"<p>c</p>", 72)]
    assert [(place, reason.split("that begins here ")[1]) for place, reason in reports] == [
        ("byte 8", "has no </p>"),
        ("byte 25", "has more than 30 bytes, or no </p>"),
        ("byte 80", "has no </p>"),
    ]


def test_an_element_cut_by_a_hole_is_left_out_by_whoever_owns_it() -> None:
    data = b"<p>a</p><p>long one</p><p>b</p>"
    found, reports = elements(data, 0, 9, [3], holes=(15,))
    assert found == [(b"<p>a</p>", 0)]
    assert reports == [("byte 8", "the page that begins here is cut by the damage at byte 15")]
    found, reports = elements(data, 9, len(data), [3], holes=(15,))
    assert found == [(b"<p>b</p>", 23)]
    assert not reports


@pytest.mark.parametrize("size", [1, 4, 9])
def test_what_lies_on_both_sides_of_a_hole_is_never_joined(size: int) -> None:
    data = b"<p>no end <p>begun " + b"." * 20 + b"</p><p>b</p>"
    found, reports = elements(data, 0, len(data), [size], holes=(data.index(b".") + 5,))
    assert found == [(b"<p>b</p>", data.rindex(b"<p>b"))]
    assert [(place, reason.split("begins here ")[1].split(" at ")[0]) for place, reason in reports] == [
        ("byte 0", "has no </p>"),
        ("byte 10", "is cut by the damage"),
    ]


def test_a_mark_that_straddles_the_end_of_one_that_is_too_long_is_seen() -> None:
    data = b"<p>" + b"x" * 30 + b"<p>b</p>"
    found, reports = elements(data, 0, len(data), [35], largest=30)
    assert found == [(b"<p>b</p>", 33)]
    assert [place for place, _ in reports] == ["byte 0"]


def test_elements_that_all_lack_their_end_take_no_longer_than_others() -> None:
    data = b"".join(b"<doc id=%d>" % number + b"text " * 100 for number in range(10_000))
    chunks = (Chunk(data[at : at + 65_536], Place(at), True) for at in range(0, len(data), 65_536))
    reports: list[str] = []
    begun = time.process_time()
    records = cut_elements(
        ReadBuffer(chunks), b"<doc ", b"</doc>", 16_000_000, lambda place, reason, remedy: reports.append(str(place)),
        name="document",
    )  # fmt: skip
    assert not list(records)
    assert len(reports) == 10_000
    assert time.process_time() - begun < 2  # searching to the end for each of them takes ten times that


def test_lines_that_are_lost_are_said_and_the_next_is_read() -> None:
    data = b"one\n" + b"x" * 30 + b"\ntwo\nthree\nfour\n"
    window = ReadBuffer(chunked(data, 0, len(data), [4], holes=(41,)))
    lines = [(line.data, line.reason, line.begun) for line in cut_lines(window, first=True, largest=20)]
    assert lines == [
        (b"one", "", True),
        (None, "has more than 20 bytes", True),
        (b"two", "", True),
        (None, "is cut by the damage at byte 40", True),
        (b"four", "", True),
    ]
