"""The highest growth of a process's memory, where the system can tell."""

from __future__ import annotations

from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures from construction on: tensors on a GPU, else the resident set of the process (Linux).

    The resident set also grows by the pages of libraries when they are first used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            self._before = _peak_resident() if _reset_peak_resident() else None

    def growth(self) -> int | None:
        """Bytes at the highest point above those at construction. None where the system does not tell."""
        if self._before is None:
            return None
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _peak_resident()
        return None if peak is None else peak - self._before


def _reset_peak_resident() -> bool:
    """Sets the peak to what is resident now (Linux 4.0, Documentation/filesystems/proc.rst)."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:  # another system, or not allowed in this container
        return False
    return True


def _peak_resident() -> int | None:
    try:
        lines = (_PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None
