"""Copies of a parameter are the same bits on all ranks: made so by what the library gives, and compared where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import (
    Cube,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    check_copies,
    checkpoint,
    init_parameter,
    local,
    logical_block,
)
from tests.ranks import run_ranks
from tests.single_device_reference import full, ranks_of

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 2, 1)]


class Model(nn.Module):
    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.tokens = Embedding3D(13, 8, cube)
        self.up, self.norm = Linear3D(8, 12, cube), LayerNorm3D(8, cube)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x)).square().sum()


# --- initialisation ------------------------------------------------------------------------------------------------

FILLS: dict[str, Callable[[Tensor], Any]] = {
    "tokens.weight": nn.init.xavier_uniform_,
    "up.weight": nn.init.orthogonal_,
    "up.bias": lambda whole: whole.uniform_(-1, 1),
    "norm.weight": lambda whole: nn.init.trunc_normal_(whole, mean=1.0, std=0.1),
    "norm.bias": lambda whole: whole.copy_(torch.randn(8)),
}


def _filled(shape: Shape) -> dict[str, Tensor]:
    cube = Cube(*shape)
    cube.manual_seed(5)
    model = Model(cube)
    before = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        version = parameter._version
        init_parameter(parameter, FILLS[name], cube)
        assert parameter._version > version
        local(parameter).data.add_(logical_block(parameter, lambda whole: whole.normal_(std=0.1), cube))
    assert torch.equal(torch.get_rng_state(), before), "dropout's stream was used"
    with cube.skip_init():
        init_parameter(model.up.weight, nn.init.zeros_, cube)
    check_copies(dict(model.named_parameters()), cube)
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def test_what_fills_a_whole_tensor_fills_it_alike_on_every_cube() -> None:
    alone = _filled((1, 1, 1, 1))
    assert all(len(torch.unique(values)) == values.numel() for values in alone.values()), "no blocks repeat"
    for shape in SHAPES:
        for found in run_ranks(ranks_of(shape), _filled, shape):
            assert all(torch.equal(found[name], values) for name, values in alone.items())


# --- comparison ----------------------------------------------------------------------------------------------------


def init(model: Model) -> None:
    nn.init.normal_(local(model.up.weight))


def noise(model: Model) -> None:
    local(model.up.weight).add_(torch.randn_like(local(model.up.weight)))


def one_bit(model: Model) -> None:
    block = local(model.up.weight).view(-1)
    block[-1:].view(torch.int32).bitwise_xor_(torch.tensor([int(model.tokens_rank)], dtype=torch.int32))  # type: ignore[arg-type]


def on_one_rank_alone(model: Model) -> None:
    if model.tokens_rank:
        local(model.up.weight).mul_(2)


def vector(model: Model) -> None:
    local(model.norm.bias).copy_(torch.randn_like(local(model.norm.bias)))


CHANGES: list[tuple[Shape, Callable[[Model], None], str]] = [
    ((1, 1, 1, 2), init, "up.weight"),
    ((1, 1, 1, 2), noise, "up.weight"),
    ((1, 1, 1, 2), one_bit, "up.weight"),
    ((1, 1, 1, 2), on_one_rank_alone, "up.weight"),
    ((2, 1, 1, 1), vector, "norm.bias"),
    ((1, 2, 1, 1), vector, "norm.bias"),
]


@torch.no_grad()
def _change(change: Callable[[Model], None], model: Model, cube: Cube) -> None:
    model.tokens_rank = cube.rank  # type: ignore[assignment]
    change(model)


def _told(shape: Shape, change: Callable[[Model], None], folder: Path) -> list[str]:
    """By a first backward pass, by a comparison, and by a save."""
    cube = Cube(*shape)
    cube.manual_seed(0)
    model = Model(cube)
    _change(change, model, cube)
    x, found = torch.ones(4 // shape[1], 8), []
    actions: list[Callable[[], Any]] = [
        lambda: model(x).backward(),
        lambda: check_copies(dict(model.named_parameters()), cube),
        lambda: checkpoint.save(folder, 1, model, torch.optim.SGD(model.parameters()), cube, {}),
    ]
    for action in actions:
        with pytest.raises(ValueError, match=r"copies of .* on ranks 0 and 1 differ.*init_parameter") as caught:
            action()
        found.append(str(caught.value))
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


@pytest.mark.parametrize(("shape", "change", "name"), CHANGES)
def test_copies_that_differ_are_refused_by_name(
    shape: Shape, change: Callable[[Model], None], name: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, _told, shape, change, tmp_path)
    assert first == second
    for message in first:
        assert f"copies of {name} on" in message.replace("model.", "")


def _later() -> None:
    """A first pass compares each parameter that comes up, later ones do not; what is no copy may differ."""
    cube = Cube(2, 1, 1)
    cube.manual_seed(0)
    model = Model(cube)
    _change(init, model, cube)  # each rank has its own rows of it
    model(torch.ones(4, 8)).backward()
    _change(vector, model, cube)
    model(torch.ones(4, 8)).backward()
    with pytest.raises(ValueError, match=r"copies of norm.bias"):
        check_copies(dict(model.named_parameters()), cube)


def test_what_differs_by_right_is_not_refused() -> None:
    run_ranks(2, _later)


def _replaced() -> list[str]:
    cube = Cube(1, 1, 1, data=2)
    changes: list[Callable[[Model], Model]] = [lambda model: model, copy.deepcopy]
    told = []
    for change in changes:
        model, x = change(Model(cube)), torch.ones(4, 8)
        model(x.to(model.up.weight.dtype)).backward()
        for layer in (model.up, model.norm):
            twin: nn.Module = Model(cube).up if layer is model.up else Model(cube).norm
            layer.weight.data = twin.weight.data
            with pytest.raises(ValueError, match=r"of shape .* was replaced .*copy_") as refused:
                layer(x.to(layer.weight.dtype))
            told.append(str(refused.value))
            layer.load_state_dict(twin.state_dict(), assign=True)
            layer(x)
    return told


def test_data_that_is_replaced_where_no_block_is_is_refused() -> None:
    first, second = run_ranks(2, _replaced)
    assert first == second
    assert len(first) == 4
