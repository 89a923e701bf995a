"""A model of others, through `parallelize`, equals the original: loss, every gradient, the weights on the way back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, Layout, Linear3D, all_reduce_replicated, gather, shard
from tensor3d.parallelize import ModuleBuilder, PackedRows, full_state_dict, parallelize, rules
from tensor3d.sharding.param_layout import local, vector
from tests.parallelize.foreign import (
    HIDDEN,
    LENGTHS,
    ROWS,
    VOCAB,
    Block,
    Language,
    Scale,
    Vision,
    errors_of,
    language_plan,
    own_plane,
    own_sequences,
    per_sequence,
    varied,
)
from tests.ranks import run_ranks
from tests.single_device_reference import FOUR_SHAPES, error, full, ranks_of, worst

Shape = tuple[int, int, int, int]


@pytest.fixture(autouse=True)
def _seeded(fp64: None) -> None:
    torch.manual_seed(5)


VISION_PLAN = {
    "patches": rules.replicated(("data", "x", "y", "z"), enters="z"),
    "first": rules.linear("z"),
    "second": rules.linear("z", turn=True),
    "third": rules.linear("y"),
    "classes": rules.head("z"),
    "": rules.wrapped({"gate": vector("z")}),
}


def _language(cube: Cube) -> dict[str, float]:
    torch.manual_seed(5)
    original = varied(Language())
    untouched = {name: value.clone() for name, value in original.state_dict().items()}
    rows = PackedRows()
    model = parallelize(original, cube, language_plan(rows))
    ids = torch.randint(0, VOCAB, (ROWS,))
    ids[::9] = 0  # padding, which gets no gradient from lookups
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    labels = torch.randint(0, VOCAB, (ROWS,))
    with rows.holding(own_sequences(cube)):
        logits = model(own_plane(ids, cube)[None], own_plane(places, cube)[None])
    assert logits.dim() == 3
    loss = F.cross_entropy(gather(logits.squeeze(0), cube, "y"), labels)
    wanted = F.cross_entropy(per_sequence(original, ids, places), labels)
    loss.backward()
    wanted.backward()
    errors = errors_of(model, original, cube, {"loss": (loss, wanted)})

    back = full_state_dict(model, cube)
    assert list(back) == list(untouched)
    assert all(torch.equal(back[name], value) for name, value in untouched.items())
    assert back["head.weight"] is back["embed.weight"]
    for parameter in [*model.parameters(), *original.parameters()]:
        local(parameter).detach().sub_(local(parameter.grad), alpha=0.1)
    restored = Language()
    restored.load_state_dict(full_state_dict(model, cube))
    trained = original.state_dict()
    return errors | {f"trained {n}": error(value, trained[n]) for n, value in restored.state_dict().items()}


def _vision(cube: Cube) -> dict[str, float]:
    torch.manual_seed(5)
    original = varied(Vision())
    original.patches.norm.running_var.uniform_(0.5, 2)
    model = parallelize(original, cube, VISION_PLAN)
    images = torch.randn(ROWS // 4, 3, 4, 4)
    logits = gather_rows(model(own_plane(images, cube)).squeeze(0), cube)
    wanted = original(images).flatten(0, 1)
    direction = torch.randn(wanted.shape)
    (logits * direction).sum().backward()
    (wanted * direction).sum().backward()
    back = full_state_dict(model, cube)
    assert list(back) == list(original.state_dict())
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())
    return errors_of(model, original, cube, {"logits": (logits, wanted)})


def gather_rows(logits: Tensor, cube: Cube) -> Tensor:
    """All rows of what is cut over rows of face z and whole in its columns: each rank adds its own."""
    over = cube.over("data", "x", "y")
    parts = [torch.zeros_like(logits)] * over.size
    parts[over.index] = logits
    return all_reduce_replicated(torch.cat(parts), over)


def _both(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube = Cube(*shape)
    return _language(cube) | {f"vision {name}": value for name, value in _vision(cube).items()}


@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_models_equal_their_originals_on_a_cube(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _both, shape))
    assert value <= 1e-9, f"{name} differs by {value}"


def test_models_equal_their_originals_on_one_device() -> None:
    assert max(_language(Cube.single()).values()) <= 1e-9
    assert max(_vision(Cube.single()).values()) <= 1e-9


def test_the_padding_row_gets_gradients_from_the_projection_alone() -> None:
    for kind in (rules.embedding(), rules.table()):
        original = nn.Embedding(6, 4, padding_idx=2)
        with torch.no_grad():
            original.weight[2] = 1.0
        model = parallelize(original, Cube.single(), {"": kind})
        result = model(torch.tensor([[2, 1, 2, 3]]))
        result.sum().backward()
        assert torch.equal(result, original(torch.tensor([[2, 1, 2, 3]])))
        assert model.weight.grad.sum(1).tolist() == [0, 4, 0, 4, 0, 0]


# --- what stays as it was ------------------------------------------------------------------------------------------


def _tripled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


class Hooked(nn.Module):
    """Two linears and a norm, whose hooks change gradients and note them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.down.weight.register_hook(lambda gradient: gradient * 0)
        self.up.weight.register_hook(lambda gradient: gradient / 2)
        self.norm.bias.register_hook(lambda gradient: None)
        self.up.bias.register_post_accumulate_grad_hook(_tripled)
        self.norm.weight.register_hook(lambda gradient: gradient + 1)
        self.norm.weight.requires_grad_(False)
        self.up.register_forward_hook(lambda module, given, result: 2 * result)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.relu(self.up(x))))


def _hooked(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    original, x = Hooked(), torch.randn(8, 8)
    result = original(x)
    result.square().sum().backward()
    cube = Cube(*shape)
    plan = {"up": rules.linear("z"), "norm": rules.norm("y"), "down": rules.linear("y")}
    model = parallelize(original, cube, plan)
    found = model(shard(x, cube, "z"))
    loss = all_reduce_replicated(found.square().sum(), cube.over("data", "x", "y", "z"))
    loss.backward()
    wanted = dict(original.named_parameters())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(wanted) - set(trained) == {"norm.weight"}
    errors = {name: error(full(p.grad), wanted[name].grad) for name, p in trained.items()}
    assert float(full(model.down.weight.grad).abs().max()) == 0
    return errors | {"loss": abs(float(loss.detach()) / float(result.detach().square().sum()) - 1)}


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, 2, 1, 2), (1, 2, 2, 1)))]
)
def test_hooks_of_parameters_and_modules_are_called(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _hooked, shape):
        assert max(errors.values()) <= 1e-9, errors


def test_a_hook_of_a_parameter_without_a_counterpart_is_refused() -> None:
    original = Hooked()
    plan = {"up": rules.linear("z"), "norm": rules.norm("y"), "down": rules.replace(lambda *_: Linear3D(16, 8, cube))}
    cube = Cube.single()
    with pytest.raises(ValueError, match=r"'down.weight' has a hook, and the one on the cube is not made from the"):
        parallelize(original, cube, plan)
    language, rows = Language(), PackedRows()
    name = next(name for name, p in language.blocks[0].named_parameters() if "attention" in name and p.dim() == 2)
    language.blocks[0].get_parameter(name).register_hook(lambda gradient: None)
    with pytest.raises(ValueError, match=rf"'blocks.0.{name}' has a hook"):
        parallelize(language, cube, language_plan(rows))


def test_own_code_keeps_attributes_hooks_mode_and_buffers() -> None:
    original = Language().eval()
    original.blocks[0].train()
    original.note = "a note"
    calls: list[str] = []
    original.blocks[1].register_forward_hook(lambda *_: calls.append("block"))
    original.blocks[1].up.register_forward_hook(lambda *_: calls.append("up"))
    original.blocks[1].scale.register_forward_hook(lambda *_: calls.append("scale"))
    rows = PackedRows()
    model = parallelize(original, Cube.single(), language_plan(rows))
    with rows.holding(own_sequences(Cube.single())):
        model(torch.ones(1, ROWS, dtype=torch.int64), torch.zeros(1, ROWS, dtype=torch.int64))
    assert calls == ["scale", "up", "block"]
    assert model.note == "a note"
    assert [block.training for block in model.blocks] == [True, False]
    assert [block.drop.training for block in model.blocks] == [True, False]
    assert [block.attention.training for block in model.blocks] == [True, False]
    model.step.fill_(9)
    model.blocks[0].scale.gamma.data.fill_(9)
    model.train()
    assert original.step == 3
    assert not original.training
    assert original.blocks[0].scale.gamma[0] == 0.7


def test_a_bound_method_among_the_attributes_is_the_copys_own() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.call = self.doubled

        def doubled(self, x: Tensor) -> Tensor:
            return 2 * self.up(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x)

    model = parallelize(Switched(), Cube.single(), {"up": rules.linear("z")})
    model(torch.ones(1, 4)).sum().backward()
    assert model.up.weight.grad is not None


def test_a_module_with_two_parents_is_made_once() -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    shared = nn.ModuleDict({"a": original, "b": original})
    model = parallelize(shared, Cube.single(), {"*.0": rules.linear("z"), "*.2": rules.linear("y")})
    assert model["a"] is model["b"]
    assert len(list(model.parameters())) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_keep_their_type(dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.float32)
    rows = PackedRows()
    model = parallelize(Language().to(dtype), Cube.single(), language_plan(rows))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_copy_of_wrapped_code_is_on_its_own() -> None:
    model = parallelize(Scale(4), Cube.single(), {"": rules.wrapped({"gamma": vector("z")})})
    twin = copy.deepcopy(model).float()
    twin.gamma.data.fill_(2.0)
    assert twin(torch.ones(1, 4, dtype=torch.float32)).tolist() == [[2.0] * 4]
    assert model(torch.ones(1, 4)).tolist() == [[0.7] * 4]


def test_weights_arrive_under_blank_too_and_no_seed_is_taken() -> None:
    original, cube = nn.Linear(4, 4), Cube.single()
    cube.manual_seed(3)
    with cube.skip_init():
        model = parallelize(original, cube, {"": rules.linear("z")})
    assert torch.equal(model.weight, original.weight)
    seed = cube.next_seed()
    cube.manual_seed(3)
    assert seed == cube.next_seed()


def test_the_original_may_be_trained_on_without_the_copy() -> None:
    original = nn.Linear(4, 4)
    model = parallelize(original, Cube.single(), {"": rules.linear("z")})
    before = model.weight.detach().clone()
    original.weight.data.zero_()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def _held_bytes(shape: Shape) -> tuple[int, int, int]:
    torch.set_default_dtype(torch.float64)
    cube = Cube(*shape)
    original = Language()
    model = parallelize(original, cube, language_plan(PackedRows()))
    blocks = [local(parameter).detach() for parameter in model.parameters()]
    held = sum(block.untyped_storage().nbytes() for block in blocks)
    needed = sum(block.numel() * block.element_size() for block in blocks)
    return held, needed, sum(parameter.numel() * 8 for parameter in original.parameters())


def test_a_rank_holds_its_blocks_and_no_more() -> None:
    for held, needed, whole in run_ranks(4, _held_bytes, (1, 2, 2, 1)):
        assert held == needed
        assert needed < 0.4 * whole


# --- kinds by themselves -------------------------------------------------------------------------------------------


def test_replace_builds_with_the_workshop() -> None:
    def build(module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        assert name == "0"
        return rules.linear("z").build(module, name, workshop)

    model = parallelize(nn.Sequential(nn.Linear(4, 8)), Cube.single(), {"0": rules.replace(build)})
    assert isinstance(model[0], Linear3D)


def test_keep_lets_through_what_mixes_rows_or_columns() -> None:
    model = parallelize(nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)), Cube.single(), {"0": rules.keep()})
    assert isinstance(model[0], nn.LayerNorm)


def test_dropout_is_done_where_no_pattern_names_it() -> None:
    model = parallelize(nn.Sequential(nn.Dropout(0.25), nn.GELU()), Cube.single(), {"1": rules.keep()})
    assert model[0].p == 0.25
    assert type(model[0]).__name__ == "Dropout3D"


def test_equal_kinds_by_two_patterns_are_no_conflict() -> None:
    model = parallelize(
        nn.Sequential(nn.Linear(4, 8)), Cube.single(), {"*": rules.linear("z"), "**0": rules.linear("z")}
    )
    assert isinstance(model[0], Linear3D)


def test_a_layout_of_ones_own_is_cut_and_comes_back_whole() -> None:
    layout = Layout(cut=(("z", 0),), sum_over=("data", "x", "y"))
    model = parallelize(varied(Scale(8)), Cube.single(), {"": rules.wrapped({"gamma": layout})})
    assert torch.equal(full_state_dict(model, Cube.single())["gamma"], varied(Scale(8)).gamma)


def test_the_printed_model_tells_what_wrapped_code_holds() -> None:
    model = parallelize(Block().up, Cube.single(), {"": rules.linear("z")})
    assert f"{HIDDEN} -> {2 * HIDDEN}" in repr(model)
    scale = parallelize(Scale(4), Cube.single(), {"": rules.wrapped({"gamma": vector("z")})})
    assert repr(scale) == "Wrapped3D[Scale](gamma: (4,), cut over z, summed over data+x+y)"
