"""What a figure was measured on, how figures are shown and kept, and what a whole run ran in: versions, machines, the
commit and the command."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tensor3d import Cube
from tools.common.files import write_file
from tools.common.workers import usable_cores


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine, as far as it decides how fast something runs."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int | None
    """Of the whole machine."""
    load: float | None
    """Processes that wanted a core in the minute before: above 0, others were at work too."""
    gpus: tuple[str, ...]
    system: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_cpu(),
            cores=usable_cores(),
            memory_bytes=_memory(),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            torch=torch.__version__,
        )

    def __str__(self) -> str:
        parts = [f"{self.cores} cores of {self.cpu}"]
        if self.memory_bytes is not None:
            parts.append(f"{self.memory_bytes / 2**30:.0f} GiB")
        parts += [f"{self.gpus.count(name)} {name}" for name in dict.fromkeys(self.gpus)]
        parts.append(f"torch {self.torch}")
        if self.load is not None:
            parts.append(f"load {self.load} before")
        return ", ".join(parts)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines: the first column on the left, numbers on the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in [header, *rows])
    ]


def heading(arguments: Sequence[str], machine: Machine) -> dict[str, Any]:
    """What every JSON file begins with: what was measured, by which command, when and where.

    Args:
        arguments: of `python -m tools.bench`, the subcommand first.
    """
    return {
        "benchmark": arguments[0],
        "command": shlex.join(["python", "-m", "tools.bench", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(machine),
    }


def write_json(path: Path, content: dict[str, Any] | list[Any]) -> None:
    """A reader sees a whole file or none."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


# --- Of a whole run ---------------------------------------------------------------------------------------------------


_ROOT = Path(__file__).resolve().parents[2]
_GIT_SECONDS = 5.0  # a checkout on a slow network disk must not hold up a run


def environment(cube: Cube) -> dict[str, Any]:
    """JSON-able, the same on every rank. Every rank calls it at the same point; machine and versions are rank 0's.

    `hosts` says how many ranks run on each machine, `devices` how many on each kind of device.
    """
    own = (socket.gethostname(), _device_name(cube), _facts(cube) if cube.rank == 0 else None)
    gathered: list[Any] = [own]
    if cube.mesh is not None:
        gathered = [None] * cube.shape.ranks
        dist.all_gather_object(gathered, own)
    hosts = [host for host, _, _ in gathered]
    devices = [device for _, device, _ in gathered]
    facts: dict[str, Any] = gathered[0][2]
    return facts | {
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "devices": {device: devices.count(device) for device in dict.fromkeys(devices)},
    }


def _facts(cube: Cube) -> dict[str, Any]:
    """What this process knows of itself and its machine."""
    cuda = cube.device.type == "cuda"
    machine = dataclasses.asdict(Machine.here())
    return {
        "command": [sys.executable, *sys.argv],
        "commit": commit(_ROOT),
        **{name: value for name, value in machine.items() if name != "load"},
        "gpus": list(machine["gpus"]),
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda or getattr(torch.version, "hip", None),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "backend": dist.get_backend() if cube.mesh is not None else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def commit(folder: Path) -> str | None:
    """The commit that is checked out in `folder`, with "+changes" where files differ from it. None: none can be told.

    Only where `folder` is the top of the checkout: an installation inside of somebody's repository is not that.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != folder.resolve():
        return None
    head, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changes else head


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git or no checkout, or it takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _device_name(cube: Cube) -> str:
    return torch.cuda.get_device_name(cube.device) if cube.device.type == "cuda" else "CPU"
