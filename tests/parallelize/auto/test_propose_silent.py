"""Code that would give other numbers on a cube without an error: `propose_plan` leaves it open."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube
from tensor3d.parallelize import parallelize, rules
from tensor3d.parallelize.auto.propose import propose_plan
from tests.parallelize.foreign import HIDDEN
from tests.parallelize.stacks import Stack, hidden, linear, open_at, spelled

SIZE, UNKNOWN = "computes with a size read off an activation", "does what propose_plan cannot follow"


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda h: torch.fft.fft(h).real, f"{UNKNOWN} (fft_fft)"),
        (lambda h: h.tril(), f"{UNKNOWN} (tril)"),
        (lambda h: h.rot90(), f"{UNKNOWN} (rot90)"),
        (lambda h: h.renorm(2, 0, 1.0), f"{UNKNOWN} (renorm)"),
        (lambda h: F.avg_pool1d(h, 3, 1, 1), f"{UNKNOWN} (avg_pool1d)"),
        (lambda h: F.local_response_norm(h, 3), f"{UNKNOWN} (local_response_norm)"),
        (lambda h: torch.special.softmax(h, -1), "reduces over columns (softmax)"),
        (lambda h: h.cummax(-1).values, "reduces over columns (cummax)"),
        (lambda h: h.logcumsumexp(-1), "reduces over columns (logcumsumexp)"),
        (lambda h: h.fliplr(), "takes rows by their place (fliplr)"),
        (lambda h: h.unsqueeze(-1), "gives columns another shape (unsqueeze to (2, 16, 16, 1))"),
        (lambda h: h.mT, "turns columns into rows (mT)"),
        (lambda h: F.gumbel_softmax(h), "draws random numbers (gumbel_softmax)"),
        (lambda h: F.dropout(h, 0.5), "draws random numbers (dropout)"),
        (lambda h: h if torch.equal(h, h) else -h, "decides by values (equal)"),
        (lambda h: h * h.shape[-1] ** -0.5, f"{SIZE} (pow)"),
        (lambda h: h / h.numel(), f"{SIZE} (div)"),
        (lambda h: h * h.size(1), f"{SIZE} (mul)"),
        (lambda h: h / len(h), f"{SIZE} (len)"),
        (lambda h: h / math.sqrt(h.size(-1)), f"{SIZE} (float)"),
        (lambda h: h * (1 / h.nelement()), f"{SIZE} (rtruediv)"),
        (lambda h: h / math.prod(h.shape[:-1]), f"{SIZE} (mul)"),
        (lambda h: h * torch.tensor(h.shape[1]), f"{SIZE} (tensor)"),
        (lambda h: h if h.shape[0] < 3 else -h, f"{SIZE} (lt)"),
    ],
)
def test_what_is_not_known_to_be_right_on_a_block_is_open(after: Any, message: str) -> None:
    x = hidden(2, HIDDEN)  # as many rows as columns: that they are turned shows in no shape
    proposal = propose_plan(Stack(lambda model, x: after(model.a(x)), a=linear()), x)
    assert message in open_at(proposal, "the module itself")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda h, v, u: h * v.softmax(0),
            "what is made of the parameter v (mul), .*: it reduces over columns (softmax)",
        ),
        (
            lambda h, v, u: h * (v / v.norm())[None],
            "what is made of the parameter v (mul), .*: it reduces over columns",
        ),
        (
            lambda h, v, u: h + (v - v.mean()).exp(),
            "what is made of the parameter v (add), .*: it reduces over columns",
        ),
        (lambda h, v, u: h * v.flip(0).view(1, -1), "parameter v (mul), .*: it takes columns by their place (flip)"),
        (lambda h, v, u: h + v.cumsum(0), "parameter v (add), .*: it reduces over columns (cumsum)"),
        (lambda h, v, u: h * (v * torch.linspace(0, 1, 16)), "it lets it meet a tensor of shape (16,) made here (mul)"),
        (lambda h, v, u: h * (v * u), "computes one with another (mul): let the activation meet one after the other"),
        (
            lambda h, v, u: h * filled(v.clone(), lambda t: t.__setitem__(0, 0.0)),
            "what is made of the parameter v (mul), .*: it writes at places (setitem)",
        ),
        (
            lambda h, v, u: h * filled(v.clone(), lambda t: t.view(1, -1)[:, 3:].zero_()),
            "what is made of the parameter v (mul), .*: it takes columns by their place ([:, 3:])",
        ),
        (lambda h, v, u: h + (v if v.sum() > 0 else -v), "decides by values of the parameter v (bool)"),
        (lambda h, v, u: h * v * float(v.max()), "decides by values of the parameter v (float)"),
        (lambda h, v, u: h * v if v[0].item() else h, "decides by values of the parameter v (item)"),
        (lambda h, v, u: h * (v / v.shape[0]), "computes with a size read off a parameter (div)"),
        (lambda h, v, u: h * (v * len(v)), "computes with a size read off a parameter (len)"),
    ],
)
def test_what_is_made_of_a_parameter_otherwise_than_element_by_element_is_open(use: Any, message: str) -> None:
    """Of its block a rank would make something else."""
    model = Stack(lambda model, x: use(model.a(x), model.v, model.u), a=linear())
    model.v, model.u = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(HIDDEN))
    points = propose_plan(model, hidden()).unresolved
    assert [each for each in points if re.search(re.escape(message).replace(r"\.\*", ".*"), each)], points


def test_a_parameter_element_by_element_is_not_open() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        model.v[:3].contiguous().to(model.v)  # gives the same tensor back, and writes into none
        return model.a(x) * (1 + model.v.exp()).clamp(max=2)[None] + model.v.view(-1)

    model = Stack(forward, a=linear())
    model.v = nn.Parameter(torch.ones(HIDDEN))
    blocks = nn.ModuleList([model])
    proposal = propose_plan(Stack(lambda model, x: model.blocks[0](x), blocks=blocks), hidden())
    assert not proposal.unresolved


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda model, h: h[None] - h[:, None], "lets rows meet one another (sub to (16, 16, 16))"),
        (lambda model, h: h.unsqueeze(0) * h.unsqueeze(1), "lets rows meet one another (mul to (16, 16, 16))"),
        (lambda model, h: torch.where(h > 0)[0], "decides by values (where)"),
        (
            lambda model, h: torch.vmap(lambda row: row / row.sum())(h),
            "returns a tensor of shape (16, 16) made here, or",
        ),
        (lambda model, h: h.reshape(-1, 16).relu(), "names sizes (reshape to (16, 16))"),
        (lambda model, h: h.expand(16, 16) + 1, "names sizes (expand to (16, 16))"),
    ],
)
def test_what_gives_other_rows_on_a_block_is_open(after: Any, message: str) -> None:
    model = Stack(lambda model, x: after(model, model.a(x)), a=linear())
    assert message in open_at(propose_plan(model, torch.randn(16, HIDDEN)), "the module itself")


def filled(tensor: Tensor, fill: Any) -> Tensor:
    fill(tensor)
    return tensor


def scale(vector: nn.Parameter | None = None) -> Stack:
    made = Stack(lambda model, x: x * model.v)
    made.v = nn.Parameter(torch.linspace(0.5, 2, HIDDEN)) if vector is None else vector
    return made


def test_a_vector_outside_of_its_module_is_open() -> None:
    model = Stack(lambda model, x: model.a(x) * model.scale.v, a=linear(), scale=scale())
    point = open_at(propose_plan(model, hidden()), "scale")
    assert "has a v that an activation meets outside of its forward (mul), where it is no plain tensor" in point


def test_a_vector_of_two_modules_is_planned_in_both() -> None:
    first = scale()
    model = Stack(lambda model, x: model.t(model.s(model.a(x))), a=linear(), s=first, t=scale(first.v))
    wrapped = {name: line for name, line in spelled(propose_plan(model, hidden())).items() if name in "st"}
    assert wrapped == dict.fromkeys("st", 'wrapped({"v": vector("y")})')
    x = hidden().flatten(0, 1)
    on_cube = parallelize(model, Cube.single(), propose_plan(model, x).settled())
    torch.testing.assert_close(on_cube(x), model(x))


def test_the_bias_of_a_layer_outside_of_it_is_open() -> None:
    model = Stack(lambda model, x: model.a(x) + model.a.bias, a=linear())
    point = open_at(propose_plan(model, hidden()), "a")
    assert "has a bias that an activation meets outside of its forward (add), where it is no plain tensor" in point


def test_sizes_that_only_shape_a_tensor_are_not_open() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.a(x)
        batch, sequence, _ = h.shape
        assert h.shape == x.shape
        assert type(copy.deepcopy(sequence)) is int
        rows = torch.relu(h).reshape(batch * sequence, h.size(-1)).view(*h.shape[:-1], -1)
        return 1 - 2 ** rows.reshape(x.shape).to(x.dtype)

    sizes = [each for each in propose_plan(Stack(forward, a=linear()), hidden()).unresolved if SIZE in each]
    assert not sizes


def test_sizes_of_what_a_head_gives_are_the_wholes() -> None:
    model = Stack(lambda model, x: model.a(x) * model.a(x).shape[-1] ** -0.5, a=linear(HIDDEN, 3))
    assert propose_plan(model, hidden()).settled() == {"a": rules.head("z")}


def test_positions_that_forward_counts_are_open() -> None:
    def counted(model: Any, ids: Tensor) -> Tensor:
        return model.words(ids) + model.places(torch.arange(ids.shape[1]).expand_as(ids))

    def summed(model: Any, ids: Tensor) -> Tensor:
        return model.words(ids) + model.places(ids.ne(0).cumsum(1))

    def passed(model: Any, ids: Tensor) -> Tensor:
        return model.words(ids.long()) + model.places(ids.view(*ids.shape).clamp(min=1))

    words, places = nn.Embedding(9, HIDDEN), nn.Embedding(9, HIDDEN)
    for forward in (counted, summed):
        model = Stack(forward, words=words, places=places)
        proposal = propose_plan(model, torch.ones(2, 5, dtype=torch.long))
        assert "Make them an argument, and pass `packs.positions`" in open_at(proposal, "places")
        assert "argument" not in next(line.why for line in proposal.lines if line.pattern == "places")
    assert not propose_plan(Stack(passed, words=words, places=places), torch.ones(2, 5, dtype=torch.int32)).unresolved


@pytest.mark.parametrize("mixing", [nn.AvgPool1d(3, 1, 1), nn.MaxPool1d(3, 1, 1), nn.Softmin(-1), nn.Softmax(1)])
def test_what_mixes_is_kept_only_on_what_is_whole(mixing: nn.Module) -> None:
    model = Stack(lambda model, x: model.b(model.mix(model.a(x))), a=linear(), b=linear(), mix=mixing)
    proposal = propose_plan(model, hidden())
    assert open_at(proposal, "mix")
    with pytest.raises(ValueError, match="mix"):
        parallelize(model, Cube.single(), proposal.plan)


def test_a_softmax_over_the_outputs_of_a_head_is_kept() -> None:
    for mixing in (nn.Softmax(-1), nn.Softmin(-1)):
        model = Stack(lambda model, x: model.mix(model.a(x)), a=linear(HIDDEN, 3), mix=mixing)
        assert propose_plan(model, hidden()).settled() == {"a": rules.head("z"), "mix": rules.keep()}


def test_a_loss_that_never_ran_is_open() -> None:
    model = Stack(lambda model, x: model.a(x), a=linear(), loss=nn.CrossEntropyLoss())
    assert "was not called on the example" in open_at(propose_plan(model, hidden()), "loss")


def test_a_row_that_is_no_vector_is_open() -> None:
    """A vector's layout would cut its first dim, which no cube divides."""
    model = Stack(lambda model, x: model.a(x) * model.row, a=linear())
    model.row = nn.Parameter(torch.ones(1, 1, HIDDEN))
    points = propose_plan(model, hidden()).unresolved
    assert any("meet the parameter row as (1, 1, 16) (mul)" in point for point in points)


def test_a_parameter_without_dims_is_open_and_no_crash() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.a(x).mean() * model.vector + model.a(x) * model.scale.exp()

    model = Stack(forward, a=linear())
    model.scale, model.vector = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.zeros(HIDDEN))
    assert any("meet the parameter scale as ()" in point for point in propose_plan(model, hidden()).unresolved)


def test_a_forward_set_on_a_layer_is_followed() -> None:
    layer = linear()
    layer.forward = lambda x: F.linear(x, layer.weight).flip(-1)  # type: ignore[method-assign]
    proposal = propose_plan(Stack(lambda model, x: model.a(x), a=layer), hidden())
    assert "takes columns by their place" in open_at(proposal, "a")
    assert not proposal.plan
