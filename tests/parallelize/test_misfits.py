"""Modules that look like what a kind takes and are not: other code, tied, on a cube already; and what layers tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, Linear3D
from tensor3d.parallelize import parallelize, rules
from tensor3d.sharding.param_layout import vector
from tests.parallelize.foreign import Scale, TinyRMSNorm
from tests.ranks import run_ranks

SINGLE = Cube.single()
Z = rules.linear("z")


def said(act: Any) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def patched(module: nn.Module) -> nn.Module:
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    module.forward = twice
    return module


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.Linear(4, 4), Z),
        (lambda: nn.Linear(4, 4), rules.projection()),
        (lambda: nn.LayerNorm(4), rules.norm("z")),
        (lambda: nn.Embedding(4, 4), rules.embedding()),
        (nn.Dropout, rules.dropout()),
    ],
)
def test_a_forward_that_was_set_on_the_module_is_no_plain_layers(make: Any, kind: Any) -> None:
    parallelize(nn.Sequential(make()), SINGLE, {"0": kind})
    with pytest.raises(ValueError, match=r"whose forward is its own.*rules\.replace\(build\)"):
        parallelize(nn.Sequential(patched(make())), SINGLE, {"0": kind})


class Tied(nn.Module):
    """A head with the embedding's weight, which is found under a third name as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.output_weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * self.embed.embedding_dim**0.5)


def test_a_tied_head_that_no_pattern_names_is_found() -> None:
    with pytest.raises(ValueError, match=r"'head' \(Linear: weight\).*rules\.projection\(\)") as caught:
        parallelize(Tied(), SINGLE, {"embed": rules.embedding()})
    assert "output_weight" not in str(caught.value)
    parallelize(Tied(), SINGLE, {"embed": rules.embedding(), "head": rules.projection()})


def test_a_tied_weight_that_a_builder_leaves_out_is_named() -> None:
    plan = {"embed": rules.replace(lambda *_: nn.Embedding(8, 4)), "head": rules.replace(lambda *_: nn.Linear(4, 8))}
    with pytest.raises(ValueError, match=r"'output_weight' of '' \(Tied\).*workshop\.parameter"):
        parallelize(Tied(), SINGLE, plan)


# --- on a cube already ----------------------------------------------------------------------------------------------


def _twice(shape: tuple[int, int, int] | None) -> list[str]:
    cube = SINGLE if shape is None else Cube(*shape)
    mixed = nn.Sequential(Linear3D(8, 8, cube, "z"), nn.Linear(8, 8))
    wrapped = parallelize(nn.Sequential(Scale(8)), cube, {"0": rules.wrapped({"gamma": vector("z")})})
    took = {"0": rules.replace(lambda module, *_: copy.deepcopy(module)), "1": rules.linear("y")}
    return [
        said(lambda: parallelize(mixed, cube, {"1": rules.linear("y")})),
        said(lambda: parallelize(wrapped, cube, {})),
        said(lambda: parallelize(mixed, cube, took)),
    ]


def _check_twice(found: list[str]) -> None:
    assert "'0' (Linear3D: weight, bias). It is on a cube already" in found[0]
    assert "It is on a cube already" in found[1]
    assert found[2] == "nothing was raised"


def _from_the_cube() -> list[str]:
    cube = Cube(1, 2, 1)
    scale = parallelize(Scale(8), cube, {"": rules.wrapped({"gamma": vector("z")})})
    plain = Scale(8)
    plain.gamma = scale.gamma
    wrapped = said(lambda: parallelize(plain, cube, {"": rules.wrapped({"gamma": vector("z")})}))
    return [*_twice((1, 2, 1)), wrapped]


def test_what_is_on_a_cube_already_is_said_to_be() -> None:
    _check_twice(_twice(None))
    results = run_ranks(2, _from_the_cube)
    assert results[0] == results[1]
    _check_twice(results[0][:3])
    assert "has a parameter of shape (8,) that is on a cube already" in results[0][3]


# --- settings -------------------------------------------------------------------------------------------------------


def test_layers_tell_what_code_around_them_asks_torchs_for() -> None:
    made: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
        "linear": (nn.Linear(4, 8), Z, {"in_features": 4, "out_features": 8}),
        "head": (nn.Linear(4, 2), rules.head("z"), {"in_features": 4, "out_features": 2}),
        "projection": (nn.Linear(4, 7), rules.projection(), {"in_features": 4, "out_features": 7}),
        "embedding": (
            nn.Embedding(6, 4, padding_idx=2),
            rules.embedding(),
            {"num_embeddings": 6, "embedding_dim": 4, "padding_idx": 2},
        ),
        "table": (nn.Embedding(6, 4), rules.table(), {"num_embeddings": 6, "embedding_dim": 4, "padding_idx": None}),
        "layer norm": (
            nn.LayerNorm(4, eps=1e-3),
            rules.norm("z"),
            {"normalized_shape": (4,), "eps": 1e-3, "elementwise_affine": True},
        ),
        "rms norm": (nn.RMSNorm(4, eps=1e-3), rules.norm("z"), {"normalized_shape": (4,), "eps": 1e-3}),
        "own rms norm": (TinyRMSNorm(4), rules.norm("z"), {"variance_epsilon": 1e-5}),
        "dropout": (nn.Dropout(0.5), rules.dropout(), {"p": 0.5, "inplace": False}),
    }
    for name, (module, kind, settings) in made.items():
        layer = parallelize(module, SINGLE, {"": kind})
        assert {each: getattr(layer, each) for each in settings} == settings, name


# --- dropout --------------------------------------------------------------------------------------------------------


class OwnDropout(nn.Dropout):
    """By its name alone."""


class Noise(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_a_dropout_of_all_is_possible() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    model = parallelize(nn.Sequential(nn.Dropout(1.0)), SINGLE, {})
    model(x).sum().backward()
    assert model(x).sum() == 0
    assert x.grad is not None
    assert x.grad.sum() == 0
    assert torch.equal(model.eval()(x), x)


def test_subclasses_of_dropout_are_dropouts_unless_their_code_is_their_own() -> None:
    model = parallelize(nn.Sequential(OwnDropout(0.25), Noise(0.25), nn.AlphaDropout(0.25)), SINGLE, {})
    assert [type(each).__name__ for each in model] == ["Dropout3D", "Noise", "AlphaDropout"]


def _unseeded() -> dict[str, str]:
    cube = Cube(1, 2, 1)
    dropouts = (nn.Dropout, OwnDropout, Noise, nn.AlphaDropout)
    found = {
        each.__name__: said(lambda each=each: parallelize(nn.Sequential(each(0.1)), cube, {})) for each in dropouts
    }
    off = said(lambda: parallelize(nn.Sequential(nn.AlphaDropout(0.0), nn.Dropout(1.0)), cube, {}))
    cube.manual_seed(1)
    seeded = said(lambda: parallelize(nn.Sequential(*(each(0.1) for each in dropouts)), cube, {}))
    return found | {"off": off, "seeded": seeded}


def test_each_dropout_needs_streams_that_differ_by_rank() -> None:
    found = run_ranks(2, _unseeded)[0]
    assert (found.pop("off"), found.pop("seeded")) == ("nothing was raised", "nothing was raised")
    assert len(found) == 4
    assert all("cube.manual_seed" in message for message in found.values()), found


@pytest.mark.parametrize(
    "module", [nn.Softmin(-1), nn.FeatureAlphaDropout(), nn.PixelShuffle(2), nn.Upsample(4), nn.CosineSimilarity()]
)
def test_more_of_torchs_modules_that_mix_are_asked_about(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="which mixes rows or columns"):
        parallelize(nn.Sequential(module), SINGLE, {})
