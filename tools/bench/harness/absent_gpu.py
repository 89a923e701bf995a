"""Compiles regions for an NVIDIA GPU that need not be there: PyTorch's compiler and Triton, told that there is one.

Kernels are made down to machine code by Triton's own assembler, and nothing is run. What PyTorch has learnt of the GPU
it keeps, so this takes a process that does nothing else.

Names that PyTorch calls private stand here and not in tensor3d/torch_private.py: they are replaced, which no library
may do. tests/test_torch_private.py looks whether this PyTorch has them.
"""

from __future__ import annotations

import ctypes
import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch

from tensor3d.ops.compiled_regions import OPTIONS, compile_region, opened
from tensor3d.torch_private import FakeTensorMode, import_compiler, private

Architecture = Literal["sm_80", "sm_90", "sm_100"]
"""Ampere (A100), Hopper (H100), Blackwell (B200)."""
_PROCESSORS: dict[Architecture, int] = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
_SHARED: dict[Architecture, int] = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Bytes of shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities)."""
DEVICE = torch.device("cuda", 0)

# What is compiled is not taken from disk; and the pass that folds uniform values computes them on the device.
_SETTINGS = {**OPTIONS, "force_disable_caches": True, "joint_graph_constant_folding": False}


@dataclass(frozen=True)
class Operand:
    """A tensor that a region takes or returns."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class RegionCode:
    """What became of a region. A kernel is compiled in some configurations, of which a GPU would keep the fastest; here
    that counts which spills least."""

    kernels: int
    """Of Triton, launched in a call."""
    operators: int
    """Of PyTorch, called beside them."""
    moved: int
    """Bytes that the kernels read and write, each of a kernel's buffers once, as the compiler reckons."""
    registers: int | None
    """Of a thread, where a kernel has the most. None: the assembler has not said."""
    spilled: int | None
    """Bytes of a thread that found no room in registers, likewise."""
    seconds: float
    """Of compiling everything."""


@dataclass(frozen=True, kw_only=True)
class _Binary:
    """A kernel in one configuration."""

    shared: int
    registers: int | None
    spilled: int | None


class _Compilation:
    """What is seen of one region on its way."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[_Binary]] = {}
        self.binaries: list[_Binary] = []
        self.code, self.moved = "", 0


def missing_triton() -> str:
    """What to install where there is no Triton; else nothing."""
    if find_spec("triton") is not None:
        return ""
    return (
        "kernels of GPUs are compiled by Triton, and it is not installed. PyTorch's builds for CUDA bring it along. "
        f"Beside another build (this is torch {torch.__version__}) run pip install triton, on Linux, of the version "
        "that PyTorch's build for CUDA of the same release asks for."
    )


def compile_for(architecture: Architecture, region: Callable[..., Any], inputs: Sequence[Any]) -> RegionCode:
    """Compiles a region as `CompiledRegions` would on such a GPU.

    Args:
        region: a function at the top of a module.
        inputs: its arguments, with an `Operand` for each tensor.

    Raises:
        ValueError: a kernel of which no configuration fits into shared memory.
        ImportError: this PyTorch lacks what is needed.
        Exception: whatever PyTorch's compiler and Triton say of a region that they cannot compile.
    """
    compile_graph = graph_compiler()

    def backend(graph: Any, examples: Any, **_: Any) -> Callable[..., Any]:
        compile_graph(graph, examples)
        forward: Callable[..., Any] = graph.forward  # what was compiled cannot be run
        return forward

    def call() -> None:
        with torch.no_grad():
            tensors = [_fake(each) if isinstance(each, Operand) else each for each in inputs]
            compile_region(region, backend)(*opened(tensors))

    return watched(architecture, call)


def graph_compiler() -> Callable[[Any, Any], Any]:
    """What compiles a graph for examples of its inputs."""
    import_compiler()
    return partial(private("_inductor.compile_fx.compile_fx"), config_patches=_SETTINGS)


def watched(architecture: Architecture, call: Callable[[], None]) -> RegionCode:
    """What a call compiles for such a GPU, among fake tensors. It raises as `compile_for`."""
    begun, seen = time.perf_counter(), _Compilation()
    with _pretence(architecture, seen), FakeTensorMode():
        call()
    best = [_least(name, each, _SHARED[architecture]) for name, each in seen.kernels.items()]
    return RegionCode(
        kernels=len(re.findall(r"^ +triton_\w+\.run\(", seen.code, re.MULTILINE)),
        operators=len(re.findall(r"^ +(?:\w+ = )?(?:aten|extern_kernels|torch\.ops)\.", seen.code, re.MULTILINE)),
        moved=seen.moved,
        registers=max((each.registers for each in best if each.registers is not None), default=None),
        spilled=max((each.spilled for each in best if each.spilled is not None), default=None),
        seconds=time.perf_counter() - begun,
    )


def _fake(operand: Operand) -> torch.Tensor:
    return torch.empty(operand.shape, dtype=operand.dtype, device=DEVICE)


def _least(name: str, binaries: Sequence[_Binary], shared: int) -> _Binary:
    fitting = [each for each in binaries if each.shared <= shared]
    if not fitting:
        least = min(each.shared for each in binaries)
        raise ValueError(f"{name} needs {least:,} bytes of shared memory, and a block may have {shared:,}.")
    return min(fitting, key=lambda each: (each.spilled or 0, each.registers or 0))


# --- What is told, and what is heard ----------------------------------------------------------------------------------


@contextmanager
def _pretence(architecture: Architecture, seen: _Compilation) -> Iterator[None]:
    import triton
    from triton.backends.compiler import GPUTarget

    capability = int(architecture.removeprefix("sm_"))
    properties = SimpleNamespace(
        name=architecture,
        gcnArchName="",  # of other GPUs; asked for all the same
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=_PROCESSORS[architecture],
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=_SHARED[architecture],
    )
    answers: dict[str, Any] = {
        "current_device": 0,
        "device_count": 1,
        "get_compute_capability": capability,
        "get_device_properties": properties,
        "is_available": True,
        "is_bf16_supported": True,
    }
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=_answering(target), get_current_device=_answering(0), get_current_stream=_answering(0)
        )
    )
    _guard_cuda()
    private("_inductor.runtime.hints.DeviceProperties").create.cache_clear()
    # `torch.cuda.is_available` stays as it is: by it fake tensors know that nothing can be run on their device.
    with ExitStack() as stack:

        def replace(place: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(place, name, value, create=True))

        interface = private("_dynamo.device_interface.CudaInterface")
        for place in (interface, interface.Worker):
            for name, answer in answers.items():
                replace(place, name, staticmethod(_answering(answer)))
        replace(torch.cuda, "current_device", _answering(0))
        replace(torch.cuda, "get_device_properties", _answering(properties))
        replace(torch.cuda, "get_device_capability", _answering((properties.major, properties.minor)))
        replace(private("_C"), "_cuda_getCurrentRawStream", _answering(0))
        stack.enter_context(patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", _answering(None)))
        replace(triton.knobs.nvidia, "dump_ptxas_log", True)
        replace(triton, "compile", _noting(triton.compile, seen))
        replace(private("_inductor.async_compile.AsyncCompile"), "triton", _kernels_by(seen))
        replace(private("_inductor.graph.GraphLowering"), "save_output_code", staticmethod(_reading(seen)))
        yield


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _noting(compile_one: Callable[..., Any], seen: _Compilation) -> Callable[..., Any]:
    """Triton's `compile`, of which the assembler's words are read."""

    def run(*arguments: Any, **options: Any) -> Any:
        log = io.StringIO()
        with redirect_stdout(log):
            made = compile_one(*arguments, **options)
        used, spilled = (
            re.search(pattern, log.getvalue()) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        seen.binaries.append(
            _Binary(
                shared=made.metadata.shared,
                registers=None if used is None else int(used[1]),
                spilled=None if spilled is None else int(spilled[1]),
            )
        )
        return made

    return run


def _kernels_by(seen: _Compilation) -> Callable[..., Any]:
    """`AsyncCompile.triton`, which compiles and loads nothing onto a device."""

    def make(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = getattr(private("_inductor.codecache.PyCodeCache").load(source), name)
        kernel.precompile(warm_cache_only=True)
        seen.kernels[name], seen.binaries = seen.binaries, []
        return kernel

    return make


def _reading(seen: _Compilation) -> Callable[[str], None]:
    def read(code: str) -> None:
        seen.code += code[: code.find("\ndef get_args")]  # which is for trying it alone
        seen.moved += private("_inductor.virtualized.V").graph.count_bytes()[0]

    return read


def _guard_cuda() -> None:
    """Builds for CUDA have a guard for its devices, under which tensors are written, fake ones too; in other builds the
    one of "meta", which does nothing, takes its place."""
    if torch.backends.cuda.is_built():
        return
    cuda, meta, kinds = 1, 14, 20  # of c10::DeviceType
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * kinds).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[cuda] = guards[meta]
