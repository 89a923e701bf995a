"""Products in one operator with a collective: by PyTorch's own fall-backs, which are plain collectives, on CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, ExecutionPolicy, Linear3D, MixedPrecisionPolicy, local, shard
from tensor3d.distributed import cube as cube_module
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.distributed.symmetric_memory import GpuPlace, check_symmetric_memory
from tensor3d.layers.linear import Projection3D
from tensor3d.sharding.fused_products import fused_with_product
from tensor3d.sharding.matmul import Reshard
from tests.ranks import run_ranks
from tests.single_device_reference import TOLERANCE, compare, fast_alone, ranks_of

Shape = tuple[int, int, int, int]
FUSED = ExecutionPolicy(symmetric_memory=True)


@contextmanager
def operators_of_cpus() -> Iterator[Counter[str]]:
    """Gives both operators what computes them on a CPU, lets cubes use them there, and counts their calls."""
    calls = Counter[str]()

    def counting(name: str) -> Any:
        fallback = getattr(symmetric_memory, f"_{name}_fallback")

        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return fallback(*arguments, **options)

        return call

    with (
        torch.library._scoped_library("symm_mem", "IMPL") as library,
        patch.object(cube_module, "check_symmetric_memory"),
    ):
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            library.impl(name, counting(name), "CPU")
        yield calls


class Two(nn.Module):
    """From face z to y and back; the first product sums more than it gathers, the second one gathers more."""

    def __init__(self, cube: Cube, reshard: Reshard = True) -> None:
        super().__init__()
        self.up = Linear3D(24, 40, cube=cube, face="z", reshard_after_forward=reshard)
        self.down = Linear3D(40, 24, cube=cube, face="y", reshard_after_forward=reshard)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x))
        return result


# --- On ranks ---------------------------------------------------------------------------------------------------------


def _errors(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    with operators_of_cpus() as calls:
        sizes = {"rows": 32, "columns": 24, "face_in": "z", "face_out": "z", "dtype": dtype}
        errors = compare(lambda cube: Two(cube.with_policy(speed=FUSED)), shape, **sizes)  # type: ignore[arg-type]
    assert sum(calls.values()) == 4, "two products forward, two backward"
    return errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 2, 1)))
def test_equal_the_twin_on_one_device(shape: Shape, dtype: torch.dtype) -> None:
    for errors in run_ranks(ranks_of(shape), _errors, shape, dtype):
        assert max(errors.values()) <= TOLERANCE[dtype], errors


def _errors_of_a_vocabulary(shape: Shape, vocab: int) -> dict[str, float]:
    sizes = {"rows": 32, "columns": 8, "face_in": "z", "face_out": "y", "dtype": torch.float64}
    with operators_of_cpus() as calls:
        errors = compare(lambda cube: Projection3D(8, vocab, cube.with_policy(speed=FUSED), True), shape, **sizes)  # type: ignore[arg-type]
    assert calls
    return errors


@pytest.mark.parametrize("vocab", [13, 1])  # with a single word, half of the ranks have no column of the result
@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (2, 2, 2, 1)))
def test_equal_it_where_blocks_are_uneven(shape: Shape, vocab: int) -> None:
    for errors in run_ranks(ranks_of(shape), _errors_of_a_vocabulary, shape, vocab):
        assert max(errors.values()) <= TOLERANCE[torch.float64], errors


class Case(NamedTuple):
    needs: str = "xw"
    """Whether the input and the weights have gradients."""
    reshard: Reshard = True
    dtype: torch.dtype = torch.float32
    recomputes: bool = False
    speed: dict[str, bool] = {}  # noqa: RUF012  # never written to


CASES = (
    Case(reshard="weight"),
    Case(reshard="input", dtype=torch.bfloat16),
    Case(speed={"overlap": False}),
    Case(reshard=False, dtype=torch.bfloat16, speed={"shadow_weights": True}),
    Case(recomputes=True),
    Case("w"),
    Case("x"),
    Case(""),
)


def _step(shape: Shape, case: Case, **speed: bool) -> tuple[list[Tensor], Any]:
    cube = Cube(
        *shape, precision=MixedPrecisionPolicy(compute=case.dtype), speed=ExecutionPolicy(**case.speed, **speed)
    )
    cube.manual_seed(3)
    model = Two(cube, case.reshard)
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(4)).requires_grad_("x" in case.needs)
    model.requires_grad_("w" in case.needs)
    with cube.traffic.counting() as traffic:
        for _ in range(2):
            own = shard(x, cube, "z")
            y = checkpoint(model, own, use_reentrant=False) if case.recomputes else model(own)
            if case.needs:
                y.float().square().sum().backward()
    gradients = [p.grad for p in (*model.parameters(), x) if p.grad is not None]
    return [y.detach(), *map(local, gradients)], (traffic.received, traffic.calls)


def _beside_todays(shape: Shape, cases: Sequence[Case]) -> None:
    for case in cases:
        wanted, counts = _step(shape, case)
        with operators_of_cpus() as calls:
            got, others = _step(shape, case, symmetric_memory=True)
        assert calls.keys() == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}
        backward = {"xw": 2, "x": 2, "w": 1, "": 0}[case.needs]
        assert sum(calls.values()) == 2 * (2 + backward + 2 * case.recomputes), (case, calls)
        assert counts == others, f"{case}: other bytes, or another number of collectives"
        assert len(got) == len(wanted)
        assert all(map(torch.equal, got, wanted)), f"{case}: other bits"


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ((1, 2, 2, 1), CASES[:2]),
        pytest.param((1, 2, 2, 1), CASES[2:], marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 1), CASES, marks=pytest.mark.slow),
    ],
    ids=["1x2x2", "1x2x2-more", "2x2x2"],
)
def test_bits_and_traffic_are_those_of_collectives_beside_the_product(shape: Shape, cases: Sequence[Case]) -> None:
    run_ranks(ranks_of(shape), _beside_todays, shape, cases)


def _refusals() -> None:
    for precision in (MixedPrecisionPolicy(), MixedPrecisionPolicy(compute=torch.bfloat16, fp8="rowwise")):
        with pytest.raises(ValueError, match=r"symmetric_memory=True\) needs a GPU for each rank\. Got a cube on cpu"):
            Cube(1, 2, 1, precision=precision, speed=FUSED)
    cube = Cube(1, 2, 1)
    with pytest.raises(ValueError, match="needs a GPU"):
        cube.with_policy(speed=FUSED)
    Cube(2, 1, 1, speed=FUSED)  # nothing is gathered or summed over y or z


def test_a_cube_of_cpus_refuses() -> None:
    run_ranks(2, _refusals)
    Cube(speed=FUSED)
    Cube.single(speed=FUSED)


# --- What it needs, and the rule --------------------------------------------------------------------------------------

BOX = CubeShape(y=2, z=2)
NODE = [GpuPlace("a", each, tuple({0, 1, 2, 3} - {each})) for each in range(4)]


def _checked(places: list[GpuPlace], backend: str = "cpu:gloo,cuda:nccl", **precision: Any) -> None:
    types = MixedPrecisionPolicy(**precision)
    check_symmetric_memory(BOX, torch.device("cuda", 0), backend, types, lambda: places)


def test_needs_of_gpus() -> None:
    _checked(NODE)
    _checked([NODE[0], NODE[1], NODE[2], NODE[3]._replace(peers=(1, 2))])  # 0 and 3 differ along both axes
    for places, message in (
        ([*NODE[:3], NODE[3]._replace(host="b")], r"on one node\. Got ranks 1 and 3, which differ along y, on a and b"),
        ([*NODE[:3], NODE[3]._replace(device=2)], r"see all GPUs of its node.*both use the device cuda:2"),
        ([*NODE[:3], NODE[3]._replace(peers=(0, 1))], r"reach each other's memory.*on cuda:\d and cuda:3"),
        ([NODE[0]._replace(peers=()), *NODE[1:]], r"reach each other's memory.*ranks 0 and"),
    ):
        with pytest.raises(ValueError, match=message):
            _checked(places)


def test_other_backends_and_fp8_are_refused_before_ranks_are_asked() -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match=r"needs a process group of NCCL\. Got one of gloo"):
        _checked(nobody, "gloo")
    with pytest.raises(ValueError, match=r"other types than FP8\. Got fp8='rowwise'"):
        _checked(nobody, compute=torch.bfloat16, fp8="rowwise")


@pytest.mark.parametrize(
    ("members", "sides", "expected"),
    [
        ((1, 1), (8, 8), None),
        ((2, 1), (8, 99), "gather"),
        ((1, 2), (99, 8), "scatter"),
        ((2, 2), (8, 32), "scatter"),
        ((2, 2), (32, 8), "gather"),
        ((2, 2), (8, 8), "gather"),
        ((4, 2), (8, 16), "gather"),  # (4-1) 8 > (2-1) 16
        ((4, 2), (8, 25), "scatter"),
    ],
)
def test_the_larger_collective_goes_with_the_product(
    members: tuple[int, int], sides: tuple[int, int], expected: str | None
) -> None:
    cube = Cube.single(speed=FUSED)
    axes = [cube_module.replace(cube.axis("y"), ranks=tuple(range(size))) for size in members]
    given = {"gathered_over": axes[0], "columns": sides[0], "summed_over": axes[1], "results": sides[1]}
    assert fused_with_product(cube, **given) == expected  # type: ignore[arg-type]
    assert fused_with_product(Cube.single(), **given) is None  # type: ignore[arg-type]
    with cube.traffic.dry(lambda *_: None):  # one rank alone finds out what would be sent
        assert fused_with_product(cube, **given) is None  # type: ignore[arg-type]
