"""The gradient norm of the logical model: the same number on any cube, in one collective."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, clip_grad_norm_, clip_gradients, constant, distribute, local, normal
from tensor3d.sharding.param_layout import copies, matrix, narrow, table, vector
from tests.dtensors import filled_like
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, make_twins, ranks_of
from tests.tied_weight_model import Tied

Shape = tuple[int, int, int, int]
BOXES: list[Shape] = [(2, 1, 2, 1), (2, 2, 2, 1), (1, 8, 1, 1), (8, 1, 1, 1), (1, 2, 2, 2)]


def _clipped(shape: Shape) -> dict[str, float]:
    """Norms and clipped gradients against torch's on plain tensors; a vocabulary of 13 leaves uneven blocks."""
    torch.set_default_dtype(torch.float64)
    cube, model, _, twin = make_twins(Tied, shape)
    model(0).backward()
    twin(0).backward()
    raw = [p.grad.clone() for p in twin.parameters() if p.grad is not None]
    errors = {}
    for max_norm in (math.inf, 1e6, 0.37):  # measure only; no need to clip; clip
        with cube.traffic.counting() as count:
            norm = clip_grad_norm_(model.parameters(), max_norm, cube)
        copy = cube.over("x", "y", "z")
        assert dict(count.calls) == {(copy.name, "all-reduce"): 1}
        assert count.total_bytes == 2 * (copy.size - 1) * 8, "one number"
        wanted = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        assert norm.shape == ()
        errors[f"norm at {max_norm}"] = error(norm, wanted)
        gradients = zip(model.named_parameters(), twin.parameters(), strict=True)
        errors |= {f"{name} at {max_norm}": error(full(p.grad), full(q.grad)) for (name, p), q in gradients}
    clipped = [p.grad for p in twin.parameters() if p.grad is not None]
    assert not torch.allclose(clipped[0], raw[0]), "nothing was clipped, so nothing is shown"
    return errors


@pytest.mark.parametrize("shape", fast_alone(*BOXES))
def test_equals_torchs_on_one_device(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _clipped, shape):
        assert max(errors.values()) <= 1e-10, errors


def _blocks(shape: Shape) -> tuple[list[float], float, list[int]]:
    """Every kind of layout alone, a rank without any block, no gradients at all, and one gradient missing; with numbers
    that go along, and without."""
    cube, norms = Cube(*shape), []
    sizes = {
        matrix("z"): (5, 6),  # 5 rows over y=4: two each, then one, then an empty block
        matrix("y"): (5, 8),
        vector("y"): (5,),
        table("z"): (3, 6),
        narrow("y"): (3, 8),
        copies("y"): (3,),
    }
    parameters = []
    for layout, size in sizes.items():
        parameter = distribute(torch.zeros(size), layout, cube)
        parameter.grad = filled_like(parameter, 2.0)
        for along in (None, torch.zeros(1)):
            norm = clip_gradients([parameter], math.inf, cube, along=along).total
            norms.append(float(norm) / (2 * math.sqrt(torch.Size(size).numel())))
        parameters.append(parameter)
    counted = [local(p.grad).numel() for p in parameters[:1] if p.grad is not None]
    parameters.append(constant((4,), copies("z"), cube, 1.0))  # without a gradient
    nothing = float(clip_grad_norm_(parameters[-1:], 1.0, cube)) + float(clip_grad_norm_(iter(()), 1.0, cube))
    total = float(clip_grad_norm_(iter(parameters), math.inf, cube))
    elements = sum(torch.Size(size).numel() for size in sizes.values())
    return [*norms, total / (2 * math.sqrt(elements))], nothing, counted


@pytest.mark.parametrize("shape", fast_alone((1, 4, 2, 1), (1, 4, 1, 2)))
def test_each_block_counts_once(shape: Shape) -> None:
    results = run_ranks(8, _blocks, shape)
    for norms, nothing, _ in results:
        assert norms == pytest.approx([1.0] * 13, rel=1e-6)
        assert nothing == 0.0
    assert 0 in [counted[0] for _, _, counted in results], "no rank was left without a block"


def _refusals() -> list[str]:
    cube, messages = Cube(2, 1, 1), []
    parameter = normal((4, 4), matrix("z"), cube, 1.0)
    parameter.grad = filled_like(parameter, 1.0)
    for max_norm in (0.0, -1.0, math.nan, -math.inf):
        try:
            clip_grad_norm_([parameter], max_norm, cube)
        except ValueError as refusal:
            messages.append(str(refusal))
    assert torch.equal(local(parameter.grad), torch.ones(2, 4))
    return messages


def test_a_norm_that_is_not_above_0_is_refused_on_every_rank() -> None:
    results = run_ranks(2, _refusals, timeout=30)
    for messages in results:
        assert [message.split("Got ")[1] for message in messages] == ["0.0.", "-1.0.", "nan.", "-inf."]
        assert "max_norm must be above 0 (inf: measure only)" in messages[0]


def _not_finite() -> list[Tensor]:
    cube = Cube(1, 2, 1)
    parameter = constant((4,), vector("y"), cube, 1.0)
    parameter.grad = filled_like(parameter, 1.0)
    if cube.rank == 1:
        local(parameter.grad)[0] = math.nan
    return [clip_grad_norm_([parameter], 1.0, cube)]


def test_every_rank_sees_what_is_not_finite() -> None:
    """A step is skipped by all or by none."""
    assert all(bool(norm.isnan()) for (norm,) in run_ranks(2, _not_finite))


def _overflow(bad: int, value: float) -> list[tuple[float, bool, float]]:
    """Rank `bad` alone has a gradient that is not finite, in a copy that no norm counts; numbers go along."""
    cube = Cube(1, 2, 2, 2)
    vector_ = constant((8,), copies("z"), cube, 1.0)
    weight = normal((8, 8), matrix("z"), cube, 1.0)
    found = []
    for broken in (False, True):
        for parameter in (vector_, weight):
            parameter.grad = filled_like(parameter, 1.0)
        if broken and cube.rank == bad:
            local(vector_.grad)[3] = value
        along = torch.tensor([1.0, float(cube.rank)])
        with cube.traffic.counting() as count:
            norm = clip_gradients([vector_, weight], 1.0, cube, along=along)
        assert count.total_calls == 1
        assert along.tolist() == [8.0, 28.0]
        parts = [name for name, part in zip(("vector", "weight"), norm.parts, strict=True) if not part.isfinite()]
        assert parts == (["vector"] if broken and cube.rank == bad else [])
        found.append((float(norm.found_inf), bool(norm.total.isfinite()), float(norm.total)))
    return [(inf, finite, total if finite else 0.0) for inf, finite, total in found]


@pytest.mark.parametrize("bad", [0, 7])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_overflows_on_one_rank_is_known_to_all(bad: int, value: float) -> None:
    for good, broken in run_ranks(8, _overflow, bad, value):
        assert good == (0.0, True, pytest.approx(math.sqrt(72)))
        assert broken == (1.0, False, 0.0)


def test_the_loss_scale_is_taken_out() -> None:
    cube = Cube.single()
    parameter = constant((4,), copies("z"), cube, 0.0)
    for max_norm, wanted in ((100.0, 3.0), (1.0, 0.5)):
        parameter.grad = torch.full((4,), 3.0 * 1024)
        norm = clip_gradients([parameter], max_norm, cube, loss_scale=torch.tensor(1024.0))
        assert float(norm.total) == 6.0
        assert local(parameter.grad).tolist() == pytest.approx([wanted] * 4, rel=1e-6)


def test_one_parameter_alone_is_clipped() -> None:
    """As torch's function does; its rows, through which a tensor can be gone, have no gradient."""
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.full((2, 3), 2.0)
    norm = clip_grad_norm_(weight, 0.5, Cube.single())
    assert (float(norm), float(weight.grad.norm())) == pytest.approx((24**0.5, 0.5))
