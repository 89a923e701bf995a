"""Attention in a module's own forward keeps its code on a cube, and equals itself one sequence after another."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import (
    Attention3D,
    Cube,
    ExecutionPolicy,
    MixedPrecisionPolicy,
    Sequences,
    gather,
    gather_together,
    keep_gathered,
    local_block,
)
from tensor3d.distributed.comm_stats import CommStats
from tensor3d.parallelize import PackedRows, Proposal, attend_packed, full_state_dict, parallelize, propose_plan, rules
from tests.parallelize.attentions import (
    HEAD_DIM,
    OUTPUTS,
    PROPOSED,
    Around,
    Fused,
    Gated,
    Grouped,
    NamedHeads,
    Projections,
    Reader,
)
from tests.parallelize.foreign import (
    HEADS,
    HIDDEN,
    LENGTHS,
    ROWS,
    VOCAB,
    errors_of,
    own_plane,
    own_sequences,
    per_sequence,
    varied,
)
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, ranks_of, worst

pytestmark = pytest.mark.usefixtures("fp64")
Shape = tuple[int, int, int, int]


def proposed(model: nn.Module) -> Proposal:
    generator = torch.Generator().manual_seed(4)
    return propose_plan(model, torch.randint(VOCAB, (2, 6), generator=generator), torch.arange(6).expand(2, 6))


def reader(attention: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return varied(Reader(attention()))


@pytest.mark.parametrize(("attention", "spelled"), PROPOSED.items(), ids=[each.__name__ for each in PROPOSED])
def test_what_is_proposed(attention: Callable[[], nn.Module], spelled: str) -> None:
    original = reader(attention)
    state = copy.deepcopy(original.state_dict())
    proposal = proposed(original)
    assert not proposal.unresolved
    assert spelled in [line.kind for line in proposal.lines]
    assert any("rows.holding(sequences)" in each for each in proposal.remarks) == spelled.startswith("own_attention")
    assert not vars(original)["_forward_hooks"]
    assert all(torch.equal(state[name], value) for name, value in original.state_dict().items())
    plain = ("in_features", "out_features", "n_head", "n_embd", "num_heads", "heads", "kv_heads", "q_size", "inner")
    fresh = reader(attention)
    for part, same in zip(original.modules(), fresh.modules(), strict=True):
        assert type(part) is type(same)
        assert all(getattr(part, name, None) == getattr(same, name, None) for name in plain)


def compared(cube: Cube, attention: Callable[[], nn.Module]) -> dict[str, float]:
    original = reader(attention)
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(VOCAB, (ROWS,), generator=generator)
    direction = torch.randn(ROWS, OUTPUTS, generator=generator)
    proposal = proposed(original)
    proposal.check(cube)
    model, sequences = parallelize(original, cube, proposal.settled()), own_sequences(cube)
    with proposal.rows.holding(sequences):
        logits = model(own_plane(ids, cube)[None], sequences.positions[None]).squeeze(0)
    wanted = per_sequence(original, ids, torch.cat([torch.arange(length) for length in LENGTHS]))
    (wanted * direction).sum().backward()
    whole = gather(logits, cube, "y")
    mine = local_block(own_plane(direction, cube), cube, "y")
    (logits * mine).sum().backward()
    back = full_state_dict(model, cube)
    assert list(back) == list(original.state_dict())
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())
    return errors_of(model, original, cube, {"logits": (whole, wanted)})


def _all(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube, errors = Cube(*shape), {}
    for attention in PROPOSED:
        errors |= {f"{name} of {attention}": value for name, value in compared(cube, attention).items()}
    return errors


@pytest.mark.parametrize("attention", PROPOSED, ids=lambda each: each.__name__)
def test_it_equals_its_original_on_one_device(attention: Callable[[], nn.Module]) -> None:
    name, value = max(compared(Cube.single(), attention).items(), key=lambda each: each[1])
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (1, 2, 2, 2), (2, 2, 2, 1), (1, 2, 4, 1), (4, 2, 1, 1)))
def test_it_equals_its_original_on_a_cube(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _all, shape))
    assert value <= 1e-9, f"{name} differs by {value}"


def test_copies_and_recomputed_layers_are_the_same() -> None:
    original = reader(Grouped)
    proposal = proposed(original)
    model = parallelize(original, Cube.single(), proposal.settled())
    sequences = Sequences.from_lengths(LENGTHS)
    ids, positions = torch.arange(ROWS)[None] % VOCAB, sequences.positions[None]
    with proposal.rows.holding(sequences):
        model(ids, positions).square().sum().backward()
        again = copy.deepcopy(model)
        again.zero_grad()
        attention = again.attention
        forward = attention.forward
        attention.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
        again(ids, positions).square().sum().backward()
    for (name, parameter), same in zip(model.named_parameters(), again.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, same.grad), name
    assert type(pickle.loads(pickle.dumps(model.attention))) is type(model.attention)


def _travels(shape: Shape) -> dict[str, Any]:
    """Collectives and bytes of three projections with an output, and what `keep_gathered` says that it spares."""
    cube = Cube(*shape, speed=ExecutionPolicy(weight_group_bytes=1 << 20))
    torch.manual_seed(0)
    rows, sequences = PackedRows(), own_sequences(cube)
    rule = rules.own_attention(rows, head_dim=4, output="proj", shares=("n_head",))
    model = parallelize(NamedHeads(), cube, {"": rule})
    fused = Attention3D(HIDDEN, HEADS, cube, causal=True, bias=False)
    x = local_block(own_plane(torch.randn(ROWS, HIDDEN), cube), cube, "z").requires_grad_()

    def count(run: Callable[[], Tensor]) -> CommStats:
        for _ in range(2):  # the order of the first pass tells the second one what to gather ahead
            with cube.traffic.counting() as found:
                run().sum().backward()
        return found

    def own() -> Tensor:
        with rows.holding(sequences):
            result: Tensor = model(x[None])
        return result

    def as_one() -> Tensor:
        with gather_together([fused], cube):
            return fused(x, sequences)  # type: ignore[no-any-return]

    before, of_fused = count(own), count(as_one)
    chosen = keep_gathered(model, cube, ROWS, 1 << 30)
    after = count(own)
    kinds = ("all-gather", "reduce-scatter")
    return {
        "received": [sum(each.received[axis, kind] for axis in "xyz" for kind in kinds) for each in (before, of_fused)],
        "calls over x": [sum(each.calls["x", kind] for kind in kinds) for each in (before, of_fused)],
        "gathers over y": [each.calls["y", "all-gather"] for each in (before, of_fused)],
        "spared": [before.total_bytes - after.total_bytes, chosen.spared_bytes],
        "spared calls": [before.total_calls - after.total_calls, chosen.spared_collectives],
        "kept": sorted(chosen.kept),
    }


def test_its_input_and_its_weights_travel_as_those_of_attention_in_one_projection() -> None:
    for found in run_ranks(8, _travels, (2, 2, 2, 1)):
        assert found.pop("kept") == ["k", "proj", "q", "v"]
        for name, (own, other) in found.items():
            assert own == other > 0, f"{name}: {own} and {other}"


def test_in_bf16_shadow_weights_change_no_bit_and_the_numbers_are_its_originals() -> None:
    found = []
    for shadow in (False, True, None):
        precision = MixedPrecisionPolicy(compute=None if shadow is None else torch.bfloat16)
        cube, rows = Cube.single(precision=precision, speed=ExecutionPolicy(shadow_weights=bool(shadow))), PackedRows()
        torch.manual_seed(0)
        rule = rules.own_attention(rows, head_dim=4, output="proj")
        model = parallelize(NamedHeads().float(), cube, {"": rule})
        x = torch.randn(1, ROWS, HIDDEN, dtype=torch.float32, requires_grad=True)
        with rows.holding(Sequences.from_lengths(LENGTHS)):
            model(x).float().square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, with_shadows, exact in zip(*found, strict=True):
        assert plain is not None
        assert exact is not None
        assert torch.equal(plain, with_shadows)
        assert 0 < error(plain, exact) <= 3e-2


class AsksTwice(NamedHeads):
    """Leaves one projection out, and takes another one's result twice, once where it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        def heads_of(part: nn.Module) -> Tensor:
            return part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # type: ignore[no-any-return]

        q = checkpoint(heads_of, self.q, use_reentrant=False)
        v = heads_of(self.v)
        k = checkpoint(heads_of, self.k, use_reentrant=False)
        mixed = F.scaled_dot_product_attention(q, k, v + 2 * heads_of(self.v))
        projected: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return projected


def test_a_projection_may_be_left_out_and_another_asked_twice() -> None:
    original = AsksTwice()
    model, rows = on_one_device(original, head_dim=4, output="proj")
    x = torch.randn(1, 8, HIDDEN, requires_grad=True)
    with rows.holding(Sequences.from_lengths([8])):
        (result := model(x)).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()} | {"x": x.grad}
    x.grad = None
    (wanted := original(x)).square().sum().backward()
    assert error(result, wanted) <= 1e-12
    for name, parameter in [*original.named_parameters(), ("x", x)]:
        got = found[name]
        assert (got is None) == (parameter.grad is None), name
        if got is not None and parameter.grad is not None and name != "k.weight":
            assert error(got, parameter.grad) <= 1e-12, name


class Changed(NamedHeads):
    """`NamedHeads` with something else than attention done on the way."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        d = c // self.n_head
        q, k, v = (part(x).view(b, t, self.n_head, d).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.proj(self.mixed(x, q, k, v).transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Masked(Changed):
    """Gives attention a mask that its class makes."""

    def mask(self, length: int) -> Tensor:
        raise NotImplementedError

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1]))


class OneKeyHead(nn.Module):
    """One head of keys and values for all queries, with norms of each head: no part of it can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.k, self.v = nn.Linear(HIDDEN, HEAD_DIM), nn.Linear(HIDDEN, HEAD_DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.mixed(self.q_norm(q), self.k_norm(k).expand_as(q), v.expand_as(q))
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class OneKeyHeadOfOthers(OneKeyHead):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q, k.roll(1, dims=2), v)


class ShowsWhatCameBefore(Masked):
    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()


class ShowsAll(Masked):
    def mask(self, length: int) -> Tensor:
        return torch.ones(1, 1, 1, length, dtype=torch.bool)


class ShowsWhatComesLater(Masked):
    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1) | torch.eye(length, dtype=torch.bool)


@pytest.mark.parametrize("attention", [ShowsWhatCameBefore, ShowsAll])
def test_masks_that_packs_need_not_have_may_be_given(attention: Callable[[], nn.Module]) -> None:
    assert max(compared(Cube.single(), attention).values()) <= 1e-9


def test_heads_that_no_y_divides_are_tried_in_one_line() -> None:
    assert max(compared(Cube.single(), OneKeyHead).values()) <= 1e-9
    assert any("something else than of all" in point for point in proposed(reader(OneKeyHeadOfOthers)).unresolved)


class Odd(NamedHeads):
    """Names that the cube's class might have, a part that is none, and a hook on a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.cube, self.rows = nn.Identity(), "cube", 3
        self.register_module("q_norm", None)
        self.q.register_forward_hook(lambda module, args, result: 2 * result)

    def forward(self, x: Tensor) -> Tensor:
        assert self.q_norm is None
        assert (self.cube, self.rows) == ("cube", 3)
        return self.attend(super().forward(x))  # type: ignore[no-any-return]


def test_names_hooks_and_parts_that_are_none_stay() -> None:
    original = Odd()
    model, rows = on_one_device(original, head_dim=4, output="proj")
    x = torch.randn(1, 8, HIDDEN)
    with rows.holding(Sequences.from_lengths([8])):
        assert error(model(x), original(x)) <= 1e-12
        assert error(model(x[0]), original(x)[0]) <= 1e-12


@pytest.mark.parametrize("example", [(1, 6), (6, 1)], ids=["one sequence", "one token"])
def test_an_example_in_which_rows_cannot_meet_leaves_it_open(example: tuple[int, int]) -> None:
    proposal = propose_plan(reader(ShiftsRows), torch.zeros(example, dtype=torch.long), torch.zeros(example))
    assert any("two sequences of two tokens or more" in point for point in proposal.unresolved)


# --- what is left open ------------------------------------------------------------------------------------------------


class TellsHeadsApart(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * torch.arange(1, self.n_head + 1).view(-1, 1, 1), k, v)


class ShiftsRows(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.roll(1, dims=2), v)


class UsesItsInput(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v) * x.mean()


class ReadsAnotherMask(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.eye(x.shape[1], dtype=torch.bool))


class DrawsByItself(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1, self.training)


class CountsPositions(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * torch.arange(q.shape[2]).view(-1, 1), k, v)


class ScalesByRows(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1 / q.shape[2])


class ScalesByHeads(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1 / self.n_head)


class IsCausalByRows(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 8)


class TurnsRowsAround(Changed):
    """Sees what comes later; what is turned around is turned back."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.flip(2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).flip(2)


class AttendsToHeads(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class MixesPairsOfHeads(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.cat([pair + pair.flip(1) for pair in q.split(2, dim=1)], dim=1)
        return F.scaled_dot_product_attention(q, k, v)


class ShiftsBeforeANormOfAll(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(HIDDEN)

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        normed = self.q_norm(q.roll(1, dims=2).transpose(1, 2).flatten(2))
        return F.scaled_dot_product_attention(normed.view(*x.shape[:2], self.n_head, -1).transpose(1, 2), k, v)


class ShiftsItsResult(NamedHeads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, dims=1)


class SumsOverItsResult(NamedHeads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class HasANormOfItsResult(NamedHeads):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


class AlsoReturnsAMean(Projections):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return super().forward(hidden)[0], self.key(hidden).mean(1)  # type: ignore[return-value]


class ReturnsMore(Around):
    def __init__(self) -> None:
        super().__init__()
        self.own = AlsoReturnsAMean()


class OneTemperatureEach(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * self.temperature, k, v)


class Strided(nn.Module):
    """The columns of a head lie apart from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEAD_DIM, -1)).permute(0, 3, 1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.permute(0, 2, 3, 1).flatten(2))  # type: ignore[no-any-return]


OTHERWISE: dict[Callable[[], nn.Module], str] = {
    TellsHeadsApart: "something else than of all",
    ShiftsRows: "something else than of all",
    UsesItsInput: r"does something else with it \(mean\)",
    ShowsWhatComesLater: "a mask that does more",
    ReadsAnotherMask: "a mask that does more",
    DrawsByItself: r"draws random numbers \(dropout\)",
    CountsPositions: "something else than of all",
    ScalesByRows: "something else than of all",
    ScalesByHeads: "something else than of all",
    IsCausalByRows: "something else than of all",
    TurnsRowsAround: "something else than of all",
    AttendsToHeads: r"attends with \(2, 6, 4, 4\)",
    MixesPairsOfHeads: "something else than of all",
    ShiftsBeforeANormOfAll: "something else than of all",
    ShiftsItsResult: "something else than of all",
    SumsOverItsResult: "something else than of all",
    HasANormOfItsResult: "names",
    ReturnsMore: "returns 2 tensors",
    OneTemperatureEach: "holds temperature too",
    Strided: "something else than of all",
}


@pytest.mark.parametrize(("attention", "why"), OTHERWISE.items(), ids=[each.__name__ for each in OTHERWISE])
def test_what_a_part_of_the_heads_would_make_otherwise_is_open(attention: Callable[[], nn.Module], why: str) -> None:
    proposal = proposed(reader(attention))
    (point,) = [each for each in proposal.unresolved if "does attention in its own forward" in each]
    assert "which its own code does not" in point
    assert re.search(why, point)
    assert not any("own_attention" in line.kind for line in proposal.lines)


class SoftmaxOfColumns(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.wi(x).softmax(-1).chunk(2, dim=-1)[0])  # type: ignore[no-any-return]


class ShiftsRowsOfAGate(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wi(x).chunk(2, dim=-1)
        return self.wo(gate.roll(1, dims=1) * up)  # type: ignore[no-any-return]


class GatesByItsInput(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wi(x).chunk(2, dim=-1)
        return self.wo(gate * up) * x  # type: ignore[no-any-return]


class DropsAGate(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wi(x).chunk(2, dim=-1)
        return self.wo(F.dropout(gate, 0.1, self.training) * up)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mlp", [SoftmaxOfColumns, ShiftsRowsOfAGate, GatesByItsInput, DropsAGate])
def test_other_code_between_linears_is_open(mlp: Callable[[], nn.Module]) -> None:
    proposal = proposed(reader(mlp))
    assert any(point.startswith("attention (") and "rules.replace(build)" in point for point in proposal.unresolved)
    assert not any("own_mlp" in line.kind for line in proposal.lines)


def test_attention_is_no_mlp() -> None:
    model = parallelize(NamedHeads(), Cube.single(), {"": rules.own_mlp("proj")})
    with pytest.raises(ValueError, match=r"was planned by rules\.own_mlp"):
        attend_packed(model, *(torch.zeros(1, 4, 8, 4),) * 3)


def test_keys_of_zero_hide_nothing() -> None:
    model = reader(ShiftsRows)
    for parameter in model.get_submodule("attention.k").parameters():
        nn.init.zeros_(parameter)
    assert any("something else than of all" in point for point in proposed(model).unresolved)


# --- a rule written by hand -------------------------------------------------------------------------------------------


def on_one_device(original: nn.Module, **told: Any) -> tuple[nn.Module, PackedRows]:
    rows = PackedRows()
    return parallelize(original, Cube.single(), {"": rules.own_attention(rows, **told)}), rows


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"head_dim": 3, "output": "proj"}, "head_dim=3 must divide the columns of .q"),
        ({"head_dim": 4, "output": "out"}, "Got output=.out. of q, v, proj, k"),
        ({"head_dim": 4, "output": "proj", "fused": {"qkv": 3}}, "fused of rules.own_attention must name projections"),
        ({"head_dim": 4, "output": "proj", "fused": {"q": 0}}, "fused of rules.own_attention must name projections"),
        ({"head_dim": 4, "output": "proj", "shares": ("heads",)}, "that are whole numbers. Got heads"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_one_device(NamedHeads(), **told)


def test_other_parameters_and_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="holds temperature too"):
        on_one_device(OneTemperatureEach(), head_dim=4, output="proj")


class RunsItselfAgain(Changed):
    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=True)
        return mixed


@pytest.mark.parametrize(
    ("attention", "told", "message"),
    [
        (Fused, {"head_dim": 2, "output": "c_proj", "fused": {"c_attn": 3}}, r"head_dim=2. Got \(1, 4, 64, 4\)"),
        (UsesItsInput, {"head_dim": 4, "output": "proj"}, r"UsesItsInput.* does something else with it \(mean\)"),
        (ReadsAnotherMask, {"head_dim": 4, "output": "proj"}, "takes no masks"),
        (RunsItselfAgain, {"head_dim": 4, "output": "proj"}, "without the module around it"),
        (NamedHeads, {"head_dim": 4}, "was given another tensor"),
    ],
    ids=["head_dim", "input", "mask", "checkpoint", "projection"],
)
def test_code_that_is_not_what_the_rule_is_for_is_refused_when_it_runs(
    attention: Callable[[], nn.Module], told: dict[str, Any], message: str
) -> None:
    model, rows = on_one_device(attention(), **told)
    with rows.holding(Sequences.from_lengths(LENGTHS)), pytest.raises(ValueError, match=message):
        model(torch.randn(1, ROWS, HIDDEN))


def test_hidden_states_must_come_first() -> None:
    model, _ = on_one_device(Projections(), head_dim=4)
    with pytest.raises(ValueError, match="needs hidden states as its first argument"):
        model(None)


def _more_ranks_than_heads() -> str:
    with pytest.raises(ValueError, match="must divide") as refused:
        parallelize(Grouped(), Cube(1, 4, 1), {"": rules.own_attention(PackedRows(), head_dim=6, output="o")})
    return str(refused.value)


def test_heads_that_do_not_divide_are_refused_on_every_rank() -> None:
    for told in run_ranks(4, _more_ranks_than_heads):
        assert "heads of .k must divide by y=4. Got 2" in told
