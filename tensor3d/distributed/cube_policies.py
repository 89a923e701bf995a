"""What all layers of a cube are told: how they do their work, and in which types.

Master weights keep theirs (Micikevicius et al. 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from tensor3d.ops.fp8 import Scaling

# --- How a model's work is done, where the results are the same: what runs under what, and which kernels --------------


@dataclass(frozen=True, kw_only=True)
class ExecutionPolicy:
    """Switches of one cube, read by all of its layers.

    Raises:
        ValueError: a limit that is no number of bytes.
    """

    overlap: bool = True
    """Collectives travel under products: gathers are issued early, the next product's weight is gathered ahead, sums
    leave as soon as they can (those over data while backward runs) and are waited for late. Not: each is waited for
    where it is issued, and those over data leave at the end of a pass. The results are the same bits. One thing to
    know: between two layers of one pass, a weight must not be edited in place in a way that its version counter does
    not show (`.data`, foreach and fused operators on a DTensor), nor on some ranks alone; before, between and after
    passes it may. The weights of the last two backward passes are held; `cube.ahead.forget()` lets go of them."""
    weight_group_bytes: int | None = None
    """A block's weights travel over x together, in one gather forward, one backward, and one sum of their gradients,
    where what a rank gathers of them is at most this: fewer collectives, more memory. None: 64 MiB where y and z are 1,
    so that nothing else travels in a block, and never elsewhere. 0: never. Results are the same bits, but where a
    backend's sums depend on sizes (NCCL's)."""
    compile: bool = False
    """Chains of small operators between products are compiled (ops/compiled_regions.py). Results differ by rounding,
    and by what dropout draws."""
    keep_buckets: bool | None = None
    """The memory of gradients that are summed over `data` stays from step to step, as DistributedDataParallel's does.
    It saves a CPU the time to clear new pages of as many bytes in every step; for it, they are there in the forward
    pass, too. Under `no_sync`, where sums of micro-batches lie elsewhere until the last one, nothing stays, nor of what
    lies in shares (`shard_over_data="gradients"`). None: on a CPU, unless an optimiser of the cube shards its state
    over `data`. On a GPU, whose allocator keeps memory by itself, it saves nothing. The results are the same bits. A
    gradient that somebody still holds when the next pass begins keeps its values: that pass takes new memory, and the
    gradient holds all of the old; hold a clone instead. `cube.ledger.free_buckets()` lets go of it."""
    shadow_weights: bool = False
    """Where products are in another type than the parameters (`MixedPrecisionPolicy.compute`, autocast), copies of
    their weights and biases in that type are made once after a change, and used and gathered as they are
    (distributed/shadow_weights.py); else each use converts its weight. It costs the memory of the copies: 2 bytes an
    element of a rank's blocks in bf16. The results are the same bits. Edits in place through `.data` are not seen, nor
    those of DTensors by foreach operators outside of an optimiser's step (`torch.optim.swa_utils.AveragedModel`):
    `cube.shadows.forget()` after them, on the ranks that have made them. Not yet timed on a GPU; on a CPU it saves
    little."""

    symmetric_memory: bool = False
    """Of the collectives over y and z around a product, the larger one goes in one operator with it, by PyTorch's
    symmetric memory (sharding/fused_products.py): parts of the product run under parts of the transfer. For GPUs that
    reach each other's memory, with NCCL and not in FP8; a cube refuses else. Elements received are the same. Results
    differ by rounding: operators multiply in parts and add in an order of their own, and a bias is added behind them.
    Every rank must come to where it is switched on. It has never run on several GPUs: what is tested is that all around
    the operators is right, with plain collectives in their place."""

    def __post_init__(self) -> None:
        limit = self.weight_group_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ValueError(f"weight_group_bytes must be a number of bytes of at least 0, or None. Got {limit!r}.")


# --- In which types a model computes and its gradients travel ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionPolicy:
    """Types on one cube, read by all of its layers.

    Weights, their gradients in `.grad`, optimiser states, LayerNorm's statistics, narrow heads and losses stay in the
    type of the parameters (or fp32 at least); shards are converted before they travel.

    Raises:
        ValueError: what is no floating-point type, or one of fewer than 16 bits, sums in fp16 where products are not,
            an unknown scaling, FP8 beside another type than bf16, or a history below 1.
    """

    compute: torch.dtype | None = None
    """Of products, hidden states and what travels between their ranks. None: the type of the parameters. fp16 needs a
    loss scale (`GradScaler`): without one, gradients below 6e-8 are 0, and nothing says so."""
    reduce: torch.dtype | None = None
    """Of gradients of parameters while they are summed over ranks. None: the type of the parameters. fp16 beside
    compute in fp16 alone, whose loss scale it needs, too."""
    fp8: Scaling | None = None
    """Linear layers multiply in FP8 (ops/fp8.py), with a scale for each row and column, or for each matrix, of what a
    rank multiplies: the forward product and the gradient of its input, and "tensorwise" that of its weight, too. All
    else, what travels and what is saved, stays in `compute`, which must be bf16. So do the projection to a vocabulary,
    narrow heads, attention itself, and weights whose local sides do not divide by 16; `Cube.fp8_uses` counts. GPUs from
    Ada and Hopper on have a kernel; elsewhere it is emulated, which is slower than bf16 alone. "delayed": one scale for
    each logical matrix from its magnitudes in passes before (distributed/fp8_scales.py); a maximum over
    the ranks ends each pass, and what was too large is cut off and counted (`Cube.fp8_scales.cut`)."""
    fp8_history: int = 16
    """Of "delayed" alone: the passes from whose largest magnitude a scale is. One backward pass outside of `no_sync`
    counts as one. More: a spike holds the scale up longer; fewer: more is cut off."""

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point type such as torch.bfloat16, or None. Got {dtype}.")
            if dtype is not None and dtype.itemsize < 2:
                remedy = " For products in FP8 there is `fp8`, beside compute=torch.bfloat16." * (name == "compute")
                raise ValueError(f"{name} must have 16 bits at least, such as torch.bfloat16. Got {dtype}.{remedy}")
        if self.reduce == torch.float16 and self.compute != torch.float16:
            raise ValueError(
                "reduce=torch.float16 needs compute=torch.float16, and with it a loss scale (GradScaler): a gradient "
                "below 6e-8 is 0 in fp16, and one above 65,504 infinite. Got "
                f"compute={self.compute}. Take reduce=torch.bfloat16, which has the range of fp32."
            )
        if isinstance(self.fp8_history, bool) or not isinstance(self.fp8_history, int) or self.fp8_history < 1:
            raise ValueError(f"fp8_history must be a number of passes of at least 1. Got {self.fp8_history!r}.")
        if self.fp8 is None:
            return
        if self.fp8 not in get_args(Scaling):
            raise ValueError(f"fp8 must be one of {', '.join(get_args(Scaling))}, or None. Got {self.fp8!r}.")
        if self.compute != torch.bfloat16:
            raise ValueError(
                f"fp8={self.fp8!r} needs compute=torch.bfloat16, the type of what its kernels return. Got "
                f"compute={self.compute}."
            )

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which something of a parameter of `dtype` is computed."""
        return dtype if self.compute is None else self.compute

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which the gradient of a parameter of `dtype` travels."""
        return dtype if self.reduce is None else self.reduce
