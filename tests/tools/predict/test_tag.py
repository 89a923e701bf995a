"""`tools.predict tag`: what the library's model says, spans of characters, and output that training reads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.asked import TAGS, TEXTS, write_models
from tests.tools.corpus.tokenized import PIECES, write_vocabulary
from tools.finetune.tag_data import TagData, Told, read_sentences
from tools.predict import Tagged, load
from tools.predict.__main__ import main
from tools.tagging.schemes import Entity, entities

LONG = TEXTS[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("asked"))


def test_spans_are_those_of_the_tags(models: Path) -> None:
    found: list[Tagged] = load(models / "tags", "tag").predict([LONG, {"tokens": ["The story", "of", "foxes"]}])
    assert " ".join(found[0].tokens) == "The story tells of a fox , of a hill , and of the morning !"
    assert (found[1].text, found[1].tokens) == ("The story of foxes", ("The story", "of", "foxes"))
    assert any(one.spans for one in found)
    for one in found:
        assert set(one.tags) <= set(TAGS)
        spelled = []
        for span in one.spans:
            assert one.text[span.start : span.end] == span.text
            assert 1 / len(TAGS) < span.probability <= 1
            first = [word for word in one.tokens if span.text.startswith(word)]
            assert first, "a span begins with a word"
            spelled.append(span.label)
        assert spelled == [entity.label for entity in entities(one.tags, "iob2")]


def test_windows_are_those_of_fine_tuning_or_as_asked(models: Path) -> None:
    model = load(models / "tags", "tag")
    task: Any = model.task
    assert (task.settings.max_length, task.settings.stride, task.settings.scheme) == (12, 4, "iob2")
    shorter: Any = load(models / "tags", "tag", max_length=5).task
    assert (shorter.settings.max_length, shorter.settings.stride) == (5, 3)
    assert len(model.predict([LONG])[0].tags) == len(load(models / "tags", "tag", max_length=5).predict([LONG])[0].tags)
    with pytest.raises(ValueError, match=r"text 0: .* tokens with the special ones, and a window has 12. Shorten it"):
        load(models / "tags", "tag", too_long="refuse").predict([LONG])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": "a", "tokens": ["a"]}, '"text" or "tokens": give one of them'),
        ({"tokens": []}, "a list of words is needed, at least one"),
        ({"tokens": ["a", " "]}, "a word must be a text, not empty"),
        ({"tokens": ["a\tb"]}, "without tab or line end"),
        ({"text_b": "a"}, '"text_b" is not read here, but "text" or "tokens"'),
        ("\u200b", '"text" or "tokens" has no token'),
    ],
)
def test_what_cannot_be_tagged(models: Path, item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"text 0: .*{message}"):
        load(models / "tags", "tag").predict([item])


def test_the_output_is_what_training_reads(
    models: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    wanted = load(models / "tags", "tag").predict(TEXTS)
    for form, name in (("spans", "a.jsonl"), ("tokens", "b.jsonl"), ("conll", "c.conll")):
        output = tmp_path / name
        more = ["--file", str(lines), "--output", str(output), "--output-format", form]
        assert main(["tag", str(models / "tags"), *more]) == 0
        found = read_sentences(TagData(train=str(output), dev=str(output)), "train", Told())
        assert [tuple(one.text.words) for one in found] == [one.tokens for one in wanted]
        for mine, theirs in zip(found, wanted, strict=True):
            spelled: list[Entity] = entities(mine.tags or (), "iob2")
            assert spelled == entities(theirs.tags, "iob2"), form
            assert form == "spans" or tuple(mine.tags or ()) == theirs.tags
    assert json.loads((tmp_path / "b.jsonl").read_text().splitlines()[2])["id"] == 2
    capfdbinary.readouterr()
    assert main(["tag", str(models / "tags"), "the fox", "--output-format", "conll"]) == 0
    assert capfdbinary.readouterr().out.decode().split("\n")[0].split("\t")[0] == "the"
    assert main(["tag", str(models / "tags"), "the fox", "--output-format", "conll", "--on-error", "skip"]) == 2
    assert b"--output-format conll has no place for an error" in capfdbinary.readouterr().err
    assert main(["tag", str(models / "classes"), "the fox"]) == 2
    assert b"tag needs a model with the head tags" in capfdbinary.readouterr().err


@pytest.mark.slow
def test_a_library_folder_says_what_the_library_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    names = dict(enumerate(TAGS))
    more: dict[str, Any] = {"id2label": names, "label2id": {tag: number for number, tag in names.items()}, **sizes}
    config = transformers.BertConfig(vocab_size=len(PIECES), initializer_range=0.3, **more)
    torch.manual_seed(3)
    theirs = transformers.BertForTokenClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    write_vocabulary(tmp_path / "vocab.txt")
    tokenizer = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path, "tag")
    words = LONG.lower().split()
    encoded = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        chances = theirs(**encoded).logits[0].softmax(1)
    first = [encoded.word_ids().index(number) for number in range(len(words))]
    (ready,) = model.task.ready([_query(words)])
    (found,) = _tags(model, ready.content)
    assert found.numbers.tolist() == chances[first].argmax(1).tolist()
    assert found.probabilities == pytest.approx(chances[first].max(1).values.numpy(), abs=1e-5)
    (said,) = model.predict([{"tokens": words}])
    assert said.tags == tuple(names[number] for number in found.numbers.tolist())

    pipeline = transformers.pipeline(
        "token-classification", model=theirs, tokenizer=tokenizer, aggregation_strategy="first"
    )
    wanted = pipeline(LONG.lower())
    (text,) = model.predict([LONG.lower()])
    assert [(one.start, one.end, one.label) for one in text.spans] == [
        (one["start"], one["end"], one["entity_group"]) for one in wanted
    ]
    assert [one.probability for one in text.spans] == pytest.approx([float(one["score"]) for one in wanted], abs=1e-5)


def _query(words: list[str]) -> Any:
    from tools.predict.inputs import Query

    return Query(where="text 0", number=0, first=" ".join(words), words=tuple(words))


def _tags(model: Any, content: Any) -> Any:
    from tools.tagging.windows import tag_texts

    task = model.task
    return tag_texts(task.model, [content.pieces], task.tokenizer, task.settings, batch_tokens=512)
