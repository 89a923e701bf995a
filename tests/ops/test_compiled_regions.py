"""Functions of regions equal the layers they stand for, and compiled regions the functions they are made of."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tensor3d import MLP3D, Cube, ExecutionPolicy, LayerNorm3D, Sequences, TransformerLayer3D, gather, shard
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.layers.mlp import GatedMLP3D, add_dropped
from tensor3d.ops.activations import Activation, activated, biased_backward
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.ops.dropout import drop, gain_of, keep_mask
from tensor3d.ops.rotary import frequencies
from tests.models.toy import FAMILIES, sums_and_gradients
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes
from tests.single_device_reference import CPU, error, fast_alone, fused, ranks_of

Shape = tuple[int, int, int, int]


# --- the functions, uncompiled, on ranks ----------------------------------------------------------------------------


def _models(shape: Shape, every: bool) -> dict[str, float]:
    """Sums and gradients of BERT on both cubes."""
    torch.set_default_dtype(torch.float64)
    errors: dict[str, float] = {}
    eurobert = {"encoder": "modern", "family": "eurobert", "activation": "silu", "types": 0, "tied": False}
    cases: tuple[dict[str, Any], ...] = (
        {"activation": "gelu_tanh"},
        {"encoder": "modern"},
        {"norm": "pre", "activation": "relu"},
        {**eurobert, "kv_heads": 4},
        FAMILIES["gemma"],
        {"family": "mpnet", "first_position": 2, "types": 0},
    )
    for changes in cases if every else cases[:2]:
        eager = Cube(*shape)
        wanted, got = (sums_and_gradients(cube, changes, {}) for cube in (eager, fused(eager)))
        errors |= {f"{changes} {name}": error(got[name], wanted[name]) for name in wanted}
    return errors


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (1, 1, 1, 1), (2, 2, 2, 1), (2, 1, 2, 2)))
def test_functions_equal_the_layers_on_ranks(shape: Shape) -> None:
    """Of the larger cubes all models; of one that has their axes, two."""
    for errors in run_ranks(ranks_of(shape), _models, shape, shape != (1, 2, 2, 1)):
        assert max(errors.values()) < 1e-11, max(errors, key=lambda name: errors[name])


def _dropped(shape: Shape) -> dict[str, float]:
    """LayerNorm of a sum with dropout, and a sum with dropout, against autograd's, with the same mask."""
    torch.set_default_dtype(torch.float64)
    cube = fused(Cube(*shape))
    cube.manual_seed(1)
    layer = LayerNorm3D(24, cube, eps=1e-5)
    errors = {}
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "norm": lambda x, y: layer(x, y, dropout=0.25),
        "sum": lambda x, y: add_dropped(x, y, 0.25, cube, "z"),
    }
    for name, function in functions.items():
        full = [torch.randn(32, 24, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (1, 2)]
        ours = [shard(each.detach(), cube, "z").clone().requires_grad_() for each in full]
        torch.manual_seed(7 + cube.rank)
        kept = keep_mask(ours[1], 0.25)
        torch.manual_seed(7 + cube.rank)
        result = function(*ours)
        total = full[0] + full[1] * gather(kept.double(), cube, "z") / 0.75
        wanted = F.layer_norm(total, (24,), eps=1e-5) if name == "norm" else total
        direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
        (wanted * direction).sum().backward()
        (result * shard(direction, cube, "z")).sum().backward()
        errors[name] = error(gather(result.detach(), cube, "z"), wanted)
        for number, (own, whole) in enumerate(zip(ours, full, strict=True)):
            assert whole.grad is not None
            errors[f"{name} gradient {number}"] = error(own.grad, shard(whole.grad, cube, "z"))  # type: ignore[arg-type]
    return errors


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (1, 1, 1, 1)))
def test_sums_with_dropout_equal_autograds(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _dropped, shape):
        assert max(errors.values()) < 1e-12, errors


def test_a_norm_adds_up_to_the_same_on_a_plain_cube() -> None:
    """The argument `dropout` and further addends of `LayerNorm3D` mean the same where nothing is fused."""
    cube = Cube.single()
    layer = LayerNorm3D(24, cube)
    x, y, z = torch.randn(3, 8, 24).unbind()
    assert torch.equal(layer(x, y, z), layer(x + y + z))
    torch.manual_seed(1)
    got = layer(x, y, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(got, layer(x + drop(y, 0.5)))
    assert torch.equal(layer(x.unsqueeze(0), y.unsqueeze(0)), layer(x, y).unsqueeze(0))
    with pytest.raises(ValueError, match=r"same.*\[8, 7\]"):
        layer(x, y[:7])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_drops_as_a_dropout_does(compiled: bool) -> None:
    """In training alone, with a probability, and not before ranks have streams of their own."""
    cube = fused(Cube.single()) if compiled else Cube.single()
    layer, (x, y) = LayerNorm3D(24, cube), torch.randn(2, 8, 24).unbind()
    assert not torch.equal(layer(x, y, dropout=0.5), layer(x, y))
    layer.eval()
    assert torch.equal(layer(x, y, dropout=0.5), layer(x, y))
    for p in (-0.5, 1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"probability.*0 and below \b1\b"):
            layer(x, y, dropout=p)
        with pytest.raises(ValueError, match=r"probability.*0 and below \b1\b"):
            add_dropped(x, y, p, cube, "z")
    several = copy.copy(cube)  # as seen by its shape
    several.shape = CubeShape(x=2)
    layer.cube = several
    with pytest.raises(ValueError, match=r"dropout of 0\.5 on 2x1x1"):
        layer(x, y, dropout=0.5)


def test_a_norm_set_apart_from_the_dropout_drops_as_without_fusion() -> None:
    layer = TransformerLayer3D(32, 4, fused(Cube.single()), dropout=0.5)
    x, sequences = torch.randn(16, 32), Sequences.from_lengths([16])
    layer.attention_norm.eval()
    layer.mlp_norm.eval()
    assert not torch.equal(layer(x, sequences), layer(x, sequences))


def test_what_somebody_has_changed_or_follows_is_called() -> None:
    """A `forward` of its own, as adapters set it, and hooks on all modules."""
    cube = fused(Cube.single())
    cube.manual_seed(0)
    mlp, x = MLP3D(8, cube), torch.randn(4, 8)
    before, forward = mlp(x), mlp.up.forward
    mlp.up.forward = lambda rows: forward(rows) + 1  # type: ignore[method-assign,assignment]
    assert not torch.equal(mlp(x), before)
    layer, sequences = TransformerLayer3D(8, 2, cube, dropout=0.1), Sequences.from_lengths([4])
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    try:
        layer(x, sequences)
    finally:
        handle.remove()
    assert (called.count("Dropout3D"), called.count("Linear3D"), called.count("LayerNorm3D")) == (2, 4, 2)


@pytest.mark.parametrize("name", get_args(Activation))
def test_an_activations_gradient_is_torchs_of_infinite_ones_too(name: Activation) -> None:
    x = torch.tensor([[-1.0, 1.0, 0.0, 2.0], [-2.0, 3.0, -1.0, 1.0]]).requires_grad_()
    bias, dy = torch.zeros(4), torch.tensor([[math.inf, math.inf, 1.0, -3.0], [math.nan, 1.0, 2.0, -math.inf]])
    result = activated(x, name)
    result.backward(dy)
    got = biased_backward(dy, result.detach() if name == "relu" else x.detach(), bias, name)[0]
    assert torch.allclose(got, x.grad, equal_nan=True)  # type: ignore[arg-type]


def test_dropout_is_none_in_evaluation() -> None:
    layer = TransformerLayer3D(32, 4, fused(Cube.single()), dropout=0.5)
    x, sequences = torch.randn(16, 32), Sequences.from_lengths([16])
    assert not torch.equal(layer(x, sequences), layer(x, sequences))
    layer.eval()
    assert torch.equal(layer(x, sequences), layer(x, sequences))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_draws_what_it_draws_without_regions(norm: Literal["post", "pre"]) -> None:
    x, sequences, found = torch.randn(48, 64, dtype=torch.float64), Sequences.from_lengths([30, 18]), []
    for cube in (Cube.single(), fused(Cube.single())):
        cube.manual_seed(3)
        layer = TransformerLayer3D(64, 8, cube, dropout=0.3, attention_dropout=0.3, norm=norm).double()
        found.append(layer(x, sequences))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_batch_of_one_goes_through_regions_too() -> None:
    layer, x = MLP3D(8, fused(Cube.single()), 12), torch.randn(6, 8)
    assert torch.equal(layer(x.unsqueeze(0)), layer(x).unsqueeze(0))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gate_keeps_its_product_alone(activation: Literal["silu", "gelu"]) -> None:
    """And not the activation's result beside it; its gradient is autograd's."""
    rows, inner, found, gradients = 6, 10, [], []
    x = torch.randn(rows, 8, dtype=torch.float64)
    for cube in (Cube.single(), fused(Cube.single())):
        cube.manual_seed(3)
        layer, own = GatedMLP3D(8, cube, inner, activation, std=0.5).double(), x.clone().requires_grad_()
        found.append(saved_bytes(partial(layer, own)))
        layer(own).square().sum().backward()
        gradients.append([own.grad, *(parameter.grad for parameter in layer.parameters())])
        batched = layer(x.unsqueeze(0))
        assert torch.equal(batched, layer(x).unsqueeze(0))
    assert found[0] - found[1] == 8 * rows * inner
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{"norm": "post"}, {"norm": "pre"}, {"activation": "relu"}], ids=str)
def test_no_more_is_saved(changes: dict[str, Any]) -> None:
    """docs/compile.md: three numbers a row of a LayerNorm, not two."""
    rows, hidden, found = 48, 64, []
    for cube in (Cube.single(), fused(Cube.single())):
        layer = TransformerLayer3D(hidden, 8, cube, dropout=0.1, **changes)
        x, sequences = torch.randn(rows, hidden, requires_grad=True), Sequences.from_lengths([rows])
        found.append(saved_bytes(partial(layer, x, sequences)))
    eager, compiled = found
    bias = 4 * 4 * hidden  # of the product up: a parameter, which is there anyway
    assert (compiled - bias) - eager == 2 * 1 * 4 * rows


# --- compiled -------------------------------------------------------------------------------------------------------


def chain(x: Tensor, shift: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    result = F.gelu(x + shift) * factor
    return result, result.sum(0)


@pytest.mark.slow  # for the seconds that a compiler takes
def test_a_region_is_compiled_once_for_any_number_of_rows() -> None:
    regions = CompiledRegions(True, CPU)
    shift = torch.randn(24, dtype=torch.float64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (24, 40, 3, 2, 7, 24, 1, 0):  # of 1 and 0 as it is written
            x = torch.randn(rows, 24, dtype=torch.float64).requires_grad_()
            got, wanted = regions(chain, x, shift, 0.3), chain(x, shift, 0.3)
            assert not got[0].requires_grad
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, wanted, strict=True))
            regions(chain, x, nn.Parameter(shift), 0.3)
            regions(chain, x.detach(), nn.Parameter(shift, requires_grad=False), 0.3)
        x = torch.randn(24, 40, dtype=torch.float64).t()  # rows that do not follow one another
        assert torch.allclose(regions(chain, x, shift, 0.3)[0], chain(x, shift, 0.3)[0], atol=1e-12)
    assert len(regions._made) == 1
    with FakeTensorMode():
        assert regions(chain, torch.empty(5, 24), torch.empty(24), 0.3)[0].shape == (5, 24)
    stored = pickle.loads(pickle.dumps(regions))
    assert stored.compiled
    assert not stored._made


def two_ways(x: Tensor, y: Tensor, shift: Tensor, halved: bool) -> tuple[Tensor | None, Tensor]:
    return (x / 2 if halved else None), x * shift - y


@pytest.mark.slow  # for the seconds that a compiler takes
@pytest.mark.parametrize("halved", [False, True])
def test_code_that_is_known_to_suit_is_called_at_once(halved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    regions, shift = CompiledRegions(True, CPU), torch.randn(24)
    made = [torch.randn(2, rows, 24) for rows in (7, 9, 7, 9)]
    same = torch.randn(9, 24)
    regions(two_ways, same, same, shift, halved)  # which is other code, and no short cut to it
    for x, y in made[:2]:
        alive = weakref.ref(regions(two_ways, x, y, shift, halved)[1])
        assert alive() is None, "what is kept holds no result"
    (code,) = regions._made.values()
    monkeypatch.setattr(code, "_ask", None)  # nobody is asked any more
    for x, y in made[2:]:
        got, wanted = regions(two_ways, x, y, shift, halved), two_ways(x, y, shift, halved)
        assert torch.allclose(got[1], wanted[1], atol=1e-6)
        assert (got[0] is None) == (not halved)
        assert not halved or torch.equal(got[0], x / 2)  # type: ignore[arg-type]
        assert torch.allclose(regions(two_ways, y, y, shift, halved)[1], y * shift - y, atol=1e-6)
    assert len(code._direct) == 2


def test_a_number_is_made_once() -> None:
    """Where it is of use: neither a stand-in nor one of inference mode serves a pass that is trained."""
    regions = CompiledRegions(False, CPU)
    with FakeTensorMode():
        assert type(regions.number(1.5, torch.float32)) is not Tensor
    with torch.inference_mode():
        assert regions.number(1.5, torch.float32).is_inference()
    number = regions.number(1.5, torch.float32)
    assert (number.item(), number.dtype, number.is_inference()) == (1.5, torch.float32, False)
    assert regions.number(1.5, torch.float32) is number
    assert regions.number(1.5, torch.float64).dtype == torch.float64
    assert not pickle.loads(pickle.dumps(regions))._numbers


def test_a_constant_is_made_once() -> None:
    """And anew under inference, whose tensors are of no use in training, and in a copy."""
    regions = CompiledRegions(False, CPU)
    made = regions.constant(frequencies, 10_000.0, 8)
    assert made is regions.constant(frequencies, 10_000.0, 8)
    assert not torch.equal(made, regions.constant(frequencies, 500.0, 8))
    with torch.inference_mode():
        assert regions.constant(frequencies, 10_000.0, 8).is_inference()
    assert not regions.constant(frequencies, 10_000.0, 8).is_inference()
    with FakeTensorMode():
        assert regions.constant(frequencies, 10_000.0, 16).shape == (8,)
    assert type(regions.constant(frequencies, 10_000.0, 16)) is Tensor
    assert not pickle.loads(pickle.dumps(regions))._constants


def test_another_probability_of_dropout_is_no_other_region() -> None:
    """Every number that a region is called with is compiled anew, and kept."""
    cube = fused(Cube.single())
    layer, x = LayerNorm3D(24, cube), torch.randn(2, 8, 24, dtype=torch.bfloat16)
    met: list[set[Any]] = []
    for p in (0.1, 0.3):
        calls: set[Any] = set()
        cube.regions = Followed(calls)
        own = x.clone().requires_grad_()
        (layer(*own, dropout=p) + add_dropped(*own, p, cube, "z")).sum().backward()
        met.append(calls)
    assert met[0] == met[1]
    assert len(met[0]) == 4


class Followed(CompiledRegions):
    """Writes down what is called with which numbers, and with tensors of which types."""

    def __init__(self, calls: set[Any]) -> None:
        super().__init__(False, CPU)
        self.calls = calls

    def __call__(self, region: Callable[..., Any], *inputs: Any) -> Any:
        self.calls.add((region, *(each.dtype if isinstance(each, Tensor) else each for each in inputs)))
        return super().__call__(region, *inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_large_mean_in_narrow_types_costs_no_digits(dtype: torch.dtype) -> None:
    """Of a norm of which one rank has all columns, whose backward pass has the mean in fp32 alone."""
    layer = LayerNorm3D(256, fused(Cube.single()))
    own = (1000 + torch.randn(64, 256)).to(dtype).requires_grad_()
    wide, direction = own.detach().double().requires_grad_(), torch.randn(64, 256).to(dtype)
    result, wanted = layer(own), F.layer_norm(wide, (256,), eps=layer.eps)
    result.backward(direction)
    wanted.backward(direction.double())
    steps = 2 * torch.finfo(dtype).eps
    assert error(result.detach(), wanted.detach()) < steps
    assert error(own.grad, wide.grad) < steps  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])  # for the compiler's seconds
def test_regions_that_draw_keep_as_many_and_the_same_in_backward(compiled: bool) -> None:
    """As they do on GPUs. Gradients tell which elements stayed, results and seeds confirm it."""
    cube, p = fused(Cube.single()), 0.25
    cube.regions = CompiledRegions(compiled, CPU)
    cube.regions.draws = True
    layer = LayerNorm3D(64, cube, eps=1e-5)
    x, y = torch.randn(2, 500, 64).unbind()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "norm": lambda own: layer(x, own, dropout=p),
        "sum": lambda own: add_dropped(x, own, p, cube, "z"),
    }
    drawn = []
    for name, function in functions.items():
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            own = y.clone().requires_grad_()
            result = function(own)
            (gradient,) = torch.autograd.grad(
                result, own, torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
            )
            kept = gradient != 0
            total = x + y * kept / (1 - p)
            wanted = F.layer_norm(total, (64,), eps=1e-5) if name == "norm" else total
            assert torch.allclose(result, wanted, atol=1e-5)
            assert abs(float(kept.double().mean()) - (1 - p)) < 0.01, "four deviations"
            drawn.append(kept)
        assert torch.equal(drawn[-3], drawn[-2])
        assert not torch.equal(drawn[-2], drawn[-1])
    assert len(cube.regions._made) == 4 * compiled


def test_dropout_scales_in_narrow_types_as_precisely_as_torch() -> None:
    """1/(1 - p), rounded to bf16 before it multiplies, would be off by up to 0.4 % everywhere."""
    cube, x = fused(Cube.single()), torch.randn(64, 32).bfloat16()
    torch.manual_seed(1)
    kept = keep_mask(x, 0.1)
    torch.manual_seed(1)
    assert torch.equal(
        add_dropped(torch.zeros_like(x), x, 0.1, cube, "z"), (x.float() * kept * gain_of(0.1)).bfloat16()
    )


@pytest.mark.slow
def test_a_break_in_a_region_is_an_error() -> None:
    with pytest.raises(Exception, match="User-inserted graph break"):
        CompiledRegions(True, CPU)(_looks_into_it, torch.ones(4, 4))


def _looks_into_it(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x + 1


def test_cubes_that_compute_in_other_types_share_what_is_compiled() -> None:
    cube = Cube.single()
    compiling = cube.with_policy(speed=ExecutionPolicy(compile=True))
    assert not cube.regions.compiled
    assert compiling.regions.compiled
    assert compiling.with_policy().regions is compiling.regions
    assert cube.with_policy().regions is cube.regions


def test_without_a_compiler_the_cube_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        from torch._inductor.exc import InvalidCxxCompiler

        raise InvalidCxxCompiler

    CompiledRegions(True, CPU)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    with pytest.raises(ValueError, match=r"compile=True needs a C\+\+ compiler .* none here.* leave compile off"):
        Cube.single(speed=ExecutionPolicy(compile=True))
    Cube.single()


@pytest.mark.parametrize("whose", ["ours", "writable for all", "another user's", "behind another user's link"])
def test_what_others_could_have_compiled_is_not_run(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch takes compiled code from a folder of /tmp with a known name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    folder.mkdir()
    if whose == "writable for all":
        folder.chmod(0o777)
    if whose == "behind another user's link":
        folder.rename(tmp_path / "ours")
        folder.symlink_to("ours")
    if "another user" in whose:
        if os.geteuid() != 0:
            pytest.skip("only root gives a file to another user")
        os.lchown(folder, 12345, 12345)
    refused = pytest.raises(ValueError, match=r"others can write there .*set TORCHINDUCTOR_CACHE_DIR to a folder of")
    with contextlib.nullcontext() if whose == "ours" else refused:
        CompiledRegions(True, torch.device("cpu"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    CompiledRegions(True, torch.device("cpu"))


def test_what_one_rank_cannot_compile_no_rank_begins() -> None:
    told: list[str] = []

    def everyone(own: str) -> list[str]:
        told.append(own)
        return [own, "Triton"]

    with pytest.raises(ValueError, match=r"compile=True.*Triton.*rank 1\b"):
        CompiledRegions(True, CPU, everyone)
    CompiledRegions(False, CPU, everyone)
    assert told == [""]
