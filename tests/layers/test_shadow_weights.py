"""Shadow weights: the bits of conversion at each use, whatever changes the weights, with fewer operators."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d import (
    Cube,
    Embedding3D,
    ExecutionPolicy,
    Linear3D,
    MixedPrecisionPolicy,
    Projection3D,
    Sequences,
    TransformerLayer3D,
    checkpoint,
    explain,
    local,
    shard,
)
from tensor3d.distributed.shadow_weights import shadow_of
from tensor3d.optim import AdamW, Lamb, StableAdamW
from tensor3d.optim.adam import ShardedAdamBase
from tensor3d.torch_private import TorchDispatchMode, storage_id
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of

VOCAB, HIDDEN, HEADS, INNER, ROWS = 67, 16, 4, 40, 24  # over x = 3, no matrix divides
BF16 = MixedPrecisionPolicy(compute=torch.bfloat16)
ALWAYS = 2**40


class _Model(nn.Module):
    """A tied table, a block that comes twice, and a frozen weight."""

    def __init__(self, cube: Cube, **options: Any) -> None:
        super().__init__()
        self.tokens = Embedding3D(VOCAB, HIDDEN, cube)
        self.layer = TransformerLayer3D(HIDDEN, HEADS, cube, INNER, **options)
        self.projection = Projection3D(HIDDEN, VOCAB, cube, bias=True, weight=self.tokens.weight)
        self.layer.mlp.up.weight.requires_grad_(False)

    def forward(self, ids: Tensor, sequences: Sequences) -> Tensor:
        h = self.layer(self.layer(self.tokens(ids), sequences), sequences)
        result: Tensor = self.projection(h)
        return result

    @property
    def multiplied(self) -> int:
        """Elements of this rank's blocks that have copies: not the norms'."""
        return sum(local(p).numel() for name, p in self.named_parameters() if "norm" not in name)


Change = Callable[[Cube, _Model, ShardedAdamBase, Path], object]


def _some(model: _Model) -> list[nn.Parameter]:
    """DTensor's arithmetic starts slowly, for each shape."""
    few = [model.tokens.weight, model.layer.attention.qkv.bias]
    assert all(each is not None for each in few)
    return few if isinstance(few[0], DTensor) else list(model.parameters())  # type: ignore[return-value]


def _in_place(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    for parameter in _some(model):
        parameter.mul_(1.01)


def _blocks_in_place(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    for parameter in model.parameters():
        local(parameter).add_(0.01)


def _one_in_place(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    local(model.layer.mlp.up.weight).add_(0.1)


def _new_data(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    """On one device: a DTensor would keep its block, and layers refuse it."""
    for parameter in _some(model):
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data * 0.99


def _unseen(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    for parameter in _some(model):
        parameter.data.mul_(1.02)
    cube.shadows.forget()


def _there_and_back(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    """The addresses of before may come again."""
    part = model.layer.attention.out if isinstance(model.tokens.weight, DTensor) else model
    part.double()
    for parameter in part.parameters():
        local(parameter).add_(1e-3)
    part.float()


def _by_torch(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    """Whose foreach operators leave the counters of a DTensor as they are."""
    parameters = [parameter for parameter in _some(model) if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.01, foreach=True).step()
    model.zero_grad()


def _loaded(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})


def _read(cube: Cube, model: _Model, optimizer: ShardedAdamBase, folder: Path) -> None:
    checkpoint.load(folder / "step-00000001", model, optimizer, cube)


CHANGES: dict[str, Change] = {
    "nothing": lambda *_: None,
    "in place": _in_place,
    "blocks in place": _blocks_in_place,
    "one in place": _one_in_place,
    "new data": _new_data,
    "unseen": _unseen,
    "to and fro": _there_and_back,
    "by torch": _by_torch,
    "loaded": _loaded,
    "read": _read,
}
CHEAP = ("nothing", "blocks in place", "one in place", "read")
"""Without DTensor's own arithmetic."""


def _trained(
    cube: Cube, kind: type[ShardedAdamBase], folder: Path, changes: Iterable[str], **options: Any
) -> list[Tensor]:
    """Everything that a stale copy would change: after each change, gradients of two micro-batches with a step, and
    evaluations before and after it."""
    cube.manual_seed(0)
    sharded = options.pop("shard_over_data", False)
    autocast = options.pop("autocast", False)
    model = _Model(cube, **options)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], cube, lr=0.01, shard_over_data=sharded)
    rows = ROWS * cube.shape.y
    ids = torch.arange(rows * cube.shape.z) % VOCAB
    sequences = Sequences.from_lengths([rows - 3, 3], device="cpu")
    results: list[Tensor] = []

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result: Tensor = model(ids, sequences)
        return result.float().square().sum()

    checkpoint.save(folder, 1, model, optimizer, cube, {})
    for name in changes:
        with torch.no_grad():
            CHANGES[name](cube, model, optimizer, folder)
            results.append(loss())
        with torch.inference_mode():
            results.append(loss().clone())
        with cube.no_sync():
            loss().backward()
        loss().backward()
        results += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results.append(loss())
    shadows = cube.shadows.kept_bytes
    assert shadows == (2 * model.multiplied if cube.speed.shadow_weights else 0), shadows
    return [result.detach() for result in results]


RUNS: dict[str, tuple[type[ShardedAdamBase], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "kept": (Lamb, {"reshard_after_forward": False}),
    "recomputed": (StableAdamW, {"recompute": "layer"}),
    "shared out": (AdamW, {"shard_over_data": True}),
    "autocast": (AdamW, {"autocast": True}),
}


def _compared(
    shape: Shape, folder: Path, runs: Iterable[str], changes: Iterable[str], limit: int | None
) -> dict[str, list[int]]:
    """Of each run, which results differ."""
    cube, found = Cube(*shape) if ranks_of(shape) > 1 else Cube.single(), dict[str, list[int]]()
    for run in runs:
        kind, options = RUNS[run]
        types = MixedPrecisionPolicy() if run == "autocast" else BF16
        policies = [ExecutionPolicy(shadow_weights=on, weight_group_bytes=limit) for on in (False, True)]
        plain, copied = (
            _trained(
                cube.with_policy(types, policy), kind, folder / f"{run}-{policy.shadow_weights}", changes, **options
            )
            for policy in policies
        )
        found[run] = [number for number, pair in enumerate(zip(plain, copied, strict=True)) if not torch.equal(*pair)]
        cube.shadows.forget()
    return found


@pytest.mark.parametrize(
    ("shape", "runs", "changes", "limit"),
    [
        pytest.param((3, 1, 1, 1), ("adamw",), CHEAP, ALWAYS, marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), tuple(RUNS), tuple(CHANGES), None, marks=pytest.mark.slow),
        pytest.param((3, 1, 1, 1), tuple(RUNS), CHEAP, ALWAYS, marks=pytest.mark.slow),
        pytest.param((3, 1, 1, 1), ("kept", "autocast"), CHEAP, 0, marks=pytest.mark.slow),
        pytest.param(
            (2, 2, 1, 1),
            tuple(RUNS),
            CHEAP,
            None,
            marks=pytest.mark.long(reason="1x1x1 and 3x1x1 have all of these runs"),
        ),
        pytest.param((2, 1, 1, 2), ("shared out",), tuple(CHANGES), None, marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_conversion(
    shape: Shape, runs: tuple[str, ...], changes: tuple[str, ...], limit: int | None, tmp_path: Path
) -> None:
    for found in run_ranks(ranks_of(shape), _compared, shape, tmp_path, runs, changes, limit):
        assert found == {run: [] for run in runs}


class _Conversions(TorchDispatchMode):
    """Counts operators that convert, and what they convert."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        narrow = (kwargs or {}).get("dtype") is torch.bfloat16 and args[0].dtype is torch.float32
        if name == "aten::_foreach_copy_" or (name == "aten::_to_copy" and narrow):
            self.operators += 1
            self.tensors += len(args[0]) if isinstance(args[0], (list, tuple)) else 1
        return func(*args, **(kwargs or {}))


def _alone(on: bool = True) -> tuple[Cube, nn.Sequential, Tensor]:
    cube = Cube.single(precision=BF16, speed=ExecutionPolicy(shadow_weights=on))
    cube.manual_seed(0)
    model = nn.Sequential(Linear3D(8, 8, cube), Linear3D(8, 8, cube, face="y"))
    return cube, model, shard(torch.ones(4, 8, dtype=torch.bfloat16), cube, "z")


def _conversions(model: nn.Module, x: Tensor) -> tuple[int, int]:
    with _Conversions() as counted:
        model(x).sum().backward()
    return counted.operators, counted.tensors


def test_one_operator_converts_what_has_changed() -> None:
    cube, model, x = _alone()
    assert _conversions(model, x)[1] == 4  # each as it comes for the first time
    assert _conversions(model, x) == (0, 0)
    AdamW(model.parameters(), cube, lr=0.1).step()
    assert _conversions(model, x) == (1, 4)
    with torch.no_grad():
        model[1].bias.add_(1)
    assert _conversions(model, x) == (1, 1)
    assert _conversions(_alone(on=False)[1], x)[1] > 4


class _Unseen(torch.optim.SGD):
    """Steps as optimisers of torch do on DTensors: no counter shows it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)


def test_a_step_is_seen_by_its_end() -> None:
    _, model, x = _alone()
    before = model(x)
    _Unseen(model.parameters(), lr=0.1).step()
    after = model(x)
    assert not torch.equal(after, before)
    fresh = copy.deepcopy(model)(x)
    assert torch.equal(after, fresh)


def test_memory_is_written_anew_unless_somebody_holds_it() -> None:
    _, model, x = _alone()
    model(x)
    weight = model[0].weight
    first = shadow_of(weight)
    assert first is not None
    place, numbers = storage_id(first), first.clone()

    def change() -> Tensor:
        with torch.no_grad():
            weight.add_(1)
            model(x)
        after = shadow_of(weight)
        assert after is not None
        assert torch.equal(after, weight.to(torch.bfloat16))
        return after

    assert storage_id(change()) != place
    assert torch.equal(first, numbers)
    del first
    place = storage_id(change())
    assert storage_id(change()) == place
    weight.data = torch.zeros(8, 8)
    model(x)
    assert torch.equal(shadow_of(weight), torch.zeros(8, 8, dtype=torch.bfloat16))


def test_a_graph_that_waits_keeps_its_numbers() -> None:
    """As a converted weight that is kept does."""
    results = []
    for on in (False, True):
        _, model, x = _alone(on)
        for layer in model:
            layer.reshard_after_forward = False
        x.requires_grad_()
        loss = model(x).float().square().sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
            model(x)
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_copies_and_files_have_none() -> None:
    cube, model, x = _alone()
    model(x)
    assert cube.shadows.kept_bytes == 2 * 2 * (64 + 8)
    twin = copy.deepcopy(model)
    assert shadow_of(twin[0].weight) is None
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.fill_(2)
    assert torch.equal(twin[0](x), torch.full((4, 8), 2.0, dtype=torch.bfloat16))
    file = io.BytesIO()
    torch.save([*model.parameters()], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    model[0].weight = loaded[0]
    assert shadow_of(loaded[0]) is None
    model(x)
    assert shadow_of(loaded[0]) is not None
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    assert torch.load(whole, weights_only=False)(x).equal(model(x))
    del twin, loaded
    cube.shadows.forget()
    assert cube.shadows.kept_bytes == 0
    model(x)
    assert cube.shadows.kept_bytes == 2 * 2 * (64 + 8)
    del model
    assert cube.shadows.kept_bytes == 0


def test_parameters_of_inference_are_converted_at_each_use() -> None:
    with torch.inference_mode():
        cube, model, x = _alone()
        before = model(x)
        model[0].weight.zero_()
        assert not torch.equal(model(x), before)
        assert cube.shadows.kept_bytes == 0


def test_what_is_kept_are_the_copies_where_nothing_is_gathered() -> None:
    """Beside them a layer that keeps all keeps no more than one that converts again."""
    saved = []
    for on, reshard in ((False, True), (False, False), (True, True), (True, False)):
        cube = Cube.single(precision=BF16, speed=ExecutionPolicy(shadow_weights=on))
        layer = TransformerLayer3D(HIDDEN, HEADS, cube, INNER, reshard_after_forward=reshard)
        x = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        saved.append(explain(layer, inputs=(x, Sequences.from_lengths([ROWS], device="cpu"))).saved)
    assert saved[0] == saved[2] == saved[3] < saved[1]
