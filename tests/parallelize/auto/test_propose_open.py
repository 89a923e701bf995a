"""What `propose_plan` leaves open in models of others, and says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube
from tensor3d.parallelize import parallelize, rules
from tensor3d.parallelize.auto.propose import propose_plan
from tests.parallelize.foreign import HIDDEN, Language
from tests.parallelize.stacks import Stack, hidden, linear, open_at, spelled


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:-1], 3, 4, -1).permute(2, 0, 3, 1, 4)
        scores = (parts[0] @ parts[1].transpose(-2, -1)).softmax(-1)
        return self.out((scores @ parts[2]).transpose(1, 2).flatten(2))


def test_attention_of_ones_own_is_open_with_its_layers() -> None:
    blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "attend": Attend()}) for _ in range(2))

    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block["attend"](block["norm"](x))
        return x

    model = Stack(forward, blocks=blocks)
    proposal = propose_plan(model, hidden())
    assert proposal.plan == {"blocks.*.norm": rules.norm("z")}
    (point,) = proposal.unresolved
    assert point.startswith("blocks.*.attend (Attend) does attention in its own forward (matmul)")
    assert "rules.replace(build)" in point
    assert '(its layers: qkv: linear("z"), out: linear("y"))' in point
    with pytest.raises(ValueError, match=r"blocks\.0\.attend\.qkv"):
        parallelize(model, Cube.single(), proposal.plan)  # nothing wrong runs by silence


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, x: model.a(x)[:, 0], "takes rows by their place ([:, 0])"),
        (lambda model, x: model.a(x)[..., :3], "takes columns by their place ([..., :3])"),
        (lambda model, x: model.a(x).mean(1), "reduces over rows (mean)"),
        (lambda model, x: model.a(x).mean(), "reduces over rows (mean)"),
        (lambda model, x: model.a(x).softmax(-1), "reduces over columns (softmax)"),
        (lambda model, x: F.layer_norm(model.a(x), (16,)), "LayerNorm3D and RMSNorm3D are for norms"),
        (lambda model, x: model.a(x).view(10, 16), "names sizes (view to (10, 16))"),
        (lambda model, x: model.a(x).view(2, 5, 4, 4), "gives columns another shape (view to (2, 5, 4, 4))"),
        (lambda model, x: model.a(x).chunk(2, -1)[0], "cuts columns apart (chunk)"),
        (lambda model, x: F.glu(model.a(x)), "cuts columns apart (glu)"),
        (lambda model, x: torch.cat([x, model.a(x)], -1), "joins columns (cat)"),
        (lambda model, x: torch.cat([x, model.a(x)], 1), "joins rows (cat)"),
        (lambda model, x: model.a(x).mT, "turns columns into rows (mT)"),
        (lambda model, x: model.a(x) + torch.ones(5, 16), "meet a tensor of shape (5, 16) made here (add)"),
        (lambda model, x: F.linear(model.a(x), model.a.weight), "multiplies by the parameter a.weight (linear)"),
        (lambda model, x: F.mse_loss(model.a(x), x), "computes a loss (mse_loss)"),
    ],
)
def test_what_a_rank_cannot_do_on_its_block_is_open(forward: Any, message: str) -> None:
    point = open_at(propose_plan(Stack(forward, a=linear()), hidden()), "the module itself")
    assert message in point


def test_what_a_module_keeps_beside_its_parameters_has_its_name() -> None:
    inner = Stack(lambda model, x: x * model.scale + model.places[:, : x.shape[1]], a=linear())
    inner.register_buffer("scale", torch.full((16,), 0.5))
    inner.places = torch.zeros(1, 8, 16)
    model = Stack(lambda model, x, mask: model.inner(model.a(x)) * mask[..., None], inner=inner, a=linear())
    proposal = propose_plan(model, hidden(), torch.ones(2, 5, dtype=torch.int64))
    told = "\n".join(proposal.unresolved)
    assert "meet its buffer scale, as a tensor of shape (16,) (mul)" in told
    assert "meet its attribute places, as a tensor of shape (1, 5, 16) (add)" in told
    assert "meet a tensor of shape (2, 5, 1) made of the arguments (mul)" in told
    model = Stack(lambda model, x: model.a(x) * model.inner.scale.abs(), inner=inner, a=linear())
    point = open_at(propose_plan(model, hidden()), "the module itself")
    assert "meet the buffer scale of inner, as a tensor of shape (16,) (mul)" in point
    model = Stack(lambda model, x: model.a(x) @ model.inner.places[0].T, inner=inner, a=linear())
    point = open_at(propose_plan(model, hidden()), "the module itself")
    assert "multiplies by the attribute places of inner, as a tensor of shape (16, 8) (matmul)" in point
    model = Stack(lambda model, x: model.a(model.inner.places) + x[:1, :1], inner=inner, a=linear())
    point = open_at(propose_plan(model, hidden()), "a")
    assert "no activation (the attribute places of inner, as a tensor of shape (1, 8, 16)): on a cube" in point
    inner.register_buffer("numbers", torch.arange(5), persistent=False)
    embedding = nn.Embedding(5, HIDDEN)
    model = Stack(lambda model, x: x + model.embed(model.inner.numbers), inner=inner, embed=embedding)
    point = open_at(propose_plan(model, hidden()), "embed")
    assert "looks up numbers (the buffer numbers of inner, as a tensor of shape (5,)) that are no argument's" in point
    inner.register_buffer("types", torch.zeros(5, dtype=torch.int64))
    model = Stack(lambda model, x: x + model.embed(inner.types.gather(0, inner.numbers)), inner=inner, embed=embedding)
    assert "looks up numbers (the buffer types of inner" in open_at(propose_plan(model, hidden()), "embed")


class Product(nn.Module):
    """A linear by another name, its weight the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def test_products_of_ones_own_are_open_and_their_attention_too() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = Product(HIDDEN, 3 * HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(HIDDEN, -1)
            return F.scaled_dot_product_attention(q, k, v)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.up = Heads(), Product(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.heads(x))

    proposal = propose_plan(nn.Sequential(Layer(), Layer()), hidden())
    assert not proposal.plan
    assert len(proposal.unresolved) == 2
    assert "does attention in its own forward" in open_at(proposal, "*.heads")
    assert "multiplies by its weight (addmm) outside of a known layer" in open_at(proposal, "*.up")


def test_cross_attention_is_left_out_of_the_plan() -> None:
    def forward(model: Any, x: Tensor, memory: Tensor) -> Tensor:
        return model.norm(x + model.cross(x, memory, memory, need_weights=False)[0])

    model = Stack(forward, cross=nn.MultiheadAttention(HIDDEN, 4), norm=nn.LayerNorm(HIDDEN))
    proposal = propose_plan(model, hidden(), hidden())
    assert proposal.plan == {"norm": rules.norm("z")}
    assert "has other keys than queries" in open_at(proposal, "cross")


def test_elementwise_work_is_not_open() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = F.gelu(model.a(x[:])[:, 0:].contiguous()) * 2 + 1
        h += torch.sigmoid(h.clone()).clamp(min=0.1).to(torch.float32)
        return h.flatten(0, 1).unsqueeze(0).masked_fill(h.flatten(0, 1) > 0, 0.0)

    assert not propose_plan(Stack(forward, a=linear()), hidden()).unresolved


def test_what_cannot_be_followed_is_said() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.b(torch.tensor(model.a(x).tolist()))

    proposal = propose_plan(Stack(forward, a=linear(), b=linear()), hidden())
    assert "reads what is no activation (a tensor of shape (2, 5, 16)" in open_at(proposal, "b")


def test_a_module_without_memory_is_read_too() -> None:
    with torch.device("meta"):
        model, ids = Language(), torch.ones(3, 5, dtype=torch.long)
    proposal = propose_plan(model, ids, ids)
    assert len(proposal.plan) == 10
    assert not proposal.unresolved


def test_a_clash_that_no_linear_can_mend_is_said() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.a(model.a(x))

    (point,) = propose_plan(Stack(forward, a=linear()), hidden()).unresolved
    assert point.startswith("a: the two places that use its weight lie on different faces")
    assert "tensor3d.redistribute" in point


def test_convolutions_and_batch_norms_are_named_with_the_remedy() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.norm(model.conv(x)).flatten(2).transpose(1, 2) + model.place

    model = Stack(forward, conv=nn.Conv2d(3, HIDDEN, 4, 4), norm=nn.BatchNorm2d(HIDDEN))
    model.place = nn.Parameter(torch.zeros(1, 4, HIDDEN))
    proposal = propose_plan(model, torch.randn(2, 3, 8, 8))
    assert not proposal.plan
    for place in ("conv", "norm"):
        assert "rules.replicated((" in open_at(proposal, place)
    assert "has parameters of its own (place)" in open_at(proposal, "the module itself")


def test_vectors_in_a_list_are_open_with_the_remedy() -> None:
    """`parallelize` refuses a rule for what has no code of its own, and the plan had one."""

    def forward(model: Any, x: Tensor) -> Tensor:
        gain = model.gain if hasattr(model, "gain") else model.gains[0]
        return model.a(x * gain)

    model = Stack(forward, a=linear(), gains=nn.ParameterList([torch.ones(HIDDEN)]))
    proposal = propose_plan(model, hidden())
    assert "gains" not in proposal.plan
    point = open_at(proposal, "gains")
    assert "has parameters of its own (0). It has no forward that rules.wrapped could run: hold the parameters" in point
    model.gain = model.gains[0]
    del model.gains
    made = parallelize(model, Cube.single(), propose_plan(model, hidden()).settled())
    assert list(made.state_dict()) == ["gain", "a.weight", "a.bias"]


def test_masks_and_layers_that_never_ran_are_said() -> None:
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.spare = linear(3, 3)
    proposal = propose_plan(model, hidden(), mask=torch.ones(5, 5, dtype=torch.bool).triu(2))
    assert spelled(proposal)["layers.*.self_attn"] == "attention(rows)"
    assert "call it without, Sequences tell them apart" in open_at(proposal, "layers.*.self_attn")
    assert "was not called on the example" in open_at(proposal, "spare")
    assert "spare" not in proposal.plan


def test_a_module_that_fails_on_its_example_is_named_with_the_place() -> None:
    model = nn.Sequential(nn.Sequential(linear(), linear(3, 3)))
    with pytest.raises(ValueError, match=r"raised RuntimeError.*'0\.1'.*input \(2, 5, 16\) float32"):
        propose_plan(model, hidden())
    assert not any(part._forward_hooks for part in model.modules())


def test_hooks_whose_code_is_not_read_are_open() -> None:
    """Softmax over all columns, in a hook of a layer: on a rank it would be that of its block."""

    def softmax(module: nn.Module, given: Any, result: Tensor) -> Tensor:
        return result.softmax(-1)

    model = Stack(lambda model, x: model.b(model.a(x)), a=linear(), b=linear())
    assert not propose_plan(model, hidden()).unresolved
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model.a, register)(softmax if register == "register_forward_hook" else lambda *_: None)
        proposal = propose_plan(model, hidden())
        assert "has hooks (" in open_at(proposal, "a")
        with pytest.raises(ValueError, match=r"has hooks"):
            proposal.settled()
        handle.remove()
    assert not propose_plan(model, hidden()).unresolved
