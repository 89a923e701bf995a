"""A training step never makes the host wait for the device: it reads no value, and copies nothing to or fro.

Tensors of PyTorch's device "meta" have shapes and no values. A step that runs on them has looked at none; what it would
have copied from the host is seen as a tensor of the CPU among its operators'. On a GPU PyTorch itself watches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube, CubeShape, ExecutionPolicy, MixedPrecisionPolicy
from tensor3d.data import Loader, SpecialTokens, TrainBatch
from tensor3d.data.dataset import PretrainingData
from tensor3d.data.loader import settle
from tensor3d.data.packed_batch import Pack, PackedBatch, collate
from tensor3d.ops import compiled_regions
from tensor3d.optim import AdamW, GradScaler, Lamb, decay_groups
from tools.bench.harness.synthetic_data import RandomPairs
from tools.training.pretraining import PretrainObjective
from tools.training.step import TrainingStep

VOCAB, CAPACITY = 97, 16
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
FROM_LISTS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class _Operators(TorchDispatchMode):
    """Fails where an operator needs a value on the host, or takes or gives a tensor of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in READS, f"{name} waits for the device"
        if name == "_fused_sgd_":  # which the device "meta" lacks: writes to its arguments alone
            return None
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), f"{name} meets a tensor of the host"
        return result


class _Functions(TorchFunctionMode):
    """Fails where a list becomes a tensor, whose copy operators do not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in FROM_LISTS, f"{func.__name__} copies from the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def watching() -> Iterator[None]:
    with _Operators(), _Functions():
        yield


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device "meta" autocast knows nothing, not even that it is off. Regions run as they are written there."""
    monkeypatch.setattr(compiled_regions, "_check_compiler", lambda *_: None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda device, **options: nullcontext())


def pack(*lengths: int) -> Pack:
    ids = np.arange(sum(lengths), dtype=np.int64) + 5
    masked = np.cumsum((0, *lengths[:-1])) + 1
    return Pack(
        ids=ids,
        types=np.zeros_like(ids),
        lengths=np.array(lengths),
        masked=masked,
        masked_labels=ids[masked],
        next_labels=np.zeros(len(lengths), dtype=np.int64),
    )


def packed(*packs: Pack) -> PackedBatch:
    limits = {"capacity": CAPACITY, "masked_per_pack": 4, "max_sequences": 4}
    return collate(packs, shape=CubeShape(), rank=0, pad=0, with_read_rows=True, **limits)  # type: ignore[arg-type]


def a_step(batches: list[PackedBatch]) -> TrainBatch:
    return TrainBatch(
        index=0,
        batches=batches,
        targets=10,
        sequences=10,
        tokens=56,
        squares=1,
        lengths=np.zeros(1, dtype=np.int64),
        fill=0.9,
    )


def cube_on(device: str, compute: torch.dtype | None, options: dict[str, Any]) -> tuple[Cube, dict[str, Any]]:
    """The cube with what of some options is its own, and the others."""
    own = {"fp8", "compile", "shadow_weights"} & options.keys()
    precision = MixedPrecisionPolicy(compute=compute, fp8=options.get("fp8"))
    speed = ExecutionPolicy(**{name: options[name] for name in own - {"fp8"}})
    return Cube.single(device, precision=precision, speed=speed), {k: options[k] for k in options.keys() - own}


def training(cube: Cube, *, lamb: bool = False, scaler: bool = False, **sizes: Any) -> TrainingStep[TrainBatch]:
    cube.manual_seed(0)
    speed = {"read_rows_only": sizes.pop("read_rows_only", False)}
    config = BertConfig(**{"layers": 2, "hidden": 32, "heads": 2, "vocab": VOCAB, "positions": CAPACITY} | sizes)
    model = BertForPreTraining(config, cube, **speed).train()
    optimizer = (Lamb if lamb else AdamW)(decay_groups(model, 0.01), cube, lr=1e-3)
    scaling = GradScaler(cube) if scaler else None
    return TrainingStep(model, optimizer, scaling, cube, PretrainObjective(model), clip=1.0)


def take(step: TrainingStep[TrainBatch], batches: list[PackedBatch]) -> None:
    step.stopwatch.begin()
    step.take(a_step(batches), learning_rate=1e-3, stall=0.0)


def on_meta(*, settled: bool = True) -> list[PackedBatch]:
    """Two micro-batches as they come from a loader for a GPU."""
    batches = [packed(pack(7, 5), pack(4, 4, 8)).to("meta"), packed(pack(16), pack(3, 9)).to("meta")]
    for batch in batches if settled else []:
        settle(batch)
    return batches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lamb": True},
        {"lamb": True, "compile": True},
        {"encoder": "modern", "positions": 512, "window": 3},
        {"norm": "pre", "dropout": 0.0, "attention_dropout": 0.0},
        {"read_rows_only": True},
        pytest.param({"fp8": "delayed", "shadow_weights": True}, marks=pytest.mark.slow),
    ],
    ids=["adamw", "lamb", "compiled lamb", "modern", "pre-norm", "read rows", "delayed fp8, shadows"],
)
@pytest.mark.usefixtures("meta")
def test_a_step_reads_nothing_and_copies_nothing(options: dict[str, Any]) -> None:
    cube, rest = cube_on("meta", torch.bfloat16, options)
    step, batches = training(cube, **rest), on_meta()
    with watching():
        take(step, batches)
        take(step, batches)  # with a state of the optimiser, and gradients that were set to None


@pytest.mark.usefixtures("meta")
def test_batches_that_are_not_settled_are_copied_in_the_step() -> None:
    step, batches = training(Cube.single("meta")), on_meta(settled=False)
    with pytest.raises(AssertionError, match="of the host"), watching():
        take(step, batches)


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("module", ["sharding.redistribute", "layers.loss"])
def test_checks_of_values_would_be_seen(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, batches = training(Cube.single("meta")), on_meta()
    monkeypatch.setattr(f"tensor3d.{module}.is_host_readable", lambda tensor: True)
    with pytest.raises((AssertionError, RuntimeError), match=r"waits for the device|meta"), watching():
        take(step, batches)


@pytest.mark.parametrize(
    "sin",
    [
        lambda t: t.sum().item(),
        lambda t: bool((t > 0).all()),
        lambda t: int(t.max()),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.masked_select(t, t > 0),
        lambda t: torch.equal(t, t + 1),
        lambda t: t.unique(),
        lambda t: t.repeat_interleave(t.long()),
        lambda t: t.new_tensor([1.0, 2.0]),
        lambda t: torch.tensor([1.0, 2.0], device=t.device),
        lambda t: torch.zeros(3).to(t.device, non_blocking=True),
        lambda t: t.copy_(torch.zeros(4)),
        lambda t: torch.from_numpy(np.zeros(4)).to(t.device),
    ],
)  # fmt: skip
def test_whatever_waits_is_seen(sin: Callable[[Tensor], object]) -> None:
    tensor = torch.zeros(4, device="meta")
    with pytest.raises((AssertionError, RuntimeError, TypeError)), watching():
        sin(tensor)


# --- on a GPU ------------------------------------------------------------------------------------------------------

SPECIAL = SpecialTokens(vocab_size=VOCAB, pad=0, cls=2, sep=3, mask=4)


@pytest.fixture
def errors_of_cuda() -> Iterator[None]:
    """From here on PyTorch raises an error where an operator would wait for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("compute", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"dropout": 0.0, "attention_dropout": 0.0}),
        (torch.float16, {"scaler": True, "lamb": True}),
        (torch.float16, {"scaler": True, "lamb": True, "compile": True}),
        (None, {"encoder": "modern", "positions": 512, "window": 3}),
        (torch.bfloat16, {"read_rows_only": True}),
        (torch.bfloat16, {"compile": True, "shadow_weights": True}),
        (torch.bfloat16, {"compile": True, "fp8": "delayed"}),
    ],
    ids=[
        "dropout",
        "no dropout",
        "fp16, lamb",
        "compiled fp16, lamb",
        "modern",
        "read rows",
        "compiled, shadows",
        "compiled, delayed fp8",
    ],
)
def test_a_step_on_a_gpu_waits_for_nothing(
    compute: torch.dtype | None, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    cube, rest = cube_on("cuda", compute, options)
    step = training(cube, **rest)
    source = RandomPairs(np.bincount([5, 7, 9, 16]), 1000, special=SPECIAL, seed=0)
    data = PretrainingData(source, SPECIAL, capacity=CAPACITY, max_length=CAPACITY, max_sequences=3, seed=0)
    place = {"shape": CubeShape(), "rank": 0}
    arguments: dict[str, Any] = {**place, "device": "cuda", "with_read_rows": True}
    with Loader(data, global_batch=8, packs_per_rank=4, **arguments) as loader:
        for number in range(5):
            if number == 2:  # libraries are loaded and memory is taken in the first steps
                request.getfixturevalue("errors_of_cuda")
            step.stopwatch.begin()
            step.take(next(loader), learning_rate=1e-3, stall=0.0)
