"""Files of fine-tuning: what is read of TSV, CSV and JSON lines, and what is refused, naming file and line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensor3d import Cube
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.finetune.__main__ import TextConfig
from tools.finetune.config import RunSection
from tools.finetune.data import TextData, read_part
from tools.finetune.rows import Column, read_rows
from tools.finetune.tasks import in_order
from tools.finetune.text_task import ClassifyTask, RegressTask

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", '"', "the"]
CUBE = Cube.single()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(VOCAB) + "\n")
    return open_tokenizer("wordpiece", file, lowercase=True)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(path: Path, columns: Sequence[Column], **options: object) -> list[list[str | None]]:
    return [[row.values[column] for column in columns] for row in read_rows(path, columns, **options)]


def test_tsv_has_no_quotes(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", 'sentence\tlabel\n"a film\t1\r\nthe " film"\t0\n\n\r\n')
    assert rows(file, ["sentence", "label"]) == [['"a film', "1"], ['the " film"', "0"]]


def test_csv_has_quotes_and_lines_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", 'label,text\n1,"a ""good"", film\nindeed"\n0,bad\n')
    found = list(read_rows(file, ["text", "label"]))
    assert [row.values["text"] for row in found] == ['a "good", film\nindeed', "bad"]
    assert [row.where for row in found] == [f"{file} line 2", f"{file} line 4"]


def test_columns_by_number(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "gj04\t1\t\tgood film\ngj04\t0\t*\tbad film\n")
    assert rows(file, [4, 2], header=False) == [["good film", "1"], ["bad film", "0"]]


def test_json_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "good", "label": true}\n{"text": "bad", "label": 2}\n\n')
    assert rows(file, ["text", "label"]) == [["good", "true"], ["bad", "2"]]


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.tsv", "text\tlabel\na\tb\tc\n", {}, r"a\.tsv line \b2\b.*\b3.*\b2"),
        ("a.tsv", "words\tlabel\na\tb\n", {}, r"a\.tsv.*'text'\. It.*'words', 'label'"),
        ("a.tsv", "a\tb\n", {"header": False}, r"has no column 'text'\. It has no header"),
        ("a.tsv", b"text\tlabel\na\tb\n\xff\tb\n", {}, "is not UTF-8 in line 3"),
        ("a.csv", 'text,label\n"a,b\n', {}, r"a\.csv line 2: .*Close the quotes"),
        ("a.jsonl", '{"text": "a", "label": 1, "label": 0}\n', {}, "line 1: .*the key 'label' is there twice"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', {}, "line 2: it is not valid JSON"),
        ("a.jsonl", "[1]\n", {}, "line 1: it must be a JSON object"),
        ("a.jsonl", '{"text": "a"}\n', {}, r"line \b1\b.*'label'\. It.*'text'"),
        ("a.jsonl", '{"text": ["a"], "label": 1}\n', {}, "line 1: 'text' must be a text or a number"),
        ("a.tsv", "text\tlabel\na\tb\n\nb\tc\n", {}, r"line \b3\b.*\b1.*\b2"),
        ("a.jsonl", '\n{"text": "a", "label": 1}\n', {}, "line 1: it is not valid JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", {}, "line 1: it is not valid JSON"),
        ("a.tsv", "text\tlabel\tlabel\na\tb\tc\n", {}, r"has 2 columns 'label'\. Give the number"),
        ("a.data", "text\n", {}, "does not say by its suffix"),
    ],
)
def test_a_bad_file_is_refused(
    name: str, text: str | bytes, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message):
        rows(file, ["text", "label"], **options)


def data(folder: Path, train: str, dev: str = "sentence\tlabel\ngood\t1\n", **options: object) -> TextData:
    files = {"train": write(folder / "train.tsv", train), "dev": write(folder / "dev.tsv", dev)}
    return TextData(**{name: str(path) for name, path in files.items()}, **options)


def test_sequences_and_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    of = data(tmp_path, "sentence\tb\tlabel\ngood film\tbad\t1\nbad\tthe film\t0\n", text_b="b")
    part = read_part(of, "train", tokenizer)
    cls, sep, good, film, bad = (VOCAB.index(piece) for piece in ("[CLS]", "[SEP]", "good", "film", "bad"))
    assert part.texts[0].ids.tolist() == [cls, good, film, sep, bad, sep]
    assert part.texts[0].types.tolist() == [0, 0, 0, 0, 1, 1]
    assert (part.labels, part.ids) == (["1", "0"], ["0", "1"])


def test_what_is_too_long_is_cut_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "sentence\tlabel\n" + "good " * 9 + "\t1\nbad\t0\n"
    part = read_part(data(tmp_path, text, max_length=6), "train", tokenizer)
    assert (part.lengths, part.truncated) == ([6, 3], 1)
    with pytest.raises(ValueError, match=r"train\.tsv line 2: text 0 has 11 tokens"):
        read_part(data(tmp_path, text, max_length=6, too_long="refuse"), "train", tokenizer)


def task(kind: type[ClassifyTask] | type[RegressTask], of: TextData, tokenizer: Tokenizer, metric: str = "") -> object:
    return kind(of, TextConfig(data=of, run=RunSection(metric=metric)), tokenizer, CUBE)


def test_classes_are_those_of_train_sorted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = "sentence\tlabel\ngood\tyes\nbad\tno\nfilm\tmaybe\n"
    found = task(ClassifyTask, data(tmp_path, train, "sentence\tlabel\ngood\tyes\n"), tokenizer)
    assert found.labels == ("maybe", "no", "yes")
    assert [example.target for example in found.train] == [2, 1, 0]
    given = data(tmp_path, train, "sentence\tlabel\ngood\tyes\n", labels=("yes", "no", "maybe"))
    assert task(ClassifyTask, given, tokenizer).labels == ("yes", "no", "maybe")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([str(number) for number in range(12)], [str(number) for number in range(12)]),
        (["10", "-1", "2", "+3"], ["-1", "2", "+3", "10"]),
        (["LABEL_10", "LABEL_9", "LABEL_0"], ["LABEL_0", "LABEL_9", "LABEL_10"]),
        (["b", "a10", "a9", "", "B"], ["", "B", "a9", "a10", "b"]),
        (["1.5", "1.25", "10"], ["1.5", "1.25", "10"]),  # no whole numbers: 5 before 25
        (["२", "10", "9"], ["9", "10", "२"]),  # digits of other scripts are text
    ],
)
def test_numeric_classes_are_in_the_order_of_their_values(given: list[str], wanted: list[str]) -> None:
    assert list(in_order(given)) == wanted
    assert list(in_order(reversed(given))) == wanted


@pytest.mark.parametrize(
    "given",
    [("1", "1.0"), ("01", "1"), ("+1", "1", "2"), ("caf\u00e9", "cafe\u0301"), ("a\u200b", "a"), ("true", "True", "b")],
)
def test_one_label_in_two_spellings_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"are one label in two spellings, and would be two classes"):
        in_order(given)
    assert len(in_order(["1", "v1.0", "1.0"])) == 3, "not all are numbers"
    assert len(in_order(["A", "a"])) == 2


def test_spaces_around_a_label_are_no_part_of_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = "sentence\tlabel\ngood\t pos\nbad\tneg \nfilm\tpos\nfilm\t\u00a0neg\n"
    found = task(ClassifyTask, data(tmp_path, train, "sentence\tlabel\ngood\tpos \n"), tokenizer)
    assert found.labels == ("neg", "pos")
    assert [example.target for example in found.train] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("kind", "train", "dev", "message"),
    [
        (ClassifyTask, "good\t1\nbad\t0", "good\t2", r"dev\.tsv line \b2\b.*'2'.*: 0, 1"),
        (ClassifyTask, "good\t1\nbad\t1", "good\t1", r"1 different labels in the column 'label'"),
        (ClassifyTask, "good\t1\n\t0", "good\t1", r"train\.tsv line \b3\b.*'sentence'"),
        (ClassifyTask, "good\t1\nbad\t", "good\t1", r"train\.tsv line 3: there is no label"),
        (ClassifyTask, "", "good\t1", r"train\.tsv has no row"),
        (RegressTask, "good\t1.5\nbad\tmuch", "good\t1", r"train\.tsv line \b3\b.*'much'"),
        (ClassifyTask, 'good\t"1\r"\nbad\t0', "good\t0", r"line 2: the label '\"1\\r\"' has a tab or line end"),
        (RegressTask, "good\t1.5\nbad\t1e39", "good\t1", r"line \b3\b.*fp32.*hold.*'1e39'"),
        (RegressTask, "good\t1.5\nbad\tnan", "good\t1", r"train\.tsv line \b3\b.*'nan'"),
    ],
)
def test_bad_rows_are_refused(
    kind: type[ClassifyTask], train: str, dev: str, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    head = "sentence\tlabel\n"
    with pytest.raises(ValueError, match=message):
        task(kind, data(tmp_path, head + train + "\n", head + dev + "\n"), tokenizer)


def test_an_unknown_metric_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    of = data(tmp_path, "sentence\tlabel\ngood\t1\nbad\t0\n")
    with pytest.raises(ValueError, match=r"run\.metric.*'pearson'"):
        task(ClassifyTask, of, tokenizer, "pearson")


def test_ids_that_would_break_the_predictions_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for rows_, message in (
        ('{"i": "x\\ty", "t": "good"}\n', r"line 1: the id 'x\\ty' has a tab or line end"),
        ('{"i": "x", "t": "good"}\n{"i": "x", "t": "bad"}\n', r"line 2: the id 'x' is that of .* line 1 already"),
    ):
        test = write(tmp_path / "test.jsonl", rows_)
        of = data(tmp_path, "sentence\tlabel\ngood\t1\n", test=str(test), test_id="i", test_text="t")
        with pytest.raises(ValueError, match=message):
            read_part(of, "test", tokenizer)


def test_a_text_of_nothing_moves_no_prediction(tmp_path: Path, tokenizer: Tokenizer) -> None:
    test = write(tmp_path / "test.tsv", "sentence\ngood\n\nbad\n")
    of = data(tmp_path, "sentence\tlabel\ngood\t1\n", test=str(test))
    with pytest.raises(ValueError, match=r"test\.tsv line \b3\b: column 'sentence'"):
        read_part(of, "test", tokenizer)


def test_bad_rows_are_left_out_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "sentence\tlabel\ngood\t1\nbad\n\t1\nfilm\t\nbad\t0\nlast\n"
    of = data(tmp_path, text, text, bad="skip")
    part = read_part(of, "dev", tokenizer)
    assert (part.ids, part.labels, part.skipped) == (["0", "4"], ["1", "0"], 4)
    assert task(ClassifyTask, of, tokenizer).notes[0] == "train: 4 rows are left out (data.bad)"


def test_what_the_tokenizer_does_not_know_is_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = f"sentence\tlabel\ngood {'film' * 30}\t1\nbad\t0\n"
    found = task(ClassifyTask, data(tmp_path, text, text), tokenizer)
    assert found.notes[0].startswith("240 of 256 characters are unknown to the tokenizer, 240 of them in words of more")


def test_names_of_special_tokens_are_counted_and_read_as_asked(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    text = "sentence\tlabel\ngood [SEP] film\t1\nbad\t0\n"
    for how, told, facts in (
        ("text", r"which are text (data.special_tokens", {}),
        ("tokens", "which are those tokens", {"special_tokens": "tokens"}),
    ):
        tokenizer = open_tokenizer("wordpiece", tmp_path / "vocab.txt", lowercase=True)
        found: Any = task(ClassifyTask, data(tmp_path, text, text, special_tokens=how), tokenizer)
        assert found.notes[0].startswith("2 texts have the names of special tokens in them, ")
        assert told in found.notes[0]
        assert found.facts().more == {"max_length": 128, "pairs": False, **facts}
        ids = found.train[0].text.ids.tolist()
        assert ids.count(tokenizer.special.sep) == (1 if how == "text" else 2)
