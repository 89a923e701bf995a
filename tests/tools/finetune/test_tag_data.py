"""Files of tags: all forms are the same sentences, what breaks a scheme is refused with its line, or replaced and
counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.finetune.tables import save_dataset
from tools.finetune.tag_data import Sentence, TagData, Told, checked, read_sentences, scheme_of

CONLL = """\
-DOCSTART- -X- O O

Ada NNP I B-PER
Byron NNP I I-PER
wrote VBD O O
. . O O
-DOCSTART- -X- O O

London NNP I B-LOC
"""
SENTENCES = [(["Ada", "Byron", "wrote", "."], ["B-PER", "I-PER", "O", "O"]), (["London"], ["B-LOC"])]
CSV = 'sentence,word,tag\n1,Ada,B-PER\n1,Byron,I-PER\n,wrote,O\n,".",O\n2,London,B-LOC\n'
SPANS = [
    {"text": "Ada Byron wrote.", "spans": [{"start": 0, "end": 9, "label": "PER", "text": "Ada Byron"}]},
    {"text": " London", "spans": [{"start": 0, "end": 7, "label": "LOC"}]},
]


def lines(*objects: Any) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def span(start: int, end: int, label: str) -> dict[str, Any]:
    return {"start": start, "end": end, "label": label}


FORMS = {
    "a.conll": CONLL,
    "a.tsv": CONLL.replace(" ", "\t"),
    "a.csv": CSV,
    "a.jsonl": lines(*({"tokens": words, "tags": tags} for words, tags in SENTENCES)),
    "b.jsonl": lines(*SPANS),
}


def read(folder: Path, name: str, content: str | bytes, **more: Any) -> tuple[list[Sentence], Told]:
    """As training reads a file, and what is told of it."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data, told = TagData(train=str(path), dev=str(path), **more), Told()
    found = read_sentences(data, "train", told)
    return checked(found, scheme_of(data, found), data, told), told


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_are_the_same_sentences(name: str, tmp_path: Path) -> None:
    found, told = read(tmp_path, name, FORMS[name])
    assert [(each.text.words, list(each.tags or ())) for each in found] == SENTENCES
    assert (told.documents, told.replaced, told.widened) == (2 if name in ("a.conll", "a.tsv") else 0, 0, 0)
    assert [each.text.text[int(each.text.starts[0]) :] for each in found][1] == "London"


def test_lists_of_parquet_and_of_datasets(tmp_path: Path) -> None:
    words, tags = ([row[column] for row in SENTENCES] for column in (0, 1))
    names = sorted({tag for each in tags for tag in each})
    of_class = {"names": names, "_type": "ClassLabel"}
    told = {"huggingface": json.dumps({"info": {"features": {"ner_tags": {"feature": of_class, "_type": "Sequence"}}}})}
    numbers = [[names.index(tag) for tag in each] for each in tags]
    table = pa.table({"words": words, "ner_tags": numbers, "id": [0, 1]}).replace_schema_metadata(told)
    pq.write_table(table, tmp_path / "classes.parquet")
    pq.write_table(pa.table({"tokens": words, "tags": tags, "text": [None, None]}), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(SPANS), tmp_path / "spans.parquet")
    saved = save_dataset(tmp_path / "saved", {"tokens": words, "tags": tags})
    for path, more in (
        (tmp_path / "a.parquet", {}),
        (tmp_path / "classes.parquet", {"word": "words", "tag": "ner_tags"}),
        (tmp_path / "spans.parquet", {}),
        (saved, {}),
    ):
        data = TagData(**{"train": str(path), "dev": str(path), **more})
        found = checked(read_sentences(data, "train", Told()), "iob2", data, Told())
        assert [(each.text.words, list(each.tags or ())) for each in found] == SENTENCES, path
    assert len(TagData(train=str(saved), dev=str(saved)).files()) == 8, "each file of the folder"
    data = TagData(train=str(tmp_path / "classes.parquet"), dev="dev.conll")
    with pytest.raises(ValueError, match=r'classes\.parquet row 0: an object with "tokens" and "tags"'):
        read_sentences(data, "train", Told())
    pq.write_table(pa.table({"tokens": words, "tags": numbers}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet row 0, word 1: a tag must be a name without spaces\. Got 1"):
        read_sentences(TagData(train=str(tmp_path / "a.parquet"), dev="dev.conll"), "train", Told())


def test_spans_are_spelled_in_the_scheme_that_is_asked_for(tmp_path: Path) -> None:
    for scheme, tags in (("iob1", ["I-PER", "I-PER"]), ("iobes", ["B-PER", "E-PER"]), ("plain", ["PER", "PER"])):
        found, _ = read(tmp_path, "a.jsonl", lines(*SPANS), scheme=scheme)
        assert list(found[0].tags or ())[:2] == tags
    touching = {"text": "Ada, Bob", "spans": [{"start": a, "end": b, "label": "P"} for a, b in ((0, 3), (3, 4))]}
    with pytest.raises(ValueError, match=r"a\.jsonl line 1, word 1: spans of one label touch each other, which plain"):
        read(tmp_path, "a.jsonl", lines(touching), scheme="plain")


def test_words_of_other_scripts_and_spaces(tmp_path: Path) -> None:
    text = "J'aime 漢字, na\u00efve_x \u0939\u093f\u0902\u0926\u0940!"
    found, _ = read(
        tmp_path, "a.jsonl", lines({"text": text, "spans": []}, {"tokens": ["20\u00a0000", "x"], "tags": ["O", "O"]})
    )
    assert found[0].text.words == [
        "J",
        "'",
        "aime",
        "漢",
        "字",
        ",",
        "na\u00efve",
        "_",
        "x",
        "\u0939\u093f\u0902\u0926\u0940",
        "!",
    ]
    assert found[1].text.words == ["20\u00a0000", "x"]
    found, _ = read(tmp_path, "a.conll", "20\u00a0000 O\nx O\n")
    assert found[0].text.words == ["20\u00a0000", "x"]


def test_entities_in_another_spelling_are_refused_unless_they_are_said_to_be_labels(tmp_path: Path) -> None:
    content = "Ada B\nByron I\nwrote O\n"
    with pytest.raises(ValueError, match=r"a.conll line 1: 'B' looks like .* Write 'B-NAME'.* data.scheme to"):
        read(tmp_path, "a.conll", content)
    found, _ = read(tmp_path, "a.conll", content, scheme="plain")
    assert found[0].tags == ["B", "I", "O"]


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "a.txt", "1 Ada I-PER x\n2 Bob B-PER x\n", word=2, tag=3)
    assert (found[0].text.words, found[0].tags) == (["Ada", "Bob"], ["I-PER", "B-PER"])
    found, _ = read(tmp_path, "b.csv", "w,s,t\nAda,1,B-P\n", word="w", sentence=2, tag=3)
    assert (found[0].text.words, found[0].tags) == (["Ada"], ["B-P"])
    with pytest.raises(ValueError, match=r"columns 1 to 2. Got 3"):
        read(tmp_path, "a.txt", "Ada O\n", tag=3)
    with pytest.raises(ValueError, match=r"columns without names: data\.tag must be a number, from 1\. Got 'ner'"):
        read(tmp_path, "a.txt", "Ada B-PER x\n", tag="ner")


THREE = lines({"tokens": ["x", "y"], "tags": ["B-PER", "I-LOC"]}, *[{"tokens": ["x"], "tags": ["B-P"]}] * 2)
BROKEN = [
    (
        "a.conll",
        "x B-PER\ny I-LOC\n\nz B-LOC\nx O\n\nz B-LOC\n",
        r"line 2: 'I-LOC' behind 'B-PER' breaks .* iob2",
    ),
    ("a.conll", "x O\n\ny B-LOC\n\nz I-LOC\n\nx I-LOC\n", r"line 3: 'B-LOC' at the beginning breaks the scheme iob1"),
    ("a.conll", "x S-PER\ny B-PER\nz O\n", r"line 2: 'B-PER' behind 'S-PER' breaks the scheme iobes, .*'S-PER'"),
    ("a.csv", "sentence,word,tag\n1,x,B-PER\n1,y,I-LOC\n2,z,B-LOC\n3,z,B-LOC\n", r"a\.csv line 3: 'I-LOC' behind"),
    ("a.jsonl", THREE, r"a\.jsonl line 1, word 2: 'I-LOC' behind 'B-PER'.* which has 'B-LOC' there"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_what_breaks_the_scheme_is_refused_or_replaced(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, name, content)
    _, told = read(tmp_path, name, content, repair=True)
    assert (told.replaced, told.sentences) == (1, 1)
    assert told.in_words("train", 3) == "train: 3 sentences; 1 tags in 1 sentences are replaced (data.repair)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.conll", "x B-PER\ny XYZ\n", r"line 2: 'XYZ' is no tag of the scheme iob2, which begin with B- or I-"),
        ("a.conll", "x B-PER\ny E-PER\nz X-PER\n", r"line 3: 'X-PER' is no tag of the scheme iobes"),
        ("a.conll", "x NN O\ny O\n", r"a\.conll line 2: it has 2 columns, and the first line has 3"),
        ("a.conll", "x\ny\n", r"a\.conll line 1: it has 1 columns, and a word and a tag are needed"),
        ("a.conll", "\n-DOCSTART- O\n\n", r"a\.conll has no sentence"),
        ("a.conll", "x\tO\n\u00a0\tO\n", r"a\.conll line 2: a word must be a text, not empty"),
        ("a.conll", b"x O\n\xff O\n", r"a\.conll is not UTF-8 in line 2"),
        ("a.xyz", "x O\n", r"a\.xyz does not say by its suffix"),
        ("a.csv", "sentence,word\n1,x\n", r"a\.csv has no column 'tag'"),
        ("a.csv", "sentence,word,tag\n,x,O\n", r"a\.csv line 2: the column 'sentence' names no sentence"),
        ("a.csv", "sentence,word,tag\n1,x,O\n2,y,O\n1,z,O\n", r"a\.csv line 4: the sentence '1' is there already"),
        ("a.csv", "sentence,word,tag\n1,x,O\n1,,O\n", r"a\.csv line 3: a word must be a text, not empty"),
        ("a.csv", "sentence,word,tag\n1,x,O O\n", r"a\.csv line 2: a tag must be a name without spaces"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"], "tags": ["B-X"]}\n', r"line 1: .*the key 'tags' is there twice"),
        ("a.jsonl", "\n{\n", r"a\.jsonl line 2: it is not valid JSON"),
        ("a.jsonl", "[]\n", r'line 1: an object with "tokens" and "tags", or "text" and "spans"'),
        ("a.jsonl", lines({"tokens": [], "tags": []}), r"line 1: a list of words is needed, at least one. Got \[\]"),
        ("a.jsonl", lines({"tokens": ["x", "y"], "tags": ["O"]}), r'must be as many as "tokens", which are 2. Got 1'),
        ("a.jsonl", lines({"tokens": ["x"]}), r'"tags" must be as many as "tokens", which are 1. Got None'),
        ("a.jsonl", lines({"tokens": ["x"], "tags": [3]}), r"line 1, word 1: a tag must be a name .* Got 3"),
        ("a.jsonl", lines({"tokens": ["\ud800"], "tags": ["O"]}), r"a word must be a text"),
        ("a.jsonl", lines({"text": " ", "spans": []}), r"line 1: the text has no word"),
        ("a.jsonl", lines({"text": "x y"}), r'"spans" must be a list of objects'),
        ("a.jsonl", lines({"text": "x y", "spans": [span(0, 4, "P")]}), r"a text of 3, the end"),
        ("a.jsonl", lines({"text": "x y", "spans": [span(1, 2, "P")]}), r"there is no word in the span"),
        ("a.jsonl", lines({"text": "x y", "spans": [span(0, 1, "O")]}), r"needs a label, which is not 'O'"),
        (
            "a.jsonl",
            lines({"text": "x y", "spans": [span(0, 3, "P"), span(2, 3, "Q")]}),
            r"two spans have the word 'y', P and Q",
        ),
    ],
)
def test_bad_files_are_refused_with_the_place(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    for repair in (False, True):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, name, content, repair=repair)


def test_a_span_that_cuts_a_word_is_refused_or_widened(tmp_path: Path) -> None:
    content = lines({"text": "in Londoners' bus", "spans": [{"start": 3, "end": 9, "label": "LOC"}]})
    with pytest.raises(ValueError, match=r"line 1: the span .* cuts a word of 'Londoners'"):
        read(tmp_path, "a.jsonl", content)
    found, told = read(tmp_path, "a.jsonl", content, repair=True)
    assert (found[0].tags, told.widened) == (["O", "B-LOC", "O", "O"], 1)


def test_a_test_file_may_have_no_tags(tmp_path: Path) -> None:
    rows = "sentence,word\n1,Ada\n1,x\n"
    for name, content in (("t.conll", "Ada\nx\n"), ("t.csv", rows), ("t.jsonl", lines({"text": "Ada x"}))):
        (tmp_path / name).write_text(content)
        data = TagData(train="a", dev="a", test=str(tmp_path / name), test_tags=False)
        (found,) = read_sentences(data, "test", Told())
        assert (found.text.words, found.tags) == (["Ada", "x"], None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dev": None}, "data.dev must name a file"),
        ({"labels": ("O", "O")}, "data.labels must be different"),
        ({"stride": 127}, "data.stride must be at most max_length - 2 = 126"),
        ({"stride": 0}, "data.stride must be at least 1"),
        ({"max_length": 2}, "data.max_length must be at least 3"),
    ],
)
def test_bad_settings(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TagData(**{"train": "a", "dev": "a", **more})
