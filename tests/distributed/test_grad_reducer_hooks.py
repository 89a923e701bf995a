"""Hooks on parameters, and optimisers of torch: both see gradients when they are whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, Linear3D, MixedPrecisionPolicy, local
from tensor3d.ops.fp8 import Scaling
from tensor3d.optim import AdamW, Lamb
from tensor3d.sharding.matmul import HandedOn
from tests.dtensors import begin_adam
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, make_twins, ranks_of
from tests.small_buckets import small_buckets
from tests.tied_weight_model import Tied, Trial, truth

Shape = tuple[int, int, int, int]
SHAPES = [*fast_alone((1, 1, 2, 2), (2, 2, 2, 1), (1, 2, 2, 2)), pytest.param((1, 1, 1, 1), id="1x1x1")]

# --- hooks on parameters -------------------------------------------------------------------------------------------


def seen(t: Trial) -> float:
    """A hook on the gradient sees the sum, once a step, tied or not; one on its arrival finds it in `.grad`."""
    told: dict[str, list[Tensor]] = {name: [] for name, _ in t.model.named_parameters()}
    arrived = dict.fromkeys(told, 0.0)
    for name, parameter in t.model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: told[name].append(full(gradient)))

        def check(parameter: Tensor, name: str = name) -> None:
            arrived[name] += float(full(parameter.grad).abs().sum())

        parameter.register_post_accumulate_grad_hook(check)
    t.model(0).backward()
    wanted = truth(t.weights, 0)
    assert all(len(each) == 1 for each in told.values()), {name: len(each) for name, each in told.items()}
    errors = [error(told[name][0], wanted[name]) for name in told]
    errors += [abs(arrived[name] / float(wanted[name].abs().sum()) - 1) for name in told]
    return max(*errors, t.error(0))


def seen_once_when_accumulated(t: Trial) -> float:
    told: list[Tensor] = []
    for parameter in (t.model.tokens.weight, t.model.on_y.bias, t.model.head.bias):  # type: ignore[union-attr]
        parameter.register_post_accumulate_grad_hook(lambda parameter: told.append(full(parameter.grad)))
    for number in range(3):
        with t.cube.no_sync() if number < 2 else nullcontext():
            t.model(number).backward()
    wanted = [truth(t.weights, number) for number in range(3)]
    assert len(told) == 3
    names = {
        tuple(each.shape): name
        for name, each in wanted[0].items()
        if name in ("tokens.weight", "on_y.bias", "head.bias")
    }
    errors = [error(each, sum(w[names[tuple(each.shape)]] for w in wanted)) for each in told]  # type: ignore[arg-type]
    return max(*errors, t.error(0, 1, 2))


def changed(t: Trial) -> float:
    """What a hook returns takes the gradient's place, for the next hook too; what was in `.grad` stays."""
    # Arithmetic on a DTensor takes a while where its placements are new: a table that is used three times, and a bias.
    hooked = {"tokens.weight", "on_y.bias"}
    for parameter in (t.model.tokens.weight, t.model.on_y.bias):
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_hook(lambda gradient: local(gradient) * 3 if not t.cube.mesh else gradient * 3)
    t.model(0).backward()
    t.model(0).backward()
    wanted = truth(t.weights, 0)
    times = {name: 12.0 if name in hooked else 2.0 for name in wanted}
    errors = [error(full(p.grad), times[name] * wanted[name], name) for name, p in t.model.named_parameters()]
    t.model.zero_grad()
    return max(errors)


def removed(t: Trial) -> float:
    calls: list[str] = []
    handles = [p.register_hook(lambda gradient: calls.append("hook")) for p in t.model.parameters()]
    bias = t.model.on_z.bias
    once = bias.register_post_accumulate_grad_hook(lambda parameter: (calls.append("once"), once.remove()))  # type: ignore[func-returns-value]
    t.model(0).backward()
    assert calls.count("once") == 1
    for handle in handles:
        handle.remove()
    calls.clear()
    t.model(1).backward()
    assert not calls
    return t.error(0, 1)


def after_a_failed_pass(t: Trial) -> float:
    calls: list[int] = []
    for parameter in t.model.parameters():
        parameter.register_hook(lambda gradient: calls.append(1))
    t.fail(0)
    assert not calls
    t.model(1).backward()
    assert len(calls) == len(list(t.model.parameters()))
    return t.error(1)


def beside_arithmetic_on_the_parameter(t: Trial) -> float:
    """Part of a gradient comes by autograd itself: a hook sees the whole."""
    bias, told = t.model.on_y.bias, []
    bias.register_hook(lambda gradient: (told.append(full(gradient)), 2 * gradient)[1])
    loss = t.model(0)
    direct = bias.sum() if t.cube.mesh is None else bias.full_tensor().sum()  # type: ignore[operator]
    (loss + direct).backward()
    wanted = truth(t.weights, 0)["on_y.bias"] + 1
    found = max(error(told[0], wanted), error(full(bias.grad), 2 * wanted))
    t.model.zero_grad()
    return found


HOOKS = (seen, seen_once_when_accumulated, changed, removed, after_a_failed_pass, beside_arithmetic_on_the_parameter)


def _hooks(shape: Shape) -> dict[str, float]:
    found = {}
    for scenario in HOOKS:
        trial = Trial(shape)
        found[scenario.__name__] = scenario(trial)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_hooks_on_parameters_are_called_when_the_sum_is_there(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _hooks, shape):
        assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("fp8", [None, "rowwise"], ids=["undivided", "as on several ranks"])
def test_hooks_are_not_called_where_no_gradient_is_computed(fp8: Scaling | None) -> None:
    """Of a layer whose result nothing reads, behind which the residual goes on; of one that is frozen before backward;
    in a pass that fails, too. Then they are there again."""
    dtype = torch.bfloat16 if fp8 else torch.float32
    cube = Cube.single(precision=MixedPrecisionPolicy(compute=dtype, fp8=fp8))
    cube.manual_seed(0)
    unread, frozen, calls = Linear3D(4, 4, cube), Linear3D(4, 4, cube), list[str]()
    for name, parameter in [*unread.named_parameters(), *frozen.named_parameters()]:
        parameter.register_hook(lambda gradient, name=name: calls.append(f"{name} {tuple(gradient.shape)}"))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: calls.append(f"{name} is there"))

    def passed(x: Tensor) -> Tensor:
        frozen.requires_grad_(True)
        with HandedOn(x, cube) as residual:
            unread(x)
        result = frozen(residual.tensor)
        frozen.requires_grad_(False)
        return result.sum()

    def fail(gradient: Tensor) -> None:
        raise OSError

    passed(torch.ones(2, 4, dtype=dtype, requires_grad=True)).backward()
    x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    x.register_hook(fail)
    with suppress(OSError):
        passed(x).backward()
    assert calls == []
    unread(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert sorted(calls) == ["bias (4,)", "bias is there", "weight (4, 4)", "weight is there"]


@small_buckets()
def _in_backward(shape: Shape) -> list[list[float]]:
    """Losses of steps after, and in, backward: each parameter has an optimiser of its own."""
    torch.set_default_dtype(torch.float64)
    found = []
    for inside in (False, True):
        cube, model, _, _ = make_twins(Tied, shape)
        optimizers = {p: torch.optim.AdamW([p], lr=0.05, fused=True) for p in model.parameters()}

        def step(parameter: Tensor, optimizers: Any = optimizers) -> None:
            begin_adam(optimizers[parameter])
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if inside:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)
        losses = []
        for number in range(4):
            with cube.no_sync():
                model(number).backward()
            loss = model(number)
            loss.backward()
            losses.append(loss.item())
            for parameter in () if inside else model.parameters():
                step(parameter)
        found.append(losses)
    return found


@pytest.mark.parametrize("shape", fast_alone((1, 1, 2, 2), (2, 2, 2, 1)))
def test_an_optimiser_in_backward_learns_what_one_behind_it_learns(shape: Shape) -> None:
    for behind, inside in run_ranks(ranks_of(shape), _in_backward, shape):
        assert len(set(behind)) == 4
        assert inside == behind


# --- optimisers of torch, while gradients are held back ------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """One of the user's own, which knows nothing of cubes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local(parameter).data.sub_(local(parameter.grad), alpha=0.1)


def _steps() -> None:
    cube = Cube(2, 1, 1)
    cube.manual_seed(0)
    model = Tied(cube)
    before = {kind: _optimizer(kind, model, cube) for kind in KINDS}  # as most are: made before the first pass
    for kind in KINDS:
        for made, closed in ((False, False), (True, False), (False, True)):
            model.zero_grad()
            optimizer = _optimizer(kind, model, cube) if made else before[kind]
            values = [local(parameter).clone() for parameter in model.parameters()]

            def hold() -> float:
                with cube.no_sync():
                    model(0).backward()
                return 0.0

            if not closed:
                hold()
            with pytest.raises(ValueError, match=r"held back by Cube\.no_sync.*last micro-batch"):
                optimizer.step(hold if closed else None)
            changed = [not torch.equal(a, local(b)) for a, b in zip(values, model.parameters(), strict=True)]
            assert closed or not any(changed), kind
            with cube.no_sync(), pytest.raises(ValueError, match=r"held back by Cube\.no_sync"):
                optimizer.step()
            model(1).backward()
            if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                begin_adam(optimizer)
            optimizer.step()
    with cube.no_sync():
        model(0).backward()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=1.0).step()  # of another model: nothing of it waits
    assert other.sum() == 0
    cube.ledger.discard()
    before["AdamW"].step()


KINDS = ("AdamW", "Adam", "RMSprop", "Plain", "ours", "Lamb", "scheduled")


def _optimizer(kind: str, model: nn.Module, cube: Cube) -> Any:
    parameters = list(model.parameters())
    if kind == "ours":
        return AdamW(parameters, cube, lr=0.01)
    if kind == "Lamb":
        return Lamb(parameters, cube, lr=0.01)
    if kind == "Plain":
        return Plain(parameters)
    if kind == "RMSprop":
        return torch.optim.RMSprop(parameters, lr=0.01, foreach=False)
    made = getattr(torch.optim, "AdamW" if kind == "scheduled" else kind)(parameters, lr=0.01, fused=True)
    if kind == "scheduled":
        torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)
    return made


@pytest.mark.slow
def test_no_optimiser_steps_while_gradients_are_held_back() -> None:
    run_ranks(2, _steps)


def _forgotten() -> list[int]:
    """Guards of cubes that are gone: none is left behind."""
    from torch.optim import optimizer

    found = [len(optimizer._global_optimizer_pre_hooks)]
    for _ in range(2):
        trial = Trial((2, 1, 1, 1))
        with suppress(KeyError), trial.cube.no_sync():
            trial.model(0).backward()
            raise KeyError
        found.append(len(optimizer._global_optimizer_pre_hooks))
        trial.model(1).backward()
        found.append(len(optimizer._global_optimizer_pre_hooks))
    return found


def test_the_guard_of_steps_goes_when_the_gradients_have_arrived() -> None:
    for counts in run_ranks(2, _forgotten):
        assert [count - counts[0] for count in counts] == [0, 1, 0, 1, 0]
