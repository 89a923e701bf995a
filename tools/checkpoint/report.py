"""What a checkpoint holds, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from tensor3d import checkpoint
from tensor3d.checkpoint import Contents, StoredTensor
from tools.bench.machine import aligned

KINDS = ("model", "optimizer", "extra", "random")


def found(folder: Path, *, every: bool) -> list[Path]:
    """The checkpoints that are meant by a checkpoint, a folder of checkpoints or a run: the newest, or every one.

    Raises:
        ValueError: there is none.
    """
    if folder.name.startswith("step-") or (folder / "progress.json").exists():
        return [folder]
    there = checkpoint.complete(folder) or checkpoint.complete(folder / "checkpoints")
    if not there:
        raise ValueError(
            f"{folder} holds no checkpoint. Name a checkpoint (step-NNNNNNNN), a folder of checkpoints or a run."
        )
    return there if every else there[-1:]


def as_text(contents: Contents) -> str:
    """Facts, totals by kind, and every tensor."""
    progress = contents.progress
    lines = [
        f"{contents.folder}",
        f"  step {progress['step']}, written on {progress['cube']} ({progress['ranks']} ranks), optimiser "
        f"{progress['optimizer']}, {contents.bytes:,} bytes in {len(contents.files)} files",
    ]
    known = {"step", "cube", "ranks", "optimizer", "version", "serial"}
    lines += [f"  {name}: {json.dumps(value)}" for name, value in progress.items() if name not in known]
    rows = [(kind, f"{tensors}", f"{numbers:,}", f"{size:,}") for kind, tensors, numbers, size in totals(contents)]
    lines += ["", *aligned(("kind", "tensors", "numbers", "bytes"), rows), ""]
    table = [_row(tensor) for tensor in _sorted(contents)]
    return "\n".join([*lines, *aligned(("tensor", "shape", "type", "bytes", "blocks"), table)])


def as_json(contents: Contents) -> dict[str, Any]:
    """The same, as an object for JSON."""
    return {
        "folder": str(contents.folder),
        "progress": contents.progress,
        "bytes": contents.bytes,
        "files": {name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"} for name, file in contents.files.items()},
        "kinds": {
            kind: {"tensors": tensors, "numbers": numbers, "bytes": size}
            for kind, tensors, numbers, size in totals(contents)
        },
        "tensors": {
            tensor.name: {
                "shape": tensor.shape,
                "dtype": _type(tensor),
                "bytes": tensor.bytes,
                "blocks": len(tensor.chunks),
            }
            for tensor in _sorted(contents)
        },
    }


def totals(contents: Contents) -> list[tuple[str, int, int, int]]:
    """Of each kind that there is: tensors, numbers in them, bytes."""
    result = []
    for kind in KINDS:
        tensors = [tensor for tensor in contents.tensors.values() if _kind(tensor) == kind]
        if tensors:
            result.append((kind, len(tensors), sum(prod(t.shape) for t in tensors), sum(t.bytes for t in tensors)))
    return result


def _sorted(contents: Contents) -> Sequence[StoredTensor]:
    """By kind, then as they were stored."""
    tensors: Iterable[StoredTensor] = contents.tensors.values()
    return sorted(tensors, key=lambda tensor: KINDS.index(_kind(tensor)) if _kind(tensor) in KINDS else len(KINDS))


def _row(tensor: StoredTensor) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "one"
    return tensor.name, shape, _type(tensor), f"{tensor.bytes:,}", str(len(tensor.chunks))


def _kind(tensor: StoredTensor) -> str:
    return tensor.name.partition(".")[0]


def _type(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
