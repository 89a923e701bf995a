"""`bench operators`: what the host names for a device in a micro-batch, by box. No device is needed.

Tensors lie on PyTorch's device "meta": they have sizes and no memory, and the code takes it for a GPU. Other ranks are
left out, by PyTorch's "fake" process group. What only kernels of GPUs do in one, attention and dropout, is called by
the operators that they are there.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert import PRESETS, BertConfig, BertForPreTraining
from models.bert.cost_model.param_shapes import OptimizerName
from models.bert.huggingface.config import settings_of
from models.bert.model import example_batch
from tensor3d import Cube, CubeShape, ExecutionPolicy, MixedPrecisionPolicy
from tensor3d.attention.backends import SUPPORT
from tensor3d.data.loader import settle
from tensor3d.layers.attention import Recompute
from tensor3d.ops import fp8 as fp8_products
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.ops.fp8 import Scaling
from tensor3d.optim.clip_grad import clip_gradients
from tensor3d.torch_private import (
    TorchDispatchMode,
    efficient_attention,
    fake_collectives,
    is_fused_sgd,
    is_storage_resize,
    mesh_environment,
    tree_leaves,
    without_modes,
)
from tools.bench.harness.benchmark import ONE_PROCESS, Benchmark, Count, Report, cubes_of, listed
from tools.bench.harness.figures import Column, as_json, milliseconds, table
from tools.bench.vs_transformers.contenders import with_sizes
from tools.training.config import OptimizerConfig
from tools.training.dry_step import alone
from tools.training.factory import TYPES, make_optimizer

R = TypeVar("R")
OURS, LIBRARY = "ours", "transformers"
_DEVICE = torch.device("meta")

# --- The command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OperatorsCommand(Benchmark[list[CubeShape]]):
    """Count the operators, collectives and bytes of a micro-batch of our BERT on boxes of GPUs that need not be there,
    and the host's time to name them; beside `transformers` on one."""

    preset: str = "large"
    """Size of BERT."""
    layers: Count | None = None
    """Transformer layers, instead of the preset's."""
    cubes: str = "1x1x1"
    """Boxes, as XxYxZ,XxYxZ,...; figures are of rank 0."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the products. In fp32 attention is `grouped`, in bf16 `varlen`."""
    rows: Count = 4096
    """Tokens of each rank's part of a micro-batch, on face y."""
    longest: Count = 512
    """Tokens of a sequence. Where the rows do not divide by it the last one is shorter, in a class of its own."""
    dropout: float = 0.1
    """Probability, of hidden states; attention weights have none."""
    kept: bool = False
    """Whether products keep what they have gathered or converted for backward."""
    recompute: Recompute = "none"
    """What backward computes again: nothing, attention, or whole layers."""
    fp8: Literal["off", "rowwise", "tensorwise", "delayed"] = "off"
    """How linear layers multiply in FP8, by a GPU's kernels, beside bf16 alone (`precision.fp8` of recipes)."""
    shadow_weights: bool = False
    """Whether weights are converted once after a change (`ExecutionPolicy.shadow_weights`), as before the micro-batch
    that is counted."""
    compile: bool = False
    """Count each compiled region (`ExecutionPolicy.compile`) as one operator, which reads what it is given and writes
    what it returns. Nothing is compiled, so the host is not timed."""
    contenders: str = f"{OURS},{LIBRARY}"
    """Which of the two; `transformers` is counted on one device."""
    passes: Count = 5
    """That are timed, after those that are counted."""

    launcher: ClassVar[str | None] = ONE_PROCESS

    def plan(self) -> list[CubeShape]:
        """The boxes."""
        listed("--preset", self.preset, PRESETS)
        listed("--contenders", self.contenders, (OURS, LIBRARY))
        if self.longest > min(self.config.positions, self.rows):
            most = min(self.config.positions, self.rows)
            raise ValueError(f"--longest must be at most {most}, the positions and --rows. Got {self.longest}.")
        shapes = cubes_of(self.cubes)
        for shape in shapes:
            self.config.check(shape)
            if self.rows * shape.z % math.lcm(shape.y, shape.z):
                raise ValueError(
                    f"--rows times z must divide by y and z, the rows of a plane. Got {self.rows} on {shape}."
                )
        return shapes

    @property
    def config(self) -> BertConfig:
        return with_sizes(PRESETS[self.preset], layers=self.layers, dropout=self.dropout, attention_dropout=0.0)

    def measure(self, plan: list[CubeShape]) -> Report:
        names = listed("--contenders", self.contenders, (OURS, LIBRARY))
        compute = None if self.precision == "fp32" else TYPES[self.precision]
        results = []
        for shape in plan if OURS in names else ():
            results.append(
                count(
                    self.config,
                    shape,
                    compute,
                    self.rows,
                    self.longest,
                    self.kept,
                    self.passes,
                    recompute=self.recompute,
                    fp8=None if self.fp8 == "off" else self.fp8,
                    shadow_weights=self.shadow_weights,
                    compiled=self.compile,
                )
            )
        if LIBRARY in names:
            results.append(count_library(self.config, compute, self.rows, self.longest, self.passes))
        lines = [
            f"BERT-{self.preset}, {self.config.layers} layers, {self.precision}, {self.rows:,} rows of each rank, "
            f"sequences of {self.longest}; forward and backward of one micro-batch",
            *table(results),
        ]
        return Report(lines=lines, content={"results": as_json(results)})


@dataclass(frozen=True, kw_only=True)
class OperatorFigures:
    """Of the first micro-batch of a step on rank 0, but where it says otherwise."""

    contender: Annotated[str, Column("who")]
    cube: Annotated[str, Column("box")]
    operators: Annotated[int, Column("operators", ",")]
    """What the host names that computes on the device: neither views nor memory without content, nor collectives."""
    further: Annotated[int, Column("next micro-batch", ",")]
    """The same of each further micro-batch, whose gradients are added to those before."""
    views: Annotated[int, Column("views", ",")]
    """Names for parts of tensors, and memory without content: the host's work alone."""
    collectives: Annotated[int, Column("collectives", ",")]
    moved_bytes: Annotated[int, Column("MiB beside products", ",.0f", 2.0**-20)]
    """Read and written by operators other than products and attention."""
    host_seconds: Annotated[float | None, milliseconds("host ms")]
    """Of the host between operators and views: the code around them and autograd; the least of some passes. What
    PyTorch does in one is left out, for on this device that is Python."""
    by_name: Mapping[str, int]
    """Operators."""


# --- Counting ---------------------------------------------------------------------------------------------------------

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_mm"}
_WRITE_ALONE = {
    *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
}
"""Read nothing of what they change; all others that change a tensor in place do."""
_OF_A_SHAPE = {
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}
"""Read nothing of what they are given."""
_BY_INDEX = {
    **{"index_select": ("self", "result"), "gather": ("self", "index"), "embedding": ("weight", "result")},
    **{"index_add_": ("self", "source"), "scatter_add_": ("self", "index"), "nll_loss_forward": ("self", "target")},
}
"""Touch of the first no more elements than the second has."""
_SIZES_ALONE = {"nll_loss_backward": "self"}
"""Of this argument they take the sizes."""


class OperatorCounter(TorchDispatchMode):
    """Inside, counts the operators that reach a device, those of backward passes too.

    What moves over memory follows from an operator's schema: what it is given it reads, what it returns it writes, and
    what it changes it reads and writes. `out=` is written alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.views, self.collectives, self.moved_bytes = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.call(func, args, kwargs)
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        aliases = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
        if namespace in ("c10d", "_c10d_functional"):
            self.collectives += 1
        elif name in _EMPTY or aliases or is_storage_resize(func):
            self.views += 1
        else:
            given = {each.name: kwargs.get(each.name) for each in schema.arguments}
            given.update(zip(given, args, strict=False))
            self.take(name, *_touched(name, schema, given, result))
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def take(self, name: str, read: Any, written: Any, untouched: int = 0) -> None:
        """One operator, with the tensors that it reads and writes, each of them once, but for so many bytes."""
        both = [*_tensors(read), *_tensors(written)]
        if both and all(each.device == _DEVICE for each in both):
            self.operators[name] += 1
            if name not in _PRODUCTS and "attention" not in name:
                self.moved_bytes += sum(map(_bytes, both)) - untouched


def _touched(name: str, schema: Any, given: Mapping[str, Any], result: Any) -> tuple[list[Any], list[Any], int]:
    """What an operator reads, what it writes, and the bytes of both that it leaves alone."""
    changed = {each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write}
    unread = {each.name for each in schema.arguments if each.is_out}
    unread |= set(given) if name in _OF_A_SHAPE else changed if name in _WRITE_ALONE else {_SIZES_ALONE.get(name, "")}
    read = [value for each, value in given.items() if each not in unread]
    # Fused optimisers write to gradients but to take a loss scale out, which clipping does here.
    written = [given[each] for each in changed if each != "grads"]
    untouched = 0
    if name in _BY_INDEX:
        table, chosen = ({**given, "result": result}[each] for each in _BY_INDEX[name])
        untouched = max(0, _bytes(table) - chosen.numel() * table.element_size()) * (1 + bool(changed))
    return read, [*written, result], untouched


class RegionsAsOne(CompiledRegions):
    """A region is one operator to the counter that is inside it: it reads what it is given, and writes what it returns
    and what it has changed."""

    counter: OperatorCounter | None = None

    def constant(self, make: Callable[..., Tensor], *numbers: float) -> Tensor:
        """Which stays: a real one does, and these are all of one mode."""
        key = (make, *numbers)
        if key not in self._constants:
            self._constants[key] = super().constant(make, *numbers)
        return self._constants[key]

    def __call__(self, region: Callable[..., R], *inputs: Any) -> R:
        given = _tensors(inputs)
        versions = [each._version for each in given]
        with torch.no_grad(), without_modes():
            result = region(*inputs)
        if self.counter is not None:
            changed = [each for each, version in zip(given, versions, strict=True) if each._version > version]
            self.counter.take(region.__name__, given, (changed, result))
        return result


class _Clock(TorchDispatchMode):
    """Inside, adds up the seconds that operators take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seconds = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        self.seconds += time.thread_time() - begun
        return result


def host_seconds(take: Callable[[], object], passes: int) -> float:
    """Of this thread, without operators, and without what PyTorch needs to tell the clock of each: that is measured
    with one alone. The least of some passes."""
    tensor = torch.empty(2, 2, device=_DEVICE)

    def alone() -> None:
        for _ in range(1000):
            torch.add(tensor, tensor)

    found: list[float] = []
    telling: list[float] = []
    for _ in range(passes):
        for work, kept in ((alone, telling), (take, found)):
            clock, begun = _Clock(), time.thread_time()
            with clock:
                work()
            beside = time.thread_time() - begun - clock.seconds
            kept.append(beside / clock.calls if work is alone else beside - clock.calls * min(telling))
    return max(0.0, min(found))


def _tensors(values: Any) -> list[Tensor]:
    """Each once."""
    return list({id(each): each for each in tree_leaves(values) if isinstance(each, Tensor)}.values())


def _bytes(tensor: Tensor) -> int:
    """What is repeated along a dimension is in memory once."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return elements * tensor.element_size()


def count(
    config: BertConfig,
    shape: CubeShape,
    compute: torch.dtype | None,
    rows: int,
    longest: int,
    kept: bool = False,
    passes: int = 1,
    *,
    recompute: Recompute = "none",
    fp8: Scaling | None = None,
    shadow_weights: bool = False,
    compiled: bool = False,
) -> OperatorFigures:
    """Of our model on a box.

    Args:
        rows: tokens of each rank on face y.
        kept: see `OperatorsCommand`; so are the others.
    """
    with ExitStack() as stack:
        stack.enter_context(alone(shape, 0))
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        types = MixedPrecisionPolicy(compute=compute, fp8=fp8)
        speed = ExecutionPolicy(shadow_weights=shadow_weights)
        cube = Cube(shape.x, shape.y, shape.z, shape.data, device=_DEVICE, precision=types, speed=speed)
        cube.manual_seed(0)
        regions = RegionsAsOne(False, _DEVICE)
        if compiled:  # as it would be told, and nothing is: there need be no compiler
            cube.speed, cube.regions = replace(speed, compile=True), regions
        with cube.skip_init():
            model = BertForPreTraining(config, cube, recompute=recompute, reshard_after_forward=not kept).train()
        batch, targets, sequences = example_batch(rows * shape.planes * shape.z, longest, cube)
        settle(batch)
        found = _figures(model, lambda: model(batch, targets, sequences).loss, 0 if compiled else passes, regions)
    return OperatorFigures(contender=OURS, cube=str(shape), **found)


@dataclass(frozen=True, kw_only=True)
class UpdateFigures:
    """Of clipping and a step of an optimiser on rank 0."""

    operators: int
    """One that takes a list of tensors is one."""
    moved_bytes: int
    """Read and written."""


class _UpdateCounter(OperatorCounter):
    """Knows the fused step of SGD, too, which is in place, and has no rule for "meta"."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return None if is_fused_sgd(func) else super().call(func, args, kwargs)


def count_update(
    config: BertConfig, shape: CubeShape, optimizer: OptimizerName, *, compiled: bool = False
) -> UpdateFigures:
    """Of gradients that are there, beside collectives."""
    with ExitStack() as stack:
        stack.enter_context(alone(shape, 0))
        stack.enter_context(as_on_a_gpu())
        cube = Cube(shape.x, shape.y, shape.z, shape.data, device=_DEVICE)
        regions = RegionsAsOne(False, _DEVICE)
        cube.manual_seed(0)
        if compiled:
            cube.speed, cube.regions = replace(cube.speed, compile=True), regions
        with cube.skip_init():
            model = BertForPreTraining(config, cube)
        stepping = make_optimizer(model, OptimizerConfig(kind=optimizer), cube, betas=(0.9, 0.999))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        counter = _UpdateCounter()
        regions.counter = counter
        with counter:
            clip_gradients(model.parameters(), 1.0, cube)
            stepping.step()
    return UpdateFigures(operators=counter.operators.total(), moved_bytes=counter.moved_bytes)


def count_library(
    config: BertConfig, compute: torch.dtype | None, rows: int, longest: int, passes: int = 1
) -> OperatorFigures:
    """Of `transformers`' model on one device, on full sequences, without a mask. Where products are of another type,
    all of its weights are."""
    from transformers import BertConfig as LibraryConfig
    from transformers import BertForPreTraining as LibraryBert

    settings = settings_of(config, "BertForPreTraining", "fp32")
    library = LibraryConfig.from_dict({**settings, "attn_implementation": "sdpa"})
    with as_on_a_gpu():
        with _DEVICE:
            model = LibraryBert(library).to(compute or torch.float32).train()
            ids = torch.zeros(rows // longest, longest, dtype=torch.int64)
            pairs = torch.zeros(len(ids), dtype=torch.int64)
        given = {"input_ids": ids, "token_type_ids": ids, "labels": ids, "next_sentence_label": pairs}
        found = _figures(model, lambda: model(**given).loss, passes)
    return OperatorFigures(contender=LIBRARY, cube="-", **found)


def _figures(
    model: nn.Module, loss: Callable[[], Tensor], passes: int, regions: RegionsAsOne | None = None
) -> dict[str, Any]:
    """One pass to warm up, one that is counted, one more beside its gradients, and some that are timed, if any."""

    def take() -> None:
        loss().backward()

    def take_first() -> None:
        model.zero_grad(set_to_none=True)
        take()

    take()  # and all that is made once
    model.zero_grad(set_to_none=True)
    torch.autograd.graph.increment_version(list(model.parameters()))  # as an optimiser's step has left them
    first, further = OperatorCounter(), OperatorCounter()
    for counter in (first, further):
        if regions is not None:
            regions.counter = counter
        with counter:
            take()
    return {
        "operators": first.operators.total(),
        "further": further.operators.total(),
        "views": first.views,
        "collectives": first.collectives,
        "moved_bytes": first.moved_bytes,
        "host_seconds": host_seconds(take_first, passes) if passes else None,
        "by_name": dict(first.operators.most_common()),
    }


# --- A GPU that need not be there -------------------------------------------------------------------------------------


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, dropout, attention and products in FP8 of tensors on "meta" are the operators that they are on a GPU, and
    autocast, which knows nothing of that device, is off."""
    varlen = replace(SUPPORT["varlen"], devices=("cuda", "meta"), backward=("cuda", "meta"))
    fake_collectives()
    with (
        patch.dict(SUPPORT, {"varlen": varlen}),
        patch.object(fp8_products, "has_kernel", lambda device: True),
        patch.object(F, "dropout", _dropout),
        patch.object(F, "scaled_dot_product_attention", _attention),
        patch.object(torch, "is_autocast_enabled", lambda device: False),
        patch.object(torch, "autocast", lambda device, **options: nullcontext()),
        patch.object(mesh_environment(), "num_devices_per_host", lambda kind: 8),
    ):
        yield


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    bias = None
    if attn_mask is not None:  # one of numbers has a gradient, one of truth values none
        numbers = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=q.dtype)
        bias = numbers.expand(*q.shape[:3], k.shape[2])
    result: Tensor = efficient_attention(q, k, v, bias, True, dropout_p, is_causal)[0]
    return result
