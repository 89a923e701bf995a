"""Every layer equals its single-device twin: output, input gradient and every parameter's gradient, on real ranks."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import (
    MLP3D,
    Attention3D,
    Cube,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    LookupEmbedding3D,
    Projection3D,
    RMSNorm3D,
    SmallHead3D,
    TransformerLayer3D,
    all_reduce_replicated,
    cross_entropy,
    gather,
    shard,
)
from tests.ranks import run_ranks
from tests.single_device_reference import (
    EVERY_SHAPE,
    SHAPES_AND_TYPES,
    SMALL_SHAPES,
    TOLERANCE,
    compare,
    error,
    fast_alone,
    fused,
    gradient_errors,
    make_twins,
    ranks_of,
    sequences_of,
)
from tests.single_device_reference import worst as worst_of

Shape = tuple[int, int, int, int]
at_shapes_and_types = pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_TYPES)
# Of what a transformer's layer has in it, which the fast tier takes with copies and in fp32 too.
within_a_layer = pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        each if each.id in ("1x1x2", "2x2x2") else pytest.param(*each.values, id=each.id, marks=pytest.mark.slow)
        for each in SHAPES_AND_TYPES
    ],
)
at_small_shapes = pytest.mark.parametrize("shape", fast_alone(*SMALL_SHAPES))


def check(shape: Shape, body: object, dtype: torch.dtype = torch.float64) -> None:
    results = run_ranks(ranks_of(shape), body, shape, dtype)  # type: ignore[arg-type]
    name, value = worst_of(results)
    assert value <= TOLERANCE[dtype], f"{name} differs by {value}"


# --- activation to activation --------------------------------------------------------------------------------------


def _linear(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    errors, whole = {}, Cube(*shape)
    for face, out in (("z", "y"), ("y", "z")):
        make = partial(Linear3D, 24, 40, face=face)
        both = compare(
            lambda cube, make=make: make(cube=cube),  # type: ignore[misc]
            whole,
            rows=32,
            columns=24,
            face_in=face,  # type: ignore[arg-type]
            face_out=out,  # type: ignore[arg-type]
            dtype=dtype,
        )
        errors |= {f"{face} {name}": value for name, value in both.items()}
    return errors


@within_a_layer
def test_linear(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, _linear, dtype)


def _kept(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    return compare(
        lambda cube: Linear3D(24, 40, cube, reshard_after_forward=False, bias=False),
        shape,
        rows=32,
        columns=24,
        face_in="z",
        face_out="y",
        dtype=dtype,
    )


@at_small_shapes
def test_linear_that_keeps_what_it_gathered(shape: Shape) -> None:
    check(shape, _kept)


def _norms(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    errors, whole = {}, Cube(*shape)
    for layer in (LayerNorm3D, RMSNorm3D):
        for face in ("z", "y"):
            both = compare(
                lambda cube, layer=layer, face=face: layer(24, cube, face),  # type: ignore[misc]
                whole,
                rows=32,
                columns=24,
                face_in=face,  # type: ignore[arg-type]
                face_out=face,  # type: ignore[arg-type]
                dtype=dtype,
            )
            errors |= {f"{layer.__name__} {face} {name}": value for name, value in both.items()}
    return errors


@within_a_layer
def test_norms(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, _norms, dtype)


def _mlp(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    return compare(lambda cube: MLP3D(24, cube, 48), shape, rows=32, columns=24, face_in="z", face_out="z", dtype=dtype)


@at_small_shapes
def test_mlp(shape: Shape) -> None:
    check(shape, _mlp)


def _attention(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    errors, whole = {}, Cube(*shape)
    for backend in ("grouped", "reference"):
        for causal in (False, True):
            both = compare(
                lambda cube, b=backend, c=causal: Attention3D(32, 8, cube, c, backend=b, std=0.3),  # type: ignore[misc]
                whole,
                rows=64,
                columns=32,
                face_in="z",
                face_out="z",
                dtype=dtype,
                call=lambda layer, x, cube: layer(x, sequences_of(cube)),
            )
            errors |= {f"{backend} causal={causal} {name}": value for name, value in both.items()}
    return errors


@at_small_shapes
def test_attention(shape: Shape) -> None:
    check(shape, _attention)


def _transformer(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    errors, whole = {}, Cube(*shape)
    for norm in ("post", "pre"):
        both = compare(
            lambda cube, n=norm: TransformerLayer3D(32, 8, cube, 48, norm=n, std=0.2),  # type: ignore[misc]
            whole,
            rows=64,
            columns=32,
            face_in="z",
            face_out="z",
            dtype=dtype,
            call=lambda layer, x, cube: layer(x, sequences_of(cube)),
        )
        errors |= {f"{norm} {name}": value for name, value in both.items()}
    return errors


@at_shapes_and_types
def test_transformer_layer(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, _transformer, dtype)


# --- tokens in, losses out -----------------------------------------------------------------------------------------


class TokenModel(nn.Module):
    """Embeddings, a weight tied three times (the lookup and two projections), a vocabulary loss and a narrow head."""

    def __init__(self, vocab: int, cube: Cube) -> None:
        super().__init__()
        self.cube, self.vocab = cube, vocab
        self.tokens = Embedding3D(vocab, 16, cube, std=0.3)
        self.positions = LookupEmbedding3D(9, 16, cube, std=0.3)
        self.projection = Projection3D(16, vocab, cube, bias=True, holds_weight=False)
        self.other_projection = Projection3D(16, vocab, cube, holds_weight=False)
        self.turned = Linear3D(16, 16, cube, std=0.3)
        self.head = SmallHead3D(16, 3, cube, "y", std=0.3)
        self.head_on_z = SmallHead3D(16, 3, cube, "z", std=0.3)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Of one plane."""
        x = self.tokens(ids) + self.positions(ids % 9)
        weight, cube = self.tokens.weight, self.cube
        z, y = cube.axis("z"), cube.axis("y")
        on_y, on_z = labels.chunk(z.size)[z.index], labels.chunk(y.size)[y.index]
        first, predictions = cross_entropy(self.projection(x, weight), on_y, self.vocab, cube)
        second, _ = cross_entropy(self.other_projection(x * x, weight), on_y, self.vocab, cube)
        narrow = F.cross_entropy(self.head(self.turned(x)), on_y % 3, reduction="sum")
        narrow_z = F.cross_entropy(self.head_on_z(x), on_z % 3, reduction="sum")
        on_face_y = all_reduce_replicated(first.sum() + 0.5 * second.sum() + narrow, cube.over("data", "x", "z"))
        return on_face_y + all_reduce_replicated(narrow_z, cube.over("data", "x", "y")), predictions


def _tokens(vocab: int, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    torch.set_default_dtype(dtype)
    cube, model, _, twin = make_twins(lambda c: TokenModel(vocab, c), shape)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (64,), generator=generator)
    labels = torch.randint(0, vocab, (64,), generator=generator)
    ids[5], labels[6], labels[7] = vocab - 1, vocab - 1, -100
    labels[7] = -100
    plane = cube.shape.plane_of(cube.rank)
    own = slice(plane * 64 // cube.shape.planes, (plane + 1) * 64 // cube.shape.planes)
    # Row 7 counts for neither vocabulary loss; its label modulo 3 serves the narrow heads on both sides alike.
    loss, predictions = model(ids[own], labels[own])
    wanted, wanted_predictions = twin(ids, labels)
    loss.backward()
    wanted.backward()
    rows = wanted_predictions[own].chunk(cube.shape.z)[cube.coordinate["z"]]
    errors = {"loss": error(loss, wanted), "predictions": float((predictions != rows).sum())}
    return errors | gradient_errors(model, twin)


@pytest.mark.parametrize("vocab", [67, 9])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_token_model(shape: Shape, vocab: int) -> None:
    check(shape, partial(_tokens, vocab))


def test_cross_entropy_equals_torchs() -> None:
    cube = Cube.single()
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 0, 10, 5, 5])
    twin = logits.detach().clone().requires_grad_()
    losses, predictions = cross_entropy(logits, labels, 11, cube)
    wanted = F.cross_entropy(twin, labels, reduction="none")
    losses.sum().backward()
    wanted.sum().backward()
    assert torch.allclose(losses, wanted, atol=1e-12)
    assert torch.allclose(logits.grad, twin.grad, atol=1e-12)  # type: ignore[arg-type]
    assert torch.equal(predictions, logits.argmax(1))


def _entries_left_out(size: int) -> dict[str, float]:
    """Losses and gradients where entries are -inf: all of a slice, all of a row but the label, the label."""
    plain = Cube(1, size, 1)
    errors: dict[str, float] = {}
    for name, cube in {"eager": plain, "fused": fused(plain)}.items():
        full = torch.randn(4, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        full[0, 5:], full[1, :5], full[2, :8], full[3, 2:] = (-math.inf,) * 4
        labels = torch.tensor([1, 7, 8, 6])
        twin, own = full.clone().requires_grad_(), shard_of(full, cube)
        losses, predictions = cross_entropy(own, labels, 9, cube)
        wanted = F.cross_entropy(twin, labels, reduction="none")
        assert wanted[3] == losses[3] == math.inf
        losses[:3].sum().backward()
        wanted[:3].sum().backward()
        assert torch.equal(predictions, full.argmax(1))
        errors[f"{name} loss"] = error(losses[:3], wanted[:3])
        errors[f"{name} gradient"] = error(own.grad, shard_of(twin.grad, cube))  # type: ignore[arg-type]
    return errors


def shard_of(full: Tensor, cube: Cube) -> Tensor:
    """This rank's columns of logits, a leaf."""
    axis = cube.axis("y")
    return full.detach().chunk(axis.size, 1)[axis.index].clone().requires_grad_()


@pytest.mark.parametrize("size", [1, 2])
def test_entries_of_the_vocabulary_may_be_left_out(size: int) -> None:
    """A slice of -inf alone is no nan: the loss would depend on the cube."""
    for errors in run_ranks(size, _entries_left_out, size):
        assert all(value < 1e-12 for value in errors.values()), errors  # no nan either


def test_layer_norm_equals_torchs() -> None:
    layer = LayerNorm3D(24, Cube.single(), eps=1e-5)
    x = torch.randn(5, 24)
    assert torch.allclose(layer(x), F.layer_norm(x, (24,), eps=1e-5), atol=1e-6)


def _norm_at_mean_1000(shape: Shape) -> float:
    cube = Cube(*shape)
    x = 1000 + torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    wanted = F.layer_norm(x.double(), (64,), eps=1e-12)
    return float((gather(LayerNorm3D(64, cube)(shard(x, cube, "z")), cube, "z") - wanted).abs().max())


@pytest.mark.parametrize("shape", [*fast_alone((1, 2, 4, 1), (1, 1, 8, 1)), pytest.param((1, 1, 1, 1), id="1x1x1")])
def test_layer_norm_at_a_large_mean(shape: Shape) -> None:
    """E[x^2] - E[x]^2 errs by 0.1 here, the plain form of Chan's by 2e-4."""
    assert max(run_ranks(ranks_of(shape), _norm_at_mean_1000, shape)) <= 1e-4
