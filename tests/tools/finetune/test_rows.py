"""Parquet files and saved datasets as input of fine-tuning, and what is refused of them."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.finetune.tables import OF_LABEL, ROWS, save_dataset, write_parquet
from tools.finetune.data import TextData
from tools.finetune.rows import check_dev, check_there, read_records, read_rows


def read(path: Path, *columns: str, **options: Any) -> list[list[str | None]]:
    return [[row.values[column] for column in columns] for row in read_rows(path, columns, **options)]


def test_a_file_that_is_not_there_is_named_as_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.tsv").touch()
    save_dataset(tmp_path / "saved/train")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    relative = "Relative paths begin in the folder that the command is started in."
    for name, told in (
        ("dev.tsv", f"{tmp_path}/dev.tsv is no file. There is train.tsv. {relative} Correct data.dev in the"),
        ("trian.tsv", "trian.tsv is no file. Is it train.tsv?"),
        ("no/dev.tsv", f"There is no folder {tmp_path}/no either."),
        ("saved/dev", f"{tmp_path}/saved has the splits train, validation."),
    ):
        with pytest.raises(ValueError) as problem:  # noqa: PT011 (its words are compared)
            check_there(Path(name), "data.dev")
        assert told in str(problem.value)
        assert str(problem.value).endswith("Correct data.dev in the recipe, or give --data.dev FILE.")
    with pytest.raises(ValueError, match=r"is no file.* Correct \[data\], or the file\.$"):
        check_there(tmp_path / "qrels.tsv", "")
    check_there(Path("train.tsv"), "data.train")


def test_dev_stands_beside_train() -> None:
    check_dev("embedded", None)
    check_dev("a.tsv", "b.tsv")
    with pytest.raises(ValueError, match=r"where there is one file alone, move a tenth of its rows into another"):
        check_dev("a.tsv", None)
    with pytest.raises(ValueError, match=r"Give --data.train FILE too, or leave data.dev out"):
        check_dev("embedded", "b.tsv")


def test_write_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    assert read(path, "text", "label") == [["good film", "1"], [None, "0"], ["bad", "-1"]]
    assert read(path, "tags", separator="|") == [["a|b"], [""], ["c"]]
    assert [(row.where, row.number) for row in read_rows(path, ["text"])][2] == (f"{path} row 2", 2)
    assert read(path.rename(tmp_path / "b"), "label", format="parquet") == [["1"], ["0"], ["-1"]]


def test_a_saved_dataset_with_the_names_of_its_classes(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "train")
    assert read(folder, "text", "label") == [["good film", "pos"], [None, "neg"], ["bad", None]]
    (folder / "dataset_info.json").unlink()
    assert read(folder, "label") == [["1"], ["0"], ["-1"]]
    data = TextData(train=str(folder), dev=str(write_parquet(tmp_path / "dev.parquet")))
    assert [path.name for path in data.files()] == [
        *("data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "state.json", "dev.parquet"),
    ]


@pytest.mark.parametrize("of_list", [[OF_LABEL], {"feature": OF_LABEL, "length": -1, "_type": "Sequence"}])
def test_names_of_classes_in_lists_and_in_parquet(tmp_path: Path, of_list: Any) -> None:
    features = {"label": OF_LABEL, "tags": of_list, "text": None}
    path = write_parquet(tmp_path / "a.parquet", features, tags=[[0, 1], [], [1]])
    assert read(path, "text", "label", "tags", separator="|") == [
        ["good film", "pos", "neg|pos"],
        [None, "neg", ""],
        ["bad", None, "pos"],
    ]


def test_no_number_is_no_label_and_two_columns_are_not_one(tmp_path: Path) -> None:
    assert read(write_parquet(tmp_path / "a.parquet", score=[0.5, float("nan"), None]), "score") == [
        ["0.5"],
        [None],
        [None],
    ]
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet has 2 columns 'text', and one is needed"):
        read(tmp_path / "b.parquet", "text")


def test_what_cannot_be_read_of_write_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", day=[date(2020, 1, 1)] * 3)
    for columns, message in (
        (
            ["words"],
            r"a\.parquet has no column 'words', and one is needed, by its name\. It has 'text', 'label', 'tags', 'day'",
        ),
        ([1], "has no column 1"),
        (["day"], r"a\.parquet row 0: 'day' must be a text or a number"),
        (["tags"], r"row 0: 'tags' must be a text or a number"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_rows(path, columns))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"a\.parquet is damaged, or not what it should be"):
        read(path, "text")


def test_records_have_lists_and_objects_as_they_are(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "x", "tags": ["a", 1]}\n{"text": {"deep": null}}\n')
    found = list(read_records(lines, ["text"], optional=["tags", "score"]))
    assert [each.values for each in found] == [{"text": "x", "tags": ["a", 1]}, {"text": {"deep": None}}]
    assert [each.where for each in found] == [f"{lines} line 1", f"{lines} line 2"]
    for path in (write_parquet(tmp_path / "a.parquet"), save_dataset(tmp_path / "train")):
        tags = [each.values for each in read_records(path, ["tags"], optional=["score"])]
        assert tags == [{"tags": ["a", "b"]}, {"tags": []}, {"tags": ["c"]}]
    (tmp_path / "a.tsv").write_text("text\nx\n")
    with pytest.raises(
        ValueError, match=r"a\.tsv must be a file of JSON lines or Parquet, or a saved dataset\. Got tsv"
    ):
        read_records(tmp_path / "a.tsv", ["text"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, r"selection.*flatten_indices"),
        ({"_data_files": None}, r"state\.json names no files of data"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"train is damaged, or not.*gone\.arrow"),
    ],
)
def test_what_no_dataset_is(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    folder = save_dataset(tmp_path / "train", **state)
    with pytest.raises(ValueError, match=message):
        read(folder, "text")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder without state\.json"):
        read(tmp_path, "text")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=rf"Give one of them: {tmp_path}/train, {tmp_path}/test"):
        read(tmp_path, "text")
    (tmp_path / "dataset_dict.json").write_text("[")
    with pytest.raises(ValueError, match=r"dataset_dict\.json is no JSON"):
        read(tmp_path, "text")
    with pytest.raises(ValueError, match=r"row 0: classes have numbers below 2.*Got 7"):
        read(save_dataset(tmp_path / "odd", {**ROWS, "label": [7, 0, 1]}), "label")
    damaged = save_dataset(tmp_path / "damaged")
    file = damaged / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged is damaged, or not what it should be"):
        read(damaged, "text")
