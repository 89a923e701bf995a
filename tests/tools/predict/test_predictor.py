"""`tools.predict` from Python: each task against the model itself, order, batches, refusals, cubes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.bert import BertForPreTraining
from models.bert.tasks import class_logits, sentence_vectors
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.single_device_reference import name_of, ranks_of
from tests.tools.asked import CONFIG, LABELS, MASKED, QUESTIONS, TEXTS, write_models
from tools.corpus.tokenizers.sentencepiece import SentencePieceTokenizer
from tools.predict import Answered, Classified, Embedded, Filled, Ranked, Scored, Tagged, load
from tools.predict.__main__ import main
from tools.predict.fill_mask import FillMask
from tools.predict.inputs import Query
from tools.predict.predictor import Predictor, _even
from tools.predict.tasks import Ready, TaskName
from tools.predict.text_encoder import TextEncoder

Shape = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("asked"))


def asked(models: Path, cube: Cube | None = None, batch_tokens: int = 24) -> dict[str, Any]:
    """What every task says, as JSON has it."""
    masked = [text for text in MASKED if "[MASK]" in text] * 3
    pairs = [{"text": text, "text_b": "a fox", "id": 3} for text in TEXTS]
    options: dict[str, Any] = {"cube": cube, "batch_tokens": batch_tokens}
    found = {
        "fill-mask": load(models / "language", "fill-mask", k=4, **options).predict(masked),
        "classify": load(models / "classes", "classify", **options).predict([*TEXTS, *pairs]),
        "regress": load(models / "number", "classify", **options).predict(TEXTS),
        "answer": load(models / "answers", "answer", **options).predict(QUESTIONS),
        "tag": load(models / "tags", "tag", **options).predict([*TEXTS, {"tokens": TEXTS[3].split()}]),
        "rank": load(models / "ranks", "rank", **options).predict([{"query": "the fox", "passages": TEXTS}] * 2),
        "mean": load(models / "language", "embed", **options).predict(TEXTS),
        "cls": load(models / "classes", "embed", pooling="cls", normalize=True, **options).predict(TEXTS),
    }
    return {name: [result.as_json() for result in results] for name, results in found.items()}


def numbers_of(found: Any) -> Iterator[Any]:
    """All leaves, in order."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            yield from numbers_of(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from numbers_of(value)
    else:
        yield found


def check_same(found: Any, wanted: Any) -> None:
    one, other = list(numbers_of(found)), list(numbers_of(wanted))
    assert len(one) == len(other) > 500
    for mine, theirs in zip(one, other, strict=True):
        assert mine == (pytest.approx(theirs, abs=2e-5) if isinstance(theirs, float) else theirs)


def test_results_do_not_depend_on_batches(models: Path) -> None:
    check_same(asked(models, batch_tokens=1), asked(models, batch_tokens=10_000))


def test_two_ranks_say_what_one_says(models: Path) -> None:
    wanted = [one.as_json()["probabilities"] for one in load(models / "classes", "classify").predict(TEXTS)]
    for found in run_ranks(2, _classified_on_two, models):
        assert found == [pytest.approx(probabilities, abs=2e-5) for probabilities in wanted]


def _classified_on_two(models: Path) -> list[dict[str, float]]:
    cube = Cube(1, 2, 1)
    with pytest.raises(ValueError, match="head answers"):
        load(models / "classes", "answer", cube=cube)
    model = load(models / "classes", "classify", cube=cube)
    with pytest.raises(ValueError, match='text 0: "text" has no token'):
        model.predict([" "])
    return [one.as_json()["probabilities"] for one in model.predict(TEXTS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 1),
        pytest.param((2, 2, 2, 1), marks=pytest.mark.long(reason="eight ranks predict what two do")),
    ],
    ids=name_of,
)
def test_results_do_not_depend_on_the_cube(shape: Shape, models: Path, tmp_path: Path) -> None:
    wanted = asked(models)
    lines = [*TEXTS, {"id": 9}, *TEXTS]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for found in run_ranks(ranks_of(shape), _asked_on, shape, models, tmp_path):
        check_same(found, wanted)
    vectors = np.load(tmp_path / "vectors.npy")
    assert np.isnan(vectors[len(TEXTS)]).all()
    by_text = [one["vector"] for one in wanted["mean"]]
    np.testing.assert_allclose(np.delete(vectors, len(TEXTS), 0), [*by_text, *by_text], atol=2e-5)


def _asked_on(shape: Shape, models: Path, folder: Path) -> dict[str, Any]:
    cube = Cube(*shape)
    with pytest.raises(ValueError, match="text 0: no mask"):
        load(models / "language", "fill-mask", cube=cube).predict(["a fox"])
    with pytest.raises(ValueError, match="head classifier"):
        load(models / "answers", "classify", cube=cube)
    found = asked(models, cube)
    # The command, in a file that the first rank reads, and one that it writes. It ends the process group.
    os.environ.update(WORLD_SIZE=str(ranks_of(shape)), RANK=str(cube.rank), LOCAL_RANK=str(cube.rank))
    x, y, z, data = shape
    split = ["--cube", f"{x}x{y}x{z}", "--data-parallel", str(data), "--batch-tokens", "20", "--on-error", "skip"]
    files = ["--file", str(folder / "texts.jsonl"), "--output", str(folder / "vectors.npy"), "--output-format", "npy"]
    assert main(["embed", str(models / "language"), *files, *split]) == 0
    return found


def test_fill_mask_fills_each_place_with_the_likeliest_pieces(models: Path) -> None:
    model = load(models / "language", "fill-mask", k=3)
    found = model.predict([MASKED[0], MASKED[3]])
    assert [len(one.masks) for one in found] == [1, 2]
    for one in found:
        for pieces in one.masks:
            chances = [piece.probability for piece in pieces]
            assert chances == sorted(chances, reverse=True)
            assert 0 < sum(chances) < 1
    first = found[0].masks[0]
    assert found[0].text == f"the {first[0].piece} went to the hill".replace(" ##", "")
    assert found[0].in_words()[1:] == [f"  {piece.probability:7.2%}  {piece.piece}" for piece in first]
    for own, text, told in (
        *(("\u00e3\u0122\u0124", "\u3002", "\u00e3\u0122\u0124  \u3002"), ("\u00e3", "\ufffd", "\u00e3")),  # of bytes
        *(("\u0120the", " the", "\u0120the"), ("\u2581", "", "\u2581")),
    ):
        assert dataclasses.replace(first[0], piece=own, text=text).in_words() == told
    # The k-th best is no better because more were asked for; and all of the vocabulary adds up to 1.
    (whole,) = load(models / "language", "fill-mask", k=CONFIG.vocab).predict([MASKED[0]])
    assert [piece.id for piece in whole.masks[0][:3]] == [piece.id for piece in first]
    assert sum(piece.probability for piece in whole.masks[0]) == pytest.approx(1, abs=1e-5)
    assert sum(piece.piece == "" for piece in whole.masks[0]) == 3, "rows that the vocabulary does not use"


def test_classes_are_those_of_the_model(models: Path) -> None:
    model = load(models / "classes", "classify")
    (found,) = model.predict([{"text": "The fox", "text_b": "a hill"}])
    task: Any = model.task
    ids = [task.reader.tokenizer.pieces([number])[0] for number in _only(task, "The fox", "a hill").ids.tolist()]
    assert ids == ["[CLS]", "the", "fox", "[SEP]", "a", "hill", "[SEP]"]
    chances = class_logits(task.model, [_only(task, "The fox", "a hill")])[0].softmax(0).tolist()
    assert found.as_json()["probabilities"] == pytest.approx(dict(zip(LABELS, chances, strict=True)))
    assert found.as_json()["label"] == LABELS[int(np.argmax(chances))]
    number: Any = load(models / "number", "classify")
    (value,) = number.predict(["the fox"])
    with torch.no_grad():
        for parameter in model.task.model.classifier.parameters():  # type: ignore[attr-defined]
            parameter.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="its weights are spoilt"):
        model.predict(["the fox"])
    assert value.as_json() == {"value": pytest.approx(float(class_logits(number.task.model, [_only(task, "the fox")])))}


def told_otherwise(models: Path, name: str, folder: Path, **changes: Any) -> Path:
    """A folder whose model.json says something else."""
    shutil.copytree(models / name, folder)
    told = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(told | changes))
    return folder


def test_each_label_of_several_has_a_probability_of_its_own(models: Path, tmp_path: Path) -> None:
    folder = told_otherwise(models, "classes", tmp_path / "several", problem=None)
    with pytest.raises(ValueError, match=r"several.*classifier.*None"):
        load(folder, "classify")
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"problem_type": "multi_label_classification"}')
    model: Any = load(folder, "classify")
    (found,) = model.predict(["the fox"])
    chances = class_logits(model.task.model, [_only(model.task, "the fox")])[0].sigmoid().tolist()
    assert found.probabilities == pytest.approx(dict(zip(LABELS, chances, strict=True)))
    assert sum(chances) != pytest.approx(1, abs=0.01)
    assert found.as_json()["labels"] == [label for label, chance in zip(LABELS, chances, strict=True) if chance > 0.5]
    assert found.in_words()[0] == (", ".join(found.labels) or "(no label)")


def test_pairs_are_read_where_the_model_was_made_of_pairs(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"text": "a fox", "text_b": "a hill"}
    pairs = told_otherwise(models, "classes", tmp_path / "pairs", facts={"pairs": True})
    single = told_otherwise(models, "classes", tmp_path / "single", facts={"pairs": False})
    of_pairs = load(pairs, "classify")
    assert of_pairs.predict([pair]) == load(models / "classes", "classify").predict([pair])
    with pytest.raises(ValueError, match=r"text \b0\b:.*fine-tuned on pairs.*object with"):
        of_pairs.predict(["a fox"])
    with pytest.raises(ValueError, match=r'"text_b".*"text"\..*fine-tuned on single'):
        load(single, "classify").predict([pair])
    assert main(["classify", str(pairs), "a fox", "a hill"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4, "one pair"
    assert main(["classify", str(pairs), "a fox"]) == 2
    assert "two by two. The model was fine-tuned on pairs. Got 1" in capsys.readouterr().err
    assert main(["classify", str(single), "a fox", "a hill", "--pairs"]) == 2
    assert "fine-tuned on single texts. Leave out --pairs" in capsys.readouterr().err


def test_a_text_goes_on_behind_a_mask(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a list is here. lists, (list) of a set.", "the set is (a list)."] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=40,
        hard_vocab_limit=False,
        user_defined_symbols=["list"],
        control_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    model = BertForPreTraining(dataclasses.replace(CONFIG, vocab=tokenizer.vocab_size), Cube.single())
    task = FillMask(model, TextEncoder(tokenizer, 24))
    for text in ("a [MASK].", "(the [MASK])s", "[MASK][MASK], is", "a [MASK] set", "a [MASK]\u6f22 a", "set[MASK]s"):
        (found,) = task.ready([Query(where="", number=0, first=text)])
        assert isinstance(found, Ready)
        shown = tokenizer.pieces(found.content.ids.tolist()[1:-1])
        # As in a text that has a word of one piece there.
        whole = tokenizer.pieces(tokenizer.encode([text.replace("[MASK]", "list")])[0])
        assert shown[::-1][: shown[::-1].index("[MASK]")] == whole[::-1][: whole[::-1].index("list")]
        head = text[: text.index("[MASK]")].rstrip()
        assert shown[: shown.index("[MASK]")] == tokenizer.pieces(tokenizer.encode([head])[0])


def _only(task: Any, first: str, second: str | None = None) -> Any:
    (text,) = task.reader.texts([first], None if second is None else [second])
    return text


def test_vectors_are_those_of_the_model(models: Path) -> None:
    model: Any = load(models / "language", "embed", pooling="cls", normalize=True)
    (found,) = model.predict(["a fox"])
    wanted = sentence_vectors(model.task.model, [_only(model.task, "a fox")], "cls")[0]
    torch.testing.assert_close(torch.from_numpy(found.vector), wanted / wanted.norm())
    assert found.vector.dtype == np.float32
    assert found.vector.shape == (CONFIG.hidden,)


def test_answers_are_parts_of_the_context(models: Path) -> None:
    model = load(models / "answers", "answer", k=3)
    for query, found in zip(QUESTIONS, model.predict(QUESTIONS), strict=True):
        assert 1 <= len(found.answers) <= 3
        assert found.as_json()["text"] == found.best.text
        for span in found.answers:
            assert span.text == query["context"][span.start : span.end] != ""
    assert model.tokens > 3 * CONFIG.positions, "the long one was read in windows"


def test_questions_are_read_as_the_model_says(models: Path, tmp_path: Path) -> None:
    for threshold in (-1e6, 1e6):
        facts = {"answer": {"max_length": 16, "question_length": 4, "no_answer": True, "null_threshold": threshold}}
        folder = told_otherwise(models, "answers", tmp_path / str(threshold), facts=facts)
        found = load(folder, "answer").predict(QUESTIONS)
        assert [bool(one.best.text) for one in found] == [threshold > 0] * len(QUESTIONS)
    lengths = {None: 16, 12: 12, 20: 20}
    assert {asked: _window(folder, asked) for asked in lengths} == lengths
    long = {**QUESTIONS[0], "question": "the fox went to the hill"}
    cutting = load(folder, "answer")
    cutting.predict([long])
    assert cutting.truncated == 1
    with pytest.raises(ValueError, match=r"text \b0\b.*6.*4"):
        load(folder, "answer", too_long="refuse").predict([long])


def _window(folder: Path, asked: int | None) -> int:
    task: Any = load(folder, "answer", max_length=asked).task
    return task.settings.max_length


def test_a_stream_holds_some_batches_and_keeps_the_order(models: Path) -> None:
    drawn = 0

    def endless() -> Iterator[str]:
        nonlocal drawn
        while True:
            yield TEXTS[drawn % len(TEXTS)]
            drawn += 1

    model = load(models / "language", "embed", batch_tokens=40)
    results = model.stream(endless())
    found = [next(results).vector for _ in range(100)]
    assert drawn < 200, "the rest was not even asked for"
    for number, vector in enumerate(found):
        np.testing.assert_allclose(vector, found[number % len(TEXTS)], atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.1, "texts differ"


def test_batches_are_consecutive_and_even() -> None:
    assert _even([], 10) == []
    assert _even([0, 0], 10) == [(0, 2)]
    assert _even([3] * 7, 9) == [(0, 2), (2, 5), (5, 7)]
    assert _even([50, 1, 1, 50], 10)[0] == (0, 1), "a long one is alone"
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 30, size=500).tolist()
    bounds = _even(sizes, 100)
    assert [first for first, _ in bounds[1:]] == [last for _, last in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, 500)
    of_batches = [sum(sizes[first:last]) for first, last in bounds]
    assert max(of_batches) <= 130
    assert min(of_batches) >= 70


@pytest.mark.parametrize(
    ("folder", "task", "item", "message"),
    [
        ("language", "fill-mask", "a fox", r"text 1: no mask. Write \[MASK\] where"),
        ("language", "fill-mask", "a " * 30 + "[MASK]", "text 1: a mask stands behind the 24 places"),
        ("language", "fill-mask", " ", "text 1: no mask"),
        ("classes", "classify", " ", 'text 1: "text" has no token'),
        ("classes", "classify", {"text": "a", "text_b": " "}, 'text 1: "text_b" has no token'),
        ("classes", "classify", {"text_b": "a"}, 'text 1: "text".*no such key'),
        ("classes", "classify", {"text": 3}, 'text 1: "text" must be a string. Got 3'),
        ("classes", "classify", 3, "text 1.*Got 3"),
        ("classes", "classify", {"text": "a", "question": "b"}, '"question" is not read here'),
        ("language", "embed", {"text": "a", "text_b": "b"}, '"text_b" is not read here'),
        ("language", "embed", "a \ud800", "half of a surrogate pair"),
        ("answers", "answer", "who?", "a string alone is not enough"),
        ("answers", "answer", {"question": "who?"}, '"context".*no such key'),
        ("answers", "answer", {"question": "who?", "context": ""}, '"context" has no token'),
    ],
)
def test_texts_that_cannot_be(models: Path, folder: str, task: Any, item: Any, message: str) -> None:
    good: Any = {"answer": QUESTIONS[0], "fill-mask": MASKED[0]}.get(task, "a fox")
    results = load(models / folder, task).stream([good, item, good])
    next(results)  # what stands before it is answered
    with pytest.raises(ValueError, match=message):
        next(results)


def test_long_texts_are_cut_and_counted_or_refused(models: Path) -> None:
    long = "a fox " * 20
    model = load(models / "classes", "classify")
    # Each alone: two rows of one product may differ in their last bits.
    assert model.predict([long]) == model.predict(["a fox " * 11])
    assert model.truncated == 1
    refusing = load(models / "classes", "classify", too_long="refuse")
    with pytest.raises(ValueError, match=r"text \b0\b: \b42\b.*24"):
        refusing.predict([long])
    # As it was fine-tuned.
    assert load(models / "number", "classify").predict([long]) == load(models / "number", "classify").predict(
        ["a fox " * 3]
    )


def test_names_of_special_tokens_are_counted_and_read_as_the_model_was_made(models: Path, tmp_path: Path) -> None:
    texts = ["a fox [SEP] a hill", "the fox"]
    plain = load(models / "classes", "classify")
    asked = load(models / "classes", "classify", special_tokens="tokens")
    made = load(told_otherwise(models, "classes", tmp_path / "made", facts={"special_tokens": "tokens"}), "classify")
    found = [model.predict(texts) for model in (plain, asked, made)]
    assert [model.named for model in (plain, asked, made)] == [1, 1, 1]
    assert found[0] != found[1] == found[2]
    ids = asked.task.reader.encode(texts)[0]  # type: ignore[attr-defined]
    assert asked.task.reader.tokenizer.pieces(ids) == ["a", "fox", "[SEP]", "a", "hill"]  # type: ignore[attr-defined]
    masks = load(models / "language", "fill-mask")
    masks.predict(["the [MASK]", "a [MASK] [CLS]"])
    assert masks.named == 1, "what asks for a piece is no name in a text"


@pytest.mark.parametrize(
    ("folder", "task", "item"),
    [
        ("classes", "classify", "LONG fox"),
        ("language", "fill-mask", "LONG [MASK]"),
        ("answers", "answer", {"question": "a fox", "context": "a LONG"}),
        ("tags", "tag", "LONG fox"),
        ("ranks", "rank", {"query": "a", "passages": ["fox", "LONG"]}),
    ],
)
def test_what_the_tokenizer_does_not_know_is_counted(models: Path, folder: str, task: Any, item: Any) -> None:
    written = json.loads(json.dumps(item).replace("LONG", "fox" * 40))
    model = load(models / folder, task)
    model.predict([written])
    assert (model.unknown.unknown, model.unknown.too_long) == (120, 120)
    assert model.unknown.in_words().startswith("120 of 12")


@pytest.mark.parametrize(
    ("folder", "task", "options", "message"),
    [
        (
            "language",
            "classify",
            {},
            "masked_lm, next_sentence. Make one.*tools.finetune",
        ),
        ("classes", "fill-mask", {}, "needs a model with the head masked_lm.*tools.pretrain"),
        ("classes", "answer", {}, "needs a model with the head answers"),
        ("language", "guess", {}, "task.*'guess'"),
        ("nothing", "embed", {}, "nothing is not there"),
        ("classes/tokenizer", "embed", {}, "is no folder of a model"),
        ("language", "embed", {"pooling": "first"}, "pooling must be one of cls, mean, max.*first"),
        ("language", "fill-mask", {"k": 0}, "k must lie between 1 and the vocabulary"),
        ("answers", "answer", {"k": 0}, "k must be at least 1"),
        ("language", "embed", {"max_length": 25}, "max_length=25.*model's 24"),
        ("language", "embed", {"max_length": 2}, "max_length must be at least 5"),
        ("language", "embed", {"batch_tokens": 0}, "batch_tokens must be at least 1"),
    ],
)
def test_models_and_options_that_cannot_be(
    models: Path, folder: str, task: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(models / folder, task, **options)


def _of_library(folder: Path, kind: str, **config: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    from tests.tools.corpus.tokenized import PIECES, write_vocabulary

    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    made = transformers.BertConfig(vocab_size=len(PIECES), **sizes, **config)
    getattr(transformers, kind)(made).save_pretrained(folder)
    write_vocabulary(folder / "vocab.txt")
    return folder


def test_folders_for_something_else_are_refused_by_name(tmp_path: Path) -> None:
    several = _of_library(
        tmp_path / "several", "BertForSequenceClassification", num_labels=3, problem_type="regression"
    )
    with pytest.raises(ValueError, match=r"regression with 3 numbers of each text"):
        load(several, "classify")
    choices = _of_library(tmp_path / "choices", "BertForMultipleChoice")
    with pytest.raises(ValueError, match=r"is a BertForMultipleChoice, whose own head is not read here"):
        load(choices, "classify")
    wrapped = _of_library(tmp_path / "wrapped", "BertForMaskedLM")
    tensors = {f"module.{name}": value for name, value in load_file(wrapped / "model.safetensors").items()}
    save_file(tensors, wrapped / "model.safetensors")
    with pytest.raises(ValueError, match=r"encoder begin with 'module.bert.' instead of 'bert.'"):
        load(wrapped, "fill-mask")


def test_weights_that_are_not_finite_answer_nothing(tmp_path: Path) -> None:
    """On CPUs PyTorch's attention gives zeros for queries that are no numbers, so that all answers look sound."""
    folder = _of_library(tmp_path / "spoilt", "BertForMaskedLM")
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        FloatingPointError, match=r"spoilt: its weights are spoilt, bert\.layers\.0\.\S+ not finite\. Take"
    ):
        load(folder, "fill-mask")


def _loaded_on_hosts(folder: Path) -> str:
    cube, here = Cube(1, 2, 1), Path.cwd()
    try:
        os.chdir(folder / f"host{cube.rank}")
        load(Path("model"), "fill-mask", cube=cube)
    except ValueError as refusal:
        return str(refusal)
    finally:
        os.chdir(here)
    return ""


def test_machines_with_other_tokenizers_are_told(tmp_path: Path) -> None:
    """Each rank cuts the texts for itself: into other pieces, or other numbers of them."""
    folder = _of_library(tmp_path / "host0/model", "BertForMaskedLM")
    shutil.copytree(folder, tmp_path / "host1/model")
    assert run_ranks(2, _loaded_on_hosts, tmp_path) == ["", ""]
    *pieces, one, other = (folder / "vocab.txt").read_text().splitlines()
    (tmp_path / "host1/model/vocab.txt").write_text("\n".join((*pieces, other, one)) + "\n")
    one, other = run_ranks(2, _loaded_on_hosts, tmp_path)
    assert one == other
    assert one.startswith("the tokenizer in model differs between ranks: rank 1 has ")


def test_pairs_need_a_type_for_the_second_text(tmp_path: Path) -> None:
    folder = _of_library(tmp_path / "one", "BertForSequenceClassification", type_vocab_size=1)
    model = load(folder, "classify")
    assert len(model.predict(["the fox"])) == 1
    with pytest.raises(ValueError, match=r"text \b0\b: the model has types below 1"):
        model.predict([{"text": "the fox", "text_b": "a hill"}])
    answers = _of_library(tmp_path / "answers", "BertForQuestionAnswering", type_vocab_size=1)
    with pytest.raises(ValueError, match=r"has types below 1 \(type_vocab_size\)"):
        load(answers, "answer")


@pytest.mark.slow
def test_hugging_face_says_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.tools.corpus.tokenized import PIECES, write_vocabulary

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(PIECES), initializer_range=0.3, num_labels=3, **sizes)
    texts, masked = [text.lower() for text in TEXTS], [text for text in MASKED if text.count("[MASK]") == 1]
    for task, kind in (("fill-mask", "BertForMaskedLM"), ("text-classification", "BertForSequenceClassification")):
        folder = tmp_path / task
        torch.manual_seed(3)
        theirs = getattr(transformers, kind)(config).eval()
        theirs.save_pretrained(folder)
        tokenizer = transformers.BertTokenizer(vocab=str(write_vocabulary(folder / "vocab.txt")))
        tokenizer.save_pretrained(folder)
        pipeline = transformers.pipeline(task, model=theirs, tokenizer=tokenizer, top_k=3)
        if task == "fill-mask":
            found: list[Filled] = load(folder, "fill-mask", k=3).predict(masked)
            for mine, wanted in zip(found, pipeline(masked), strict=True):
                assert [piece.id for piece in mine.masks[0]] == [one["token"] for one in wanted]
                assert [piece.probability for piece in mine.masks[0]] == pytest.approx(
                    [one["score"] for one in wanted], abs=1e-5
                )
                assert mine.text == wanted[0]["sequence"]
        else:
            for result, wanted in zip(load(folder, "classify").predict(texts), pipeline(texts), strict=True):
                scores = {one["label"]: one["score"] for one in wanted}
                assert result.as_json()["probabilities"] == pytest.approx(scores, abs=1e-5)


CALLS: dict[str, tuple[str, Any, type[Any]]] = {
    "fill-mask": ("language", "the [MASK] went", Filled),
    "score": ("language", "the fox went", Scored),
    "classify": ("classes", {"text": "a fox", "text_b": "the hill"}, Classified),
    "answer": ("answers", {"question": "who went?", "context": "a fox went"}, Answered),
    "tag": ("tags", {"tokens": ["a", "fox"]}, Tagged),
    "rank": ("ranks", {"query": "a fox", "passages": ["the hill", "the fox"]}, Ranked),
    "embed": ("language", "the fox", Embedded),
}
"""Of each task: a model, what is asked, and what comes back."""
PAGE = (Path(__file__).parents[3] / "docs/inference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", get_args(TaskName))
def test_the_same_call_serves_each_task(models: Path, task: TaskName) -> None:
    folder, item, kind = CALLS[task]
    predictor = load(models / folder, task)
    (found,) = predictor.predict([item])
    assert type(found) is kind
    assert [result.as_json() for result in predictor.stream(iter([item]))] == [found.as_json()]
    assert json.loads(json.dumps(found.as_json()))
    assert all(isinstance(line, str) for line in found.in_words())
    (row,) = re.findall(rf"^\| `load\(folder, \"{task}\"\)` \|.*", PAGE, re.MULTILINE)
    assert f"`{kind.__name__}`" in row, "as the page says"


def test_the_predictor_is_one_of_its_task(models: Path) -> None:
    before = torch.get_rng_state()
    model = load(str(models / "language"), "embed")
    load(models / "classes", "classify")
    assert torch.equal(before, torch.get_rng_state()), "the program's random numbers are its own"
    assert isinstance(model, Predictor)
    assert (model.batch_tokens, model.tokens, model.truncated) == (4096, 0, 0)
    assert model.predict([]) == []
    for item in ("good", {"text": "good"}):
        with pytest.raises(ValueError, match=r"this is one text: .*good.*\. Put it into a list"):
            model.predict(item)
