"""How a command ends: an exit status, and one message where something went wrong."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.distributed.host_all_to_all import PeerError
from tensor3d.distributed.object_collectives import format_error
from tensor3d.distributed.process_group import is_launched

# --- From one command to a cube of processes --------------------------------------------------------------------------

_TIMEOUT = timedelta(minutes=10)  # of a collective
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
def cube_of(
    shape: CubeShape, *, wire: tuple[AxisName, ...] | None = None, timeout: timedelta = _TIMEOUT
) -> Iterator[Cube]:
    """The cube of all processes, which are connected inside alone. Arguments are those of `Cube.from_env`."""
    try:
        cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data, wire=wire, timeout=timeout)
        yield cube
        cube.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- How a command ends -----------------------------------------------------------------------------------------------


def run_main(name: str, action: Callable[[], int]) -> int:
    """The exit status of `action`; 2 for bad input or a file that cannot be read or written, 1 where another rank died
    (one message on standard error each), 130 after Ctrl-C.

    Args:
        name: of the command, such as "tools.gpt".
    """
    try:
        return action()
    except (ValueError, FloatingPointError, OSError) as problem:
        print(f"{name}: {format_error(problem)}", file=sys.stderr, flush=True)
        return 2
    except PeerError as problem:
        print(f"{name}: {problem}", file=sys.stderr, flush=True)
        return 1
    except dist.DistError as problem:
        print(f"{name}: {str(problem).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        # torchrun passes on the Ctrl-C that has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130
