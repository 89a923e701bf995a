"""Steps of both optimisers: AdamW is torch's, a skipped step never was, and the host is not waited for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, local
from tensor3d.optim import AdamW, Lamb, StableAdamW, decay_groups
from tests.optim.zoo import (
    BETAS,
    EPS,
    KINDS,
    NoWaiting,
    bits,
    first_values,
    give,
    gradients_of,
    make,
    rate,
    run,
    same,
    spoiled,
)
from tests.ranks import run_ranks
from tests.single_device_reference import error, full
from tests.tied_weight_model import Tied

Shape = tuple[int, int, int, int]
kinds = pytest.mark.parametrize("kind", KINDS)
WAYS = [("adamw", False), ("lamb", False), ("lamb", True), ("stable_adamw", False), ("stable_adamw", True)]
ways = pytest.mark.parametrize(("kind", "regions"), WAYS)


# AdamW


def _against_torch() -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube, zoo, optimizer = make("adamw", (2, 2, 2, 1))
    twins = {name: nn.Parameter(value) for name, value in first_values().items()}
    groups = decay_groups(nn.ParameterDict(twins), 0.1)
    twin = torch.optim.AdamW(groups, lr=rate(0), betas=BETAS, eps=EPS)
    with cube.traffic.counting() as count:
        run(optimizer, zoo, cube, range(8))
    assert count.total_calls == 0, "nothing is to be sent"
    for step in range(8):
        for name, gradient in gradients_of(step).items():
            twins[name].grad = gradient
        for group in twin.param_groups:
            group["lr"] = rate(step)
        twin.step()
    errors = {name: error(full(p), twins[name], name) for name, p in zoo.named_parameters()}
    for name, parameter in zoo.named_parameters():
        wanted, got = twin.state[twins[name]], optimizer.state[parameter]
        errors |= {f"{name}.{key}": error(full(got[key]), full(wanted[key])) for key in wanted}
    return errors


def test_adamw_is_torchs_on_one_device() -> None:
    for errors in run_ranks(8, _against_torch):
        assert max(errors.values()) <= 1e-14, errors


# Steps that are skipped


def _skipping(kind: str, shape: Shape, regions: bool) -> dict[str, bool]:
    """Steps 0, 1 and 2 with skipped ones before, between and after, and the same steps alone."""
    cube, zoo, optimizer = make(kind, shape, regions=regions)
    _, plain_zoo, plain = make(kind, shape, regions=regions)
    done, skipped = (torch.tensor(value, dtype=torch.float32) for value in (0.0, 1.0))
    found = {}

    def skip(when: str) -> None:
        before = bits(zoo, optimizer)
        give(zoo, cube, spoiled(7))
        optimizer.found_inf = skipped
        optimizer.step()
        found[f"{when}: no bit has changed"] = same(bits(zoo, optimizer), before)

    skip("before the first step")
    for step in range(3):
        optimizer.found_inf = done
        run(optimizer, zoo, cube, range(step, step + 1))
        run(plain, plain_zoo, cube, range(step, step + 1))  # which knows nothing of found_inf
        found[f"step {step} is as if none had been skipped"] = same(bits(zoo, optimizer), bits(plain_zoo, plain))
        skip(f"after step {step}")
    optimizer.found_inf = done
    give(zoo, cube, spoiled(7))
    optimizer.step()
    found["the gradients would have done harm"] = not all(local(p).isfinite().all() for p in zoo.parameters())
    return found


def _both_skipping() -> dict[str, bool]:
    return {f"{way}, {what}": ok for way in WAYS for what, ok in _skipping(way[0], (2, 2, 1, 1), way[1]).items()}


def test_a_skipped_step_never_was_on_ranks() -> None:
    results = run_ranks(4, _both_skipping)
    found = {what: all(result[what] for result in results if "harm" not in what) for what in results[0]}
    assert all(found.values()), found
    for way in WAYS:
        assert any(result[f"{way}, the gradients would have done harm"] for result in results)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_skipped_step_never_was(kind: str, regions: bool, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if dtype == torch.float64:
        request.getfixturevalue("fp64")
    found = _skipping(kind, (1, 1, 1, 1), regions)
    assert all(found.values()), found


@ways
def test_the_host_waits_for_nothing(kind: str, regions: bool) -> None:
    cube, zoo, optimizer = make(kind, (1, 1, 1, 1), regions=regions)
    optimizer.found_inf = torch.tensor(0.0)
    give(zoo, cube, gradients_of(0))
    with NoWaiting():
        optimizer.step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        float(optimizer.found_inf)


# What torch's optimisers promise


@ways
def test_parameters_without_a_gradient_stay(kind: str, regions: bool) -> None:
    cube, zoo, optimizer = make(kind, (1, 1, 1, 1), regions=regions)
    give(zoo, cube, gradients_of(0))
    zoo.up.grad = None
    before = zoo.up.detach().clone()
    optimizer.step()
    assert torch.equal(zoo.up, before)
    assert (float(optimizer.state[zoo.up]["step"]), float(optimizer.state[zoo.down]["step"])) == (0.0, 1.0)
    assert not torch.equal(zoo.down, first_values()["down"])
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()  # nothing at all
    assert float(optimizer.state[zoo.down]["step"]) == 1.0


@kinds
def test_a_closure_is_called_with_gradients_enabled(kind: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = KINDS[kind]([weight], Cube.single(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert float(weight.detach().max()) < 1.0


@kinds
def test_autograd_sees_that_weights_changed(kind: str) -> None:
    """A backward pass through weights of before the step would be wrong: it must raise, as with torch's optimisers."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = KINDS[kind]([weight], Cube.single(), lr=0.1)
    product = (weight * weight).sum()
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def _versions() -> list[tuple[int, int]]:
    versions = []
    for kind in KINDS:
        cube, zoo, optimizer = make(kind, (2, 1, 1, 1))
        before = zoo.up._version
        run(optimizer, zoo, cube, range(1))
        versions.append((before, zoo.up._version))
    return versions


def test_the_version_of_a_dtensor_moves() -> None:
    for versions in run_ranks(2, _versions):
        assert all(after > before for before, after in versions)


@kinds
def test_groups_of_several_types(kind: str) -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = KINDS[kind]([first, second], Cube.single(), lr=0.5)
    for parameter in (first, second):
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    assert first.dtype == torch.float32
    assert torch.allclose(first.double(), second)
    assert not torch.equal(second, torch.ones(2, 2, dtype=torch.float64))


@kinds
def test_a_copy_goes_its_own_way(kind: str) -> None:
    cube, zoo, optimizer = make(kind, (1, 1, 1, 1))
    run(optimizer, zoo, cube, range(2))
    twin_zoo, twin = copy.deepcopy((zoo, optimizer))
    assert twin.cube is cube
    before = bits(zoo, optimizer)
    run(twin, twin_zoo, cube, range(2, 4))
    assert same(bits(zoo, optimizer), before)
    run(optimizer, zoo, cube, range(2, 4))
    assert same(bits(zoo, optimizer), bits(twin_zoo, twin))


# Refusals


@kinds
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr must be at least 0 and finite in float32\. Got -1\.0"),
        ({"lr": float("nan")}, "lr must be at least 0 and finite"),
        ({"weight_decay": -0.1}, r"weight_decay.*\b0.*-0\.1"),
        ({"eps": 0.0}, r"eps.*\b0.*\b0/\b0\b.*\b0\.0"),
        ({"eps": 1e-40}, r"eps.*from 1\.18e-38 on.*\b1e-40"),
        ({"eps": 1e39}, r"eps.*finite in float32.*\b1e\+39"),
        ({"lr": 1e39}, r"lr.*finite in float32.*\b1e\+39"),
        ({"betas": (0.9, 1.0)}, r"betas.*\b1.*\(0\.9, 1\.0\)"),
        ({"betas": (0.9,)}, "betas must be two rates"),
    ],
)
def test_options_out_of_range_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KINDS[kind]([nn.Parameter(torch.ones(2))], Cube.single(), **({"lr": 0.1} | options))
    with pytest.raises(ValueError, match=message):
        KINDS[kind]([{"params": [nn.Parameter(torch.ones(2))], **options}], Cube.single(), lr=0.1)


@kinds
@pytest.mark.parametrize("found_inf", [torch.zeros((), dtype=torch.float64), torch.zeros(2)])
def test_what_no_kernel_could_read_is_refused(kind: str, found_inf: Tensor) -> None:
    _, _, optimizer = make(kind, (1, 1, 1, 1))
    optimizer.found_inf = found_inf
    with pytest.raises(ValueError, match=r"found_inf.*fp32"):
        optimizer.step()


def _refusals() -> None:
    cube = Cube(2, 1, 1)
    cube.manual_seed(0)
    for kind in KINDS.values():
        with pytest.raises(ValueError, match=r"parameter.*\(4,\).*2x1x1"):
            kind([nn.Parameter(torch.ones(4))], cube, lr=0.1)
        model = Tied(cube)
        optimizer = kind(model.parameters(), cube, lr=0.1)
        with cube.no_sync():
            model(0).backward()
        with pytest.raises(ValueError, match=r"held back by Cube\.no_sync"):
            optimizer.step()
        assert all(float(optimizer.state[p]["step"]) == 0 for p in model.parameters())
        model(1).backward()
        optimizer.step()


def test_what_would_part_the_ranks_is_refused_on_all() -> None:
    """Plain parameters, and gradients that are not summed yet."""
    run_ranks(2, _refusals, timeout=60)


# Groups


def test_vectors_do_not_decay() -> None:
    model = Tied(Cube.single())
    matrices, vectors = decay_groups(model, 0.3)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {names[id(p)] for p in matrices["params"]} == {"tokens.weight", "dense.weight", "head.weight"}
    assert all("bias" in names[id(p)] or names[id(p)].startswith("on_") for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(names)


def test_what_is_not_trained_is_in_no_group() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    (group,) = decay_groups(model, 0.1)
    assert [id(p) for p in group["params"]] == [id(model.weight)]
    with pytest.raises(ValueError, match=r"no parameter.*gradient"):
        decay_groups(model.requires_grad_(False), 0.1)
    with pytest.raises(ValueError, match=r"weight_decay.*0.*-1"):
        decay_groups(model, -1.0)


@pytest.mark.parametrize("kind", [AdamW, Lamb, StableAdamW])
def test_a_model_that_is_converted_under_its_optimiser(kind: Any) -> None:
    """AdamW's kernel knows one type alone; the others step in any."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = kind([weight], Cube.single(), lr=0.1)
    weight.data, weight.grad = weight.data.bfloat16(), torch.ones(4, 4, dtype=torch.bfloat16)
    if kind is AdamW:
        with pytest.raises(
            ValueError, match=r"is of torch\.bfloat16, and its moments are of torch\.float32.*Convert first"
        ):
            optimizer.step()
    else:
        optimizer.step()
        assert (weight != 1).all()
