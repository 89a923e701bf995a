"""Whether all ranks were given the same model: what differs would be put together from pieces of several."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.collectives import all_gather
from tensor3d.cube import Cube

_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same(module: nn.Module, cube: Cube) -> None:
    """Raises ValueError, on every rank, where parameters or buffers differ from rank 0's in a bit.

    One all-gather of two numbers; the names are sent only where something differs.
    """
    everyone = cube.over("data", "x", "y", "z")
    if everyone.size == 1:
        return
    # What lies on a cube already is meant to differ.
    tensors = {
        name: tensor
        for name, tensor in chain(module.named_parameters(), module.named_buffers())
        if not isinstance(tensor, DTensor)
    }
    prints = torch.tensor([_fingerprint(tensor) for tensor in tensors.values()], dtype=torch.int64)
    # Multiplied by its place, so that two tensors that changed places are found.
    total = (prints * torch.arange(1, len(prints) + 1)).sum()
    found = _on_all_ranks([len(prints), int(total)], cube)
    strange = [rank for rank, numbers in enumerate(found) if not torch.equal(numbers, found[0])]
    if not strange:
        return
    which = ""
    if all(int(numbers[0]) == int(found[0][0]) for numbers in found):
        table = _on_all_ranks(prints.tolist(), cube)
        names = [name for place, name in enumerate(tensors) if any(row[place] != table[0][place] for row in table)]
        which = f", first in {names[0]}" if names else ""
    raise ValueError(
        f"all ranks must pass the same model to parallelize. Got other weights than rank 0's on ranks {strange}{which}."
        " Load them from one file, or make the model after torch.manual_seed with one seed (cube.manual_seed gives "
        "each rank a random stream of its own)."
    )


def _on_all_ranks(numbers: Iterable[int], cube: Cube) -> Tensor:
    """(ranks, n)"""
    own = torch.tensor([list(numbers)], dtype=torch.int64, device=cube.device)
    return all_gather(own, cube.over("data", "x", "y", "z")).wait().cpu()


def _fingerprint(tensor: Tensor) -> int:
    """The sum of its bits, read as whole numbers: the same in any order of summation."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.contiguous().view(_WIDTH[flat.element_size()])
    return int(flat.sum(dtype=torch.int64))
