"""Which files are read, and as what, where their names or their beginnings do not help."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.tools.corpus.dumps import HEAD, TAIL, documents, page, pages, run, texts
from tools.common.log import start_logging
from tools.corpus.extract.bzip2 import find_marks
from tools.corpus.extract.inputs import find_sources, tell_empty
from tools.corpus.extract.read_context import detect_format
from tools.corpus.pipeline import BadInput
from tools.corpus.quick.text_sources import TextSource


def test_links_are_followed_and_not_in_circles(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    (folder / "b").mkdir(parents=True)
    (elsewhere / "AA").mkdir(parents=True)
    for path in (folder / "a.txt", folder / "b" / "b.txt", elsewhere / "AA" / "c.txt", folder / "d.txt"):
        path.write_text(path.name)
    (folder / "c").symlink_to(elsewhere)
    (folder / "b" / "up").symlink_to(folder)
    (elsewhere / "same").symlink_to(".")
    manifest = run(tmp_path / "out", folder, format="books")
    assert [document["id"] for document in documents(manifest)] == ["a.txt", "b/b.txt", "c/AA/c.txt", "d.txt"]
    assert manifest.counts["files_passed_over"] == 2
    (folder / "e").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"in/e.*link to nothing"):
        run(tmp_path / "again", folder)


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.txt", "notes.md", ".hidden"):
        (folder / name).write_text(name)
    manifest = run(tmp_path / "out", folder, format="text")
    assert (texts(manifest), manifest.counts["files_passed_over"]) == (["a.txt"], 2)
    (folder / "a.txt").unlink()
    (folder / "b.txt").touch()
    with pytest.raises(ValueError, match=r"document.*\(2 files passed over\)"):
        run(tmp_path / "again", folder, format="text")


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.txt").write_text("Stays.")
    name = os.fsdecode(b"caf\xe9.txt")
    try:
        (folder / name).write_text("A book.")
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    found = [(document["id"], document["text"]) for document in documents(run(tmp_path / "o", folder, format="books"))]
    assert found == [("caf\\xe9.txt", "A book."), ("good.txt", "Stays.")]
    (folder / name).write_bytes(b"\xff")
    with pytest.raises(BadInput, match=r"caf\\xe9\.txt, byte 0: this is not UTF-8"):
        run(tmp_path / "strict", folder)
    assert texts(run(tmp_path / "skipping", folder, skip_bad=True)) == ["Stays."]
    assert json.loads((tmp_path / "skipping" / "left-out.jsonl").read_text())["file"] == "caf\\xe9.txt"
    (folder / name).rename(folder / os.fsdecode(b"caf\xe9.dat"))
    with pytest.raises(ValueError, match=r"the format of .*caf\\xe9\.dat cannot be told"):
        run(tmp_path / "strange", folder)


def filled(part: str) -> str:
    """Some 100 kB that do not pack, so that what comes after them lies in a later block."""
    return part.replace("@", "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz    ", k=110_000)))


@pytest.mark.parametrize(
    "text, expected, stays",
    [
        (HEAD + filled(page("A", "@")) + "".join(pages(5)) + TAIL, "mediawiki", 5),
        (filled('<doc id="1">\n@\n</doc>\n') + '<doc id="2">\nText.\n</doc>\n', "wikiextractor", 1),
        (filled('{"text": "@"}\n') + '{"text": "Text."}\n', "jsonl", 1),
    ],
)  # fmt: skip
def test_a_damaged_head_is_told_by_what_comes_after(tmp_path: Path, text: str, expected: str, stays: int) -> None:
    packed = bytearray(bz2.compress(text.encode(), 1))
    assert len([mark for mark in find_marks(bytes(packed)) if mark.begins]) > 1
    packed[2_000] ^= 1
    path = tmp_path / "nameless.bz2"
    path.write_bytes(packed)
    assert detect_format(path, "bz2") == expected
    with pytest.raises(BadInput, match=r"byte \b4\b: the bzip2"):
        run(tmp_path / "strict", path)
    assert len(documents(run(tmp_path / "out", path, skip_bad=True))) == stays


@pytest.mark.parametrize("name, pack", [("nameless.gz", gzip.compress), ("nameless.bz2", bz2.compress)])
def test_a_damaged_file_that_nothing_tells_is_left_out(tmp_path: Path, name: str, pack: object) -> None:
    assert callable(pack)
    folder = tmp_path / "in"
    folder.mkdir()
    whole = pack((HEAD + "".join(pages(5)) + TAIL).encode())
    damaged = bytearray(whole)
    damaged[20:40] = bytes(20)
    (folder / "a.txt").write_text("Stays.")
    for packed in (bytes(damaged), whole[:15], b"<html>"):
        (folder / name).write_bytes(packed)
        with pytest.raises(BadInput, match=r"byte \b0\b: the \w+.*damaged"):
            run(tmp_path / f"strict{len(packed)}", folder)
        manifest = run(tmp_path / f"out{len(packed)}", folder, skip_bad=True)
        assert (texts(manifest), manifest.left_out) == (["Stays."], 1)
    # What is sound and strange stays an error that --format mends.
    (folder / name).write_bytes(pack(b"\0\1\2"))
    with pytest.raises(ValueError, match=rf"the format of .*{name} cannot be told\. Say it by --format"):
        run(tmp_path / "strange", folder, skip_bad=True)


def test_the_summary_of_a_table_of_many_files_has_no_rows(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "part-0.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["One.", "Two."]}), path)
    metadata = pyarrow.parquet.read_metadata(path)
    metadata.set_file_path(path.name)
    metadata.write_metadata_file(folder / "_metadata")
    assert texts(run(tmp_path / "out", folder)) == ["One.", "Two."]


def test_an_output_inside_the_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("Some text.\n")
    with pytest.raises(ValueError, match=r"in/out.*in. Choose an --output"):
        run(tmp_path / "in" / "out", tmp_path / "in")
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["a.txt"]


# --- Names of fields, entities, blank lines and encodings -------------------------------------------------------------


def test_dotted_names_reach_fields_inside_of_others(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"data": {"text": "One.", "meta": {"id": 7, "title": "A"}}},
        {"data": {"text": None, "meta": {}}},
        {"data.text": "Named so."},  # the very name comes first
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"text_field": "data.text", "id_field": "data.meta.id", "title_field": "data.meta.title"}
    found = documents(run(tmp_path / "out", path, **names))
    assert [(each["id"], each["title"], each["text"]) for each in found] == [
        ("7", "A", "One."),
        ("", "", "Named so."),
    ]
    with pytest.raises(BadInput, match=r"no field 'data\.body' but 'data\.text', 'data\.meta\.id'"):
        run(tmp_path / "again", path, text_field="data.body")


@pytest.mark.parametrize(
    ("row", "name", "found"),
    [
        ({"a.b": {"c": "One."}}, "a.b.c", "One."),
        ({"a": {"b.c": "One."}}, "a.b.c", "One."),
        ({"a": {"x": 1}, "a.b": {"c": "One."}}, "a.b.c", "One."),
        ({"a": {"b": None}, "t": 1}, "a.b.c", None),
        ({"a": None}, "a.b", None),
        ({"a": [{"b": "One."}]}, "a.b", "no field 'a.b' but 'a' (a list)"),
        ({"a": {"c": {"d": "One."}}, "e": 1}, "a.b", "no field 'a.b' but 'a.c.d', 'e'"),
        ({"a": "One."}, "a.b", "no field 'a.b' but 'a'"),
    ],
)
def test_kind_13_names_reach_fields_whatever_their_shape(
    row: dict[str, object], name: str, found: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({name: "Two."}) + "\n")
    if found is not None and found.startswith("no field"):
        with pytest.raises(BadInput, match=re.escape(found)):
            run(tmp_path / "out", path, text_field=name)
        return
    manifest = run(tmp_path / "out", path, text_field=name)
    assert texts(manifest) == ([] if found is None else [found]) + ["Two."]
    assert manifest.counts["empty"] == (found is None)


def test_kind_13_columns_of_structures_may_be_null_or_have_dots(tmp_path: Path) -> None:
    structures = pyarrow.table({"data": pyarrow.array([{"text": "One."}, {"text": None}, None])})
    dotted = pyarrow.table({"data.text": ["One."], "data": [{"text": "Two."}]})
    for name, table, empty in (("structures", structures, 2), ("dotted", dotted, 0)):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(table, path)
        manifest = run(tmp_path / name, path, text_field="data.text")
        assert (texts(manifest), manifest.counts["empty"]) == (["One."], empty)
        with pytest.raises(BadInput, match=r"no 'data\.body' in data\.text"):
            run(tmp_path / f"{name}-again", path, text_field="data.body")


def test_kind_13_dotted_names_reach_columns_of_structures(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"data": [{"text": "One.", "n": 1}, {"text": "Two.", "n": 2}], "id": ["a", "b"]})
    pyarrow.parquet.write_table(table, path)
    found = documents(run(tmp_path / "out", path, text_field="data.text"))
    assert [(each["id"], each["text"]) for each in found] == [("a", "One."), ("b", "Two.")]
    with pytest.raises(BadInput, match=r"no 'other\.text' in data\.text, data\.n, id"):
        run(tmp_path / "again", path, text_field="other.text")


def test_kind_6_both_forms_of_wikiextractor_give_one_text(tmp_path: Path) -> None:
    url = "https://en.wikipedia.org/wiki?curid=12"
    lines = "R&amp;D\n\nAbout 1 &lt; 2\nIt is &quot;so&quot;.\n"
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "wiki_00").write_text(f'<doc id="12" url="{url}" title="R&amp;D">\n{lines}</doc>\n')
    row = {"id": "12", "revid": "1", "url": url, "title": "R&amp;D", "text": lines}
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "wiki_00").write_text(json.dumps(row) + "\n")
    one, other = (documents(run(tmp_path / f"out-{form}", tmp_path / form)) for form in ("doc", "json"))
    assert [one[0][name] for name in ("id", "title", "text")] == ["12", "R&D", 'About 1 < 2\n\nIt is "so".']
    assert one == other
    # Further fields, as other versions and forks write them, change nothing.
    (tmp_path / "json" / "wiki_00").write_text(json.dumps({**row, "language": "en", "length": 5}) + "\n")
    assert documents(run(tmp_path / "kind-6", tmp_path / "json")) == one
    # Elsewhere an entity is what somebody has written.
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "Write &amp; for an ampersand."}) + "\n")
    assert texts(run(tmp_path / "plain", path)) == ["Write &amp; for an ampersand."]


@pytest.mark.parametrize("blank", ["", " ", "\u00a0", "\u3000", "\u2003\u2009", "\u0085"])
def test_kind_12_a_blank_line_of_any_kind_ends_a_document(blank: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"One.\n{blank}\nTwo.\n".encode())
    assert texts(run(tmp_path / "out", path, format="text")) == ["One.", "Two."]
    assert list(TextSource(path).documents()) == ["One.", "Two."]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_of_another_encoding_is_refused_by_its_likely_name(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Some words of plain English.\n\nAnd a second text.\n".encode(encoding))
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(BadInput, match=rf"NUL characters, as of .*{name}"):
        run(tmp_path / "out", path, format="text")
    with pytest.raises(ValueError, match=rf"NUL characters in line 1, as of .*{name}"):
        list(TextSource(path).documents())
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a\\u0000b"}\n')
    with pytest.raises(BadInput, match="NUL character"):
        run(tmp_path / "again", rows)


@pytest.mark.parametrize(
    ("encoding", "text", "said"),
    [
        ("utf-16-le", "孩子们去学校读书。今天的天气很好。你喜欢喝茶吗", "UTF-16-LE"),
        ("utf-16-be", "孩子们去学校读书。今天的天气很好。你喜欢喝茶吗", "UTF-16-BE"),
        ("utf-16", "Some words of plain English, with a mark.", "UTF-16"),
        ("utf-32-le", "Some words of plain English, without a mark.", "UTF-32-LE"),
        ("utf-32-be", "Some words of plain English, without a mark.", "UTF-32-BE"),
        ("cp1251", "Маленький ёж идёт домой. Где твой зелёный чай?", "CP1251"),
        ("gb18030", "孩子们去学校读书。今天的天气很好。你喜欢喝茶吗", "GB18030"),
        ("shift_jis", "子どもたちは学校へ行きます。今日はとても天気がいい。", "CP932"),
        ("latin-1", "Le café est fermé, déjà vu à l'hôtel. Élève très âgé.", r"ISO 8859-1 \(Latin-1\)"),
    ],
)
def test_kind_12_text_of_other_encodings_is_refused_by_its_likely_name(
    encoding: str, text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(BadInput, match=rf"(not UTF-8 .* but, as it seems,|NUL characters, as of).* {said}"):
        run(tmp_path / "out", path, format="text")


DUMP = HEAD + "<page><title>A</title><ns>0</ns><id>1</id><revision><text>A page.</text></revision></page>\n" + TAIL
OTHERS = {
    "dump.xml": ("auto", DUMP),
    "dump": ("mediawiki", DUMP),
    "pages": ("auto", '<doc id="1" title="A">\nA\n\nA page, of WikiExtractor.\n</doc>\n'),
    "rows.jsonl": ("auto", '{"text": "A row, of a file of JSON lines."}\n'),
    "book.txt": ("books", "A book, of a file of its own.\n"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("packing", ["", "bz2", "gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_file_of_another_encoding_is_refused_whole_in_any_format(
    name: str, packing: str, encoding: str, tmp_path: Path
) -> None:
    """What is looked for in bytes, such as tags of pages, is not in them, and so a dump seemed to have no page."""
    format_, text = OTHERS[name]
    data, folder = text.encode(encoding), tmp_path / "in"
    pack = {"": bytes, "bz2": bz2.compress, "gz": gzip.compress}[packing]
    folder.mkdir()
    (folder / f"{name}{packing and '.'}{packing}").write_bytes(pack(data))
    told = encoding.replace("utf", "UTF").replace("-be", "")
    with pytest.raises(
        BadInput, match=rf"byte 0: .*{told} \((little|big)-endian.*Convert the file to UTF-8 first \(iconv"
    ):
        run(tmp_path / "out", folder, format=format_)
    (folder / f"z-{name}").write_bytes(text.encode("utf-8-sig"))  # its mark is the right one
    manifest = run(tmp_path / "skipping", folder, format=format_, skip_bad=True)
    assert len(documents(manifest)) == 1
    assert len((tmp_path / "skipping" / "left-out.jsonl").read_text().splitlines()) == 1


def test_empty_files_among_others_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    for name, text in (("a.txt", "A text."), ("b.txt", ""), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    tell_empty(find_sources([tmp_path / "a.txt"], "text")[0])
    assert capsys.readouterr().err == ""
    tell_empty(find_sources([tmp_path], "text")[0])
    assert capsys.readouterr().err == f"{tmp_path / 'b.txt'} has no text, and 1 more: left out of the corpus.\n"
