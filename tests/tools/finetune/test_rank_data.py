"""Files of queries with passages: each form, what is counted, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.finetune.tables import save_dataset
from tests.tools.squad.small import small_tokenizer
from tools.finetune.rank_data import RankData, RankPart, read_candidates, read_part

TOLD = [("red", ["red house", "blue", "a number"], [2, 0, 1]), ("of the", ["green", "red house"], [0, 1])]
"""Two queries with passages and grades."""
FLAT = [(query, text, grade) for query, texts, grades in TOLD for text, grade in zip(texts, grades, strict=True)]


def data_of(path: Path, **changes: Any) -> RankData:
    return RankData(**{"train": str(path), "dev": str(path), **changes})


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, part: str = "train", **changes: Any) -> list[tuple[str, list[str], list[float]]]:
    return [(each.query, each.passages, each.grades) for each in read_candidates(data_of(path, **changes), part)]


def part_of(path: Path, folder: Path, part: str = "train", **changes: Any) -> RankPart:
    return read_part(data_of(path, **changes), part, small_tokenizer(folder))


def test_each_form_of_file_says_the_same(tmp_path: Path) -> None:
    table = "".join(f"{query}\t{text}\t{grade}\n" for query, text, grade in FLAT)
    (tmp_path / "a.tsv").write_text("query\tpassage\tlabel\n" + table)
    (tmp_path / "a.csv").write_text("q,p,g\n" + table.replace("\t", ","))
    lists = {
        "query": [row[0] for row in TOLD],
        "passages": [row[1] for row in TOLD],
        "grades": [row[2] for row in TOLD],
    }
    objects = [[{"text": t, "grade": g} for t, g in zip(texts, grades, strict=True)] for _, texts, grades in TOLD]
    pq.write_table(pa.table(lists), tmp_path / "lists.parquet")
    pq.write_table(pa.table({"query": lists["query"], "passages": objects}), tmp_path / "objects.parquet")
    flat = [dict(zip(("query", "passage", "label"), row, strict=True)) for row in FLAT]
    of_lists = [{"query": q, "passages": p, "grades": g} for q, p, g in TOLD]
    for path, changes in (
        (tmp_path / "a.tsv", {}),
        (tmp_path / "a.csv", {"query": "q", "passage": "p", "label": 3}),
        (lines(tmp_path / "flat.jsonl", flat[3], *flat[:3], flat[4]), {}),
        (lines(tmp_path / "lists.jsonl", *of_lists), {}),
        (
            lines(
                tmp_path / "objects.jsonl",
                *({"query": q[0], "passages": o} for q, o in zip(TOLD, objects, strict=True)),
            ),
            {},
        ),
        (tmp_path / "lists.parquet", {}),
        (tmp_path / "objects.parquet", {}),
        (save_dataset(tmp_path / "saved", {name: [*column, column[0]][:2] for name, column in lists.items()}), {}),
    ):
        assert sorted(read(path, **changes)) == sorted(TOLD), path


def test_positives_and_negatives(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"query": "red", "positive": "house", "negatives": ["blue", "green"], "id": "q7"},
        {"query": "of", "positive": ["a", "in"], "negatives": "the", "id": None},
    )
    assert read(path) == [("red", ["house", "blue", "green"], [1, 0, 0]), ("of", ["a", "in", "the"], [1, 1, 0])]
    assert [each.id for each in read_candidates(data_of(path, id="id"), "dev")] == ["q7", "1"]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"query": "red", "positive": ["house"], "negatives": ["blue", "green", "white"]},
        {"query": "blue", "positive": [], "negatives": ["blue", "green"]},
        {"query": "the", "positive": ["of", "in", "a"], "negatives": ["is"]},
        {"query": "green", "positive": ["of", "in"], "negatives": []},
    )
    assert part_of(path, tmp_path).report == "train: 4 queries with 12 passages; 1 without a relevant passage"
    dev = part_of(path, tmp_path, "dev")
    assert dev.report == "dev: 4 queries with 12 passages; 1 without a relevant passage, which no metric counts"
    for loss in ("ranknet", "margin", "softmax", "listnet"):
        with pytest.raises(ValueError, match=r"a\.jsonl line 2: of the passages of 'blue' none is a relevant one"):
            part_of(path, tmp_path, loss=loss)
        found = part_of(path, tmp_path, loss=loss, bad="skip", max_passages=2)
        assert found.report == (
            "train: 2 queries with 4 passages; 2 left out, whose passages have all one grade (data.bad); "
            "4 passages left out (data.max_passages)"
        )
        assert found.grades is not None
        assert [grades.tolist() for grades in found.grades] == [[1, 0], [1, 0]], "a better and a worse one stay"
    path = lines(path, {"query": "green", "positive": ["of", "in"], "negatives": []})
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: of the passages of 'green' none is a lower grade"):
        part_of(path, tmp_path, loss="softmax")


def test_what_the_model_reads(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"query": "red house", "passages": ["blue", "a number of the house [SEP]"]})
    found = part_of(path, tmp_path, "test", test=str(path), test_grades=False, max_length=9)
    pieces = small_tokenizer(tmp_path).pieces
    assert [pieces(text.ids.tolist()) for text in found.texts[0]] == [
        ["[CLS]", "red", "house", "[SEP]", "blue", "[SEP]"],
        ["[CLS]", "red", "house", "[SEP]", "a", "number", "of", "the", "[SEP]"],
    ]
    assert [text.types.tolist() for text in found.texts[0]] == [[0] * 4 + [1] * 2, [0] * 4 + [1] * 5]
    assert (found.truncated, found.grades, found.queries, list(found.passages)) == (1, None, ["0"], [["0", "1"]])
    assert "1 texts have the names of special tokens" in found.report
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: text 1 has .* tokens"):
        part_of(path, tmp_path, "test", test=str(path), test_grades=False, max_length=9, too_long="refuse")
    path.write_text(json.dumps({"query": "red", "passages": ["red" * 34]}) + "\n")
    found = part_of(path, tmp_path, "test", test=str(path), test_grades=False, max_length=9)
    assert "102 of 105 characters are unknown to the tokenizer" in found.report


GOOD = {"query": "red", "positive": "house", "negatives": "blue"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"query": "red"}, "a query needs 'passages', or 'positive' and 'negatives', or one 'passage'. It has 'query'"),
        ({"positive": "a", "negatives": "b"}, "it has no key 'query'"),
        ({"query": " ", "positive": "a"}, "a query must be a text with something in it. Got ' '"),
        ({"query": 3, "positive": "a"}, "a query must be a text with something in it. Got 3"),
        ({"query": "red", "passages": []}, "the query 'red' has no passage"),
        ({"query": "red", "passages": "blue"}, "'passages' must be a list. Got 'blue'"),
        ({"query": "red", "passages": ["a", 3], "grades": [0, 1]}, "a passage must be a text. Got 3"),
        ({"query": "red", "passages": ["a", "b"], "grades": [1]}, "'grades' must be as many as passages, 2. Got 1"),
        ({"query": "red", "passages": ["a"], "grades": ["high"]}, "a grade must be a number, 0 for what is not"),
        ({"query": "red", "passages": [{"text": "a"}]}, "what is not relevant. Got None"),
        ({"query": "red", "passages": ["a"], "grades": [-1]}, "a grade must be 0 for what is not relevant, or more"),
        ({"query": "red", "positive": "a", "negatives": ["a"]}, "the passage 'a' has the grades 1 and 0"),
        ({"query": "red", "positive": "\u200b"}, "a text has no token. Got '\\u200b'"),
    ],
)  # fmt: skip
def test_what_is_refused_has_its_place(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    path = lines(tmp_path / "a.jsonl", GOOD, row)
    with pytest.raises(ValueError, match=r"a\.jsonl line 2: ") as problem:
        part_of(path, tmp_path)
    assert told in str(problem.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("query\tpassage\tlabel\nred\tblue\tno\n")
    with pytest.raises(ValueError, match=r"a\.tsv line 2: a grade must be a number.*Got 'no'"):
        part_of(tmp_path / "a.tsv", tmp_path)
    (tmp_path / "a.tsv").write_text("query\tpassage\tlabel\n")
    with pytest.raises(ValueError, match=r"a\.tsv has no query"):
        part_of(tmp_path / "a.tsv", tmp_path)
    path = lines(tmp_path / "a.jsonl", {"query": "red", "passage": "a", "label": 1}, GOOD)
    with pytest.raises(ValueError, match=r"a\.jsonl line 2: it has no key 'passage', which the first row has"):
        part_of(path, tmp_path)
    path = lines(tmp_path / "a.jsonl", {**GOOD, "id": 4}, {**GOOD, "id": 4})
    with pytest.raises(ValueError, match=r"line 2: the id '4' is that of .*a\.jsonl line 1 already"):
        part_of(path, tmp_path, "dev", id="id")
    (tmp_path / "a.tsv").write_text("n\tquery\tpassage\tlabel\n7\tred\tblue\t0\n7\tred\thouse\t1\n8\tred\tgreen\t1\n")
    assert len(read(tmp_path / "a.tsv")) == 1
    with pytest.raises(ValueError, match=r"line 4: the query 'red' has the id '8', and '7' in .*a\.tsv line 2"):
        part_of(tmp_path / "a.tsv", tmp_path, "dev", id="n")
    with pytest.raises(ValueError, match=r"data\.margin must be above 0"):
        RankData(margin=0.0)
    with pytest.raises(ValueError, match=r"data\.max_passages must be at least 2"):
        RankData(max_passages=1, loss="softmax")
