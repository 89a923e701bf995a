"""`tools.predict embed`: files of vectors, vectors that are cut, and the nearest of those that were written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tensor3d import Cube
from tests.ranks import run_ranks
from tests.tools.asked import TEXTS, write_models
from tools.predict import load
from tools.predict.__main__ import main
from tools.predict.stored_vectors import open_vectors
from tools.predict.vector_search import nearest


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("embedded")) / "language"


@pytest.fixture(scope="module")
def written(language: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the vectors of the same lines in each form; the third line has no text."""
    folder = tmp_path_factory.mktemp("written")
    lines = [{"text": text, "id": f"t{number}"} for number, text in enumerate(TEXTS)]
    lines[2] = {"text": " ", "id": "empty"}
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind in ("npy", "parquet", "jsonl"):
        (folder / kind).mkdir()
        output = ["--output", f"{folder}/{kind}/v.{kind}", "--output-format", kind, "--on-error", "skip"]
        assert main(["embed", str(language), "--file", f"{folder}/in.jsonl", *output]) == 0
    return folder


def plain(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# --- files ------------------------------------------------------------------------------------------------------------


def test_each_form_holds_the_same_vectors(language: Path, written: Path) -> None:
    kept = [place for place in range(len(TEXTS)) if place != 2]
    wanted = np.stack([one.vector for one in load(language, "embed").predict([TEXTS[place] for place in kept])])
    for kind in ("npy", "parquet", "jsonl"):
        stored = open_vectors(written / kind / f"v.{kind}")
        assert stored.shape == (len(TEXTS), 32)
        np.testing.assert_allclose(stored[:][kept], wanted, atol=1e-5)
        assert np.isnan(stored[2:3]).all(), "its place is kept"
        assert stored.id_of(3) == (None if kind == "npy" else "t3")
    table = pq.read_table(written / "parquet/v.parquet").to_pylist()
    assert [row["error"] is not None for row in table] == [False, False, True, False, False, False]


def test_files_of_a_folder_are_one_behind_another(written: Path, tmp_path: Path) -> None:
    for name, rows in (("a", 3), ("b", 1), ("c", 5)):
        np.save(tmp_path / f"{name}.npy", np.full((rows, 2), ord(name), dtype=np.float32))
    stored = open_vectors(tmp_path)
    assert stored[2:5][:, 0].tolist() == [97, 98, 99]
    assert stored[8:99].shape == (1, 2)
    np.save(tmp_path / "d.npy", np.zeros((1, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"d\.npy has vectors of 3 numbers, and .*a\.npy of 2"):
        open_vectors(tmp_path)


ARCHIVE = io.BytesIO()
np.savez(ARCHIVE, vectors=np.ones((1, 2), dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.npy", b"no array", r"v\.npy has no vectors that can be read"),
        ("v.jsonl", b'{"id": 1}\n', r"v\.jsonl has no vectors that can be read: no 'vector'"),
        ("v.jsonl", b"[1, 2]\n", r"v\.jsonl has no vectors"),
        ("v.jsonl", b'{"vector": [1, 2]}\n{"vector": [1]}\n', r"v\.jsonl has no vectors"),
        ("v.jsonl", b'{"vector": ["1_0", true]}', r"vector 1 is not of numbers alone, \['1_0', True\]"),
        ("v.jsonl", b'{"vector": [1' + b"0" * 400 + b"]}", r"v\.jsonl has no vectors that can be read: int too large"),
        ("v.jsonl", b'{"vector": [1], "vector": [2]}', r"the key 'vector' is there twice"),
        ("v.jsonl", b'{"vector": null, "error": "too long"}', r"must have vectors of numbers"),
        ("v.npy", ARCHIVE.getvalue(), r"it is an archive of arrays"),
        ("v.jsonl", b"", r"must have vectors of numbers"),
        ("v.parquet", b"PAR1", r"v\.parquet has no vectors"),
        ("v.txt", b"1", r"does not say by its suffix"),
    ],
)
def test_what_holds_no_vectors_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"has no vectors: files \.npy"):
        open_vectors(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_vectors(tmp_path / name)


# --- vectors that are cut ---------------------------------------------------------------------------------------------


def test_vectors_are_cut_and_have_length_1_again(
    language: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = np.stack([one.vector for one in load(language, "embed").predict(TEXTS)])
    cut = load(language, "embed", dimensions=8, normalize=True).predict(TEXTS)
    np.testing.assert_allclose(np.stack([one.vector for one in cut]), plain(whole[:, :8]), atol=1e-5)
    assert "has learnt to be cut nowhere; vectors of 8 numbers may be poor" in caplog.text
    raw = load(language, "embed", dimensions=8).predict(TEXTS[:1])[0].vector
    np.testing.assert_allclose(raw, whole[0, :8], atol=1e-5)
    more = ["--dimensions", "8", "--output-format", "npy", "--output", f"{tmp_path}/v.npy"]
    assert main(["embed", str(language), TEXTS[0], *more]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy")[0], raw, atol=1e-6)
    for wrong in (0, 33):
        with pytest.raises(ValueError, match=f"dimensions must be between 1 and the model's 32. Got {wrong}"):
            load(language, "embed", dimensions=wrong)


# --- the nearest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "parquet", "jsonl"])
def test_the_nearest_of_what_was_written(
    language: Path, written: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["embed", str(language), TEXTS[1], "--against", f"{written}/{kind}", "--top", "9", "--json"]
    assert main(call) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    vectors = plain(open_vectors(written / kind)[:])
    wanted = np.delete(vectors @ vectors[1], 2)
    assert [hit["score"] for hit in hits] == pytest.approx(sorted(wanted, reverse=True), abs=1e-5)
    assert hits[0]["index"] == 1
    assert 2 not in [hit["index"] for hit in hits], "it has no vector"
    if kind != "npy":
        assert [hit["id"] for hit in hits] == [f"t{hit['index']}" for hit in hits]
    assert main(call[:-1]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["1.0000", "1" if kind == "npy" else "t1"]


def search_on(language: Path, written: Path) -> list[int]:
    (found,) = load(language, "embed", cube=Cube(1, 2, 1), against=written / "npy", top=3).predict([TEXTS[3]])
    return [hit.index for hit in found.hits]


def test_every_rank_finds_the_same(language: Path, written: Path) -> None:
    (found,) = load(language, "embed", against=written / "npy", top=3).predict([TEXTS[3]])
    assert run_ranks(2, search_on, language, written) == [[hit.index for hit in found.hits]] * 2


def test_equal_ones_keep_their_order_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.predict.vector_search._DOCUMENTS", 7)
    monkeypatch.setattr("tools.predict.vector_search._QUERIES", 2)
    draw = np.random.default_rng(0)
    # Of axes, so that cosines are exact, and many of them equal, some of these 0 and -0.
    documents = np.eye(4, dtype=np.float32)[draw.integers(4, size=40)] * draw.choice([-3.0, 1.0, 2.0], (40, 1))
    queries = np.array([[1, 0, 0, 0], [0, 0, -2, 0], [3, 4, 0, 0]], dtype=np.float32)
    documents = documents.astype(np.float32)
    documents[11] = np.nan
    scores, places = nearest(torch.from_numpy(queries), documents, 39)
    cosines = plain(queries) @ np.delete(plain(documents), 11, axis=0).T
    names = np.delete(np.arange(40), 11)
    for row in range(3):
        order = np.argsort(-cosines[row], kind="stable")
        assert places[row].tolist() == names[order].tolist()
        assert scores[row].tolist() == pytest.approx(cosines[row][order].tolist(), abs=1e-6)
    more, last = nearest(torch.from_numpy(queries), documents, 99)
    assert (last[:, -1].tolist(), more[0, -1]) == ([-1] * 3, -np.inf)
    with pytest.raises(ValueError, match="k must be at least 1"):
        nearest(torch.from_numpy(queries), documents, 0)


def test_what_cannot_be_asked(language: Path, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    against = ["--against", f"{written}/npy"]
    for more, message in (
        (["--top", "3"], "--top needs vectors to search in. Give --against FILE"),
        ([*against, "--top", "0"], "top must be at least 1. Got 0"),
        ([*against, "--dimensions", "8"], "v.npy has vectors of 32 numbers, and those of the texts have 8"),
        ([*against, "--output-format", "npy", "--output", f"{written}/w.npy"], "which npy has no place for"),
        (["--output-format", "parquet"], "parquet needs a file. Give --output FILE.parquet"),
        (
            ["--output", f"{written}/w.npy"],
            "is lines of JSON. Give --output-format npy, or another name",
        ),
        (["--against", f"{written}/none"], "none has no vectors"),
    ):
        assert main(["embed", str(language), "a fox", *more]) == 2
        assert message in capsys.readouterr().err
