"""Regions: chains of small operators between products, compiled into a kernel or two each (docs/compile.md).

A region is a plain function of tensors, in which nothing is sent and nothing kept. Whole layers cannot be compiled:
their collectives are under way while others work, and their gradients leave by the ledger; `torch.compile` refuses the
one and loses the other without a word. So an autograd function calls regions in its forward and backward, between its
collectives, and states itself what it saves.
"""

from __future__ import annotations

import os
import stat
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tensor3d.torch_private import (
    FakeTensor,
    compile_graph,
    compiled_code_folder,
    has_cpp_compiler,
    has_triton,
    import_compiler,
    is_in_torch_dispatch_mode,
    mark_dynamic,
)

R = TypeVar("R")


def _alone(own: str) -> Sequence[str]:
    return [own]


# Compiled in this process: the default is a pool of as many processes as the machine has cores, for every rank.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}


class CompiledRegions:
    """Runs regions, compiled or as they are written. One on each cube, used by its layers.

    Each is compiled at its first call, for the types and columns that it meets; the number of rows is left open.

    Args:
        compiled: False runs the functions as they are: the results differ by rounding.
        device: where the tensors will lie.
        everyone: gives every rank's words in place of the own ones, called where regions are to be compiled: so all
            ranks refuse what one of them cannot do. Default: this rank is alone.

    Raises:
        ValueError: regions are to be compiled, and there is nothing to compile them with, or others can write where
            PyTorch keeps what is compiled.
    """

    def __init__(self, compiled: bool, device: torch.device, everyone: Callable[[str], Sequence[str]] = _alone) -> None:
        if compiled:
            _check_compiler(device, everyone)
        self.compiled, self._device = compiled, device
        self.with_activations = device.type != "cpu"
        """Whether bias and activation are a region: on CPUs PyTorch's own kernels are faster (docs/compile.md)."""
        self.draws = device.type != "cpu"
        """Whether regions draw the masks of dropout themselves: on CPUs those are drawn several at a time before."""
        self._made: dict[tuple[Any, ...], _Code] = {}
        self._numbers: dict[tuple[Any, ...], Tensor] = {}
        self._constants: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, region: Callable[..., R], *inputs: Any) -> R:
        """`region(*inputs)`, without a graph.

        Args:
            region: a function at the top of a module. It returns no input, and changes none but contiguous ones; on
                GPUs such as begin at a multiple of 16 bytes, of others it may be given copies.
            inputs: what is no tensor is part of the compiled code, and what is compiled is kept: a number that changes
                is to be a tensor of no dims. Of tensors with two dims and more the last but one counts rows, of which
                there may be another number each time; all else of their shapes stays.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(region, *inputs)
        if not self.compiled or not _can_compile(inputs):
            return region(*inputs)
        plain = [_plain(each) if isinstance(each, Tensor) else each for each in inputs]
        key = (region, *[_kind(each) if isinstance(each, Tensor) else each for each in plain])
        code = self._made.get(key)
        if code is not None:
            return cast("R", code(plain))
        code = _Code(region)
        result = code(opened(plain))
        self._made[key] = code
        return cast("R", result)

    def number(self, value: float, dtype: torch.dtype) -> Tensor:
        """A number that is an input of regions, as a tensor of no dims: made once, and not to be written to."""
        key = (value, dtype, torch.is_inference_mode_enabled())
        known = self._numbers.get(key)
        if known is None:
            known = torch.full((), value, dtype=dtype, device=self._device)
            if type(known) is Tensor:  # and no stand-in, which outside of its mode is of no use
                self._numbers[key] = known
        return known

    def constant(self, make: Callable[..., Tensor], *numbers: float) -> Tensor:
        """`make(*numbers, device=...)`: a small tensor that is an input of regions, made once, and not to be written
        to."""
        key = (make, *numbers, torch.is_inference_mode_enabled())
        known = self._constants.get(key)
        if known is None:
            known = make(*numbers, device=self._device)
            if type(known) is Tensor:
                self._constants[key] = known
        return known

    def can_write_to(self, tensor: Tensor) -> bool:
        """Whether a compiled region may change this input: of others it may be given copies, and a fake one, which has
        no code, is not worth a region."""
        return tensor.is_contiguous() and type(tensor) is not FakeTensor and tensor.data_ptr() % 16 == 0

    def switched(self, compiled: bool) -> CompiledRegions:
        """These, or new ones where they are not as told."""
        return self if compiled == self.compiled else CompiledRegions(compiled, self._device)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_made": {},
            "_numbers": {},
            "_constants": {},
        }  # a stored model takes its cube along; these are made anew


def as_written(region: Callable[..., R], *inputs: Any) -> R:
    """Runs a region, and compiles nothing: in place of a cube's `CompiledRegions`."""
    return region(*inputs)


def compile_region(region: Callable[..., R], backend: Callable[..., Any]) -> Callable[..., R]:
    """The region, compiled at its first call, for what is of those inputs' kind: see `opened`.

    Args:
        backend: compiles a graph, as `torch.compile` takes it.
    """
    # dynamic=False: nothing but the rows is to be open, whatever other regions have met.
    return torch.compile(own_copy(region), fullgraph=True, dynamic=False, backend=backend)


def opened(inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a first call, whose number of rows is left open."""
    return [_open(each) if isinstance(each, Tensor) else each for each in inputs]


class _Code:
    """A region compiled for one kind of inputs, for any number of rows.

    In each call PyTorch finds out anew which code suits what it is given, which takes the host longer than to start
    that code. Where it has found some for so many rows, what it found is called directly.
    """

    def __init__(self, region: Callable[..., Any]) -> None:
        self._ask = compile_region(region, self._compiled)
        self._asked: tuple[Callable[..., Any], Sequence[Any], Sequence[Any]] | None = None
        self._direct: dict[tuple[int, ...], Callable[[Sequence[Any]], Any]] = {}

    def _compiled(self, graph: Any, examples: Any) -> Callable[..., Any]:
        code = compile_graph(graph, examples, OPTIONS)

        def run(*given: Any) -> Any:
            found = code(*given)
            self._asked = code, given, found
            return found

        return run

    def __call__(self, inputs: Sequence[Any]) -> Any:
        rows = tuple([each.shape[-2] for each in inputs if isinstance(each, Tensor) and each.dim() > 1])
        direct = self._direct.get(rows)
        if direct is not None:
            return direct(inputs)
        result = self._ask(*inputs)
        asked, self._asked = self._asked, None
        if asked is not None and len(self._direct) < _MOST_DIRECT:
            direct = _direct(inputs, *asked, result)
            if direct is not None:
                self._direct[rows] = direct
        return result


_MOST_DIRECT = 256
"""Numbers of rows for which what was found is kept, of one region's code."""


def _direct(
    inputs: Sequence[Any], code: Callable[..., Any], given: Sequence[Any], found: Sequence[Any], result: Any
) -> Callable[[Sequence[Any]], Any] | None:
    """From inputs to a result by way of the code, as they were in one call: which of the inputs it was given, beside
    sizes, and which of what it found the region returned. None where that cannot be told."""
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    places = {id(each): number for number, each in enumerate(inputs) if isinstance(each, Tensor)}
    outputs = {id(each): number for number, each in enumerate(found) if isinstance(each, Tensor)}
    returned = result if isinstance(result, tuple) else (result,)
    known = all(id(each) in places for each in given if isinstance(each, Tensor))
    known = known and all(each is None or id(each) in outputs for each in returned)
    if not known or len(places) < len(tensors):  # one tensor in two places has code of its own
        return None
    taken = [(places[id(each)], None) if isinstance(each, Tensor) else (None, each) for each in given]
    gives = [None if each is None else outputs[id(each)] for each in returned]
    several = isinstance(result, tuple)  # no tensor is to be held by what is kept

    def call(inputs: Sequence[Any]) -> Any:
        found = code(*[size if place is None else inputs[place] for place, size in taken])
        results = [None if each is None else found[each] for each in gives]
        return tuple(results) if several else results[0]

    return call


def _can_compile(inputs: Sequence[Any]) -> bool:
    """Not where somebody follows the operators one by one, and not for so few rows that each number is its own code."""
    if is_in_torch_dispatch_mode():
        return False
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    return all(type(each) is not FakeTensor and (len(shape := each.shape) < 2 or shape[-2] > 1) for each in tensors)


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers, as compiled code expects them in each call."""
    if tensor.requires_grad or type(tensor) is not Tensor:  # a frozen parameter would be another kind
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _open(tensor: Tensor) -> Tensor:
    """The same numbers, with rows whose number is open; not the same object, on which that would stay written."""
    tensor = tensor.detach()
    if tensor.dim() > 1:
        mark_dynamic(tensor, tensor.dim() - 2)
    return tensor


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor that compiled code depends on."""
    shape = tensor.shape
    return tensor.dtype, tensor.device, tensor.is_inference(), shape[:-2], shape[-1:], len(shape)


def own_copy(function: Callable[..., R]) -> Callable[..., R]:
    """The function with code of its own: the compiler keeps what it has made by code, and not many of one."""
    assert isinstance(function, FunctionType), f"it must be a function at the top of a module. Got {function}."
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


def _check_compiler(device: torch.device, everyone: Callable[[str], Sequence[str]]) -> None:
    """Raises ValueError where nothing can be compiled for the device, or others may change what is, on some rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch imports what it has deprecated itself
        import_compiler()  # needed where something is compiled alone
    told = everyone(_missing_for_cuda() if device.type == "cuda" else _missing_for_cpu())
    lacking = [rank for rank, missing in enumerate(told) if missing]
    if lacking:
        place = "here" if len(lacking) == len(told) else f"on rank {lacking[0]}"
        raise ValueError(
            f"compile=True needs {told[lacking[0]]}, and there is none {place}. Install it, or leave compile off: the "
            "results are the same but for rounding."
        )
    strange = everyone(_cache_of_others())
    if found := [rank for rank, folder in enumerate(strange) if folder]:
        raise ValueError(
            f"compile=True runs the code that lies in {strange[found[0]]!r}, and others can write there (on rank "
            f"{found[0]}). Remove it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own."
        )


def _cache_of_others() -> str:
    """The folder in which PyTorch keeps compiled code and takes it from, where that is its own choice, /tmp in general,
    and somebody else has made it, or may write into it; else nothing."""
    folder, default = compiled_code_folder()
    if folder != default:
        return ""  # whoever named it knows whom it is for
    found, name = os.stat(folder), os.lstat(folder)
    made_by_others = not {found.st_uid, name.st_uid} <= {os.geteuid(), 0}
    in_their_group = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
    return folder if made_by_others or in_their_group or found.st_mode & stat.S_IWOTH else ""


def _missing_for_cpu() -> str:
    if not has_cpp_compiler():
        return "a C++ compiler (g++, or another one that the variable CXX names)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the headers of Python (Python.h, in the package python3-dev of most systems)"
    return ""


def _missing_for_cuda() -> str:
    return "" if has_triton() else "Triton (the Python package triton) for this GPU, and a C compiler"
