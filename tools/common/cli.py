"""The frame of a command: its options, and how it ends: an exit status, and one message where something went wrong."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import shlex
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Protocol, Union, runtime_checkable

import torch.distributed as dist
import tyro

from tensor3d import Cube, CubeShape
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.distributed.host_all_to_all import PeerError
from tensor3d.distributed.object_collectives import format_error, run_on_rank0
from tensor3d.distributed.process_group import is_launched, place
from tools.common import log
from tools.common.files import lock_folder
from tools.common.garbage import collect_as_usual
from tools.common.idle_options import IdleRule, tell_idle_options
from tools.common.option_names import with_options
from tools.common.parse import parse_options

_log = logging.getLogger(__name__)

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
    """The cube of all processes, which are connected inside alone. Arguments are those of `Cube.from_env`.

    Under NCCL a process that leaves by an error of its own ends where Python does, after its message, and leaves the
    groups: to end them, here or when they are collected, would wait for what other ranks have not joined, and they wait
    for this one.
    """
    alone = False
    try:
        cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data, wire=wire, timeout=timeout)
        yield cube
        cube.close()
    except BaseException as error:
        alone = _is_alone(error)
        if alone:
            atexit.register(
                _end_now, 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, OSError) else 1
            )
        raise
    finally:
        if not alone and dist.is_initialized():
            dist.destroy_process_group()


def _is_alone(error: BaseException) -> bool:
    """Whether NCCL would wait for ranks that do not leave as this one does: bad input and a loss that diverges are seen
    by all alike."""
    alike = isinstance(error, ValueError | FloatingPointError | SystemExit)
    return not alike and dist.is_initialized() and dist.get_world_size() > 1 and "nccl" in dist.get_backend()


def _end_now(status: int) -> None:
    """With the status that `run_main` gives."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


@contextmanager
def run_folder(folder: Path, cube: Cube) -> Iterator[None]:
    """Inside the block the folder is this job's: rank 0 holds it. Every rank calls it.

    Raises:
        ValueError: another run has it, or there can be no such folder; on every rank.
    """
    with ExitStack() as held:
        run_on_rank0(cube, lambda: held.enter_context(lock_folder(folder)))
        yield


# --- The options of a command -----------------------------------------------------------------------------------------


class Command(Protocol):
    """Options of one command, which can run."""

    def run(self) -> int:
        """Returns the exit status; raises ValueError or OSError for what the user can mend."""


@runtime_checkable
class HasIdleRules(Protocol):
    """A command some of whose options change nothing beside others."""

    def idle_rules(self) -> Sequence[IdleRule]:
        """What options need; those of a command that `check` has taken."""


@dataclass(frozen=True, kw_only=True)
class CubeCommand(ABC):
    """A command that runs on the ranks of a cube; it has the options `cube` and `data_parallel`."""

    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube, self.data_parallel)

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""

    @abstractmethod
    def run(self) -> int:
        """Runs on every rank, which is connected inside alone. The exit status."""


def parse_command(name: str, commands: Mapping[str, type], words: Sequence[str], description: str) -> Any:
    """The options of the command that `words` begin with. Arguments are those of `run_command`, without `--verbose`."""
    chosen, *rest = words or [""]
    prog = f"python -m {name}"
    if chosen in commands:
        # Alone, so that messages are about its own options.
        return parse_options(commands[chosen], rest, f"{prog} {chosen}")
    kinds = tuple(Annotated[kind, tyro.conf.subcommand(each)] for each, kind in commands.items())
    union: Any = Union[kinds]  # noqa: UP007 (its arms are a tuple)
    return parse_options(union, words, prog, description=f"{description} {log.HELP}")


def run_command(
    name: str,
    commands: Mapping[str, type],
    arguments: Sequence[str] | None,
    description: str,
    *,
    refused: tuple[type[Exception], ...] = (),
) -> int:
    """Reads the options of one of the commands and runs it. The exit status, as of `run_main`.

    Args:
        name: of the module, such as "tools.squad".
        commands: the options of each sub-command, by its name.
        arguments: instead of those of this process.
        refused: as of `run_main`.
    """
    words, verbose = log.take_verbose(arguments)
    command: Command = parse_command(name, commands, words, description)

    def run() -> int:
        if isinstance(command, CubeCommand):
            command.check()
            check_started(command.shape, name, words)
        if isinstance(command, HasIdleRules):
            tell_idle_options(command, command.idle_rules())
        return command.run()

    return run_main(name, run, verbose=verbose, refused=refused, options=type(command))


# --- How a command ends -----------------------------------------------------------------------------------------------


def recipe_among(arguments: Sequence[str]) -> Path | None:
    """The recipe of a command line: it must be known before its values can be the defaults of options."""
    return next((Path(argument) for argument in arguments if argument.endswith(".toml")), None)


def refuse_empty(arguments: Sequence[str], *options: str) -> None:
    """Of options that name a file or folder: an empty value, which would be the current folder.

    Raises:
        ValueError: one of `options` has nothing behind it, as of a variable of the shell that is not set.
    """
    for word, value in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word in {f"{option}=" for option in options} or (word in options and not value):
            raise ValueError(
                f"{word.removesuffix('=')} must name a file or a folder. Got '', as of a variable of the shell that is "
                "not set. Name one ('.' for the current folder), or leave the option out."
            )


def run_main(
    name: str,
    action: Callable[[], int],
    *,
    verbose: bool = False,
    refused: tuple[type[Exception], ...] = (),
    options: type | None = None,
) -> int:
    """The exit status of `action`; 2 for bad input or a file that cannot be read or written, 1 where another rank died
    (one message on standard error each), 130 after Ctrl-C, quietly but where Python was asked to tell of faults
    (`-X faulthandler`), as a stage of `bench gpu` is. Where the reader of standard output has gone, as `head`
    does, the command goes on to its end, quietly: it may have files to write.

    Args:
        name: of the command, such as "tools.gpt".
        verbose: of the log.
        refused: what else is bad input.
        options: the dataclass of the command line, by which messages say how a setting is typed.
    """
    collect_as_usual()
    mendable: tuple[type[Exception], ...] = (ValueError, FloatingPointError, OSError, *refused)
    rank = status = 0
    with suppress(ValueError):  # which whoever connects the ranks will tell
        rank = own.rank if (own := place()) else 0
    log.open_streams()
    log.start_logging(verbose=verbose, rank=rank)
    try:
        with log.naming_stdout():
            status = action()
    except log.StdoutError as problem:
        return log.lost_stdout(problem, name, status)
    except mendable as problem:
        return _end(name, with_options(format_error(problem), options), 2)
    except PeerError as problem:
        return _end(name, str(problem), 1)
    except dist.DistError as problem:
        return _end(name, str(problem).splitlines()[0], 1)
    except KeyboardInterrupt:
        # torchrun passes on the Ctrl-C that has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if faulthandler.is_enabled():
            traceback.print_exc()
        return 130
    return status


def _end(name: str, told: str, status: int) -> int:
    """Says why a command ends, where that can be said; its exit status."""
    with suppress(OSError):
        _log.error("%s: %s", name, told)
    return status
