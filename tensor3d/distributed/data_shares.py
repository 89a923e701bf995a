"""Shares over `data` of the blocks of parameters: which rows of a block are whose, in ZeRO (Rajbhandari et al. 2020,
arXiv 1910.02054). Optimisers step them (optim/data_shards.py), and the ledger leaves each rank the sums of its own
(distributed/grad_buckets.py).

    R rows of this rank's block of a parameter, n elements of it, D ranks along data, C = ceil(R/D) rows of a share

A share is a block of the logical tensor, cut by one axis more than the parameter, the innermost one: so checkpoints and
norms know it as they know any block. Scalars have no rows, and lie in no shares.
"""

from __future__ import annotations

from typing import Literal
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import optimizer as torch_optim

from tensor3d.distributed.collectives import Axis
from tensor3d.distributed.cube_shape import MESH_AXES, chunk_bounds
from tensor3d.torch_private import as_dtensor, local_tensor

ShardOverData = bool | Literal["state", "gradients"]
"""What lies in shares: nothing, the optimiser's state (True is the same), or gradients too."""

_DATA = MESH_AXES.index("data")


def check_shard_over_data(option: object) -> None:
    """Raises ValueError for what is no `ShardOverData`."""
    if not isinstance(option, bool) and option not in ("state", "gradients"):
        raise ValueError(f'shard_over_data must be True, False, "state" or "gradients". Got {option!r}.')


def lies_in_share(parameter: Tensor, data: Axis) -> bool:
    """Whether ranks along data hold copies of a parameter of which each can take some rows."""
    return (
        data.size > 1
        and isinstance(parameter, DTensor)
        and parameter.dim() > 0
        and parameter.placements[_DATA].is_replicate()
    )


def is_whole(tensor: Tensor) -> bool:
    """Whether no share over data has been taken of it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.mesh_dim_names != MESH_AXES:
        return True
    return tensor.placements[_DATA].is_replicate()


def share_placements(parameter: Tensor) -> tuple[Placement, ...]:
    """DTensor's, of what lies in shares of a parameter."""
    assert isinstance(parameter, DTensor)
    return (*parameter.placements[:_DATA], Shard(0), *parameter.placements[_DATA + 1 :])


def share(block: Tensor, data: Axis) -> Tensor:
    """(R, ...) -> this rank's rows of it, C at most; of a contiguous block the memory itself."""
    first, last = chunk_bounds(block.shape[0], data.size, data.index)
    return block[first:last].contiguous()


def share_elements(shape: torch.Size, members: int) -> int:
    """C n/R: of a share of a block, the first ones."""
    return -(-shape[0] // members) * shape[1:].numel()


def cut_grad(parameter: Tensor, data: Axis) -> None:
    """Leaves of a whole `.grad`, which copies of the parameter have alike, this rank's share."""
    gradient = parameter.grad
    if gradient is not None and isinstance(parameter, DTensor) and is_whole(gradient):
        assert isinstance(gradient, DTensor)
        parameter.grad = as_dtensor(share(local_tensor(gradient), data).clone(), parameter, share_placements(parameter))


def refuse_unaware_optimizers(owner: object) -> None:
    """While `owner` lives, optimisers that were not made for shares refuse to step where gradients lie in them."""
    handle = torch_optim.register_optimizer_step_pre_hook(_check_step)
    finalize(owner, handle.remove).atexit = False


def _check_step(optimizer: torch.optim.Optimizer, *step: object) -> None:
    if getattr(optimizer, "shard_over_data", False):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None and not is_whole(parameter.grad) and is_whole(parameter):
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is this rank's share over data alone: "
                'an optimiser of this cube was made with shard_over_data="gradients". '
                f"{type(optimizer).__name__} needs it whole. Make it with that option (AdamW, Lamb and StableAdamW of "
                "tensor3d.optim have it), or the other one on a Cube of its own without it."
            )
