"""Bad input: said with its file, its place and a remedy; left out, counted and listed under --skip-bad."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.tools.corpus.dumps import HEAD, TAIL, documents, page, pages, run, texts
from tools.corpus.extract.bzip2 import bzip2_chunks, find_marks
from tools.corpus.pipeline import BadInput


def left_out(folder: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, (folder / "left-out.jsonl").read_text().splitlines())
    return [(line["at"], line["reason"]) for line in lines]


def check(tmp_path: Path, path: Path, message: str, stay: list[str], places: list[str], **options: Any) -> None:
    """The default stops with the first place; --skip-bad keeps what is sound and lists the places."""
    with pytest.raises(BadInput, match=message) as error:
        run(tmp_path / "strict", path, **options)
    assert str(error.value).startswith(f"{path}, ")
    assert str(error.value).endswith(", or leave it out by --skip-bad.")
    assert not (tmp_path / "strict").exists()
    manifest = run(tmp_path / "skipping", path, skip_bad=True, **options)
    assert texts(manifest) == stay
    assert [at for at, _ in left_out(manifest.folder)] == places
    assert manifest.left_out == len(places)


@pytest.mark.parametrize("packing", ["gz", pytest.param("bz2", marks=pytest.mark.slow)])
def test_what_unpacks_without_end_is_refused_in_little_memory(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"bomb.txt.{packing}"
    with gzip.open(path, "wb", 1) if packing == "gz" else bz2.open(path, "wb") as file:
        for _ in range(128):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="has more than 1000000 bytes"):
            run(tmp_path / "out", path, largest_document=1.0)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unit", [1.0, 0.00001])
def test_invalid_utf8_is_named_by_its_byte(tmp_path: Path, unit: float) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"First.\n\nIt has\nBir\xffne.\n\nLast.\n")
    check(tmp_path, path, r"byte 18: this is not UTF-8 \(invalid start byte\)\. Convert the file", ["First.", "Last."],
          ["byte 18"], unit_megabytes=unit)  # fmt: skip


def test_invalid_utf8_and_broken_xml_in_a_dump(tmp_path: Path) -> None:
    parts = [part.encode() for part in (HEAD, page("A", "Text of A."), page("B", "Text of B."), page("C", "Of C."))]
    parts[2] = parts[2].replace(b"Text of B", b"Text \xc3 of B")
    parts[3] = parts[3].replace(b"</revision>", b"")
    at = len(parts[0] + parts[1] + parts[2].partition(b"\xc3")[0])
    broken = len(b"".join(parts[:3])) + 2
    path = tmp_path / "dump.xml"
    path.write_bytes(b"".join(parts) + TAIL.encode())
    check(tmp_path, path, f"byte {at}: this is not UTF-8", ["Text of A."], [f"byte {at}", f"byte {broken}"])
    assert "no well-formed XML (mismatched tag" in left_out(tmp_path / "skipping")[1][1]
    packed = tmp_path / "dump.xml.bz2"
    packed.write_bytes(bz2.compress(path.read_bytes()))
    with pytest.raises(BadInput, match=f"byte 4, {at} bytes into what is unpacked from there: this is not UTF-8"):
        run(tmp_path / "packed", packed)


def test_a_page_that_is_too_large_or_has_no_end(tmp_path: Path) -> None:
    first, large, last = page("A", "Text of A."), page("B", "Words " * 2000), page("C", "Text of C.")
    path = tmp_path / "dump.xml"
    path.write_text(HEAD + first + large + last + TAIL)
    at = len(HEAD + first) + 2
    remedy = "Raise --largest-document"
    check(tmp_path, path, f"byte {at}: the page .* has more than 9000 bytes, or no </page>. {remedy}",
          ["Text of A.", "Text of C."], [f"byte {at}"], largest_document=0.009)  # fmt: skip
    path.write_text(HEAD + first + last[:-12])
    with pytest.raises(BadInput, match=f"byte {at}: the page that begins here has no </page>"):
        run(tmp_path / "open", path)


def test_rows_that_hold_no_text(tmp_path: Path) -> None:
    lines = [
        '{"text": "Good."}', '{"title": "none"}', '{"text": 3}', "no json", "[1]", '{"text": "half \\ud800"}',
        '{"text": "' + "x" * 300 + '"}', "[" * 9000, '{"text": "Last."}',
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    starts = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    places = [f"byte {start}" for start in starts[1:-1]]
    check(tmp_path, path, f"byte {starts[1]}: the row has no field 'text' but 'title'. Name the field by --text-field",
          ["Good.", "Last."], places, largest_document=0.0002)  # fmt: skip
    reasons = [reason for _, reason in left_out(tmp_path / "skipping")]
    expected = ["no field", "is no text (int)", "is no JSON (", "no JSON object", "surrogate", "200 bytes", "200 bytes"]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True))
    path.write_text("[" * 9000 + "\n" + lines[0])
    check(tmp_path / "deep", path, "byte 0: the line that begins here is no JSON", ["Good."], ["byte 0"])


def test_a_document_of_text_or_a_book_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One.\n\n" + "a line\n" * 20 + "\n" + "b" * 200 + "\n\nTwo.\n")
    for unit in (1.0, 0.00001):
        check(tmp_path / f"{unit}", path, "byte 6: the document that begins here has more than 100 bytes",
              ["One.", "Two."], ["byte 6", "byte 147"], largest_document=0.0001, unit_megabytes=unit)  # fmt: skip
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_bytes(path.read_bytes())
    (tmp_path / "books" / "b.txt").write_text("A book.")
    with pytest.raises(BadInput, match=r"a\.txt, byte \b0\b.*100"):
        run(tmp_path / "x", tmp_path / "books", format="books", largest_document=0.0001)
    manifest = run(tmp_path / "y", tmp_path / "books", format="books", largest_document=0.0001, skip_bad=True)
    assert texts(manifest) == ["A book."]


@pytest.fixture(scope="module")
def noisy() -> bytes:
    """A dump of more than three blocks of the smallest bzip2 level."""
    draw = random.Random(1)
    noise = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz   ", k=2_000)) for _ in range(60))
    filled = [one.replace("they said", f"they said {text}") for one, text in zip(pages(60), noise, strict=True)]
    return (HEAD + "".join(filled) + TAIL).encode()


@pytest.mark.parametrize("unit", [16.0, 0.2])
def test_a_damaged_block_takes_its_pages_and_the_page_before_it(tmp_path: Path, noisy: bytes, unit: float) -> None:
    packed = bytearray(bz2.compress(noisy, 1))
    block = [mark.bit // 8 for mark in find_marks(bytes(packed)) if mark.begins][1]
    packed[block + 5_000] ^= 1
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(packed)
    with pytest.raises(BadInput, match=f"byte {block}: the bzip2 block that begins here is damaged or cut off"):
        run(tmp_path / "strict", path, unit_megabytes=16)
    manifest = run(tmp_path / "out", path, skip_bad=True, unit_megabytes=unit)
    places = left_out(manifest.folder)
    assert sorted(reason.split(" that")[0] for _, reason in places) == ["the bzip2 block", "the page"]
    assert any(f"is cut by the damage at byte {block}" in reason for _, reason in places)
    chunks = list(bzip2_chunks(path, 0, len(packed), lambda place, reason, remedy: None, lambda size: None))
    before = len(chunks[0].data or b"")
    after = len(noisy) - sum(len(chunk.data or b"") for chunk in chunks[2:])
    spans = [match.span() for match in re.finditer(rb"<page>.*?</page>", noisy, re.DOTALL)]
    whole = [str(number) for number, (first, last) in enumerate(spans) if last <= before or first >= after]
    assert 3 < len(whole) < 57
    assert [document["id"] for document in documents(manifest)] == whole


@pytest.mark.parametrize("name, pack", [("a.xml.bz2", bz2.compress), ("a.xml.gz", gzip.compress)])
def test_a_truncated_file(tmp_path: Path, noisy: bytes, name: str, pack: object) -> None:
    assert callable(pack)
    packed = pack(noisy)
    path = tmp_path / name
    path.write_bytes(packed)
    whole = run(tmp_path / "whole", path)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadInput, match=f"{re.escape(str(path))}, byte \\d+: the .* cut off"):
        run(tmp_path / "strict", path)
    if name.endswith(".gz"):
        manifest = run(tmp_path / "skipping", path, skip_bad=True)
        assert 20 < len(documents(manifest)) < 40
        assert documents(manifest) == documents(whole)[: len(documents(manifest))]
        assert manifest.left_out == 2  # the file's second half, and the page that it cuts


def test_gzip_data_goes_on_after_zeros_and_an_empty_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"One.\n\n") + bytes(700) + gzip.compress(b"Two.") + bytes(2_000_000))
    assert texts(run(tmp_path / "out", path)) == ["One.", "Two."]
    path.write_bytes(b"")
    with pytest.raises(BadInput, match=r"byte 0: no gzip data.*empty"):
        run(tmp_path / "empty", path)


def test_damaged_gzip_is_named_by_a_byte_of_the_file(tmp_path: Path, noisy: bytes) -> None:
    packed = bytearray(gzip.compress(noisy))
    packed[len(packed) // 2] ^= 255
    path = tmp_path / "a.xml.gz"
    path.write_bytes(packed)
    with pytest.raises(BadInput, match=r"byte \d+.*-3") as error:
        run(tmp_path / "strict", path)
    assert int(error.value.at.split()[1]) <= len(packed)


def test_damaged_parquet(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [{"text": "x" + "".join(draw.choices("abcdefgh ", k=500)) + f" {row}"} for row in range(60)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=20, write_page_checksum=True, compression="none",
        use_dictionary=False,
    )  # fmt: skip
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    path.write_bytes(damaged)
    good = [row["text"] for row in rows[:20] + rows[40:]]
    check(tmp_path, path, "row 20: the rows of its group from here on are damaged: .*CRC checksum", good, ["row 20"])
    path.write_bytes(whole[:-100])
    (tmp_path / "in").mkdir()
    path.rename(tmp_path / "in" / "rows.parquet")
    (tmp_path / "in" / "a.txt").write_text("Stays.")
    with pytest.raises(BadInput, match=r"Parquet file.*magic bytes not found"):
        run(tmp_path / "cut", tmp_path / "in")
    assert texts(run(tmp_path / "rest", tmp_path / "in", skip_bad=True)) == ["Stays."]


def test_a_parquet_row_that_is_no_utf8_and_a_column_that_is_missing(tmp_path: Path) -> None:
    values = pyarrow.array([b"Good.", b"bad \xff", b"Last."], type=pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(3, values.buffers()[1], values.buffers()[2])
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    check(tmp_path, path, "row 1: this is not UTF-8", ["Good.", "Last."], ["row 1"])
    with pytest.raises(BadInput, match=r"'body'.*--text-field"):
        run(tmp_path / "body", path, text_field="body")


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"file.*\(.*empty\)"):
        run(tmp_path / "out", tmp_path / "empty")
    with pytest.raises(ValueError, match=r"there is no \.txt or .* file in the input"):
        run(tmp_path / "out", tmp_path / "empty", format="books")
    with pytest.raises(ValueError, match=r"file.*\(nothing\)"):
        run(tmp_path / "out")
    with pytest.raises(ValueError, match="nowhere is no file and no folder"):
        run(tmp_path / "out", tmp_path / "nowhere")
    (tmp_path / "a.dat").write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match=r"format.*a\.dat.*--format"):
        run(tmp_path / "out", tmp_path / "a.dat")
    for head, kind in ((b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PK\3\4", "zip")):
        (tmp_path / "a.dat").write_bytes(head + bytes(9))
        with pytest.raises(ValueError, match=rf"is a {kind} file, which is not read here. Unpack it first"):
            run(tmp_path / "out", tmp_path / "a.dat")
    (tmp_path / "empty.txt").write_bytes(b"\n\n")
    with pytest.raises(ValueError, match=r"document.*\(none was read\). Check --format"):
        run(tmp_path / "out", tmp_path / "empty.txt")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"unit_megabytes": 0.0}, r"--unit-megabytes.*\b0.*\b0.0"),
        ({"least_letters": 1.5}, r"least_letters.*\b0.*\b1.*\b1.5"),
        ({"min_characters": 5, "max_characters": 4}, "Got 5 and 4"),
        ({"language_characters": ("klingon",)}, "'klingon' is no script that is known .latin, greek, "),
        ({"language_characters": ("U+0500-U+0400",)}, "it must ascend"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_text("Text.")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", tmp_path / "a.txt", **options)


@pytest.mark.parametrize(
    "name, content, package",
    [("a.xml", HEAD + page("A", "Text.") + TAIL, "mwparserfromhell"), ("a.parquet", "PAR1", "pyarrow")],
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, package: str
) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "a.txt").write_text("Text.")
    for module in [module for module in sys.modules if module.startswith("tools.corpus.extract.wikitext")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"need {package} .*: pip install 'tensor3d\[corpus\]'"):
        run(tmp_path / "out", tmp_path / name)
    assert texts(run(tmp_path / "out", tmp_path / "a.txt")) == ["Text."]
