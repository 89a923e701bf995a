"""Wrappers of PyTorch around layers: they look for gradients where the ledger does not bring them, and are refused."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tensor3d import Cube, Linear3D, torch_private
from tensor3d.torch_private import is_there
from tests.ranks import run_ranks


def _model() -> nn.Sequential:
    cube = Cube.single()
    cube.manual_seed(0)
    return nn.Sequential(Linear3D(8, 16, cube), Linear3D(16, 8, cube, face="y"), nn.Linear(8, 1))


def _pass(model: nn.Module) -> None:
    loss: Tensor = model(torch.ones(4, 8) * (1 + torch.distributed.get_rank())).square().sum()
    loss.backward()


def _not_given_back(model: nn.Module) -> nn.Module:
    fully_shard(model)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    return model


def _refused() -> dict[str, str]:
    told = {}
    wrappers: dict[str, Any] = {
        "ddp": DistributedDataParallel,
        "ddp, unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
        "fully_shard": fully_shard,
        "fully_shard, kept": lambda model: fully_shard(model, reshard_after_forward=False),
        "fully_shard, not given back": _not_given_back,
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
            assert len(mine) == (2 if name == "ddp" else 3)
            assert all(remedy in text for text in mine)


@dataclass
class _State:
    """Of a module whose parameters `fully_shard` has put into groups of several meshes."""

    _fsdp_param_groups: list[Any]

    @property
    def _fsdp_param_group(self) -> None:
        raise AssertionError("Expected at most 1 param group")


def test_a_module_of_several_groups_may_be_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    state = _State([SimpleNamespace(fsdp_params=[SimpleNamespace(_unsharded_param=each)]) for each in (other, own)])
    states = {nn.Identity(): weakref.ref(state)}
    monkeypatch.setattr("torch.distributed._composable_state._module_state_mapping", states)
    assert torch_private.lent_by_fully_shard([nn.Parameter(torch.ones(2)), own]) is own
    assert torch_private.lent_by_fully_shard([nn.Parameter(torch.ones(2))]) is None


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


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning", "ignore:.*autograd.function.Function:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_refused_and_what_learns_nothing_is_not(backend: str) -> None:
    torch_private.reset_compiler()
    model, rows = _model(), torch.ones(4, 8)
    with pytest.raises(RuntimeError, match=r"reason: a layer of tensor3d is used within torch\.compile"):
        torch.compile(model, backend=backend, fullgraph=True)(rows)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows), model(rows))
    with pytest.raises(ValueError, match=r"within torch\.compile.*Compile what lies between such layers"):
        compiled(rows)
    part = nn.Sequential(nn.Linear(8, 8), torch.compiler.disable(model))
    torch.compile(part, backend=backend)(rows).sum().backward()
    assert all(parameter.grad is not None for parameter in part.parameters())
    torch_private.reset_compiler()


def test_layers_stay_out_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without the compiler, which is slow to import."""
    model, rows = _model(), torch.ones(4, 8)
    monkeypatch.setattr("tensor3d.ops.autograd_function.within_compiled", lambda: True)
    with pytest.raises(ValueError, match="within torch"):
        model(rows)
    with torch.no_grad():
        model(rows)
    model.requires_grad_(False)
    model(rows)
    assert is_there(torch_private._compiling_calls)
    assert not torch_private.within_compiled()


# --- torch.func -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_of_functions_are_refused(transform: str) -> None:
    model, rows = _model(), torch.ones(4, 8)
    calls = {
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(rows),
        "vmap": lambda: torch.func.vmap(model)(rows[None]),
    }
    with pytest.raises(ValueError, match=r"within a transform of torch\.func"):
        calls[transform]()
    named: dict[str, Tensor] = dict(model.named_parameters())
    torch.func.functional_call(model, named, (rows,)).sum().backward()  # is none
    assert all(parameter.grad is not None for parameter in named.values())
