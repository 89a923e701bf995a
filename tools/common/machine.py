"""What a figure was measured on, and how figures are shown and kept."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tools.common.cpu import usable_cores
from tools.common.files import write_file


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


def check_output(path: Path | None, option: str = "--output") -> None:
    """Raises ValueError where no file can be written: better before a measurement than after."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{option} must be a file in a folder that exists. Got {path}.")


def write_json(path: Path, content: dict[str, Any]) -> None:
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
