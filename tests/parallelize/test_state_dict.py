"""`load_full_state_dict` is the inverse of `full_state_dict`, and plain loads that would mix rows up are refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, Linear3D, Sequences, to_fused_rows
from tensor3d.parallelize import ModuleBuilder, PackedRows, full_state_dict, parallelize, rules
from tensor3d.parallelize.state_dict import load_full_state_dict
from tensor3d.parallelize.torch_layer_rules import Linear
from tensor3d.sharding.param_layout import matrix, vector
from tests.parallelize.foreign import Language, Scale, language_plan, varied
from tests.ranks import run_ranks

SINGLE = Cube.single()


def said(act: Any) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def some_of(state: dict[str, Any]) -> dict[str, Any]:
    """Of rows in another order, and as they were: to copy a DTensor takes a while where its placements are new."""
    for name in set(state) - {"blocks.0.attention.in_proj_weight", "norm.bias"}:
        del state[name]
    return state


def _round_trip(shape: tuple[int, int, int, int] | None) -> dict[str, Any]:
    cube = SINGLE if shape is None else Cube(*shape)
    model = parallelize(varied(Language()), cube, language_plan(PackedRows()))
    other = varied(Language(), seed=8)
    other.step.fill_(7)
    state = other.state_dict()
    load_full_state_dict(model, state, cube)
    back = full_state_dict(model, cube)
    return {
        "names": list(back) == list(state),
        "values": all(torch.equal(back[name], value) for name, value in state.items()),
        "tied": model.head.weight is model.embed.weight,
        "plain": said(lambda: model.load_state_dict(state)),
        "own": said(lambda: model.load_state_dict(some_of(copy.deepcopy(model.state_dict())), strict=False)),
        "shape": said(lambda: load_full_state_dict(model, state | {"norm.bias": torch.ones(3)}, cube)),
        "untouched": torch.equal(full_state_dict(model, cube)["norm.bias"], state["norm.bias"]),
    }


def _checked(found: dict[str, Any]) -> None:
    assert found["names"]
    assert found["values"]
    assert found["tied"]
    assert found["untouched"]
    assert "load_full_state_dict(model, state, cube)" in found["plain"]
    assert found["own"] == "nothing was raised"
    assert "'norm.bias' must have shape (16,). Got (3,)" in found["shape"]


def test_full_states_go_in_and_out_on_one_device() -> None:
    _checked(_round_trip(None))


# The vocabulary is odd, so chunks of it differ in size; in the second, x and y cut the same dim.
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 2, 1, 1)])
def test_full_states_go_in_and_out_on_ranks(shape: tuple[int, int, int, int]) -> None:
    results = run_ranks(4, _round_trip, shape)
    assert all(result == results[0] for result in results)
    _checked(results[0])


def scales() -> nn.Module:
    return parallelize(nn.Sequential(Scale(4), Scale(4)), SINGLE, {"*": rules.wrapped({"gamma": vector("z")})})


GAMMA = torch.arange(4.0)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"0.gamma": GAMMA}, r"Missing: '1.gamma'. Unexpected: none"),
    "unexpected": ({"0.gamma": GAMMA, "1.gamma": GAMMA, "1.beta": GAMMA}, r"Missing: none. Unexpected: '1.beta'"),
    "of another shape": ({"0.gamma": GAMMA, "1.gamma": GAMMA[:2]}, r"'1.gamma' must have shape \(4,\). Got \(2,\)"),
    "no tensor": ({"0.gamma": GAMMA, "1.gamma": 3.0}, "'1.gamma' must be a full, plain tensor .* Got a float"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    state, message = BAD[case]
    model = scales()
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(model, state, SINGLE)
    assert model[0].gamma.tolist() == scales()[0].gamma.tolist()


def test_tied_weights_take_one_value() -> None:
    model = parallelize(Language(), SINGLE, language_plan(PackedRows()))
    state = Language().state_dict()
    state["head.weight"] = state["head.weight"].clone()
    load_full_state_dict(model, state, SINGLE)
    state["head.weight"] += 1
    with pytest.raises(ValueError, match=r"'output_weight' and 'head\.weight' are one weight"):
        load_full_state_dict(model, state, SINGLE)


def test_values_take_the_types_of_the_model() -> None:
    model = scales().bfloat16()
    load_full_state_dict(model, {"0.gamma": GAMMA, "1.gamma": GAMMA}, SINGLE)
    assert model[0].gamma.dtype == torch.bfloat16
    assert model[1].gamma.tolist() == GAMMA.tolist()


class Counted(nn.Module):
    """A layer that stores a number besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.steps = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


def test_what_modules_store_besides_comes_back() -> None:
    model = parallelize(nn.Sequential(Counted()), SINGLE, {"0.inner": rules.linear("z")})
    other = nn.Sequential(Counted())
    other[0].steps = 5
    load_full_state_dict(model, other.state_dict(), SINGLE)
    assert model[0].steps == 5


# --- plain loads, on one device -------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x, x, x, need_weights=False)[0]


def attending() -> tuple[nn.Module, PackedRows]:
    rows = PackedRows()
    return parallelize(varied(Attending()), SINGLE, {"a": rules.attention(rows)}), rows


def test_an_originals_state_in_torchs_order_is_refused_and_loads_whole() -> None:
    model, rows = attending()
    other = varied(Attending(), seed=9)
    for state in (other.state_dict(), dict(other.state_dict()), full_state_dict(model, SINGLE)):
        with pytest.raises(ValueError, match=r"'a.in_proj_weight' are in another order .*load_full_state_dict"):
            model.load_state_dict(state)
    load_full_state_dict(model, other.state_dict(), SINGLE)
    x = torch.randn(1, 6, 8)
    with rows.holding(Sequences.from_lengths([6])):
        assert torch.allclose(model(x), other(x), atol=1e-5)


def test_a_models_own_state_loads_as_ever() -> None:
    model, _ = attending()
    twin, _ = attending()
    nn.init.zeros_(twin.a.in_proj_weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert torch.equal(twin.a.in_proj_weight, model.a.in_proj_weight)
    assert copy.deepcopy(twin).load_state_dict(model.state_dict()).missing_keys == []


def test_rows_that_a_builder_has_put_in_another_order_go_back_and_are_guarded() -> None:
    order = to_fused_rows(torch.arange(12), parts=3, groups=2)

    def build(module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        made = nn.Sequential(Linear3D(4, 12, workshop.cube))
        made[0].weight = workshop.parameter(module.get_parameter("0.weight"), matrix("z"), order)
        made[0].bias = workshop.parameter(module.get_parameter("0.bias"), vector("y"), order)
        return made

    original, other = nn.Sequential(nn.Linear(4, 12)), nn.Sequential(nn.Linear(4, 12))
    model = parallelize(original, SINGLE, {"": rules.replace(build)})
    assert torch.equal(model[0].weight, original[0].weight[order])
    for name, value in full_state_dict(copy.deepcopy(model), SINGLE).items():
        assert torch.equal(value, original.state_dict()[name])
    with pytest.raises(ValueError, match=r"'0.weight' are in another order .*load_full_state_dict"):
        model.load_state_dict(other.state_dict())
    load_full_state_dict(model, other.state_dict(), SINGLE)
    assert torch.equal(model[0].bias, other[0].bias[order])
    model.load_state_dict(copy.deepcopy(model).state_dict())


def test_a_layer_that_a_builder_put_deeper_is_guarded_too() -> None:
    def build(module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        return nn.Sequential(Linear(face="z").build(module, name, workshop))

    model = parallelize(nn.Linear(4, 4), SINGLE, {"": rules.replace(build)})
    state = {"0.weight": torch.eye(4), "0.bias": torch.zeros(4)}
    model.load_state_dict(state)  # one device, no rows in another order: as in torch
    assert torch.equal(model[0].weight, torch.eye(4))
