"""Texts packed over the cube: losses and gradients of the heads of fine-tuning, and outputs in the order of the texts.

The twins are written here in plain PyTorch, on each text alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert import BertConfig, BertForPreTraining
from models.bert.tasks import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    class_logits,
    likely_pieces,
    piece_losses,
    sentence_vectors,
    span_logits,
    tag_logits,
)
from models.bert.text_batches import EncodedText, TextBatch, collate_texts
from tensor3d import Cube, gather
from tests.models.toy import toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import (
    TOLERANCE,
    error,
    fast_alone,
    full,
    gradient_errors,
    make_twins,
    name_of,
    ranks_of,
    worst,
)

VOCAB = 67
Shape = tuple[int, int, int, int]
CONFIG: BertConfig = toy_config(VOCAB)


def some_texts(count: int, seed: int = 4) -> list[EncodedText]:
    """Very different lengths, the shortest of them one token; some have places to guess."""
    random = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        length = [1, 24, 5, 3, 17, 9][number % 6]
        masked = np.sort(random.choice(length, number % 3 if length > 2 else 0, replace=False))
        types = (np.arange(length) * 2 // length).astype(np.int64)
        texts.append(EncodedText(ids=random.integers(5, VOCAB, length), types=types, masked=masked))
    return texts


def alone(text: EncodedText) -> TextBatch:
    return collate_texts([text], Cube.single())


# --- losses -----------------------------------------------------------------------------------------------------------


def step_loss(model: Any, texts: list[EncodedText], loss: Callable[[TextBatch, slice], Tensor]) -> Tensor:
    """That of a step of two micro-batches, the second of which is smaller; of each by its texts and their place."""
    parts = []
    for part in (slice(5), slice(5, None)):
        parts.append(loss(collate_texts(texts[part], model.cube), part))
        parts[-1].backward()
    return torch.stack(parts).sum().detach()


def classified(
    model: Any, texts: list[EncodedText], labels: Tensor, fill: float, counted: float = 0.0, **more: Any
) -> Tensor:
    count = counted or len(texts)
    return step_loss(model, texts, lambda laid, part: model(laid.batch, laid.spread(labels[part], fill), count, **more))


def classification_errors(shape: Shape, regression: bool) -> dict[str, float]:
    outputs = 1 if regression else 3
    _, model, _, twin = make_twins(lambda cube: BertForSequenceClassification(CONFIG, outputs, cube), shape)
    texts = some_texts(8)
    classes = torch.arange(len(texts)) % 3
    labels, fill = (classes.to(torch.get_default_dtype()) - 0.7, torch.nan) if regression else (classes, -100)
    loss = classified(model, texts, labels, fill)

    logits = torch.cat([twin.logits(alone(text).batch)[:1] for text in texts])
    wanted = F.mse_loss(logits[:, 0], labels) if regression else F.cross_entropy(logits, labels)
    wanted.backward()
    outputs_error = error(class_logits(model, texts), logits)
    return {"loss": error(loss, wanted), "logits": outputs_error} | gradient_errors(model, twin)


def weighted_errors(shape: Shape, several: bool) -> dict[str, float]:
    """With classes that count differently and labels that are smoothed; or several labels of each text."""
    _, model, _, twin = make_twins(lambda cube: BertForSequenceClassification(CONFIG, 3, cube), shape)
    texts, weights, share = some_texts(8), torch.tensor([0.5, 2.0, 1.25]), 0.1
    logits = torch.cat([twin.logits(alone(text).batch)[:1] for text in texts])
    classes = torch.arange(len(texts)) % 3
    if several:
        labels = (torch.arange(len(texts)).unsqueeze(1) % torch.tensor([2, 3, 5]) == 0).to(weights.dtype)
        loss = classified(model, texts, labels, torch.nan, weights=weights, smoothing=share)
        smooth = labels * (1 - share) + share / 2
        wanted = F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=weights)
    else:
        counted = float(weights[classes].sum())
        loss = classified(model, texts, classes, -100, counted, weights=weights, smoothing=share)
        wanted = F.cross_entropy(logits, classes, weights, label_smoothing=share)
    wanted.backward()
    return {"loss": error(loss, wanted)} | gradient_errors(model, twin)


def answering_errors(shape: Shape) -> dict[str, float]:
    _, model, _, twin = make_twins(lambda cube: BertForQuestionAnswering(CONFIG, cube), shape)
    texts = some_texts(8)
    spans = torch.tensor([[i % len(text.ids), len(text.ids) - 1] for i, text in enumerate(texts)])
    loss = step_loss(
        model, texts, lambda laid, part: model(laid, *laid.spread(spans[part], -100).unbind(1), len(texts))
    )

    logits = [twin.logits(alone(text).batch)[: len(text.ids)] for text in texts]
    losses = [F.cross_entropy(each.t(), span) for each, span in zip(logits, spans, strict=True)]
    wanted = torch.stack(losses).mean()
    wanted.backward()
    got = span_logits(model, texts)
    errors = {"loss": error(loss, wanted), "logits": error(torch.cat(got), torch.cat(logits))}
    # What moves the logits of all tokens alike changes no softmax over them: these gradients are 0 but for rounding.
    errors |= gradient_errors(model, twin)
    names, largest = ("answers.bias", "bert.layers.1.mlp_norm.bias"), float(twin.answers.weight.grad.abs().max())
    parameters = dict(model.named_parameters())
    return errors | {name: float(full(parameters[name].grad).abs().max()) / largest for name in names}


def tagging_errors(shape: Shape) -> dict[str, float]:
    """Some tokens have no label, so that the mean over texts would be another one than that over labels."""
    _, model, _, twin = make_twins(lambda cube: BertForTokenClassification(CONFIG, 5, cube), shape)
    texts = some_texts(8)
    labels = [(text.ids + i) % 5 for i, text in enumerate(texts)]
    for own in labels:
        own[::3] = -100
    targets = int(sum((own >= 0).sum() for own in labels))
    loss = step_loss(
        model, texts, lambda laid, part: model(laid.batch, laid.spread_tokens(labels[part], -100), targets)
    )

    logits = torch.cat([twin.logits(alone(text).batch)[: len(text.ids)] for text in texts])
    wanted = F.cross_entropy(logits, torch.from_numpy(np.concatenate(labels)))
    wanted.backward()
    said = error(torch.cat(tag_logits(model, texts)), logits)
    return {"loss": error(loss, wanted), "logits": said} | gradient_errors(model, twin)


# --- what a model says ------------------------------------------------------------------------------------------------


def said_errors(shape: Shape) -> dict[str, float]:
    _, model, single, twin = make_twins(lambda cube: BertForPreTraining(CONFIG, cube), shape)
    texts = some_texts(8)
    hidden = [gather(twin.bert(alone(text).batch), single, "z")[: len(text.ids)].detach() for text in texts]
    vectors = {
        "cls": error(sentence_vectors(model.bert, texts, "cls"), torch.stack([h[0] for h in hidden])),
        "mean": error(sentence_vectors(model.bert, texts, "mean"), torch.stack([h.mean(0) for h in hidden])),
    }
    ids, probabilities = likely_pieces(model, texts, 40)  # more than a slice of the vocabulary has on y=4
    logits = []
    for text in texts:
        if len(text.masked):
            laid = alone(text)
            rows = laid.batch.masked[: len(text.masked)]
            found = twin.masked_lm(twin.bert(laid.batch), rows, twin.bert.embeddings.tokens.weight)
            logits.append(found.detach())
    best = torch.cat(logits).softmax(1).topk(40)
    assert torch.equal(ids, best.indices)
    told = torch.cat(logits).log_softmax(1)
    # Every other place is to hold what the model guesses there.
    hidden = torch.where(torch.arange(len(told)) % 2 == 0, told.argmax(1), torch.arange(len(told)) % VOCAB)
    ends = np.cumsum([len(text.masked) for text in texts])[:-1]
    parts = np.split(hidden.numpy(), ends)
    losses, guessed = piece_losses(model, [replace(text, hidden=part) for text, part in zip(texts, parts, strict=True)])
    assert torch.equal(guessed, told.argmax(1))
    wanted = -told[torch.arange(len(told)), hidden]
    return vectors | {"probabilities": error(probabilities, best.values), "losses": error(losses, wanted)}


def all_errors(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    torch.set_default_dtype(dtype)
    found = {
        "classes": classification_errors(shape, regression=False),
        "numbers": classification_errors(shape, regression=True),
        "weighted": weighted_errors(shape, several=False),
        "labels": weighted_errors(shape, several=True),
        "answers": answering_errors(shape),
        "tags": tagging_errors(shape),
        "said": said_errors(shape),
    }
    return {f"{what}: {name}": value for what, errors in found.items() for name, value in errors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        *fast_alone((1, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1)),
        *(
            pytest.param(each, id=name_of(each), marks=pytest.mark.long(reason="2x2x2 has these axes"))
            for each in ((1, 2, 4, 1), (4, 2, 1, 1))
        ),
    ],
)
def test_packed_over_the_cube_equals_each_text_alone(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), all_errors, shape, torch.float64))
    assert value < TOLERANCE[torch.float64], name


@pytest.mark.slow
def test_in_fp32_too() -> None:
    name, value = worst(run_ranks(4, all_errors, (1, 2, 2, 1), torch.float32))
    assert value < TOLERANCE[torch.float32], name


def test_fewer_texts_than_packs() -> None:
    results = run_ranks(8, _one_text)
    assert all(torch.equal(result, results[0]) for result in results)


def _one_text() -> Tensor:
    cube = Cube(2, 2, 2)
    cube.manual_seed(0)
    model = BertForSequenceClassification(CONFIG, 2, cube)
    return class_logits(model, some_texts(1))


def test_looking_leaves_every_part_in_its_mode() -> None:
    cube = Cube.single()
    cube.manual_seed(0)
    model = BertForPreTraining(CONFIG, cube)
    model.train()
    model.bert.layers[0].eval()
    before = [module.training for module in model.modules()]
    sentence_vectors(model.bert, some_texts(2))
    assert [module.training for module in model.modules()] == before


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_laid_is_refused() -> None:
    empty = EncodedText(ids=np.empty(0, np.int64), types=np.empty(0, np.int64))
    for texts in ([], [*some_texts(2), empty]):
        with pytest.raises(ValueError, match=r"one text.*a token"):
            collate_texts(texts, Cube.single())


def test_asking_for_pieces_where_nothing_is_masked_is_refused() -> None:
    cube = Cube.single()
    cube.manual_seed(0)
    model = BertForPreTraining(CONFIG, cube)
    with pytest.raises(ValueError, match="masked place"):
        likely_pieces(model, some_texts(1), 5)
    with pytest.raises(ValueError, match="no text has a masked place"):
        piece_losses(model, some_texts(1))
    masked = [text for text in some_texts(6) if len(text.masked)]
    for k in (0, VOCAB + 1):
        with pytest.raises(ValueError, match="k must lie between 1 and the vocabulary of 67"):
            likely_pieces(model, masked, k)


def test_a_head_needs_outputs() -> None:
    with pytest.raises(ValueError, match=r"outputs.*1.*0"):
        BertForSequenceClassification(CONFIG, 0, Cube.single())
