"""The task `rank`: scores are those of the transformers library, in order; folders, input and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.bert.tasks import BertForSequenceClassification
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.tools.asked import CONFIG, TEXTS, write_model
from tests.tools.corpus.tokenized import PIECES, write_vocabulary
from tools.convert.__main__ import main as convert
from tools.predict import Ranked, load
from tools.predict.__main__ import main

QUERY = "the fox"
HEADS = ("pooler", "classifier")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cube = Cube.single()
    cube.manual_seed(5)
    encoder = BertForSequenceClassification(CONFIG, 1, cube)
    folder = tmp_path_factory.mktemp("rank") / "model"
    return write_model(folder, encoder, HEADS, problem="rank", facts={"max_length": 20})


def ranked(folder: Path, *passages: Any, query: str = QUERY, **options: Any) -> Ranked:
    (found,) = load(folder, "rank", **options).predict([{"query": query, "passages": passages or TEXTS}])
    return found


def cross_encoder(folder: Path, **settings: Any) -> Any:
    """A cross-encoder as sentence-transformers leaves it, and the library's model of it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        **{"vocab_size": len(PIECES) + 3, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 64, "max_position_embeddings": 32, "initializer_range": 0.3, "num_labels": 1},
    )
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(folder)
    write_vocabulary(folder / "vocab.txt")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **settings}))
    return theirs


def library_scores(theirs: Any, folder: Path, query: str, passages: list[str]) -> list[float]:
    import transformers

    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=True)
    rows = tokenizer([query] * len(passages), passages, truncation="longest_first", max_length=20, padding=True)
    with torch.no_grad():
        found = theirs(**{name: torch.tensor(values) for name, values in rows.items()}).logits[:, 0].tolist()
    return [float(score) for score in found]


def test_a_cross_encoder_of_the_library_has_its_scores(tmp_path: Path) -> None:
    wanted = library_scores(cross_encoder(tmp_path / "theirs"), tmp_path / "theirs", QUERY, TEXTS)
    found = ranked(tmp_path / "theirs", max_length=20)
    scores = {each.index: each.score for each in found.passages}
    assert [scores[place] for place in range(len(TEXTS))] == pytest.approx(wanted, abs=1e-5)
    assert [each.index for each in found.passages] == sorted(range(len(TEXTS)), key=lambda place: -wanted[place])
    assert [each.rank for each in found.passages] == list(range(1, len(TEXTS) + 1))
    assert [each.text for each in found.passages] == [TEXTS[each.index] for each in found.passages]


@pytest.mark.parametrize(
    "settings",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.0.0"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
    ],
)
def test_what_the_folder_does_with_scores_is_done(tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = cross_encoder(tmp_path / "theirs", **settings)
    wanted = torch.tensor(library_scores(theirs, tmp_path / "theirs", QUERY, TEXTS)).sigmoid().tolist()
    found = ranked(tmp_path / "theirs", max_length=20).passages
    assert [each.score for each in found] == pytest.approx(sorted(wanted, reverse=True), abs=1e-5)
    told = json.loads((tmp_path / "theirs/config.json").read_text())
    told["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "theirs/config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"the scores go through 'torch\.nn\.modules\.activation\.Tanh'"):
        ranked(tmp_path / "theirs")


def test_an_exported_folder_is_the_librarys_with_one_label(model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert convert(["to-hf", str(model), str(tmp_path / "hf")]) == 0
    told = json.loads((tmp_path / "hf/config.json").read_text())
    assert (told["architectures"], "problem_type" in told) == (["BertForSequenceClassification"], False)
    assert told["sentence_transformers"] == {"activation_fn": "torch.nn.modules.linear.Identity"}
    theirs, info = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert (theirs.config.num_labels, info["missing_keys"], info["unexpected_keys"]) == (1, set(), set())
    wanted = sorted(library_scores(theirs.eval(), tmp_path / "hf", QUERY, TEXTS), reverse=True)
    for folder in (model, tmp_path / "hf"):
        assert [each.score for each in ranked(folder, max_length=20).passages] == pytest.approx(wanted, abs=1e-5)


def test_passages_by_id_ties_and_the_first_few(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    rows = [{"_id": "d1", "title": "", "text": TEXTS[1]}, {"_id": "d2", "title": "A fox", "text": "went"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ranked(model, {"id": "d2"}, {"id": "d1"}, {"id": 7, "text": "a fox went"}, collection=file)
    by_id = {each.id: each for each in found.passages}
    assert (by_id["d1"].text, by_id["d2"].text) == (TEXTS[1], "A fox went")
    assert by_id["d2"].score == by_id[7].score, "the same text, in small letters"
    assert by_id["d2"].rank + 1 == by_id[7].rank, "of equal scores the first one"
    assert found.as_json()["passages"][0].keys() == {"rank", "index", "id", "score", "text"}
    whole = ranked(model)
    assert ranked(model, top=2).passages == whole.passages[:2]
    assert "id" not in whole.as_json()["passages"][0]


def test_a_query_of_more_tokens_than_a_batch(model: Path) -> None:
    many = [TEXTS[number % 6] for number in range(40)]
    queries = [{"query": QUERY, "passages": many}, {"query": "hill", "passages": TEXTS}]
    whole, few = (load(model, "rank", batch_tokens=tokens).predict(queries) for tokens in (10_000, 30))
    for one, other in zip(whole, few, strict=True):
        assert [each.score for each in one.passages] == pytest.approx([each.score for each in other.passages], abs=1e-5)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(model), QUERY, *TEXTS[:3]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [each.text for each in ranked(model, *TEXTS[:3]).passages]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"query": QUERY, "passages": TEXTS, "id": 3}) + "\n")
    assert main(["rank", str(model), "--file", str(file), "--output", str(output), "--top", "2"]) == 0
    assert "1 text, 1 truncated" in capsys.readouterr().err
    found = json.loads(output.read_text())
    wanted = ranked(model, top=2).as_json()
    assert (found["id"], found["query"]) == (3, QUERY)
    for one, other in zip(found["passages"], wanted["passages"], strict=True):
        assert one == {**other, "score": pytest.approx(other["score"], abs=1e-5)}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"query": "a", "passages": [{"id": "d9"}]}, "has no text, but the id 'd9', and no --collection is given"),
        ({"query": "a"}, '"passages" must be a list of texts, at least one. Got None'),
        ({"query": "a", "passages": ["b", 3]}, '"passages" must have strings, or objects with "text" or "id". Got 3'),
        ({"query": "a", "passages": ["b", " "]}, "passage 1 has no token"),
        ({"query": " ", "passages": ["b"]}, '"query" has no token'),
        ({"query": "a", "text": "b", "passages": ["b"]}, '"text" is not read here, but "query" and "passages"'),
        ("a", 'a string alone is not enough. Give an object with "query" and "passages"'),
    ],
)
def test_what_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, told: str) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(f"{json.dumps({'query': QUERY, 'passages': TEXTS})}\n{json.dumps(row)}\n")
    assert main(["rank", str(model), "--file", str(file), "--output", str(output)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("tools.predict: line 2: ")
    assert told in message
    assert not output.exists()


def test_what_is_refused_of_models_and_collections(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Ask it so: python -m tools\.predict rank"):
        load(model, "classify")
    with pytest.raises(ValueError, match="top must be at least 1"):
        load(model, "rank", top=0)
    with pytest.raises(ValueError, match=r"places for 5\. Shorten it"):
        ranked(model, max_length=5, too_long="refuse")
    classes = BertForSequenceClassification(CONFIG, 3, Cube.single())
    write_model(tmp_path / "classes", classes, HEADS, labels=("a", "b", "c"), problem="classify")
    with pytest.raises(ValueError, match=r"one output, the score, is needed\. Got 3 outputs"):
        load(tmp_path / "classes", "rank")
    file = tmp_path / "corpus.jsonl"
    for line, told in (
        ('{"_id": "a"}', 'an object with "_id" and "text" is needed'),
        ('{"_id": true, "text": "b"}', 'an object with "_id" and "text" is needed'),
        ('{"_id": "c", "text": "b", "title": 1984}', '"title" must be a text. Got 1984'),
        ('{"_id": "c", "text": "b", "text": "d"}', "it is not valid JSON: the key 'text' is there twice"),
        ("[", "it is not valid JSON"),
    ):
        file.write_text(f'{{"_id": "a", "text": "b"}}\n{line}\n')
        with pytest.raises(ValueError, match=rf"corpus\.jsonl line 2: {told}"):
            load(model, "rank", collection=file)
    with pytest.raises(ValueError, match=r"a passage has no text, but the id 'd9', which the collection does not have"):
        ranked(model, {"id": "d9"}, collection={"d1": "a"})


def scores_on(folder: Path) -> list[float]:
    return [each.score for each in ranked(folder, cube=Cube(1, 1, 2)).passages]


@pytest.mark.slow
def test_on_a_cube(model: Path) -> None:
    wanted = [each.score for each in ranked(model).passages]
    for found in run_ranks(2, scores_on, model):
        assert found == pytest.approx(wanted, abs=1e-5)
