"""Files of pairs, triplets and scores, collections as BEIR has them, and what is measured on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from models.bert import PRESETS
from models.bert.embedding import VectorLoss
from tensor3d import Cube
from tests.tools.squad.small import small_tokenizer
from tools.finetune.__main__ import EmbedConfig
from tools.finetune.config import ModelSection, RunSection
from tools.finetune.embed_data import Collection, EmbedData
from tools.finetune.embed_task import EmbedTask, InBatchTask, _measured, _measured_ranking, embed_task

PAIRS = [("red house", "blue house"), ("the number 3", "number 3"), ("green", "white black")]


def task_of(folder: Path, train: Path | str, batch: int = 8, **data: Any) -> EmbedTask:
    section = EmbedData(**{"train": str(train), "dev": str(train), **data})
    recipe = EmbedConfig(data=section, model=ModelSection(vocab="vocab.txt"), run=RunSection(batch=batch))
    return embed_task(section, recipe, small_tokenizer(folder), Cube.single())


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(task: EmbedTask, folder: Path) -> list[list[str]]:
    tokenizer = small_tokenizer(folder)
    return [[tokenizer.decode(text.ids[1:-1].tolist()) for text in example.texts] for example in task.train]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_pairs_and_negatives_of_files(tmp_path: Path, kind: str) -> None:
    path, columns = tmp_path / f"pairs.{kind}", {"negatives": ("wrong",)}
    rows = [{"anchor": a, "positive": b, "wrong": f"a house {number}"} for number, (a, b) in enumerate(PAIRS)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        lines(path, *({**row, "wrong": [row["wrong"], "white"][: 1 + place % 2]} for place, row in enumerate(rows)))
    else:
        mark = "\t" if kind == "tsv" else ","
        path.write_text("\n".join(mark.join(values) for values in (rows[0], *(row.values() for row in rows))) + "\n")
    found = words(task_of(tmp_path, path, **columns), tmp_path)
    wanted = [[*pair, f"a house {number}"] for number, pair in enumerate(PAIRS)]
    if kind == "jsonl":
        wanted[1].append("white")
    assert found == wanted


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{"anchor": " ", "positive": "red"}], {}, r"jsonl line 1: 'anchor' has no text\. Got ' '"),
        ([{"anchor": "red", "positive": None}], {}, r"line 1: 'positive' has no text\. Got None"),
        (
            [{"anchor": ["red"], "positive": "a"}, {"anchor": ["a", "b"], "positive": "a"}],
            {},
            r"line 2.*must be one",
        ),
        ([{"anchor": "red"}], {}, r"line 1: it has no key 'positive'"),
        ([{"anchor": "red", "positive": "a", "n": ""}], {"negatives": ("n",)}, r"line 1: 'n' has no negative\. Got ''"),
        ([{"anchor": "red", "positive": "a", "n": []}], {"negatives": ("n",)}, r"line 1: 'n' has no negative"),
        ([{"anchor": "red", "positive": "a", "n": ["a"]}], {"negatives": ("n",)}, r"line 1: .* is the positive itself"),
        ([{"anchor": "red", "positive": "a", "n": "red"}], {"negatives": ("n",)}, r"line 1: .* is the anchor itself"),
        ([{"anchor": "red", "positive": "a", "score": "x"}], {"loss": "cosine"}, r"line 1: the score must be a number"),
        (
            [{"anchor": "red", "positive": "a", "score": None}],
            {"loss": "cosine"},
            r"the score must be a number",
        ),
        ([{"anchor": "red", "positive": "a", "score": 4.5}], {"loss": "cosine"}, r"the score is 4\.5, and a cosine is"),
        ([{"anchor": "red", "positive": "a"}], {}, r"has 1 pairs.*a single one.*Give more pairs"),
        (
            [{"anchor": a, "positive": b} for a, b in PAIRS],
            {"batch": 2},
            r"has 3 pairs.*batch = 2.*batch to 3",
        ),
        ([{"anchor": a, "positive": b} for a, b in PAIRS], {"batch": 1}, r"Set run\.batch to 3"),
        (
            [{"anchor": "red", "positive": "a b c d"}],
            {"max_length": 5, "too_long": "refuse"},
            r"line 1: .* has 6 tokens",
        ),
        ([], {}, r"pairs\.jsonl has no row"),
    ],
)
def test_bad_rows_are_refused_with_their_place(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, lines(tmp_path / "pairs.jsonl", *rows), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dev": None}, r"data\.dev must name a file or a folder"),
        ({"sizes": (8, 8)}, r"data\.sizes must be different, each at least 1\. Got \[8, 8\]"),
        ({"sizes": (0,)}, r"data\.sizes must be"),
        ({"dense": (8, 0)}, r"data\.dense must be columns, each at least 1\. Got \[8, 0\]"),
        ({"temperature": 0.0}, r"data\.temperature must be above 0"),
        ({"loss": "cosine", "negatives": ("n",)}, r"learns from pairs with scores"),
        ({"max_length": 4}, r"data\.max_length must be at least 5"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbedData(**{"train": "a.tsv", "dev": "b.tsv", **changes})


def test_sizes_are_below_the_hidden_size_and_metrics_are_known(tmp_path: Path) -> None:
    path = lines(tmp_path / "pairs.jsonl", *({"anchor": a, "positive": b} for a, b in PAIRS))
    task = task_of(tmp_path, path, sizes=(128,))
    with pytest.raises(ValueError, match=r"data\.sizes must be below the model's hidden size, 128\. Got 128"):
        task.make_model(PRESETS["tiny"], Cube.single())
    task = task_of(tmp_path, path, sizes=(64,), dense=(64,))
    with pytest.raises(ValueError, match=r"data\.sizes must be below the model's last dense layer, 64\. Got 64"):
        task.make_model(PRESETS["tiny"], Cube.single())
    section = EmbedData(train=str(path), dev=str(path))
    recipe = EmbedConfig(data=section, model=ModelSection(vocab="vocab.txt"), run=RunSection(metric="spearman"))
    with pytest.raises(ValueError, match=r"run\.metric of this dev is one of ndcg@10, .*Got 'spearman'"):
        embed_task(section, recipe, small_tokenizer(tmp_path), Cube.single())


# --- what is no negative of what --------------------------------------------------------------------------------------


def test_texts_that_belong_together_are_counted_and_are_no_negatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [("red", "a"), ("blue", "a"), ("red", "black"), ("green", "red"), ("white", "the"), ("number", "of")]
    path = lines(tmp_path / "pairs.jsonl", *({"anchor": a, "positive": b} for a, b in pairs))
    task = task_of(tmp_path, path)
    assert isinstance(task, InBatchTask)
    assert "4 pairs share a text with another pair, of which it is no negative" in task.notes
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(VectorLoss, "in_batch", lambda _, anchors, candidates, allowed: seen.append(allowed))
    task.step_loss(torch.zeros(12, 4), task.train)
    masked = [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1), (2, 3)]
    assert [(int(i), int(j)) for i, j in (~seen[0]).nonzero()] == masked


# --- collections ------------------------------------------------------------------------------------------------------


def collection(folder: Path, **qrels: str) -> Path:
    documents = [("d1", "Red", "the house"), ("d2", "", "blue is a number"), ("q2", "black", "white")]
    queries = [("q1", "what is red ?"), ("q2", "black white"), ("q3", "green")]
    (folder / "qrels").mkdir()
    lines(folder / "corpus.jsonl", *({"_id": name, "title": title, "text": text} for name, title, text in documents))
    lines(folder / "queries.jsonl", *({"_id": name, "text": text} for name, text in queries))
    for name, rows in qrels.items():
        (folder / "qrels" / f"{name}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


def test_queries_and_documents_have_their_own_prompts(tmp_path: Path) -> None:
    rows = [{"anchor": "red", "positive": "blue"}, {"anchor": "green", "positive": "red"}]
    path, prompts = lines(tmp_path / "p.jsonl", *rows), {"query_prompt": "number ", "document_prompt": "the "}
    task = task_of(tmp_path, path, test=str(path), **prompts)
    assert words(task, tmp_path) == [["number red", "the blue"], ["number green", "the red"]]
    told = [
        "queries behind the prompt 'number ', documents behind 'the '",
        "1 pairs share a text with another pair, of which it is no negative",  # whatever the prompts
    ]
    assert list(task.notes[1:]) == told
    found = task._parts["test"]
    assert isinstance(found, Collection)
    tokenizer = small_tokenizer(tmp_path)
    asked, given = (
        [tokenizer.decode(found.texts[each].ids[1:-1].tolist()) for each in part]
        for part in (found.queries, found.documents)
    )
    assert (asked, given) == (["number red", "number green"], ["the blue", "the red"])
    assert found.omitted == [1, -1]
    files = task.facts().files(PRESETS["tiny"])  # type: ignore[misc]
    assert files["config_sentence_transformers.json"]["prompts"] == {"query": "number ", "document": "the "}
    assert files["config_sentence_transformers.json"]["default_prompt_name"] is None
    lines(path, {**rows[0], "wrong": "red"})
    with pytest.raises(ValueError, match="a negative in 'wrong' is the anchor itself"):
        task_of(tmp_path, path, negatives=("wrong",), **prompts)
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    lines(folder / "corpus.jsonl", {"_id": "d", "title": "white", "text": "house"})
    lines(folder / "queries.jsonl", {"_id": "q", "text": "green"})
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    lines(path, *rows)
    beir = task_of(tmp_path, path, test=str(folder), **prompts)._parts["test"]
    assert [tokenizer.decode(text.ids[1:-1].tolist()) for text in beir.texts] == ["the white house", "number green"]


def test_a_collection_of_beir(tmp_path: Path) -> None:
    train = lines(tmp_path / "pairs.jsonl", *({"anchor": a, "positive": b} for a, b in PAIRS))
    (tmp_path / "beir").mkdir()
    folder = collection(tmp_path / "beir", dev="q1\td1\t2\nq1\td2\t0\nq2\td2\t1\n", test="q3\tq2\t1\n")
    task = task_of(tmp_path, train, dev=str(folder), test=str(folder))
    dev, test = task._parts["dev"], task._parts["test"]
    assert isinstance(dev, Collection)
    assert isinstance(test, Collection)
    assert (dev.query_names, dev.document_names) == (["q1", "q2"], ["d1", "d2", "q2"])
    assert dev.grades == [{0: 2.0, 1: 0.0}, {1: 1.0}]
    assert dev.omitted == [-1, 2], "a document with the query's own name is not found by it"
    decode = small_tokenizer(tmp_path).decode
    texts = [decode(dev.texts[place].ids[1:-1].tolist()) for place in dev.documents]
    assert texts == ["red the house", "blue is a number", "black white"]
    assert "dev: 1 queries have no row in dev.tsv" in task.notes
    assert any("1 queries have the name of a document" in note for note in task.notes)
    assert test.grades == [{2: 1.0}]
    assert len(EmbedData(train=str(train), dev=str(folder)).files()) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("q1\td9\t1\n", r"dev\.tsv line 2: there is no document 'd9'"),
        ("q1\td1\t1\nq9\td1\t1\n", r"dev\.tsv line 3: there is no query 'q9'"),
        ("q1\td1\tmuch\n", r"dev\.tsv line 2: a grade must be a number"),
        (None, r"dev\.tsv is not there\. Name another split.*: other\.tsv"),
    ],
)
def test_a_collection_with_unknown_names_is_refused(tmp_path: Path, rows: str | None, message: str) -> None:
    train = lines(tmp_path / "pairs.jsonl", *({"anchor": a, "positive": b} for a, b in PAIRS))
    (tmp_path / "beir").mkdir()
    folder = collection(tmp_path / "beir", **({"other": "q1\td1\t1\n"} if rows is None else {"dev": rows}))
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, train, dev=str(folder))


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        ("corpus", {"_id": "d1", "title": "", "text": "red"}, r"corpus\.jsonl line 4: the name 'd1' is there already"),
        ("corpus", {"_id": "d4", "title": "", "text": ""}, r"corpus\.jsonl line 4: 'text' has no text"),
        ("corpus", {"_id": "a\tb", "title": "", "text": "red"}, r"line 4: '_id' must be a name without tab"),
        ("queries", {"_id": "q1", "text": "red"}, r"queries\.jsonl line 4: the name 'q1' is there already"),
    ],
)
def test_bad_rows_of_a_collection(tmp_path: Path, file: str, row: dict[str, Any], message: str) -> None:
    train = lines(tmp_path / "pairs.jsonl", *({"anchor": a, "positive": b} for a, b in PAIRS))
    (tmp_path / "beir").mkdir()
    folder = collection(tmp_path / "beir", dev="q1\td1\t1\n")
    with (folder / f"{file}.jsonl").open("a") as opened:
        opened.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, train, dev=str(folder))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_spearman_of_cosines_is_scipys(tmp_path: Path) -> None:
    from scipy import stats  # takes every process that collects tests 0.7 s

    draw = np.random.default_rng(1)
    rows = [
        {"anchor": a, "positive": b, "score": score} for (a, b), score in zip(PAIRS * 5, draw.random(15), strict=True)
    ]
    task = task_of(tmp_path, lines(tmp_path / "pairs.jsonl", *rows), loss="cosine")
    part: Any = task._parts["dev"]
    vectors = torch.randn(len(part.texts), 6, generator=torch.Generator().manual_seed(0))
    cosines = [float(vectors[a] @ vectors[b] / vectors[a].norm() / vectors[b].norm()) for a, b in part.examples]
    found = _measured(part, vectors)
    scores = [row["score"] for row in rows]
    assert found["spearman"] == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-6)
    assert found["pearson"] == pytest.approx(stats.pearsonr(cosines, scores).statistic, abs=1e-6)
    assert [example.target for example in task.train] == pytest.approx(scores)


def test_rankings_are_measured_as_a_plain_reference_does() -> None:
    draw = np.random.default_rng(2)
    vectors = torch.from_numpy(draw.normal(size=(60, 5)).astype(np.float32))
    queries, documents = list(range(10)), list(range(10, 60))
    grades = [{int(place): 1.0 for place in draw.choice(50, 3, replace=False)} for _ in queries]
    omitted = [next(place for place in range(50) if place not in own) if q % 2 else -1 for q, own in enumerate(grades)]
    part = Collection(
        texts=(),
        queries=queries,
        query_names=[str(q) for q in queries],
        documents=documents,
        document_names=[str(d) for d in documents],
        grades=grades,
        omitted=omitted,
    )
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    mrr, gain, within = [], [], {1: [], 10: [], 100: []}
    for query, own, left_out in zip(queries, grades, omitted, strict=True):
        order = (unit[documents] @ unit[query]).argsort(descending=True).tolist()
        order = [place for place in order if place != left_out]
        ranks = [rank for rank, place in enumerate(order, start=1) if place in own]
        mrr.append(1 / ranks[0] if ranks[0] <= 10 else 0)
        best = sum(1 / np.log2(rank + 1) for rank in (1, 2, 3))
        gain.append(sum(1 / np.log2(rank + 1) for rank in ranks if rank <= 10) / best)
        for cut, found in within.items():
            found.append(sum(rank <= cut for rank in ranks) / 3)
    measured = _measured_ranking(part, vectors)
    assert measured["mrr@10"] == pytest.approx(np.mean(mrr))
    assert measured["ndcg@10"] == pytest.approx(np.mean(gain))
    assert [measured[f"recall@{cut}"] for cut in within] == pytest.approx([np.mean(found) for found in within.values()])


def test_among_more_equal_documents_than_are_found_the_relevant_ones_come_last() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=(2, 100)).astype(np.float32)
    # A product in fp32 gives the last of 130 equal documents another cosine than the first ones.
    vectors = torch.from_numpy(np.stack([one, *[one] * 130, other]))
    part = Collection(
        texts=(),
        queries=[0, 131, 131],
        query_names=["equal", "omitted", "one is nearer"],
        documents=range(1, 132),
        document_names=[str(number) for number in range(131)],
        grades=[{0: 1.0, 129: 2.0, 130: 1.0}, {1: 1.0, 99: 0.0}, {130: 1.0, 3: 1.0}],
        omitted=[-1, 0, -1],
    )
    found = _measured_ranking(part, vectors)
    assert (found["recall@100"], found["mrr@10"]) == ((0 + 0 + 1 / 2) / 3, 1 / 3)
