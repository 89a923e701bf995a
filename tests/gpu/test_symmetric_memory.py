"""On several GPUs that reach each other's memory, products in one operator with a collective are those beside one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from tensor3d import Cube, ExecutionPolicy, Linear3D, MixedPrecisionPolicy, gather, shard
from tests.single_device_reference import error, full

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def _results(shape: tuple[int, int, int], dtype: torch.dtype, fused: bool) -> dict[str, Tensor]:
    speed = ExecutionPolicy(symmetric_memory=fused)
    cube = Cube(*shape, precision=MixedPrecisionPolicy(compute=dtype), speed=speed)
    cube.manual_seed(3)
    up = Linear3D(256, 512, cube=cube, face="z")
    down = Linear3D(512, 256, cube=cube, face="y", reshard_after_forward=False)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(4)).cuda().requires_grad_()
    y = gather(down(up(shard(x, cube, "z"))), cube, "z")
    y.float().square().mean().backward()
    layers = {"up": up, "down": down}
    gradients = {name: full(p.grad) for each, layer in layers.items() for name, p in layer.named_parameters(each)}
    found: dict[str, Any] = {"y": y.detach(), "x": x.grad, **gradients}
    cube.close()
    return found


def _rank(rank: int, shape: tuple[int, int, int], dtype: torch.dtype, folder: str) -> None:
    torch.cuda.set_device(rank)
    world = shape[0] * shape[1] * shape[2]
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    wanted, got = _results(shape, dtype, False), _results(shape, dtype, True)
    for name, each in wanted.items():
        assert error(got[name].float(), each.float(), name) <= (1e-4 if dtype == torch.float32 else 3e-2), name
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2)], ids=str)
def test_equal_those_beside_a_collective(shape: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    world = shape[0] * shape[1] * shape[2]
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    multiprocessing.spawn(_rank, (shape, dtype, str(tmp_path)), nprocs=world)
