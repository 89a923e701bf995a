"""Overlap: the same bits, bytes and memory for backward with and without, and weights gathered ahead in every order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.adamw import adamw

from models.bert import BertForPreTraining
from tensor3d import Cube, Embedding3D, ExecutionPolicy, Linear3D, local, matmul, shard
from tensor3d.cost_model.comm_volume import lookup_way
from tensor3d.optim import AdamW
from tests.dtensors import filled_like
from tests.models.toy import Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes
from tests.single_device_reference import fast_alone, full, name_of, ranks_of

STEPS = 3


def _train(cube: Cube, options: dict[str, Any]) -> dict[str, Any]:
    """A few steps of a small BERT, the second in two micro-batches; everything that overlap could change."""
    cube.manual_seed(0)
    config = toy_config(67, layers=3, dropout=0.1)
    model = BertForPreTraining(config, cube, **options)
    optimizer = AdamW(model.parameters(), cube, lr=1e-2)
    packs = toy_packs(config.vocab, 16)
    batch, (targets, sequences) = lay(packs, cube), totals(packs)
    losses, received = [], []
    for step in range(STEPS):
        with cube.traffic.counting() as traffic:
            for _ in range(1 + (step == 1)):
                loss = model(batch, targets, sequences).loss
                loss.backward()
                losses.append(loss.item())
        received.append((dict(traffic.received), dict(traffic.calls)))
        optimizer.step()
        optimizer.zero_grad()
    kept = saved_bytes(lambda: model(batch, targets, sequences).loss)
    weights = [local(parameter).detach().clone() for parameter in model.parameters()]
    return {"losses": losses, "received": received, "kept": kept, "weights": weights}


def _both(shape: Shape, options: dict[str, Any]) -> tuple[int, int]:
    """Asserts that nothing differs, and gives what was gathered ahead: used and in vain."""
    cube = Cube(*shape)
    off = _train(Cube(*shape, speed=ExecutionPolicy(overlap=False)), options)
    on = _train(cube, options)
    for name in ("losses", "received", "kept"):
        assert on[name] == off[name], f"{name} differ: {on[name]} with overlap, {off[name]} without"
    assert all(map(torch.equal, on["weights"], off["weights"])), "weights differ"
    return cube.ahead.used, cube.ahead.dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        *fast_alone((2, 1, 2, 1), (2, 2, 2, 1), (2, 1, 2, 2)),
        *(
            pytest.param(each, id=name_of(each), marks=pytest.mark.long(reason="2x1x2 and 2x2x2 have these axes"))
            for each in ((4, 1, 2, 1), (1, 2, 2, 2))
        ),
    ],
)
def test_overlap_changes_no_bit_and_no_byte(shape: Shape) -> None:
    for used, dropped in run_ranks(ranks_of(shape), _both, shape, {}):
        # Uses of a forward pass: 4 products in 3 layers, 3 in the heads, and the embedding; all but one are ahead.
        # In backward those of the layers: weights of heads stay for it. From the second backward pass on; one pass more
        # is a forward pass alone.
        ahead = 4 * 3 + 3
        assert used == ((ahead + 4 * 3) * STEPS + ahead if shape[0] > 1 else 0)
        assert dropped == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "layer"},
        {"recompute": "attention"},
        {"reshard_after_forward": False},
        {"recompute": "layer", "reshard_after_forward": False},
    ],
)
def test_overlap_changes_nothing_where_things_are_kept_or_computed_again(options: dict[str, Any]) -> None:
    for used, dropped in run_ranks(2, _both, (2, 1, 1, 1), options):
        assert used > 0
        assert dropped == 0


class _Branches(nn.Module):
    """A layer, and then one of two others."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.first, self.left, self.right = (Linear3D(8, 8, cube, face) for face in ("z", "y", "y"))

    def forward(self, x: torch.Tensor, *, right: bool) -> torch.Tensor:
        return (self.right if right else self.left)(self.first(x))


def _changed_order() -> tuple[list[bool], int]:
    cube = Cube(2, 1, 1)
    cube.manual_seed(0)
    model = _Branches(cube)
    twin_cube = Cube.single()
    twin_cube.manual_seed(0)
    twin = _Branches(twin_cube)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    same = []
    for right in (False, False, True, False):
        for each, where in ((model, cube), (twin, twin_cube)):
            each.zero_grad()
            each(shard(x, where, "z"), right=right).square().sum().backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        got = [(full(ours.grad), full(its.grad)) for ours, its in pairs if its.grad is not None]
        same.append(len(got) == 4 and all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in got))
    return same, cube.ahead.dropped


def test_another_order_is_correct() -> None:
    for same, dropped in run_ranks(2, _changed_order):
        assert all(same)
        assert dropped > 0, "nothing was gathered in vain, so that nothing was tried"


def _edit_block(weight: nn.Parameter) -> None:
    local(weight).mul_(2)


def _edit_weight(weight: nn.Parameter) -> None:
    weight.mul_(2)


EDITS: dict[str, Callable[[nn.Parameter], None]] = {
    "its block": _edit_block,
    "the weight": _edit_weight,
}


def _changed_weight(edit: str) -> tuple[float, int]:
    """A weight that changes between its gather ahead and its use."""
    cube = Cube(2, 1, 1)
    one, two = Linear3D(8, 8, cube, "z", bias=False), Linear3D(8, 8, cube, "y", bias=False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for step in range(3):
        between = one(x)
        if step == 2:
            with torch.no_grad():
                EDITS[edit](two.weight)
        result = two(between)
        if step == 2:
            wanted = x @ full(one.weight).t() @ full(two.weight).t()
            return float((result - wanted).detach().abs().max()), cube.ahead.dropped
        result.sum().backward()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("edit", EDITS)
def test_a_weight_that_has_changed_is_gathered_again(edit: str) -> None:
    for difference, dropped in run_ranks(2, _changed_weight, edit):
        assert difference < 1e-6
        assert dropped == 1


def _scale_together(weights: list[nn.Parameter]) -> None:
    torch._foreach_mul_(weights, 2.0)


def _scale_data(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data.mul_(2)


def _scale_blocks(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        local(weight).data.mul_(2)


def _step(weights: list[nn.Parameter]) -> None:
    """The operator of a fused optimiser alone: of a whole one's step the cube tells the counters."""
    with torch.no_grad():
        gradients, *moments = ([filled_like(weight, 1.0) for weight in weights] for _ in range(3))
        steps = [torch.ones(()) for _ in weights]
        options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "maximize": False}
        adamw(weights, gradients, *moments, [], steps, fused=True, lr=0.5, weight_decay=0.01, **options)


UNSEEN: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "foreach": _scale_together,
    "data": _scale_data,
    "blocks": _scale_blocks,
    "fused": _step,
}


def _edited(moment: str, edit: str, overlap: bool) -> list[list[float]]:
    """Weights that change between passes, in ways that no counter shows: what one pass after another gives."""
    cube = Cube(2, 1, 1, speed=ExecutionPolicy(overlap=overlap))
    cube.manual_seed(0)
    first, second = ([Linear3D(8, 8, cube, face, bias=False) for face in ("z", "y")] for _ in range(2))
    weights = [layer.weight for layer in (*first, *second)]
    drawn = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for _ in range(3):
        x = drawn.clone().requires_grad_()

        def change(now: str) -> None:
            if now == moment:
                with torch.no_grad():
                    UNSEEN[edit](weights)

        abandoned = first[1](first[0](x)).sum()
        change("after a forward pass that is abandoned")
        result = first[1](first[0](x))
        change("between two models")
        result = result * second[1](second[0](x)) + 0 * abandoned.detach()
        change("between forward and backward pass")
        result.sum().backward()
        assert x.grad is not None
        results += [result.flatten().tolist(), x.grad.flatten().tolist()]
        for weight in weights:
            weight.grad = None
    assert (cube.ahead.used > 0) == overlap
    return results


def _edited_both(moment: str) -> dict[str, bool]:
    return {edit: _edited(moment, edit, overlap=True) == _edited(moment, edit, overlap=False) for edit in UNSEEN}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("after a forward pass that is abandoned", marks=pytest.mark.slow),
        pytest.param("between two models", marks=pytest.mark.slow),
        "between forward and backward pass",
    ],
)
@pytest.mark.slow
def test_weights_may_change_between_passes(moment: str) -> None:
    for same in run_ranks(2, _edited_both, moment):
        assert same == dict.fromkeys(UNSEEN, True)


def _edited_before_a_lookup(overlap: bool) -> list[list[float]]:
    """The weight behind a lookup for which no weight travels changes, unseen, right before the lookup."""
    cube = Cube(2, 1, 1, speed=ExecutionPolicy(overlap=overlap))
    cube.manual_seed(0)
    first, table, second = Linear3D(8, 8, cube), Embedding3D(1000, 8, cube), Linear3D(8, 8, cube)
    assert lookup_way(cube.shape, 4, 1000, 8, 4, 4) == "rows"
    results = []
    for _ in range(3):
        one = first(torch.ones(4, 8))
        second.weight.data.mul_(2)
        two = second(table(torch.arange(4)))
        (one.sum() + two.sum()).backward()
        results.append(two.flatten().tolist())
    assert (cube.ahead.used > 0) == overlap, "its gather goes under the lookup"
    return results


def _edited_before_a_lookup_both() -> bool:
    return _edited_before_a_lookup(overlap=True) == _edited_before_a_lookup(overlap=False)


def test_nothing_is_gathered_ahead_of_a_lookup_before_it() -> None:
    assert run_ranks(2, _edited_before_a_lookup_both) == [True, True]


def _gathers_beside_kept_weights() -> list[list[int]]:
    """Of each pass, how many weights were gathered in its backward when each layer, from the last, had its gradient."""
    cube = Cube(2, 1, 1)
    layers = [Linear3D(8, 8, cube, face) for face in ("z", "y", "z", "y")]
    passes = []
    for number in range(4):
        for layer in layers[1:] if number == 1 else ():
            layer.reshard_after_forward = "input"
        x, found = torch.randn(4, 8, requires_grad=True), []
        seen = lambda gradient: found.append(count.calls["x", "all-gather"])  # noqa: B023, E731
        hidden = [x]
        for layer in layers:
            hidden[-1].register_hook(seen)
            hidden.append(layer(hidden[-1]))
        with cube.traffic.counting() as count:
            hidden[-1].sum().backward()
        passes.append(found)
    return [*passes, [cube.ahead.dropped]]


def test_nothing_is_gathered_while_kept_weights_have_their_turn() -> None:
    """It would lie beside them. One layer before its use, under the last product with a kept weight, it is. In the
    first pass in which they are kept nobody goes by the order of the one before, in vain."""
    for passes in run_ranks(2, _gathers_beside_kept_weights):
        assert passes == [[1, 2, 3, 4], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0]]


def _left_behind() -> list[tuple[int, ...]]:
    """What is alive of a model that is gone, and what is on its way after a pass; before and after `forget`."""
    cube = Cube(2, 1, 1)
    layers = [Linear3D(8, 8, cube, face, bias=False) for face in ("z", "y", "z")]
    counts = []
    for needs_gradient in (True, False, True, True):
        layers[2](layers[1](layers[0](torch.randn(4, 8, requires_grad=needs_gradient)))).sum().backward()
        counts.append((cube.ahead.used, cube.ahead.dropped))
    alive = [weakref.ref(tensor) for layer in layers for tensor in (layer.weight, layer.weight.grad)]
    del layers
    gc.collect()
    counts.append((sum(reference() is not None for reference in alive),))
    cube.ahead.forget()
    counts.append((sum(reference() is not None for reference in alive),))
    known = weakref.ref(cube)
    del cube
    return [*counts, (int(known() is not None),)]


def test_what_is_held_and_let_go() -> None:
    # Ahead: two of three weights in each direction. An input that needs no gradient spares the last gather of the
    # backward pass: it is not issued in the pass after, and in vain where it is not asked for.
    for passes in run_ranks(2, _left_behind):
        assert passes[:4] == [(0, 0), (3, 1), (6, 1), (10, 1)]
        assert passes[4:] == [(6,), (0,), (0,)], "weights and gradients; the cube is no cycle"


def _dead_weights() -> int:
    """A head that is replaced, and still alive on one rank alone."""
    cube = Cube(2, 1, 1)
    trunk, kept = Linear3D(8, 8, cube, "z"), []
    x = torch.randn(4, 8)
    for _ in range(4):
        head = Linear3D(8, 8, cube, "y")
        if cube.rank == 0:
            kept.append(head)
        for _ in range(2):
            head(trunk(x)).sum().backward()
        del head
    return cube.ahead.dropped


def test_ranks_agree_whatever_is_alive_on_each() -> None:
    first, second = run_ranks(2, _dead_weights)
    assert first == second > 0


def _without_training() -> tuple[int, int]:
    cube = Cube(2, 1, 1)
    layers = [Linear3D(8, 8, cube, face) for face in ("z", "y", "z")]
    x = torch.randn(4, 8)
    for _ in range(3):
        with torch.no_grad(), cube.traffic.counting() as traffic:
            h = x
            for layer in layers:
                h = matmul(h, layer.weight, cube, layer.face)
    return cube.ahead.used, sum(traffic.calls.values())


def test_nothing_is_gathered_ahead_where_no_backward_follows() -> None:
    """The end of such a pass shows nowhere, and what is gathered across it would be one collective more."""
    assert run_ranks(2, _without_training) == [(0, 3)] * 2
