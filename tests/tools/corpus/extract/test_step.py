"""From inputs of every kind to documents: the same ones however the input is packed, cut and shared out."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.corpus.dumps import BENGALI_HEAD, HEAD, TAIL, content, documents, page, pages, run, texts
from tools.corpus.extract.dedup import BUCKET, hash_text
from tools.corpus.extract.filters import Filters
from tools.corpus.extract.format_readers import read_text
from tools.corpus.extract.read_context import Fields, FileRange, ReadContext, detect_format, tidy
from tools.corpus.extract.step import COUNTS, WIKITEXT_COUNTS
from tools.corpus.inspect.command import inspect
from tools.corpus.inspect.report import InspectOptions
from tools.corpus.pipeline import Context
from tools.corpus.quick.text_sources import TextSource


def test_the_articles_of_a_dump(tmp_path: Path) -> None:
    dump = HEAD + "".join(
        [
            page("Rhine", "The '''Rhine''' is a [[river|long river]].\n\nIt ends in the sea.", number=7),
            page("Talk:Rhine", "A talk page.", ns=1),
            page("Rhein", "#REDIRECT [[Rhine]]", more='    <redirect title="Rhine" />\n'),
            page("Rhin", "#redirect [[Rhine]]"),
            page("Rhine (disambiguation)", "Rhine may refer to:\n* [[Rhine]]\n{{disambiguation}}"),
            page("Data", '{"a": 1}', model="json"),
            page("Nothing", ""),
            page("A & B", "Letters &amp; <nowiki>more</nowiki> of them.", number=8),
        ]
    )
    (tmp_path / "dump.xml").write_text(dump + TAIL)
    manifest = run(tmp_path / "out", tmp_path / "dump.xml")
    assert documents(manifest) == [
        {"id": "7", "title": "Rhine", "text": "The Rhine is a long river.\n\nIt ends in the sea."},
        {"id": "8", "title": "A & B", "text": "Letters & more of them."},
    ]
    found = {name: count for name, count in manifest.counts.items() if count}
    assert found == {
        "read": 8, "other_namespaces": 1, "redirects": 2, "disambiguations": 1, "other_content": 1, "empty": 1,
        "documents": 2, "characters": 70, "bytes": (tmp_path / "out" / "documents-00000.jsonl").stat().st_size,
    }  # fmt: skip


@pytest.fixture(scope="module")
def dump() -> bytes:
    """Some 80 articles with what does not pack: more than one block of the smallest bzip2 level."""
    draw = random.Random(1)
    noise = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz   ", k=3_000)) for _ in range(80))
    filled = [
        one.replace("they said", f"they said {text}") for one, text in zip(pages(80), noise, strict=True)
    ]  # fmt: skip
    return (HEAD + "".join(filled) + TAIL).encode()


@pytest.mark.slow
def test_every_packing_gives_the_same_documents(tmp_path: Path, dump: bytes) -> None:
    (tmp_path / "plain.xml").write_bytes(dump)
    (tmp_path / "one.xml.bz2").write_bytes(bz2.compress(dump, 1))
    # As dumps of several streams are: cut anywhere here, also inside of tags.
    parts = [dump[at : at + 30_011] for at in range(0, len(dump), 30_011)]
    (tmp_path / "several.xml.bz2").write_bytes(b"".join(map(bz2.compress, parts)))
    (tmp_path / "one.xml.gz").write_bytes(gzip.compress(dump[:99_999]) + gzip.compress(dump[99_999:]) + bytes(512))
    expected = documents(run(tmp_path / "out", tmp_path / "plain.xml", unit_megabytes=100))
    assert [document["title"] for document in expected] == [f"Title {number}" for number in range(80)]
    for name in ("plain.xml", "one.xml.bz2", "several.xml.bz2", "one.xml.gz"):
        for unit in (0.3, 0.1):
            manifest = run(tmp_path / f"{name}-{unit}", tmp_path / name, unit_megabytes=unit, deduplicate=False)
            assert documents(manifest) == expected
            assert manifest.left_out == 0


@pytest.mark.slow
@pytest.mark.parametrize("deduplicate", [True, False])
def test_every_number_of_workers_gives_the_same_bytes(tmp_path: Path, dump: bytes, deduplicate: bool) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.xml.bz2").write_bytes(bz2.compress(dump, 1))
    (tmp_path / "in" / "b.jsonl").write_text("".join(json.dumps({"text": f"row {row % 5}"}) + "\n" for row in range(9)))
    outputs = []
    for workers in (1, 2):
        run(
            tmp_path / f"out{workers}", tmp_path / "in", workers=workers, unit_megabytes=0.1, deduplicate=deduplicate
        )  # fmt: skip
        outputs.append(content(tmp_path / f"out{workers}"))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 5
    assert json.loads(outputs[0]["step.json"])["counts"]["documents"] == (85 if deduplicate else 89)


def test_every_piece_of_a_dump_knows_its_namespaces_and_language(tmp_path: Path) -> None:
    articles = [
        page(
            f"ঢাকা {number}",
            f"[[চিত্র:Foo.jpg|thumb|right]]ঢাকা শহর {number} {{{{নাম {number % 3}}}}}{{{{lang-en|Dhaka}}}}।"
            "[[বিষয়শ্রেণী:ঢাকা]]",
        )
        for number in range(40)
    ]  # fmt: skip
    articles.append(page("ঢাকা নগর", "#পুনর্নির্দেশ [[ঢাকা]]"))
    data = (BENGALI_HEAD + "".join(articles) + TAIL).encode()
    (tmp_path / "plain.xml").write_bytes(data)
    # As dumps of several streams are: the first one has the siteinfo alone.
    cuts = [0, len(BENGALI_HEAD.encode()), *range(4_000, len(data), 4_000), len(data)]
    streams = [bz2.compress(data[begin:end]) for begin, end in pairwise(cuts)]
    (tmp_path / "several.xml.bz2").write_bytes(b"".join(streams))
    counts = []
    for name, workers, unit in (("plain.xml", 1, 1.0), ("plain.xml", 2, 0.004), ("several.xml.bz2", 2, 0.002)):
        manifest = run(tmp_path / f"{name}-{unit}", tmp_path / name, workers=workers, unit_megabytes=unit)
        assert texts(manifest) == [f"ঢাকা শহর {number}।" for number in range(40)]
        counts.append(manifest.counts)
    assert counts[0] == counts[1] == counts[2]
    assert {name: count for name, count in counts[0].items() if count} == {
        "read": 41, "redirects": 1, "documents": 40, "characters": counts[0]["characters"], "bytes": counts[0]["bytes"],
        "templates_dropped": 80, "files_dropped": 40, "categories_dropped": 40,
        "commonest_templates_dropped": {"lang-en": 40, "নাম 0": 14, "নাম 1": 13, "নাম 2": 13},
    }  # fmt: skip
    assert list(counts[0]) == [*COUNTS, *WIKITEXT_COUNTS, "commonest_templates_dropped"]
    assert list(counts[0]["commonest_templates_dropped"]) == ["lang-en", "নাম 0", "নাম 1", "নাম 2"]


def test_the_language_that_is_asked_for_is_taken_in_place_of_the_dumps(tmp_path: Path) -> None:
    pages_ = [
        page("甲", "电脑是-{zh-hans:计算机; zh-hant:電腦}-的。{{convert|5|km}}"),
        page("Category:甲", "它是一个类。").replace("    <ns>0</ns>\n", ""),  # dumps of before 2012 do not say it
    ]
    (tmp_path / "zh.xml").write_text(HEAD.replace('"en"', '"zh"') + "".join(pages_) + TAIL)
    (tmp_path / "none.xml").write_text("".join(pages_))
    for name, language, text in (
        ("zh", "", "电脑是计算机的。"),
        ("zh", "zh_TW", "电脑是電腦的。"),
        ("none", "zh-hant", "电脑是電腦的。"),
        ("none", "en", "电脑是-{zh-hans:计算机; zh-hant:電腦}-的。5 km"),
        ("none", "", "电脑是-{zh-hans:计算机; zh-hant:電腦}-的。"),
    ):
        manifest = run(tmp_path / f"{name}-{language}", tmp_path / f"{name}.xml", language=language)
        assert texts(manifest) == [text]
        assert manifest.counts["other_namespaces"] == 1
    with pytest.raises(ValueError, match=r"--language is a code such as en, bn or zh-tw. Got 'Chinese!'"):
        run(tmp_path / "out", tmp_path / "zh.xml", language="Chinese!")


def test_a_template_is_listed_by_its_commonest_spelling(tmp_path: Path) -> None:
    article = "It is. {{cite web}}{{Cite web}}{{Cite_web|a}}{{Infobox|{{x}}}}{{b}}{{B}}{{B c}} So it is."
    (tmp_path / "dump.xml").write_text(HEAD + page("A", article) + TAIL)
    manifest = run(tmp_path / "out", tmp_path / "dump.xml")
    found = {"Cite web": 3, "B": 2, "B c": 1, "Infobox": 1}
    assert list(manifest.counts["commonest_templates_dropped"].items()) == list(found.items())
    shown = inspect(InspectOptions(folder=tmp_path / "out"))
    lines = shown[shown.index("templates that were left out, the commonest") :].split("\n")[1:5]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("Cite", "3"), ("B", "2"), ("B", "1"), ("Infobox", "1"),
    ]  # fmt: skip
    # Counts are shown in the order of the work.
    assert -1 < shown.index("redirects") < shown.index("duplicates") < shown.index("templates dropped")


def test_kind_6_wikiextractor_in_both_of_its_forms(tmp_path: Path) -> None:
    folder = tmp_path / "extracted" / "AA"
    folder.mkdir(parents=True)
    (folder / "wiki_00").write_text(
        '<doc id="1" url="https://x/?curid=1" title="A &amp; &quot;B&quot;">\nA &amp; "B"\n\nOne &lt; two.\nThree.\n\n'
        '\n</doc>\n<doc id="2" url="https://x/?curid=2" title="Says "who" > me">\nOther line\n\n</doc>\n'
    )
    (folder / "wiki_01").write_text('{"id": "3", "url": "u", "title": "C", "text": "Four.\\n\\n\\nFive.\\n"}\n')
    manifest = run(tmp_path / "out", tmp_path / "extracted")
    assert documents(manifest) == [
        {"id": "1", "title": 'A & "B"', "text": "One < two.\n\nThree."},
        {"id": "2", "title": 'Says "who" > me', "text": "Other line"},
        {"id": "3", "title": "C", "text": "Four.\n\nFive."},
    ]
    for unit in (0.00001, 0.00005):
        cut = run(tmp_path / f"{unit}", tmp_path / "extracted", unit_megabytes=unit, deduplicate=False)
        assert documents(cut) == documents(manifest)


def test_text_ends_at_a_blank_line_and_books_with_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfOne\r\nline two  \r\n\r\n \t\r\nTwo.\r\n")
    (folder / "inner" / "b.txt").write_bytes("\n\nDreißig\nVier".encode())
    (folder / "inner" / "mac.txt").write_bytes(b"Five.\r\rSix.\rSeven.\r")
    (folder / "notes.md").write_text("no text")
    text = run(tmp_path / "text", folder, format="text")
    assert texts(text) == ["One\nline two", "Two.", "Dreißig\nVier", "Five.", "Six.\nSeven."]
    for size in (1, 3, 8):
        cut = run(tmp_path / f"{size}", folder, format="text", unit_megabytes=size / 1e6, deduplicate=False)
        assert texts(cut) == texts(text)
    assert documents(run(tmp_path / "books", folder, format="books")) == [
        {"id": "a.txt", "title": "", "text": "One\nline two\n\nTwo."},
        {"id": "inner/b.txt", "title": "", "text": "Dreißig\nVier"},
        {"id": "inner/mac.txt", "title": "", "text": "Five.\n\nSix.\nSeven."},
    ]


@given(st.lists(st.sampled_from(["a", "b", " ", "\n", "\r\n"]), max_size=25).map("".join), st.integers(1, 9))
def test_pieces_of_text_have_the_documents_that_prepare_reads(
    tmp_path_factory: pytest.TempPathFactory, text: str, step: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    context = Context(folder=path.parent, scratch=path.parent, skip_bad=False)
    fields = Fields(text="text", title="title", id="id")
    found = []
    for begin in range(0, len(text), step):
        piece = FileRange(
            path=path, name="a.txt", format="text", packing="", begin=begin, end=min(begin + step, len(text)), size=step
        )  # fmt: skip
        reading = ReadContext(piece=piece, fields=fields, largest=100, context=context, counts=Counter())
        found += [document.text for document in read_text(reading)]
    assert found == [tidy(document) for document in TextSource(path).documents()]


def test_rows_of_json_and_parquet(tmp_path: Path) -> None:
    rows = [{"body": f"Row {row}.\r\n\r\n\r\nMore.", "name": f"N{row}", "key": row, "other": [1]} for row in range(40)]
    rows[3]["body"] = None
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=7
    )  # fmt: skip
    expected = [
        {"id": str(row), "title": f"N{row}", "text": f"Row {row}.\n\nMore."} for row in range(40) if row != 3
    ]  # fmt: skip
    for name, unit in (("rows.jsonl", 1.0), ("rows.jsonl", 0.00003), ("rows.parquet", 1.0), ("rows.parquet", 0.0003)):
        manifest = run(
            tmp_path / f"{name}-{unit}", tmp_path / name, text_field="body", title_field="name", id_field="key",
            unit_megabytes=unit, deduplicate=False,
        )  # fmt: skip
        assert documents(manifest) == expected
        assert manifest.counts["empty"] == 1
        assert len(list(manifest.folder.glob("*.jsonl"))) > (1 if unit < 1 else 0)


def test_of_equal_texts_the_first_of_the_corpus_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.corpus.extract.dedup.BUCKET", 16)
    monkeypatch.setattr("tools.corpus.extract.dedup.RUN", 7)
    draw = random.Random(0)
    rows = [{"id": row, "text": f"a  text {draw.randrange(60)}" + " " * draw.randrange(3)} for row in range(200)]
    for row in rows[::3]:
        row["text"] = str(row["text"]).replace("  ", "\n\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(" ".join(str(row["text"]).split()), str(row["id"]))
    for unit in (0.0005, 1.0):
        manifest = run(tmp_path / f"{unit}", tmp_path / "rows.jsonl", unit_megabytes=unit)
        assert [document["id"] for document in documents(manifest)] == list(first.values())
        assert manifest.counts["duplicates"] == 200 - len(first)
        assert manifest.counts["characters"] == sum(map(len, texts(manifest)))
        assert manifest.counts["bytes"] == sum(manifest.files.values())
    assert len(documents(run(tmp_path / "all", tmp_path / "rows.jsonl", deduplicate=False))) == 200


def test_a_hash_takes_16_bytes_and_sees_words() -> None:
    assert len(hash_text("a")) == 16
    assert hash_text(" a\n\nb ") == hash_text("a b") != hash_text("ab")
    assert 20 * BUCKET < 32e6


def test_filters_count_what_they_leave_out(tmp_path: Path) -> None:
    rows = ["short", "x" * 99, "| 12 | 34 | 56 | 78 |", "Это написано по-русски.", "This one stays here.", "", " \n"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    options: dict[str, Any] = {"min_characters": 6, "max_characters": 50, "least_letters": 0.7}
    manifest = run(tmp_path / "out", tmp_path / "rows.jsonl", language_characters=("latin",), **options)
    assert texts(manifest) == ["This one stays here."]
    names = ("read", "too_short", "too_long", "few_letters", "other_language", "empty", "documents")
    assert [manifest.counts[name] for name in names] == [7, 1, 1, 1, 1, 2, 1]
    russian = run(tmp_path / "ru", tmp_path / "rows.jsonl", language_characters=("U+0410-U+044F", "U+0401"))
    assert texts(russian) == [rows[3]]


@pytest.mark.parametrize(
    ("text", "filters", "refused"),
    [
        ("abcde", Filters(min_characters=5), None),
        ("abcd", Filters(min_characters=5), "too_short"),
        ("abcde", Filters(max_characters=5), None),
        ("abcdef", Filters(max_characters=5), "too_long"),
        # Three letters of four visible characters, and a space, which is none.
        ("ab c1", Filters(least_letters=0.75), None),
        ("ab 12", Filters(least_letters=0.75), "few_letters"),
        ("“你好。”他说。“走吧。”", Filters(least_letters=0.75), None),
        ("…… —— 。", Filters(least_letters=0.75), "few_letters"),
        # Three of four letters are Latin; of one letter alone, one must be.
        ("abcж", Filters(language_characters=("latin",), least_language=0.75), None),
        ("abжж", Filters(language_characters=("latin",), least_language=0.75), "other_language"),
        ("a", Filters(language_characters=("latin",), least_language=0.0), None),
        ("1", Filters(language_characters=("latin",), least_language=0.0), "other_language"),
    ],
)
def test_filters_at_their_bounds(text: str, filters: Filters, refused: str | None) -> None:
    assert filters.refuse(text) == refused


@pytest.mark.parametrize(
    "name, head, expected",
    [
        ("dump", b"<?xml version='1.0'?>\n<mediawiki xmlns=''>", "mediawiki"),
        ("part", b"  <page>\n <title>", "mediawiki"),
        ("enwiki-pages-articles1.xml-p1p41242", b"", "mediawiki"),
        ("wiki_00", b'<doc id="12" url=', "wikiextractor"),
        ("wiki_00", b'{"id": "1"', "jsonl"),
        ("rows.ndjson", b"", "jsonl"),
        ("table", b"PAR1....", "parquet"),
        ("book.txt", b'{"a": it begins like this', "text"),
    ],
)
def test_formats_are_told_by_the_beginning_or_the_name(tmp_path: Path, name: str, head: bytes, expected: str) -> None:
    for packing, suffix, pack in (("", "", bytes), ("bz2", ".bz2", bz2.compress), ("gz", ".gz", gzip.compress)):
        if expected != "parquet" or not packing:
            path = tmp_path / f"{name}{suffix}"
            path.write_bytes(pack(head))
            assert detect_format(path, packing) == expected  # type: ignore[arg-type]


def test_hidden_files_and_the_record_of_a_download_are_no_input(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / ".cache").mkdir(parents=True)
    for name in ("b.txt", "a.txt", ".hidden.txt", "_part.txt", ".cache/c.txt"):
        (folder / name).write_text(name)
    (folder / "_SUCCESS").touch()
    record = {"step": "download", "version": 1, "settings": {}, "counts": {}, "left_out": 0, "files": {"a.txt": 5}}
    (folder / "step.json").write_text(json.dumps(record))
    manifest = run(tmp_path / "out", folder)
    assert texts(manifest) == ["_part.txt", "a.txt", "b.txt"]
    assert manifest.counts["files_passed_over"] == 2
    # A download below the input has a record of its own.
    (tmp_path / "in2").mkdir()
    folder = folder.rename(tmp_path / "in2" / "in")
    assert texts(run(tmp_path / "out2", tmp_path / "in2")) == texts(manifest)
    (folder / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a\.txt is missing where step\.json speaks of 5 bytes"):
        run(tmp_path / "again", folder)
