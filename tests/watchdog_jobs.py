"""Jobs of a few watched ranks whose processes end in ways of their own: exit codes and last words by rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensor3d import Cube
from tensor3d.distributed import failure_detector
from tensor3d.distributed.collectives import all_reduce
from tensor3d.distributed.watchdog import Watchdog
from tests.ranks import PRELOAD

Body = Callable[[Cube, Watchdog, Path], int]


class Job:
    """Starts `body(cube, watch, folder)` on ranks of a cube (1, world, 1). What it returns is the exit code.

    The store is another process's, as under torchrun.

    Args:
        hang_after, grace, patience: of the watch.
        deaf: seconds after which it gives up a store that does not answer.
        limit: seconds after which a collective raises.
    """

    def __init__(
        self,
        world: int,
        body: Body,
        folder: Path,
        *,
        hang_after: float = 60.0,
        grace: float = 3.0,
        patience: float = 25.0,
        deaf: float = 60.0,
        limit: float = 60.0,
    ) -> None:
        times = (hang_after, grace, patience, deaf, limit)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "tensor3d", __name__])
        ours, theirs = context.Pipe()
        self.folder = folder
        self.host: Any = context.Process(target=_host, args=(theirs,))
        self.host.start()
        port = ours.recv()
        self.processes: list[Any] = [
            context.Process(target=_main, args=(rank, world, port, body, folder, *times)) for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Job:
        for rank in range(len(self.processes)):
            self.reached(rank, "watched")
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.processes, self.host):
            process.kill()
            process.join()

    def reached(self, rank: int, mark: str, timeout: float = 30.0) -> None:
        """Waits until a rank has come to a mark."""
        deadline = time.monotonic() + timeout
        while not (self.folder / f"{rank} {mark}").exists():
            assert time.monotonic() < deadline, f"rank {rank} has not {mark}: {self.words(rank)}"
            time.sleep(0.01)

    def send(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        """kill -9, and the burial that torchrun would see to."""
        self.send(rank, signal.SIGKILL)
        self.processes[rank].join(10)

    def code(self, rank: int, timeout: float = 15.0) -> int | None:
        """The exit code of a rank that ends within the time; None: it lives on."""
        self.processes[rank].join(timeout)
        code = self.processes[rank].exitcode
        assert code is None or isinstance(code, int)
        return code

    def words(self, rank: int) -> str:
        """What it has said."""
        path = self.folder / f"{rank} says"
        return path.read_text() if path.exists() else ""


def mark(folder: Path, rank: int, what: str) -> None:
    """Tells the test that a rank has come here."""
    (folder / f"{rank} {what}").touch()


def meet(cube: Cube, value: float = 0.0) -> float:
    """A sum over all ranks."""
    return all_reduce(torch.tensor([value]), cube.over("data", "x", "y", "z")).wait().item()


def _host(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(120)


def _main(rank: int, world: int, port: int, body: Body, folder: Path, *times: float) -> None:
    torch.set_num_threads(1)
    hang_after, grace, patience, deaf, seconds = times
    failure_detector._DEAF = deaf
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    cube = Cube(1, world, 1)
    meet(cube)

    def say(line: str) -> None:
        with (folder / f"{rank} says").open("a") as words:
            words.write(f"{line}\n")

    with Watchdog(cube, hang_after=hang_after, grace=grace, patience=patience, say=say) as watch:
        mark(folder, rank, "watched")
        code = body(cube, watch, folder)
    os._exit(code)
