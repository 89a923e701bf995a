"""Vectors of texts, of each pooling and behind dense layers, on a cube: against plain PyTorch on each text alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert.embedding import Activation, BertForSentenceEmbedding, DenseConfig, Pooling
from models.bert.tasks import sentence_vectors
from models.bert.text_batches import EncodedText, collate_texts
from tensor3d import Cube, gather
from tests.default_type import default_type
from tests.models.toy import toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import TOLERANCE, error, gradient_errors, make_twins, ranks_of, worst

Shape = tuple[int, int, int, int]
VOCAB = 67
CONFIG = toy_config(VOCAB)
POOLED: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "cls": lambda h: h[0],
    "mean": lambda h: h.mean(0),
    "max": lambda h: h.amax(0),
    "mean_sqrt_len": lambda h: h.sum(0) / len(h) ** 0.5,
    "last": lambda h: h[-1],
    "weightedmean": lambda h: sum((i + 1) * row for i, row in enumerate(h)) / sum(range(1, len(h) + 1)),  # type: ignore
}
ACTIVATED: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda v: v,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
LAYERS = (
    (),
    (DenseConfig(outputs=64), DenseConfig(outputs=7, bias=False, activation="gelu")),  # 7 divides by no axis
)


def some_texts() -> list[EncodedText]:
    """Very different lengths, the shortest of them one token."""
    random = np.random.default_rng(4)
    lengths = (1, 24, 5, 3, 17, 9, 1, 24)
    return [EncodedText(ids=random.integers(5, VOCAB, each), types=np.zeros(each, dtype=np.int64)) for each in lengths]


def errors(shape: Shape, pooling: Pooling, dense: tuple[DenseConfig, ...]) -> dict[str, float]:
    """Of a step of two micro-batches, and of what is said of all texts."""
    _, model, single, twin = make_twins(
        lambda cube: BertForSentenceEmbedding(CONFIG, cube, pooling=pooling, dense=dense), shape
    )
    texts = some_texts()
    weights = torch.randn(8, model.width, generator=torch.Generator().manual_seed(1))
    for part in (slice(5), slice(5, None)):
        (model(collate_texts(texts[part], model.cube)) * weights[part]).sum().backward()
    hidden = [gather(twin.bert(collate_texts([text], single).batch), single, "z")[: len(text.ids)] for text in texts]
    vectors = torch.stack([POOLED[pooling](h) for h in hidden])
    for layer in twin.dense:
        vectors = ACTIVATED[layer.config.activation](F.linear(vectors, layer.weight, layer.bias))
    (vectors * weights).sum().backward()
    said = sentence_vectors(model.bert, texts, pooling, model.dense)
    return {"said": error(said, vectors)} | gradient_errors(model, twin)


def all_errors(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    with default_type(dtype):
        return {
            f"{pooling}, {len(dense)} layers: {name}": value
            for number, pooling in enumerate(get_args(Pooling))
            for dense in (LAYERS if pooling == "last" else LAYERS[number % 2 :][:1])
            for name, value in errors(shape, pooling, dense).items()
        }


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_vectors_and_gradients_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    name, value = worst([all_errors((1, 1, 1, 1), dtype)])
    assert value < TOLERANCE[dtype], name


@pytest.mark.slow
def test_they_are_the_same_on_a_cube_and_on_copies() -> None:
    for shape, dtype in (((2, 2, 2, 1), torch.float64), ((2, 1, 2, 2), torch.float32)):
        name, value = worst(run_ranks(ranks_of(shape), all_errors, shape, dtype))
        assert value < TOLERANCE[dtype], (shape, name)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_are_those_of_torch(activation: Activation) -> None:
    cube = Cube.single()
    cube.manual_seed(3)
    dense = DenseConfig(outputs=5, bias=False, activation=activation)
    layer = BertForSentenceEmbedding(CONFIG, cube, dense=(dense,)).dense[0]
    vectors = torch.randn(3, CONFIG.hidden)
    with torch.autocast("cpu", torch.bfloat16):  # they are in fp32, as those before them
        made = layer(vectors)
    torch.testing.assert_close(made, ACTIVATED[activation](vectors @ layer.weight.t()), atol=1e-6, rtol=1e-6)
    assert "64 -> 5" in repr(layer)


def test_dense_layers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outputs of a dense layer must be at least 1\. Got 0"):
        DenseConfig(outputs=0)
    with pytest.raises(ValueError, match=r"activation must be one of identity, tanh, .*Got 'mish'"):
        DenseConfig(outputs=1, activation="mish")  # type: ignore[arg-type]
