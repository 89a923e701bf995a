"""What is wrong with a plan, or does not fit it, is said with names and the remedy, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tensor3d import Cube, Layout, shard
from tensor3d.parallelize import PackedRows, parallelize, rules
from tensor3d.sharding.param_layout import vector
from tests.parallelize.foreign import Language, Scale, TinyRMSNorm
from tests.ranks import run_ranks


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class WithInputRMSNorm(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class BareNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hiding() -> nn.Module:
    module = Chain()
    module.parts = [nn.Linear(4, 4)]
    return module


def shared() -> nn.Module:
    inner = nn.Linear(8, 8)
    return nn.ModuleDict({"a": inner, "b": inner})


def tied(other: nn.Module) -> nn.Module:
    module = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": other})
    other.weight = module["a"].weight
    return module


LINEAR = {"up": rules.linear("z"), "down": rules.linear("y")}
Z, Y = rules.linear("z"), rules.linear("y")
Case = tuple[Callable[[], nn.Module], dict[str, Any], str]
CASES: dict[str, Case] = {
    "a pattern that matches nothing": (Chain, LINEAR | {"dwn": Y}, "'dwn' of the plan matches no module.*'down'"),
    "a wildcard for the root": (lambda: nn.GELU(), {"**": rules.keep()}, "matches no module"),
    "two kinds for a module": (Chain, LINEAR | {"d*": Z}, r"'down' is matched by two .* 'down' .*y.* and 'd\*' .*z"),
    "a kind inside of another": (
        Language,
        {"blocks.*": rules.keep(), "blocks.*.up": Z},
        r"'blocks.0.up' .* lies inside of 'blocks.0' .*keep",
    ),
    "a module in two places, two kinds": (shared, {"a": Z, "b": Y}, "used as 'a' and as 'b'.*face='z'.*face='y'"),
    "a module in two places, one named": (shared, {"a": Z}, "used as 'a' and as 'b'.*no kind here"),
    "a module without a kind": (Chain, {"up": Z}, r"'down' \(Linear: weight, bias\).*rules.linear"),
    "a convolution without a kind": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(2, 2)),
        {"1": Z},
        r"'0' \(Conv1d: weight, bias\). A convolution has no 3-D kind. Keep it replicated, .* rules.replicated\(",
    ),
    "a batch norm without a kind": (
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)),
        {"1": Z},
        r"'0' \(BatchNorm1d: weight, bias\). Batch norm has no 3-D kind.*rules.replicated\(",
    ),
    "a batch norm under a norm's kind": (
        lambda: nn.Sequential(nn.BatchNorm1d(2)),
        {"0": rules.norm("z")},
        r"'0' is a BatchNorm1d, and norm\(face='z'\) takes nn.LayerNorm or nn.RMSNorm. Batch norm.*replicated",
    ),
    "a convolution under a linear's kind": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1)),
        {"0": Z},
        "'0' is a Conv2d.* takes nn.Linear. A convolution.*gradient summed.*replicated",
    ),
    "what mixes columns, without parameters": (
        lambda: nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4)),
        {"1": Z},
        r"'0' \(LayerNorm, which mixes rows or columns\)",
    ),
    "a softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), {"0": Z}, r"'1' \(Softmax, which mixes"),
    "modules in a list": (hiding, LINEAR, "'' keeps modules in the attribute 'parts'.*nn.ModuleList"),
    "a parameter in no module with a kind": (lambda: Scale(4), {}, r"'' \(Scale: gamma\).*rules.wrapped"),
    "a linear with code of its own": (
        lambda: nn.Sequential(OwnLinear(4, 4)),
        {"0": Z},
        "'0' is a OwnLinear, whose forward is its own.*replace",
    ),
    "a weight norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 4))),
        {"0": Z},
        "'0' .* holds bias, parametrizations.weight.original0, .*Remove its parametrization",
    ),
    "a norm without weight, of no known columns": (
        lambda: nn.Sequential(BareNorm()),
        {"0": rules.norm("z")},
        r"needs the columns that '0' \(BareNorm\) normalises over.*does not say.*columns=H",
    ),
    "a norm of other columns": (
        lambda: nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)),
        {"0": rules.norm("z", columns=8)},
        "says to be 4",
    ),
    "a norm over two dims": (
        lambda: nn.Sequential(nn.LayerNorm((4, 4))),
        {"0": rules.norm("z")},
        r"weight of one dim. '0' has one of \(4, 4\)",
    ),
    "an RMSNorm that is none": (lambda: WithInputRMSNorm(4), {"": rules.norm("z")}, "computes something else.*replace"),
    "an embedding with max_norm": (
        lambda: nn.Embedding(4, 4, max_norm=1.0),
        {"": rules.embedding()},
        "has no max_norm. Got max_norm=1.0",
    ),
    "a channel dropout": (lambda: nn.Sequential(nn.Dropout2d(), nn.Linear(4, 4)), {"1": Z}, "'0' .Dropout2d, which"),
    "a tied weight in two layouts": (
        lambda: tied(nn.Linear(8, 8)),
        {"a": Z, "b": Y},
        "shape .8, 8. is shared by 'a' and 'b', and their kinds need it in different layouts",
    ),
    "a tied table": (
        lambda: tied(nn.Embedding(8, 8)),
        {"a": rules.projection(), "b": rules.table()},
        "shared by 'a' and 'b'.*rules.embedding.. and rules.projection",
    ),
    "a layout for a parameter that is not there": (
        lambda: Scale(4),
        {"": rules.wrapped({"gain": vector("z")})},
        r"holds the parameters \['gamma'\], and its plan names \['gain'\]",
    ),
    "a layout that cuts no dim of it": (
        lambda: Scale(4),
        {"": rules.wrapped({"gamma": Layout(cut=(("z", 1),), sum_over=("data",))})},
        "cuts dim 1 over z",
    ),
    "code that no forward runs": (
        lambda: nn.ParameterList([torch.zeros(4)]),
        {"": rules.replicated(("data",))},
        "ParameterList. has no forward of its own",
    ),
    "parameters that are kept": (Chain, {"*": rules.keep()}, "keep.. is for modules without parameters. 'up'.*weight"),
    "a builder that gives the original": (
        Chain,
        LINEAR | {"down": rules.replace(lambda module, name, workshop: module)},
        "'down' holds a module of the original",
    ),
    "a builder that gives no module": (
        Chain,
        LINEAR | {"down": rules.replace(lambda module, name, workshop: None)},  # type: ignore[arg-type, return-value]
        "for 'down' must be an nn.Module. Got None",
    ),
    "a lazy linear": (lambda: nn.LazyLinear(4), {"": Z}, "'weight' has no values yet.*Run a lazy module once"),
    "weights on no device": (
        lambda: nn.Linear(4, 4, device="meta"),
        {"": Z},
        "'weight' has no values.*meta device",
    ),
    "an attention of another class": (
        lambda: nn.Linear(4, 4),
        {"": rules.attention(PackedRows())},
        "takes nn.MultiheadAttention",
    ),
    "no kinds": (Chain, {"up": "z"}, "a plan maps patterns"),
}


def message_of(cube: Cube, case: str) -> str:
    make, plan, _ = CASES[case]
    try:
        parallelize(make(), cube, plan)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_what_is_wrong(case: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){CASES[case][2]}"):
        parallelize(CASES[case][0](), Cube.single(), CASES[case][1])


def _on_ranks() -> tuple[list[str], dict[str, str]]:
    cube = Cube(2, 1, 2)
    messages = [message_of(cube, case) for case in CASES]
    later = {
        "divide": said(lambda: parallelize(nn.Linear(8, 7), cube, {"": Y})),
        "uneven": said(lambda: parallelize(Scale(5), cube, {"": rules.wrapped({"gamma": vector("z")})})),
        "plain": said(lambda: parallelize(Chain(), cube, LINEAR | {"down": rules.replace(lambda *_: nn.Linear(8, 8))})),
        "unseeded": said(lambda: parallelize(nn.Sequential(nn.Dropout()), cube, {"0": rules.dropout()})),
    }
    model = parallelize(Chain(), cube, {"up": Z, "down": Z})
    later["faces"] = said(lambda: model(shard(torch.randn(8, 8, requires_grad=True), cube, "z")))
    return messages, later


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_every_rank_raises_the_same_error_and_none_hangs() -> None:
    results = run_ranks(4, _on_ranks)
    messages, later = results[0]
    assert all(result == results[0] for result in results)
    assert "nothing was raised" not in [*messages, *later.values()]
    assert "out_features must divide by z=2. Got 7" in later["divide"]
    assert "cuts dim 0 over z=2, which must divide it" in later["uneven"]
    assert "is a plain tensor" in later["plain"]
    assert "cube.manual_seed" in later["unseeded"]
    assert "reads face z" in later["faces"]
    assert "redistribute" in later["faces"]


def test_a_list_of_open_modules_is_cut_short() -> None:
    with pytest.raises(ValueError, match=r"(?s)'7' .*and 4 more") as caught:
        parallelize(nn.Sequential(*(nn.Linear(2, 2) for _ in range(12))), Cube.single(), {})
    assert "'8'" not in str(caught.value)


@pytest.mark.parametrize("make", [rules.linear, rules.norm, rules.head])
def test_a_face_that_is_none_is_refused_where_the_plan_is_written(make: Any) -> None:
    with pytest.raises(ValueError, match='face must be "y" or "z"'):
        make("x")
    with pytest.raises(ValueError, match='face must be "y" or "z"'):
        rules.replicated(("data",), enters="x")  # type: ignore[arg-type]


def test_an_entry_that_is_no_matrix_is_refused_at_the_first_forward() -> None:
    model = parallelize(Chain(), Cube.single(), {"up": rules.replicated(("data",), enters="z"), "down": Z})
    with pytest.raises(ValueError, match=r"Wrapped3D\[Linear\] enters face z: .* Got shape \(8,\)"):
        model(torch.randn(8))
