"""The most memory that this process, and every other of the cube, has had at once."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from tensor3d import Cube
from tensor3d.distributed.collectives import all_gather


def peak_memory(cube: Cube) -> list[int]:
    """Bytes by rank, since each process began: tensors on a GPU, else the resident set. One all-gather of one number.

    Every rank calls it at the same point.
    """
    own = torch.cuda.max_memory_allocated(cube.device) if cube.device.type == "cuda" else peak_resident()
    number = torch.tensor([own], dtype=torch.int64, device=cube.device)
    # The ranks of all axes together are all ranks, in their order.
    peaks: list[int] = all_gather(number, cube.over("data", "x", "y", "z")).wait().tolist()
    return peaks


def peak_resident() -> int:
    """Bytes of this process at its largest.

    From Linux' own count of this programme. `getrusage` may count what the process was before it began this programme:
    a child of a large parent would report its parent's size.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if found:
        return found[0] * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # kibibytes, everywhere but on macOS
