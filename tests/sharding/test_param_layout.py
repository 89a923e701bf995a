"""Initialisation that does not depend on the cube, and parameters of one's own."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d import Cube, Layout, check_parameters, clip_grad_norm_, constant, distribute, local, local_param, normal
from tensor3d.sharding.param_layout import as_parameter, copies, detached, matrix, narrow, table, vector, zeros_like
from tests.default_type import default_type
from tests.ranks import run_ranks
from tests.single_device_reference import full, name_of, ranks_of

Shape = tuple[int, int, int, int]
BOXES: list[Shape] = [(2, 2, 2, 1), (1, 8, 1, 1), (8, 1, 1, 1), (1, 3, 2, 1), (1, 2, 2, 2)]
# Several tiles of 256 with rests on both sides; an odd vocabulary; one smaller than some axes; and small ones.
WEIGHTS: tuple[tuple[tuple[int, int], Layout], ...] = (
    ((700, 300), matrix("z")),
    ((700, 300), matrix("y")),
    ((1021, 24), matrix("z")),
    ((5, 24), matrix("z")),
    ((12, 24), table("z")),
    ((3, 24), narrow("y")),
    ((7, 5), copies("y")),
)


def made(cube: Cube) -> list[nn.Parameter]:
    cube.manual_seed(20)
    return [normal(shape, layout, cube, 0.5) for shape, layout in WEIGHTS]


def _drawn(shape: Shape) -> tuple[list[float], list[tuple[int, ...]]]:
    """Distances to one device's weights, and the sizes of what was drawn."""
    draw, sizes = torch.randn, list[tuple[int, ...]]()

    def spy(*args: object, **kwargs: object) -> Tensor:
        tile: Tensor = draw(*args, **kwargs)  # type: ignore[call-overload]
        sizes.append(tuple(tile.shape))
        return tile

    cube = Cube(*shape)
    with mock.patch("torch.randn", spy):
        ours = made(cube)
    wanted = made(Cube.single())
    for parameter in ours:
        _check_likes(parameter)
    return [float((full(a) - b.detach()).abs().max()) for a, b in zip(ours, wanted, strict=True)], sizes


def _check_likes(parameter: nn.Parameter) -> None:
    """What is laid as a parameter without an operator of DTensor lies as what its operators make."""
    assert isinstance(parameter, DTensor)
    for like in (detached(parameter), zeros_like(parameter)):
        assert isinstance(like, DTensor)
        assert not like.requires_grad
        assert (like.shape, like.stride(), like.dtype) == (parameter.shape, parameter.stride(), parameter.dtype)
        assert (like.device_mesh, like.placements) == (parameter.device_mesh, parameter.placements)
        assert local(like).shape == local(parameter).shape
    assert local(detached(parameter)).data_ptr() == local(parameter).data_ptr()
    assert not local(zeros_like(parameter)).any()


@pytest.mark.parametrize("shape", BOXES, ids=name_of)
def test_the_same_seed_gives_the_same_weights_on_any_cube(shape: Shape) -> None:
    """To the bit, and without any rank making more than a tile at a time."""
    for distances, sizes in run_ranks(ranks_of(shape), _drawn, shape):
        assert distances == [0.0] * len(WEIGHTS)
        assert sizes, "the spy saw nothing"
        assert max(height for height, _ in sizes) <= 256
        assert max(width for _, width in sizes) <= 256


def _tiles_of_a_tall_matrix() -> list[tuple[int, ...]]:
    cube, draw, sizes = Cube(1, 8, 1), torch.randn, list[tuple[int, ...]]()

    def spy(size: tuple[int, int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        sizes.append(size)
        return draw(size, generator=generator, dtype=dtype)

    with mock.patch("torch.randn", spy):
        normal((1024, 256), matrix("z"), cube, 1.0)
    return sizes


def test_a_rank_draws_what_touches_its_block_alone() -> None:
    """8 ranks of 1024 rows hold 128 each: half a tile."""
    assert run_ranks(8, _tiles_of_a_tall_matrix) == [[(256, 256)]] * 8


def test_parameters_differ_and_follow_the_normal_distribution() -> None:
    cube = Cube.single()
    cube.manual_seed(4)
    first, second = (normal((700, 300), matrix("z"), cube, 0.02).detach() for _ in range(2))
    assert not torch.isclose(first, second).any(dim=1).all()
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.01
    for values in (first, second):
        assert float(values.mean()) == pytest.approx(0, abs=5 * 0.02 / 210_000**0.5)
        assert float(values.std()) == pytest.approx(0.02, rel=0.01)
        kurtosis = float((values.double() / 0.02).pow(4).mean())
        assert kurtosis == pytest.approx(3, rel=0.05)
    # Tiles have seeds of their own: none repeats another.
    tiles = normal((512, 512), matrix("z"), cube, 1.0).detach().unfold(0, 256, 256).unfold(1, 256, 256)
    assert float((torch.corrcoef(tiles.reshape(4, -1)) - torch.eye(4)).abs().max()) < 0.02
    cube.manual_seed(5)
    assert not torch.equal(normal((700, 300), matrix("z"), cube, 0.02), first)
    cube.manual_seed(4)
    assert torch.equal(normal((700, 300), matrix("z"), cube, 0.02), first)


def test_the_default_type_is_taken_and_the_values_are_the_same() -> None:
    wide, narrow_ = ([p.detach() for p in _in_type(dtype)] for dtype in (torch.float64, torch.float32))
    for a, b in zip(wide, narrow_, strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b.double())


def _in_type(dtype: torch.dtype) -> list[nn.Parameter]:
    with default_type(dtype):
        return made(Cube.single())


# --- parameters of one's own ---------------------------------------------------------------------------------------


def _distributed(shape: Shape) -> dict[str, float]:
    """`distribute` and `constant` against DTensor's own idea of where blocks lie."""
    cube, errors = Cube(*shape), {}
    for size, layout in (*WEIGHTS, ((37,), vector("y")), ((37,), vector("z")), ((2, 6, 11), Layout(sum_over=()))):
        values = torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size)
        parameter = distribute(values, layout, cube)
        errors[f"{size} {layout}"] = float((full(parameter) - values).abs().max())
        errors[f"constant {size} {layout}"] = float((full(constant(size, layout, cube, 3.0)) - 3).abs().max())
        local(parameter).data.add_(1)  # a copy: the tensor it came from belongs to the caller
        errors[f"source {size} {layout}"] = float(values.flatten()[0].abs())
    return errors


@pytest.mark.parametrize("shape", BOXES[::2], ids=name_of)
def test_distribute_and_constant(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _distributed, shape):
        assert max(errors.values()) == 0.0, errors


def _own_arithmetic(shape: Shape) -> dict[str, float]:
    """A module of a user: a gate per column on face z and a temperature that every rank applies alike."""
    cube = Cube(*shape)
    gate = distribute(torch.linspace(1, 2, 24, dtype=torch.float64), vector("z"), cube)
    temperature = distribute(torch.tensor([3.0], dtype=torch.float64), copies("z"), cube)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 24, generator=generator, dtype=torch.float64)
    rows = x.chunk(cube.shape.planes)[cube.shape.plane_of(cube.rank)]
    own = rows.chunk(cube.shape.y)[cube.coordinate["y"]].chunk(cube.shape.z, 1)[cube.coordinate["z"]]
    (own * local_param(gate, vector("z"), cube)).square().sum().backward()
    # Beside a head whose logits are copies over z, the row sums stand in for the logits.
    logits = rows.chunk(cube.shape.y)[cube.coordinate["y"]].sum(1)
    (logits / local_param(temperature, copies("z"), cube)).square().sum().backward()
    wanted_gate = 2 * x.square().sum(0) * torch.linspace(1, 2, 24, dtype=torch.float64)
    wanted_temperature = -2 * x.sum(1).square().sum() / 27
    return {
        "gate": float((full(gate.grad) - wanted_gate).abs().max()),
        "temperature": float((full(temperature.grad) - wanted_temperature).abs().max()),
    }


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 1)], ids=name_of)
def test_a_module_of_ones_own(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _own_arithmetic, shape):
        assert max(errors.values()) <= 1e-10, errors


def _plain() -> list[str]:
    cube, messages = Cube(1, 2, 1), []
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    fine = constant((4,), vector("y"), cube, 1.0)
    for check in (
        lambda: local_param(plain, vector("y"), cube),
        lambda: clip_grad_norm_([plain], 1.0, cube),
        lambda: check_parameters([fine, plain], cube),
    ):
        try:
            check()
        except ValueError as refusal:
            messages.append(str(refusal))
    check_parameters([fine], cube)
    return messages


def test_a_plain_parameter_is_refused_on_every_rank() -> None:
    results = run_ranks(2, _plain, timeout=30)
    assert all(messages == results[0] for messages in results)
    assert len(results[0]) == 3
    assert all("a parameter of shape (3,) is a plain tensor on 1x2x1" in message for message in results[0])


def test_a_plain_parameter_serves_on_one_device() -> None:
    cube, plain = Cube.single(), nn.Parameter(torch.ones(3))
    local_param(plain, vector("y"), cube).sum().backward()
    assert torch.equal(plain.grad, torch.ones(3))  # type: ignore[arg-type]
    assert float(clip_grad_norm_([plain], 10.0, cube)) == pytest.approx(3**0.5)
    assert not isinstance(as_parameter(torch.ones(2), (2,), vector("y"), cube), DTensor)


@pytest.mark.parametrize("blank", [False, True])
def test_layers_are_not_made_on_the_meta_device(blank: bool) -> None:
    cube = Cube.single()
    cube.manual_seed(0)
    with torch.device("meta"), cube.skip_init() if blank else nullcontext():
        for make in (lambda: normal((4, 8), matrix("z"), cube, 1.0), lambda: constant((4,), vector("z"), cube, 0.0)):
            with pytest.raises(ValueError, match=r"is made on the meta device.*skip_init"):
                make()
        assert constant((4,), vector("z"), Cube.single("meta"), 0.0).is_meta  # which its cube is for
