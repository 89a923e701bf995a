"""What a run ran in: versions, machines, the commit and the command."""

from __future__ import annotations

import dataclasses
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tensor3d import Cube
from tools.common.machine import Machine

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
