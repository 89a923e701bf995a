"""`bench kernels`: every compiled region compiled for a GPU that need not be there, down to machine code.

Which regions there are, and of what, is not listed: the models take a training micro-batch and one of evaluation on
PyTorch's device "meta" (operators.py), and whatever a cube's regions are called with is compiled. A region is a kernel
or two; whether Triton can make them, what they move beside what they must, and whether a thread's registers suffice,
shows without running them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from models.bert import PRESETS, BertConfig, BertForPreTraining
from models.bert.electra import ElectraForPreTraining, ReplacedTokens
from models.gpt.model import Gpt, GptConfig
from models.vit.config import VitConfig
from models.vit.model import Vit
from tensor3d import Cube, CubeShape, ExecutionPolicy, MixedPrecisionPolicy
from tensor3d.ops.activations import Activation
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.ops.fp8 import Scaling
from tensor3d.optim import Lamb, StableAdamW
from tensor3d.torch_private import tree_leaves, tree_map_only
from tools.bench.harness.absent_flex import FlexKernel
from tools.bench.harness.absent_gpu import Architecture, Operand, RegionCode, compile_for, missing_triton
from tools.bench.harness.benchmark import ONE_PROCESS, Benchmark, Count, Report, cubes_of, listed
from tools.bench.harness.figures import Column, as_json, table
from tools.bench.operators import as_on_a_gpu
from tools.bench.vs_transformers.contenders import with_sizes
from tools.common.log import progress
from tools.common.workers import begin_worker, usable_cores
from tools.training.dry_step import alone

R = TypeVar("R")
_DEVICE = torch.device("meta")

# --- The command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelsCommand(Benchmark[list[CubeShape]]):
    """Compile every region of ours (`ExecutionPolicy.compile`) for a GPU that need not be there, down to its machine
    code, and tell what has become of it. The regions are those that BERT, ELECTRA, GPT and a vision transformer call
    in training and evaluation, and LAMB and StableAdamW in a step. It needs Triton."""

    preset: str = "large"
    """Size of BERT; the other models have its columns and heads."""
    rows: Count = 4096
    """Tokens of each rank's part of a micro-batch, on face y. Kernels take any number."""
    cubes: str = "1x1x1,2x2x2"
    """Boxes, as XxYxZ,XxYxZ,...; of calls of a region with tensors of the same types the widest is compiled."""
    arch: Architecture = "sm_90"
    """Of the GPU: A100, H100, B200. FP8 is for the latter two."""
    regions: str | None = None
    """Names of some, with commas. Default: all."""
    processes: Count | None = None
    """That compile at the same time. Default: as many as there are cores for this one."""

    launcher: ClassVar[str | None] = ONE_PROCESS

    def plan(self) -> list[CubeShape]:
        """The boxes."""
        listed("--preset", self.preset, PRESETS)
        shapes = cubes_of(self.cubes)
        for shape in shapes:
            self.config.check(shape)
        if told := missing_triton():
            raise ValueError(told)
        return shapes

    @property
    def config(self) -> BertConfig:
        return with_sizes(PRESETS[self.preset], layers=1, dropout=0.1, attention_dropout=0.0)

    def measure(self, plan: list[CubeShape]) -> Report:
        scalings = () if self.arch == "sm_80" else get_args(Scaling)
        calls: list[Call | FlexCall] = [*widest(collect(self.config, plan, self.rows, scalings=scalings))]
        calls += flex_calls(self.config, self.rows)
        if self.regions is not None:
            names = listed("--regions", self.regions, sorted({call.name for call in calls}))
            calls = [call for call in calls if call.name in names]
        results, faults = compile_all(calls, self.arch, self.processes or usable_cores())
        lines = [
            f"{len(results)} of {len(calls)} compiled for {self.arch}; columns of BERT-{self.preset} on {self.cubes}",
            *(table(results) if results else []),
        ]
        content = {"arch": self.arch, "results": as_json(results), "failed": faults}
        return Report(lines=lines, content=content, faults=faults)


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """Of one region with inputs of certain types."""

    region: Annotated[str, Column("region", of="shown")]
    takes: str
    """Its inputs; R rows."""
    type: Annotated[str, Column("type")]
    """Of its largest input."""
    kernels: Annotated[int, Column("kernels")]
    """Launched in a call."""
    operators: Annotated[int, Column("operators")]
    """Of PyTorch, called beside them: a region with dropout asks for a seed."""
    bytes: Annotated[float, Column("bytes an element", ".1f")]
    """Of all inputs and results, by the elements of the largest input."""
    moved: Annotated[float, Column("moved", ".1f")]
    """The same of what the kernels read and write."""
    registers: Annotated[int | None, Column("registers")]
    """Of a thread, where a kernel has the most."""
    spilled: Annotated[int | None, Column("spilled")]
    """Bytes of a thread that have no room in registers, likewise."""
    seconds: Annotated[float, Column("seconds", ".1f")]
    """Of compiling all kernels, in all configurations that a GPU would try."""

    @property
    def shown(self) -> str:
        return f"{self.region}({self.takes})"


# --- Which regions there are ------------------------------------------------------------------------------------------

_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int64": "i64",
    "uint8": "u8",
    "float8_e4m3fn": "e4m3",
}
_NAMES |= {"float8_e5m2": "e5m2"}


@dataclass(frozen=True)
class Call:
    """A region with what it was given, an `Operand` for each tensor."""

    region: Callable[..., Any]
    inputs: tuple[Any, ...]
    results: tuple[Operand, ...]

    @property
    def name(self) -> str:
        return self.region.__name__

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but sizes, and numbers such as an epsilon."""
        return (self.region, *map(_kind, self.inputs))

    @property
    def operands(self) -> list[Operand]:
        return [each for each in self.inputs if isinstance(each, Operand)]

    @property
    def largest(self) -> Operand:
        """Of the inputs."""
        return max(self.operands, key=lambda each: each.elements)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in (*self.operands, *self.results))

    def compile(self, architecture: Architecture) -> RegionCode:
        return compile_for(architecture, self.region, self.inputs)

    def __str__(self) -> str:
        """What it takes, without what is not there."""
        runs = [(text, len(list(run))) for text, run in groupby(map(_shown, self.inputs)) if text]
        return ", ".join(text if count == 1 else f"{count} {text}" for text, count in runs)


def _kind(given: Any) -> Any:
    if isinstance(given, Operand):
        return given.dtype, len(given.shape)
    return float if isinstance(given, float) else given


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def _shown(given: Any) -> str:
    if given is None:
        return ""
    if isinstance(given, torch.dtype):
        return f"to {_short(given)}"
    if not isinstance(given, Operand):
        return str(given)
    sizes = [str(size) for size in given.shape]
    if len(sizes) > 1:
        sizes[-2] = "R"
    return f"{_short(given.dtype)}({','.join(sizes)})"


@dataclass(frozen=True, kw_only=True)
class FlexCall(FlexKernel):
    """FlexAttention's forward, or backward, with what a `Call` has to tell."""

    @property
    def name(self) -> str:
        return "flex_backward" if self.backward else "flex"

    @property
    def largest(self) -> Operand:
        return Operand(self.dtype, (self.heads, self.rows, self.head_dim))

    @property
    def bytes(self) -> int:
        """Of q, k, v and the result, and of all four gradients; and of the logarithms of sums."""
        sums = 4 * self.heads * self.rows
        return self.largest.bytes * (8 if self.backward else 4) + sums * (2 if self.backward else 1)

    def __str__(self) -> str:
        masks = [*(["causal"] if self.causal else []), *([] if self.window is None else [f"window {self.window}"])]
        return ", ".join([f"{8 if self.backward else 4} {_shown(self.largest)}", *masks])


def flex_calls(config: BertConfig, rows: int) -> list[FlexCall]:
    """In each type with whole sequences, and in bf16 with the other masks that models have."""
    kinds: list[dict[str, Any]] = [{"dtype": each} for each in (torch.bfloat16, torch.float16, torch.float32)]
    kinds += [{"dtype": torch.bfloat16, "causal": True}, {"dtype": torch.bfloat16, "window": 65}]
    sizes: dict[str, Any] = {"rows": rows, "heads": config.heads, "head_dim": config.head_size}
    return [FlexCall(backward=backward, **kind, **sizes) for backward in (False, True) for kind in kinds]


class _Noted(CompiledRegions):
    """Keeps what regions are called with. What one has been called with before it need not work out again."""

    def __init__(self) -> None:
        super().__init__(False, _DEVICE)
        self.calls: dict[tuple[Any, ...], Call] = {}
        self._results: dict[tuple[Any, ...], Any] = {}

    def __call__(self, region: Callable[..., R], *inputs: Any) -> R:
        given = tuple(_operand(each) if isinstance(each, Tensor) else each for each in inputs)
        key = (region, given)
        with torch.no_grad():
            if key not in self.calls:
                self._results[key] = region(*inputs)
                returned = [each for each in tree_leaves(self._results[key]) if isinstance(each, Tensor)]
                self.calls[key] = Call(region, given, tuple(map(_operand, returned)))
            return cast("R", tree_map_only(Tensor, torch.empty_like, self._results[key]))


def _operand(tensor: Tensor) -> Operand:
    return Operand(tensor.dtype, tuple(tensor.shape))


def collect(
    config: BertConfig,
    shapes: Sequence[CubeShape],
    rows: int,
    types: Sequence[torch.dtype | None] = (None, torch.bfloat16, torch.float16),
    scalings: Sequence[Scaling] = get_args(Scaling),
) -> list[Call]:
    """What the models of this repository call in training and evaluation, with that BERT's columns; BERT itself in FP8,
    too. Other activations than its own are taken on the first box alone: by them no other region differs.

    Args:
        rows: tokens of each rank on face y.
        types: of products; None: fp32.
    """
    policies = [MixedPrecisionPolicy(compute=each) for each in types]
    scaled = [MixedPrecisionPolicy(compute=torch.bfloat16, fp8=each) for each in scalings]
    regions = _Noted()
    activations: list[Activation] = [each for each in get_args(Activation) if each != config.activation]
    for number, shape in enumerate(shapes):
        models = _models(config)
        if number == 0:
            models += [partial(BertForPreTraining, replace(config, activation=each)) for each in activations]
        with alone(shape, 0), as_on_a_gpu(), torch.random.fork_rng(devices=[]):
            cube = Cube(shape.x, shape.y, shape.z, shape.data, device=_DEVICE)
            cube.manual_seed(0)
            for make, policy in [*product(models, policies), *product(models[:1], scaled)]:
                own = cube.with_policy(policy)
                own.speed, own.regions = ExecutionPolicy(compile=True), regions  # as told, though there be no compiler
                _call(make, own, rows)
    return list(regions.calls.values())


def _models(config: BertConfig) -> list[Callable[[Cube], nn.Module]]:
    hidden, heads, vocab, dropout = config.hidden, config.heads, config.vocab, config.dropout
    sizes: dict[str, Any] = {"hidden": hidden, "heads": heads, "dropout": dropout}
    # Two layers: its first one has a norm less.
    modern = BertConfig(layers=2, vocab=vocab, encoder="modern", attention_dropout=0.0, **sizes)
    eurobert = replace(modern, family="eurobert", activation="silu", types=0, tied=False)
    gemma = replace(modern, family="gemma3_text", activation="gelu_tanh", types=0, head_dim=2 * hidden // heads)
    electra = replace(config, family="electra", next_sentence=False)
    return [
        partial(BertForPreTraining, config),
        partial(BertForPreTraining, replace(config, norm="pre")),
        partial(BertForPreTraining, modern),
        partial(BertForPreTraining, eurobert),
        partial(BertForPreTraining, gemma),
        partial(ElectraForPreTraining, electra, ReplacedTokens(generator_size=1.0)),
        partial(Gpt, GptConfig(layers=1, vocab=vocab, **sizes)),
        partial(Vit, VitConfig(layers=1, **sizes)),
    ]


def _call(make: Callable[[Cube], nn.Module], cube: Cube, rows: int) -> None:
    """Both ways of one model, steps of its largest matrix, and the way of evaluation, on rank 0."""
    with cube.skip_init():
        model: Any = make(cube)
    given = model.example(rows * cube.shape.planes * cube.shape.z)
    found = model.train()(**given)
    (found if isinstance(found, Tensor) else found.loss).backward()
    for optimizer in (Lamb, StableAdamW):
        optimizer([max(model.parameters(), key=lambda each: each.numel())], cube, lr=1e-3).step()
    with torch.no_grad():
        model.eval()(**given)


def widest(calls: Sequence[Call]) -> list[Call]:
    """One of each kind, by name: that whose largest input is the largest."""
    found: dict[tuple[Any, ...], Call] = {}
    for call in calls:
        known = found.get(call.kind)
        if known is None or known.largest.elements < call.largest.elements:
            found[call.kind] = call
    return sorted(found.values(), key=lambda call: (call.name, str(call.largest.dtype), str(call)))


# --- Compiling --------------------------------------------------------------------------------------------------------


def compile_all(
    calls: Sequence[Call | FlexCall], arch: Architecture, processes: int
) -> tuple[list[KernelFigures], list[str]]:
    """In processes of their own; figures in the order of the calls, and what went wrong, in words.

    Raises:
        OSError: a process is gone.
    """
    found: dict[int, RegionCode | str] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.bench.kernels"])
    try:
        with ProcessPoolExecutor(min(processes, len(calls)), mp_context=context, initializer=begin_worker) as pool:
            tasks = {pool.submit(_compiled, call, arch): number for number, call in enumerate(calls)}
            for done in progress(as_completed(tasks), total=len(tasks), desc="compiling", unit="region", lines=True):
                found[tasks[done]] = done.result()
    except BrokenProcessPool:
        raise OSError(
            "a process that compiles has died, perhaps for want of memory. Try again with fewer (--processes)."
        ) from None
    results, faults = list[KernelFigures](), list[str]()
    for number, call in enumerate(calls):
        code = found[number]
        if isinstance(code, str):
            faults.append(f"region {call.name} of {call}: {code}")
        else:
            results.append(_figures(call, code))
    return results, faults


def _compiled(call: Call | FlexCall, arch: Architecture) -> RegionCode | str:
    """Or why it cannot be: errors of compilers do not all travel between processes."""
    try:
        return call.compile(arch)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def _figures(call: Call | FlexCall, code: RegionCode) -> KernelFigures:
    elements = call.largest.elements
    return KernelFigures(
        region=call.name,
        type=_short(call.largest.dtype),
        kernels=code.kernels,
        operators=code.operators,
        bytes=call.bytes / elements,
        moved=code.moved / elements,
        registers=code.registers,
        spilled=code.spilled,
        seconds=code.seconds,
        takes=str(call),
    )
