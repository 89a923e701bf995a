"""From one command to a cube of processes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.rendezvous import is_launched

_TORCHRUN = "python launch/torchrun.py --standalone --local-addr=127.0.0.1"


def check_started(shape: CubeShape, module: str, arguments: Sequence[str]) -> None:
    """Raises ValueError, with the command to run instead, where a cube of several processes is asked of this one.

    Args:
        module: what `python -m` was given, such as "tools.gpt".
    """
    if shape.ranks > 1 and not is_launched():
        command = f"{_TORCHRUN} --nproc-per-node={shape.ranks} -m {module} {shlex.join(arguments)}"
        raise ValueError(f"the cube needs {shape.ranks} processes, and this is one alone. Run:\n{command}")


@contextmanager
def cube_of(shape: CubeShape) -> Iterator[Cube]:
    """The cube of all processes, which are connected inside alone."""
    try:
        cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data)
        yield cube
        cube.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
