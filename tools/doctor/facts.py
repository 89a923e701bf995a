"""What a process knows of its software and of its machine, as JSON that any other version of this file can read."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import models
import tensor3d
import tools
from tensor3d.distributed.process_group import gloo_interface
from tools.common.files import read_file
from tools.common.machine import Machine

_LINKS_SECONDS = 10.0
MISSING = "missing"
"""Stands for the hash of a recipe that cannot be read."""


def versions(recipe: Path | None = None) -> dict[str, str]:
    """What must be the same everywhere, by name. Sources count by a hash of their files: versions are rarely raised."""
    cuda = torch.cuda.is_available()
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "tensor3d": tensor3d.__version__,
        **{f"source of {package.__name__}": source(Path(str(package.__path__[0]))) for package in _PACKAGES},
        "CUDA": str(torch.version.cuda or getattr(torch.version, "hip", None) or "none") if cuda else "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
    }
    return found if recipe is None else found | {f"recipe {recipe.name}": hash_of(recipe)}


_PACKAGES = (tensor3d, models, tools)


def source(folder: Path) -> str:
    """A hash of the names and contents of a package's *.py files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()[:12]


def hash_of(path: Path) -> str:
    """A hash of a file's content, or `MISSING`, of a FIFO or a device too, which nobody can compare."""
    try:
        return hashlib.sha256(read_file(path)).hexdigest()[:12]
    except OSError:
        return MISSING


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A machine, as one of its processes sees it."""

    host: str
    ranks: int
    """Of the node, as its launcher says."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that its processes see."""
    gpu_memory: tuple[int, ...] = ()
    """Bytes of each."""
    gpu_error: str = ""
    """Why GPUs that are there cannot be used."""
    links: tuple[str, ...] = ()
    """Kinds of links between GPUs, as nvidia-smi names them."""
    cores: int = 1
    memory: int | None = None
    """Bytes."""
    cpu: str = ""
    interface: str = ""
    """That gloo is told to use."""
    interfaces: tuple[str, ...] = ()
    """That there are."""
    address: str = ""
    """That the host name resolves to here, which gloo uses where no interface is named; empty where it resolves to
    none."""

    @classmethod
    def here(cls, ranks: int) -> NodeFacts:
        """This machine, on which the launcher has started so many ranks."""
        error, memory = "", tuple[int, ...]()
        try:
            machine = Machine.here()
            memory = tuple(torch.cuda.get_device_properties(i).total_memory for i in range(len(machine.gpus)))
        except RuntimeError as problem:  # a driver that is broken, or too old
            error = str(problem).splitlines()[0]
            machine = Machine(
                cpu="", cores=1, memory_bytes=None, load=None, gpus=(), system="", python="", torch=torch.__version__
            )
        return cls(
            host=socket.gethostname(),
            ranks=ranks,
            gpus=machine.gpus,
            gpu_memory=memory,
            gpu_error=error,
            links=links() if len(machine.gpus) > 1 else (),
            cores=machine.cores,
            memory=machine.memory_bytes,
            cpu=machine.cpu,
            interface=gloo_interface(),
            interfaces=_interfaces(),
            address=_own_address(),
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> NodeFacts:
        """What `dataclasses.asdict` and JSON, which knows lists alone, have made of one."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        return cls(**values)


def links() -> tuple[str, ...]:
    """Kinds of links between the GPUs of this machine; none where nvidia-smi does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=_LINKS_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_links(done.stdout)


def read_links(text: str) -> tuple[str, ...]:
    """The kinds of links in the table of `nvidia-smi topo -m`, each once: `("NV18", "SYS")`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    gpus = [cells for cells in lines if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells]
    found = {cell for cells in gpus for cell in cells[1 : len(gpus) + 1]}
    return tuple(sorted(found - {"X"}))


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except OSError:
        return ()


def _own_address() -> str:
    """Where gloo listens unless it is told an interface: the host name's first address that this machine has."""
    try:
        found: Sequence[tuple[object, ...]] = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for kind, _, _, _, address in found:
        assert isinstance(address, tuple)
        try:
            with socket.socket(kind, socket.SOCK_STREAM) as probe:  # type: ignore[arg-type]
                probe.bind((address[0], 0))
                return str(address[0])
        except OSError:
            continue
    return ""
