"""Wrappers of PyTorch around layers: they look for gradients where the ledger does not bring them, and are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tensor3d import Cube, Linear3D
from tests.ranks import run_ranks


def _model() -> nn.Sequential:
    cube = Cube.single()
    cube.manual_seed(0)
    return nn.Sequential(Linear3D(8, 16, cube), Linear3D(16, 8, cube, face="y"), nn.Linear(8, 1))


def _pass(model: nn.Module) -> None:
    loss: Tensor = model(torch.ones(4, 8) * (1 + torch.distributed.get_rank())).square().sum()
    loss.backward()


def _refused() -> dict[str, str]:
    told = {}
    wrappers: dict[str, Any] = {
        "ddp": DistributedDataParallel,
        "ddp, unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
        "fully_shard": fully_shard,
        "fully_shard, kept": lambda model: fully_shard(model, reshard_after_forward=False),
    }
    for name, wrap in wrappers.items():
        with pytest.raises(ValueError, match="layer of tensor3d") as refused:
            _pass(wrap(_model()))
        told[name] = str(refused.value)
    return told


def test_they_are_refused_on_every_rank_with_what_to_do_instead() -> None:
    for told in run_ranks(2, _refused):
        for name, remedy in {"ddp": "Cube(..., data=N)", "fully_shard": "Cube(x=N)"}.items():
            mine = [text for which, text in told.items() if which.startswith(name)]
            assert len(mine) == 2
            assert all(remedy in text for text in mine)


def _with_frozen_layers() -> float:
    """A head behind layers that do not train is the wrapper's alone; so is evaluation."""
    plain, wrapped = _model(), _model()
    wrapped.load_state_dict(plain.state_dict())
    wrapped[:2].requires_grad_(False)
    around = DistributedDataParallel(wrapped)
    with torch.no_grad():
        DistributedDataParallel(plain)(torch.ones(4, 8))
    _pass(around)
    x = [plain(torch.ones(4, 8) * (1 + rank)).square().sum() for rank in range(2)]
    wanted = torch.autograd.grad(sum(x) / 2, plain[2].weight)[0]  # type: ignore[arg-type, call-overload]
    return float((wrapped[2].weight.grad - wanted).abs().max())


def test_a_head_behind_frozen_layers_is_the_wrappers() -> None:
    assert max(run_ranks(2, _with_frozen_layers)) < 1e-6
