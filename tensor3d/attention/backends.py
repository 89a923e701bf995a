"""What each backend can do: one record each, from which the choice and the refusals follow. What they compute is in
modules of their own, which `tensor3d.attention` names in `_BACKENDS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from tensor3d.attention.flash_version import flash_version
from tensor3d.attention.relative import RelativeTerms
from tensor3d.batches.row_selection import RowSelection
from tensor3d.batches.sequences import Sequences
from tensor3d.torch_private import flash_attention, is_there

# --- What is asked of a backend beside q, k and v ---------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)  # made in every layer: a frozen one takes three times as long
class AttentionArgs:
    sequences: Sequences
    queries: RowSelection | None
    """None: all rows ask."""
    dropout: float
    causal: bool
    window: int | None
    """None where it is no narrower than the longest sequence, too."""
    relative: RelativeTerms | None = None
    """What scores have beside q k^T."""


def apart(v: Tensor, k: Tensor) -> Tensor:
    """Values that will be kept for backward. Where turned queries and keys have left a fused QKV, the whole of it would
    be kept for the values alone; a copy of them is smaller."""
    return v if k._base is not None and k._base is v._base else v.contiguous()


def served(keys: Tensor, heads: int) -> Tensor:
    """Keys or values (T, g, d) as (T, h, d): each head of theirs once for every head of queries that it serves, which
    are next to one another (Ainslie et al. 2023, arXiv 2305.13245, §2.2)."""
    own = keys.shape[1]
    return keys if own == heads else keys.unsqueeze(2).expand(-1, -1, heads // own, -1).flatten(1, 2)


# --- What each backend can do -----------------------------------------------------------------------------------------

Name = Literal["reference", "grouped", "varlen", "flex"]
Backend = Literal["auto", Name]


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What decides which backends can serve a call."""

    device: str
    """Its type, as "cpu" or "cuda"."""
    dtype: torch.dtype
    head_dim: int
    capability: tuple[int, int] | None = None
    """Of the GPU; None on other devices."""
    dropout: bool = False
    causal: bool = False
    window: bool = False
    queries: bool = False
    relative: bool = False
    gradient: bool = True
    """Whether a backward pass may come."""
    flash: str | None = None
    """What is in the place of PyTorch's own FlashAttention (attention/flash_version.py). None: nothing."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> AttentionRequest:
        return cls(
            device=k.device.type,
            dtype=k.dtype,
            head_dim=k.shape[-1],
            capability=_capability(k.device) if k.is_cuda else None,
            dropout=call.dropout > 0,
            causal=call.causal,
            window=call.window is not None,
            queries=call.queries is not None,
            relative=call.relative is not None,
            gradient=torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
            flash=flash_version() if k.is_cuda else None,
        )


@cache  # every layer asks
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What a backend serves."""

    name: Name
    operator: Any = None
    """PyTorch's own one that it calls, as `torch_private` knows it."""
    devices: tuple[str, ...] | None = None
    """None: all."""
    backward: tuple[str, ...] | None = None
    """The devices on which it has a backward pass. None: all."""
    types: tuple[torch.dtype, ...] | None = None
    """None: all floating-point types."""
    capability: tuple[int, int] | None = None
    """The least of a GPU."""
    head_dims: tuple[int, int] | None = None
    """The head dimension is a multiple of the first, and at most the second. None: any."""
    least_head_dim: int = 1
    dropout: bool = True
    causal: bool = True
    window: bool = True
    relative: bool = True
    """Scores that depend on distance."""
    kv_heads: bool = False
    """Keys and values of fewer heads than queries, as they are: the others get them repeated (`served`)."""
    queries: bool = True
    queries_masked: bool = True
    """Queries together with a causal mask or a window."""

    def serves(self, facts: AttentionRequest) -> bool:
        """Whether it can serve a call."""
        return next(self._refusals(facts), None) is None

    def refusals(self, facts: AttentionRequest) -> list[str]:
        """Why it cannot; nothing if it can."""
        return list(self._refusals(facts))

    def _refusals(self, facts: AttentionRequest) -> Iterator[str]:
        if not is_there(self.operator):
            yield f"needs an operator that torch {torch.__version__} does not have"
        if self.devices is not None and facts.device not in self.devices:
            yield f"runs on {_either(self.devices)}, not on {facts.device}"
        elif facts.gradient and self.backward is not None and facts.device not in self.backward:
            yield f"has no backward pass on {facts.device} (only under torch.no_grad)"
        if self.types is not None and facts.dtype not in self.types:
            yield f"takes {_either([named(each) for each in self.types])}, not {named(facts.dtype)}"
        if None not in (self.capability, facts.capability) and facts.capability < self.capability:  # type: ignore[operator]
            yield f"needs a GPU of compute capability {_dotted(self.capability)}, not {_dotted(facts.capability)}"
        if self.head_dims is not None and (facts.head_dim % self.head_dims[0] or facts.head_dim > self.head_dims[1]):
            step, most = self.head_dims
            yield f"needs a head dimension that divides by {step} and is at most {most}, not {facts.head_dim}"
        if facts.head_dim < self.least_head_dim:
            yield f"needs a head dimension of at least {self.least_head_dim}, not {facts.head_dim}"
        for wanted, has, what in (
            (facts.dropout, self.dropout, "dropout of the probabilities"),
            (facts.causal, self.causal, "causal mask"),
            (facts.window, self.window, "window"),
            (facts.queries, self.queries, "choice of queries"),
            (facts.relative, self.relative, "relative positions"),
        ):
            if wanted and not has:
                yield f"has no {what}"
        if facts.dropout and facts.flash is not None and self.operator is flash_attention:
            yield f"has no dropout of the probabilities by {facts.flash}"
        if facts.queries and (facts.causal or facts.window) and self.queries and not self.queries_masked:
            yield "takes chosen queries without a causal mask and without a window only"


SUPPORT: dict[Name, BackendSpec] = {
    "reference": BackendSpec(name="reference"),
    "grouped": BackendSpec(name="grouped"),
    "varlen": BackendSpec(
        name="varlen",
        operator=flash_attention,
        devices=("cuda",),
        backward=("cuda",),
        types=(torch.bfloat16, torch.float16),
        capability=(8, 0),
        head_dims=(8, 256),
        relative=False,
        kv_heads=True,
        # Its mask would be aligned with the last query, wherever that one stands.
        queries_masked=False,
    ),
    "flex": BackendSpec(
        name="flex",
        devices=("cuda", "cpu"),
        backward=("cuda",),
        types=(torch.float32, torch.bfloat16, torch.float16),
        capability=(7, 0),
        least_head_dim=16,  # of the tiles that Triton multiplies
        dropout=False,
        relative=False,
    ),
}
AUTO: tuple[Name, ...] = ("varlen", "grouped")
"""The first that can serve a call is taken; the last one serves all. FlexAttention is compiled for every size, which is
for the user to want."""


def choose(backend: Backend, facts: AttentionRequest) -> Name:
    """The backend that serves a call.

    Raises:
        ValueError: an unknown one, or one that cannot.
    """
    if backend == "auto":
        return next(name for name in AUTO if SUPPORT[name].serves(facts))
    if backend not in SUPPORT:
        raise ValueError(f"attention backend must be one of {', '.join(['auto', *SUPPORT])}. Got {backend!r}.")
    refusals = SUPPORT[backend].refusals(facts)
    if refusals:
        others = [name for name, support in SUPPORT.items() if name != "reference" and support.serves(facts)]
        raise ValueError(
            f'attention backend "{backend}" cannot serve this call: it {"; it ".join(refusals)}. Take '
            f'{_either([f"{other!r}" for other in others])}, or "auto", which takes '
            f"{choose('auto', facts)!r} here."
        )
    return backend


def check_gpus(backend: Backend, least: tuple[int, int] | None) -> None:
    """Raises ValueError for a backend that some GPU of a cube is too old for.

    Args:
        least: the compute capability that each of them has at least (`Cube.least_capability`).
    """
    needed = SUPPORT[backend].capability if backend in SUPPORT else None
    if needed is not None and least is not None and least < needed:
        raise ValueError(
            f'attention backend "{backend}" needs GPUs of compute capability {_dotted(needed)} on all ranks. Got one '
            f'of {_dotted(least)}. Take "grouped", or "auto", by which each rank takes what its GPU can do.'
        )


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"
