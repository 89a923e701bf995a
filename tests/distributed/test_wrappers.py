"""Wrappers of PyTorch around layers: those that look for gradients where the ledger does not bring them are refused,
and compiled models leave layers as they are."""

from __future__ import annotations

import inspect
import math
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tensor3d
from tensor3d import (
    Cube,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    Sequences,
    TransformerLayer3D,
    all_reduce_replicated,
    constant,
    local,
    local_param,
    local_shard,
    torch_private,
    vector,
)
from tensor3d.distributed import collectives
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
    cube = Cube(1, 1, 2)
    for error, wrap in ((RuntimeError, DistributedDataParallel), (TypeError, fully_shard)):
        # As docs/custom.md has it; before torch 2.13 it is a view that DDP fails at.
        with pytest.raises(error, match=r"c10d\.broadcast_|flatten multiple dimensions|value was None"):
            wrap(Linear3D(8, 16, cube))
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


_MAKE_OR_ASK = {  # what no forward calls
    *("check_copies", "check_parameters", "clip_grad_norm_", "clip_gradients", "constant", "distribute", "explain"),
    *("from_fused_rows", "full_state_dict", "gather_together", "init_parameter", "keep_gathered"),
    *("load_full_state_dict", "normal", "parallelize", "propose_plan", "to_fused_rows"),
}


def test_what_a_forward_may_call_stays_out_of_compiled_code() -> None:
    """Known by the mark, without the compiler, which is slow to import: what it does is below, and slow."""
    public = {name: getattr(tensor3d, name) for name in tensor3d.__all__}
    layers = [each.forward for each in public.values() if isinstance(each, type) and issubclass(each, nn.Module)]
    functions = {name: each for name, each in public.items() if inspect.isroutine(each)}
    assert len(layers) > 10
    assert functions.keys() >= _MAKE_OR_ASK
    sent = [each for name, each in vars(collectives).items() if name in ("all_gather", "all_to_all", "reduce_scatter")]
    called = [each for name, each in functions.items() if name not in _MAKE_OR_ASK]
    for each in (*layers, *called, *sent, collectives.CommHandle.wait, Cube.axis, Cube.over):
        assert each._torchdynamo_disable, each.__qualname__
    assert is_there(torch_private._set_way_of_code)


class _Mixed(nn.Module):
    """Layers of the library and functions of torch in turns, on a checkpoint too."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        self.embed, self.norm = Embedding3D(32, 16, cube), LayerNorm3D(16, cube)
        self.up, self.down = Linear3D(16, 32, cube), Linear3D(32, 16, cube, face="y")
        self.block = TransformerLayer3D(16, 4, cube, dropout=0.1)
        self.gain = constant((16,), vector("z"), cube, 1.0)

    def forward(self, ids: Tensor, sequences: Sequences) -> Tensor:
        h = self.embed(ids).sin() * local_param(self.gain, vector("z"), self.cube)
        h = h + self.down(torch.relu(self.up(self.norm(h))) * 2)
        h = checkpoint(lambda rows: self.block(rows, sequences).cos() * 2, h, use_reentrant=False)
        return all_reduce_replicated(h.square().sum() / 32, self.cube.over("data", "x", "y", "z"))


def _compiled(shape: tuple[int, int, int], data: int, backend: str) -> tuple[float, int]:
    """The largest difference from the same without a compiler, and how many graphs were compiled."""
    cube = Cube(*shape, data=data)
    cube.manual_seed(0)
    ids, sequences = (
        local_shard(torch.arange(32), cube),
        Sequences.from_lengths([8 // shape[2]] * (4 // data // shape[0])),
    )
    model = _Mixed(cube)
    torch_private.reset_compiler()
    found = []
    either: list[Any] = [model, torch.compile(model, backend=backend)]
    for called in either:
        cube.manual_seed(1)
        model.zero_grad()  # the compiler looks at `gain`, which the forward reads itself, and at its gradient
        with torch.inference_mode():
            values = [called.eval()(ids, sequences).clone()]
        called.train()
        for _ in range(2):  # the second pass gathers ahead what the first has seen
            model.zero_grad()
            loss = called(ids, sequences)
            loss.backward()
        found.append([*values, loss.detach(), *[local(p.grad) for p in model.parameters() if p.grad is not None]])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch_private.reset_compiler()
    assert len(found[0]) == len(found[1]) == 2 + len(list(model.parameters()))
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), graphs


_IN_GRAPHS = pytest.mark.filterwarnings("ignore:Dynamo:UserWarning", "ignore:.*Function:DeprecationWarning")


@pytest.mark.slow
@_IN_GRAPHS
@pytest.mark.parametrize(
    ("shape", "data", "backend"),
    [((1, 1, 1), 1, "aot_eager"), ((1, 1, 2), 1, "aot_eager"), ((2, 1, 1), 1, "eager"), ((1, 1, 1), 2, "aot_eager")],
)
def test_a_compiled_model_learns_the_same(shape: tuple[int, int, int], data: int, backend: str) -> None:
    """What lies between layers is compiled, and they are as they were."""
    for difference, graphs in run_ranks(math.prod(shape) * data, _compiled, shape, data, backend):
        assert difference < 1e-12
        assert graphs > 3


def _compiled_with_a_plain_parameter() -> str:
    cube = Cube(1, 1, 2)
    layer, plain = Linear3D(16, 16, cube), nn.Linear(8, 8)
    torch_private.reset_compiler()
    with pytest.raises(ValueError, match="is a plain tensor on 1x1x2") as refused:
        torch.compile(lambda x: layer(plain(x).sin()), backend="aot_eager")(torch.ones(4, 8))
    torch_private.reset_compiler()
    return str(refused.value)


@pytest.mark.slow
@_IN_GRAPHS
def test_a_plain_parameter_in_compiled_code_is_refused() -> None:
    assert len(set(run_ranks(2, _compiled_with_a_plain_parameter))) == 1


@pytest.mark.slow
@_IN_GRAPHS
def test_a_whole_graph_is_refused_in_our_words() -> None:
    torch_private.reset_compiler()
    with pytest.raises(RuntimeError, match=r"no part of compiled code.*leave fullgraph=True"):
        torch.compile(_model(), backend="eager", fullgraph=True)(torch.ones(4, 8))
    torch_private.reset_compiler()


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
